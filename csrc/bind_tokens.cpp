// The first and last ops of a step: from token ids, positions and page tables to inputs; from logits to ids.
#include <nanobind/stl/array.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "bind.h"
#include "draw.h"
#include "elementwise.h"
#include "linear.h"
#include "philox.h"

namespace ridgeline {
namespace {

using Any = nb::ndarray<nb::ro, nb::device::cpu>;

void embed(Pool& pool, const Any& table, const std::string& kind_name, const Ids& ids, const Output& out) {
    const Kind kind = one_of<Kind>(kind_name, "kind", {"float32", "bfloat16", "float16"});
    const bool wide = kind == Kind::float32;
    if (table.ndim() != 2 || table.dtype() != (wide ? nb::dtype<float>() : nb::dtype<uint16_t>()) ||
        (table.shape(1) > 1 && table.stride(1) != 1))
        refuse("a table must be a float32 or uint16 array with two axes, the last one dense");
    const int64_t n = int64_t(ids.size()), k = int64_t(table.shape(1));
    const SourceRows from{table.data(), kind, int64_t(table.shape(0)), int64_t(table.stride(0))};
    const Rows<float> to = rows_of(out, "out", n, k);
    const int64_t* id = vector_of(ids, "ids", n);
    auto job = [from, to, id, n, k](Pool::Hold& hold) {
        for (int64_t i = 0; i < n; ++i) check_id(id[i], from.rows, "token");
        hold.split(n, [&](int64_t begin, int64_t end, int) {
            for (int64_t i = begin; i < end; ++i) panel_kernels().widen(from, id[i], k, to.data + i * to.stride);
        });
    };
    perform(pool, pool, job, table, ids, out);
}

// Copies each row of x to the given row of an array.
void write_rows(Pool& pool, const Output& to, const Ids& rows, const Input& x) {
    const Rows<float> target = rows_of(to, "to");
    const int64_t n = int64_t(rows.size());
    const Rows<const float> from = rows_of(x, "x", n, target.columns);
    const int64_t* row = vector_of(rows, "rows", n);
    auto job = [=](Pool::Hold&) {
        for (int64_t i = 0; i < n; ++i) check_id(row[i], target.rows, "row");
        for (int64_t i = 0; i < n; ++i)
            std::copy_n(from.data + i * from.stride, from.columns, target.data + row[i] * target.stride);
    };
    perform(pool, pool, job, to, rows, x);
}

// Row i of out is row rows[i] of x [k, heads, columns], or of `more` for numbers from k on.
void take_rows(Pool& pool, const Input& x, const std::optional<Input>& more, const Ids& rows, const Output& out) {
    if (x.ndim() != 3) refuse("x must have an axis of heads");
    const int64_t n = int64_t(rows.size()), heads = int64_t(x.shape(1)), columns = int64_t(x.shape(2));
    const int64_t own = int64_t(x.shape(0)), all = own + (more && more->ndim() ? int64_t(more->shape(0)) : 0);
    const Heads3<const float> first = heads_of(x, "x", own, heads, columns);
    const Heads3<const float> second = more ? heads_of(*more, "more", all - own, heads, columns) : first;
    const Rows<float> to = rows_of(out, "out", n, heads * columns);
    const int64_t* row = vector_of(rows, "rows", n);
    auto job = [=](Pool::Hold& hold) {
        for (int64_t i = 0; i < n; ++i) check_id(row[i], all, "row");
        hold.split(n, [&](int64_t begin, int64_t end, int) {
            for (int64_t i = begin; i < end; ++i) {
                const Heads3<const float>& from = row[i] < own ? first : second;
                const float* found = from.data + (row[i] < own ? row[i] : row[i] - own) * from.stride;
                for (int64_t h = 0; h < heads; ++h)
                    std::copy_n(found + h * from.head, columns, to.data + i * to.stride + h * columns);
            }
        });
    };
    perform(pool, pool, job, x, more, rows, out);
}

// cos, sin = factor * cos(angle), sin(angle), angle = position * frequency in float64, rounded to float32.
void rotary(Pool& pool, const Ids& positions, const Input& frequencies, float factor, const Output& cos,
            const Output& sin) {
    const bool own = frequencies.ndim() == 2;
    const int64_t n = int64_t(positions.size()), pairs = int64_t(own ? frequencies.shape(1) : frequencies.size());
    const int64_t* position = vector_of(positions, "positions", n);
    const Rows<const float> frequency =
        own ? rows_of(frequencies, "frequencies", n, pairs)
            : Rows<const float>{vector_of(frequencies, "frequencies", pairs), n, pairs, 0};
    const Rows<float> c = rows_of(cos, "cos", n, pairs), s = rows_of(sin, "sin", n, pairs);
    auto job = [=](Pool::Hold& hold) {
        hold.split(n, [&](int64_t begin, int64_t end, int) {
            for (int64_t t = begin; t < end; ++t)
                for (int64_t i = 0; i < pairs; ++i) {
                    const double angle = double(float(position[t]) * frequency.data[t * frequency.stride + i]);
                    c.data[t * c.stride + i] = float(std::cos(angle)) * factor;
                    s.data[t * s.stride + i] = float(std::sin(angle)) * factor;
                }
        });
    };
    perform(pool, pool, job, positions, frequencies, cos, sin);
}

// The page and the slot of each token; for each sequence, the row of the page table up to the page of its last token.
void decode_layout(Pool& pool, const Ids& table, const Ids& rows, const Ids& positions, const Ids& last,
                   int64_t page_tokens, const Places& pages, const Places& slots, const Places& tables) {
    const Rows<const int64_t> from = rows_of(table, "page table");
    const int64_t tokens = int64_t(rows.size()), n = int64_t(last.size());
    const Rows<int64_t> to = rows_of(tables, "tables", n, from.columns);
    const int64_t *row = vector_of(rows, "rows", tokens), *position = vector_of(positions, "positions", tokens),
                  *end = vector_of(last, "last", n);
    int64_t *page = vector_of(pages, "pages", tokens), *slot = vector_of(slots, "slots", tokens);
    if (page_tokens < 1) refuse("a page holds at least one token");
    auto job = [=](Pool::Hold&) {
        for (int64_t t = 0; t < tokens; ++t) {
            check_id(row[t], from.rows, "row");
            const int64_t index = position[t] / page_tokens;
            check_id(index, from.columns, "page");
            page[t] = from.data[row[t] * from.stride + index];
            slot[t] = position[t] % page_tokens;
        }
        for (int64_t i = 0; i < n; ++i) {
            check_id(end[i], tokens, "token");
            std::copy_n(from.data + row[end[i]] * from.stride, position[end[i]] / page_tokens + 1,
                        to.data + i * to.stride);
        }
    };
    perform(pool, pool, job, table, rows, positions, last, pages, slots, tables);
}

// Writes the index of each row's first NaN, or else of its first largest number, and that number.
void find_best(Pool::Hold& hold, const Rows<const float>& x, int64_t* id, float* value) {
    constexpr int64_t BLOCK = 2048;
    const int64_t blocks = (x.columns + BLOCK - 1) / BLOCK;
    float* most = (float*)hold.scratch(0, size_t(x.rows * blocks) * sizeof(float));
    hold.split(x.rows * blocks, [&](int64_t begin, int64_t end, int) {
        for (int64_t i = begin; i < end; ++i) {
            const int64_t at = i % blocks * BLOCK;
            most[i] =
                elementwise_kernels().largest(x.data + i / blocks * x.stride + at, std::min(BLOCK, x.columns - at));
        }
    });
    for (int64_t r = 0; r < x.rows; ++r) {
        int64_t found = 0;
        for (int64_t b = 1; b < blocks && !std::isnan(most[r * blocks + found]); ++b)
            if (most[r * blocks + b] > most[r * blocks + found] || std::isnan(most[r * blocks + b])) found = b;
        const float wanted = most[r * blocks + found], *row = x.data + r * x.stride;
        int64_t i = found * BLOCK;
        while (std::isnan(wanted) ? !std::isnan(row[i]) : row[i] != wanted) ++i;
        id[r] = i;
        value[r] = row[i];
    }
}

void best(Pool& pool, const Input& logits, const Places& ids, const Output& values) {
    const Rows<const float> x = rows_of(logits, "logits");
    int64_t* id = vector_of(ids, "ids", x.rows);
    float* value = vector_of(values, "values", x.rows);
    if (x.columns < 1) refuse("there are no logits");
    auto job = [=](Pool::Hold& hold) { find_best(hold, x, id, value); };
    perform(pool, pool, job, logits, ids, values);
}

void draw_rows(Pool& pool, const Input& logits, const Ids& draws, const std::optional<Ids>& token_ids,
               const Places& ids, const Output& values) {
    const Rows<const float> x = rows_of(logits, "logits");
    const int64_t* words = vector_of(draws, "draws", x.rows * int64_t(sizeof(Draw) / sizeof(int64_t)));
    const int64_t* token = token_ids ? vector_of(*token_ids, "token_ids", x.columns) : nullptr;
    int64_t* id = vector_of(ids, "ids", x.rows);
    float* value = vector_of(values, "values", x.rows);
    if (x.rows < 1 || x.columns < 1) refuse("there are no logits");
    auto job = [=](Pool::Hold& hold) {
        find_best(hold, x, id, value);
        std::vector<Draw> how(size_t(x.rows));
        std::memcpy(how.data(), words, how.size() * sizeof(Draw));
        const bool has_filters =
            std::any_of(how.begin(), how.end(), [](const Draw& d) { return !d.is_greedy() && d.is_filtered(); });
        const size_t each = DrawRoom::bytes(x.columns);
        char* const memory = has_filters ? (char*)hold.scratch(1, each * size_t(hold.threads())) : nullptr;
        hold.split(x.rows, [&](int64_t begin, int64_t end, int thread) {
            const DrawRoom room = memory ? DrawRoom::at(memory + each * size_t(thread), x.columns) : DrawRoom{};
            for (int64_t r = begin; r < end; ++r)
                if (const Draw& d = how[size_t(r)]; !d.is_greedy() && std::isfinite(value[r]))
                    id[r] = draw_row(x.data + r * x.stride, token, x.columns, value[r], d, room);
        });
    };
    perform(pool, pool, job, logits, draws, token_ids, ids, values);
}

int64_t draw_logits(const Input& logits, float top, double temperature, const std::array<uint64_t, 4>& key) {
    const float* x = vector_of(logits, "logits", int64_t(logits.size()));
    if (!logits.size()) refuse("there are no logits");
    if (!(temperature > 1e-30)) refuse("the temperature must be above 1e-30");
    nb::gil_scoped_release release;
    return draw_kernels().logits(x, nullptr, int64_t(logits.size()), top, temperature, draw_key(key.data()));
}

std::pair<int64_t, double> likely(const Input& logits, float top, double temperature, float least,
                                  const Places& found) {
    const int64_t n = int64_t(logits.size());
    const float* x = vector_of(logits, "logits", n);
    int64_t* ids = vector_of(found, "found", n + 1);
    if (!(temperature > 1e-30)) refuse("the temperature must be above 1e-30");
    if (!(least > -80)) refuse("least must be above -80");
    nb::gil_scoped_release release;
    double rest = 0;
    const int64_t count = draw_kernels().likely(x, n, top, temperature, least, ids, rest);
    return {count, rest};
}

int64_t draw_scores(const Given<const double>& scores, const std::optional<Ids>& ids,
                    const std::array<uint64_t, 4>& key) {
    const int64_t n = int64_t(scores.size());
    const double* x = vector_of(scores, "scores", n);
    const int64_t* id = ids ? vector_of(*ids, "ids", n) : nullptr;
    if (!n) refuse("there are no scores");
    nb::gil_scoped_release release;
    return draw_kernels().scores(x, id, n, draw_key(key.data()));
}

using Tokens = Given<const int32_t>;

// The length of the longest part of a text that equals the last tokens of another, and the index behind it; 0, 0 if it
// is shorter than `least`. Of equally long parts, the latest one counts. No part is longer than `most`, and only the
// latest `candidates` of at least `least` tokens are looked at.
std::pair<int64_t, int64_t> longest_match(const Tokens& text, const Tokens& last, int64_t least, int64_t most,
                                          int64_t candidates) {
    const int64_t n = int64_t(text.size()), m = std::min(int64_t(last.size()), most);
    const int32_t *x = vector_of(text, "text", n),
                  *y = vector_of(last, "last", int64_t(last.size())) + int64_t(last.size()) - 1;
    int64_t best = 0, behind = 0;
    if (least < 1) refuse("a match has at least one token");
    if (m < least) return {0, 0};
    for (int64_t end = n - 1; end >= 0 && candidates > 0 && best < m; --end) {
        if (x[end] != *y) continue;
        int64_t length = 1;
        while (length < m && length <= end && x[end - length] == y[-length]) ++length;
        if (length < least) continue;
        --candidates;
        if (length > best) best = length, behind = end + 1;
    }
    return {best, behind};
}

}  // namespace

void bind_tokens(nb::module_& m) {
    m.def("embed", embed, nb::arg("pool"), array("table"), nb::arg("kind"), array("ids"), array("out"));
    m.def("write_rows", write_rows, nb::arg("pool"), array("to"), array("rows"), array("x"));
    m.def("take_rows", take_rows, nb::arg("pool"), array("x"), array("more").none(), array("rows"), array("out"));
    m.def("rotary", rotary, nb::arg("pool"), array("positions"), array("frequencies"), nb::arg("factor"), array("cos"),
          array("sin"));
    m.def("decode_layout", decode_layout, nb::arg("pool"), array("table"), array("rows"), array("positions"),
          array("last"), nb::arg("page_tokens"), array("pages"), array("slots"), array("tables"));
    m.def("philox", philox, nb::arg("key"), nb::arg("counter"));
    m.def("draw_logits", draw_logits, array("logits"), nb::arg("top"), nb::arg("temperature"), nb::arg("key"));
    m.def("likely", likely, array("logits"), nb::arg("top"), nb::arg("temperature"), nb::arg("least"), array("found"));
    m.def("draw_scores", draw_scores, array("scores"), nb::arg("ids").noconvert().none(), nb::arg("key"));
    m.def("longest_match", longest_match, array("text"), array("last"), nb::arg("least"), nb::arg("most"),
          nb::arg("candidates"));
    m.def("best", best, nb::arg("pool"), array("logits"), array("ids"), array("values"));
    m.def("draw_rows", draw_rows, nb::arg("pool"), array("logits"), array("draws"),
          nb::arg("token_ids").noconvert().none(), array("ids"), array("values"));
}

}  // namespace ridgeline
