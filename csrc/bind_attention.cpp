#include <cmath>

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include "attention_calls.h"
#include "bind.h"

namespace ridgeline {
namespace {

constexpr int64_t MOST_DRAFTS = 63;  // of a tree: bits of a path without its sign

AttentionCase make_case(int heads, int kv_heads, int key_dim, int value_dim, float scale, float softcap, int64_t window,
                        const std::string& pattern, int64_t number, int64_t block) {
    const Pattern kind = pattern == "first_tokens" ? Pattern::first_tokens
                         : pattern == "dilated"    ? Pattern::dilated
                         : pattern == "strided"    ? Pattern::strided
                                                   : Pattern::none;
    if (kind == Pattern::none && !pattern.empty()) refuse("unknown pattern " + pattern);
    if (heads < 1 || kv_heads < 1 || heads % kv_heads || key_dim < 1 || value_dim < 1 || window < 0 ||
        (kind != Pattern::none && number < 1) || block < 1 || (block > 1 && window))
        refuse("heads, dimensions, window, pattern or block out of range");
    return {.heads = heads,
            .kv_heads = kv_heads,
            .key_dim = key_dim,
            .value_dim = value_dim,
            .scale = scale,
            .softcap = softcap,
            .window = window,
            .pattern = kind,
            .number = number,
            .block = block};
}

// Numbers in their stored type: float32, bfloat16 as uint16, float16, int8, whose rows end with the four bytes of a
// scale, or e4m3 as uint8, whose scale is an argument.
using Anything = nb::ndarray<nb::device::cpu>;

StateType stored_of(const Anything& a, const char* name) {
    const nb::dlpack::dtype type = a.dtype();
    if (type == nb::dtype<float>()) return StateType::float32;
    if (type == nb::dtype<uint16_t>()) return StateType::bfloat16;
    if (type == nb::dlpack::dtype{uint8_t(nb::dlpack::dtype_code::Float), 16, 1}) return StateType::float16;
    if (type == nb::dtype<int8_t>()) return StateType::int8;
    if (type == nb::dtype<uint8_t>()) return StateType::fp8;
    throw nb::type_error(
        (std::string(name) + " must be float32, uint16 (bfloat16), float16, int8 or uint8 (e4m3)").c_str());
}

StateType state_type(const std::string& name) {
    return one_of<StateType>(name, "type of state", {"float32", "bfloat16", "float16", "int8", "fp8"});
}

// An array [count, ..., heads, row], dense behind its first axis, whose stride is in bytes.
struct Part {
    StateType stored;
    char* data;
    int64_t count, heads, numbers, stride;
    int64_t size() const { return size_of(stored); }
    int64_t row() const { return numbers * size() + scale_bytes(stored); }  // bytes
};
Part part_of(const Anything& a, const char* name) {
    const StateType stored = stored_of(a, name);
    const Rows<char> rows = bytes_of(a, name, size_of(stored));
    const size_t last = a.ndim() - 1;
    return {.stored = stored,
            .data = rows.data,
            .count = rows.rows,
            .heads = int64_t(a.shape(last - 1)),
            .numbers = int64_t(a.shape(last)) - scale_bytes(stored),
            .stride = rows.stride};
}

// One part of a layer's state in every page, [pages, page_tokens, heads, row].
struct Paged : Part {
    int64_t page_tokens;
    int64_t head() const { return page_tokens * row(); }  // bytes
};
Paged pages_of(const Anything& a, const char* name) {
    if (a.ndim() != 4) refuse(std::string(name) + " must be [pages, page_tokens, heads, numbers]");
    return {part_of(a, name), int64_t(a.shape(1))};
}

// Returns the factor of numbers as stored.h reads them. scale: that of fp8; other types ignore it.
float factor_of(StateType stored, float scale, const char* name) {
    if (stored != StateType::fp8) return 1.f;
    if (!(scale > 0.f) || !std::isfinite(scale)) refuse(std::string(name) + " must be a positive number");
    return scale * 256.f;
}

void write(Pool& pool, const Anything& pages, const Input& x, const Ids& page, const Ids& slot, bool transposed,
           float scale) {
    const Paged p = pages_of(pages, "pages");
    const int64_t tokens = int64_t(page.size());
    const Rows<const float> from = rows_of(x, "x", tokens, p.heads * p.numbers);
    factor_of(p.stored, scale, "scale");
    const PageWrite job{.from = from.data,
                        .tokens = tokens,
                        .stride = from.stride,
                        .heads = p.heads,
                        .numbers = p.numbers,
                        .page = vector_of(page, "write pages", tokens),
                        .slot = vector_of(slot, "write slots", tokens),
                        .stored = p.stored,
                        .to = p.data,
                        .pages = p.count,
                        .page_stride = p.stride,
                        .page_tokens = p.page_tokens,
                        .transposed = transposed,
                        .scale = scale};
    perform(pool, pool, [job](Pool::Hold& hold) { write_pages(hold, job); }, pages, x, page, slot);
}

void move(Pool& pool, const Anything& pages, const Ids& from_page, const Ids& from_slot, const Ids& to_page,
          const Ids& to_slot, bool transposed) {
    const Paged p = pages_of(pages, "pages");
    const int64_t rows = int64_t(from_page.size());
    const RowMoves moves{.pages = p.data,
                         .count = p.count,
                         .page_stride = p.stride,
                         .page_tokens = p.page_tokens,
                         .heads = p.heads,
                         .numbers = p.numbers,
                         .stored = p.stored,
                         .transposed = transposed,
                         .rows = rows,
                         .from_page = vector_of(from_page, "from pages", rows),
                         .from_slot = vector_of(from_slot, "from slots", rows),
                         .to_page = vector_of(to_page, "to pages", rows),
                         .to_slot = vector_of(to_slot, "to slots", rows)};
    Work work(pool);
    move_rows(moves);
}

AttentionStep step_of(const AttentionCase& c, const KeyValues& kv, const Input& q, const std::optional<Input>& sinks,
                      const Output& out) {
    const int64_t tokens = int64_t(q.shape(0));
    const Rows<const float> queries = rows_of(q, "q", tokens, int64_t(c.heads) * c.key_dim);
    const Rows<float> to = rows_of(out, "out", tokens, int64_t(c.heads) * c.value_dim);
    return {.c = c,
            .kv = kv,
            .q = queries.data,
            .q_stride = queries.stride,
            .sinks = vector_of(sinks, "sinks", c.heads),
            .out = to.data,
            .out_stride = to.stride};
}

void check_sum(int64_t rows, int64_t sum) {
    if (rows != sum)
        refuse("lengths add up to " + std::to_string(sum) + ", not to the " + std::to_string(rows) + " queries");
}

// Returns the number of known queries before the drafts. paths: of a sequence's queries; see Sequence.
int64_t check_paths(const int64_t* paths, int64_t length) {
    int64_t known = 0;
    while (known < length && !paths[known]) ++known;
    if (length - known > MOST_DRAFTS) refuse("a tree has more than " + std::to_string(MOST_DRAFTS) + " drafts");
    for (int64_t i = 0; i < length - known; ++i) {
        const int64_t path = paths[known + i], parents = path ^ int64_t(1) << i;
        if (path >> i != 1 || (parents && parents != paths[known + 63 - __builtin_clzll(uint64_t(parents))]))
            refuse("draft " + std::to_string(i) + " has the path " + std::to_string(path) +
                   ", which is not itself and the path of an earlier draft");
    }
    return known;
}

// Where the sequences of a step are: the page of a position, and the drafts on the path to each query, if any.
struct Positions {
    int64_t queries, sequences;
    const int64_t *starts, *lengths;
    Rows<const int64_t> tables;
    const int64_t* paths;  // or null
};

Positions positions_of(int64_t queries, const Ids& starts, const Ids& lengths, const Ids& tables,
                       const std::optional<Ids>& paths) {
    const int64_t n = int64_t(starts.size());
    return {.queries = queries,
            .sequences = n,
            .starts = vector_of(starts, "starts", n),
            .lengths = vector_of(lengths, "lengths", n),
            .tables = rows_of(tables, "tables"),
            .paths = vector_of(paths, "paths", queries)};
}

std::vector<Sequence> paged_sequences(const KeyValues& kv, const Positions& at) {
    if (at.tables.rows != at.sequences) refuse("there must be a page table for each sequence");
    std::vector<Sequence> sequences;
    int64_t row = 0;
    for (int64_t i = 0; i < at.sequences; ++i) {
        const int64_t *table = at.tables.data + i * at.tables.stride, start = at.starts[i], length = at.lengths[i];
        if (start < 0 || length < 0 || start + length > at.tables.columns * kv.page_tokens)
            refuse("a sequence is longer than its page table");
        for (int64_t p = 0; p * kv.page_tokens < start + length; ++p)
            if (table[p] < 0 || table[p] >= kv.pages)
                throw std::out_of_range("page " + std::to_string(table[p]) + " is not in the arena");
        sequences.push_back({.start = start,
                             .length = length,
                             .row = row,
                             .table = table,
                             .table_size = at.tables.columns,
                             .base = 0});
        row += length;
    }
    check_sum(at.queries, row);
    for (Sequence& s : sequences) {
        if (!at.paths) break;
        const int64_t known = check_paths(at.paths + s.row, s.length);
        if (known < s.length) s.paths = at.paths + s.row, s.limit = s.start + known;  // others run as without trees
    }
    return sequences;
}

// Returns attention over pages as a job. It reads positions, tables and paths each time that it runs.
auto job_of(const AttentionStep& step, const Positions& at) {
    return [kv = step.kv, step, at](Pool::Hold& hold) {
        const AttentionStep own{.c = step.c,
                                .kv = kv,
                                .q = step.q,
                                .q_stride = step.q_stride,
                                .sinks = step.sinks,
                                .out = step.out,
                                .out_stride = step.out_stride};
        attend(hold, own, paged_sequences(kv, at));
    };
}

// [tokens, heads, row].
Part rows_part(const Anything& a, const char* name, int64_t tokens) {
    if (a.ndim() != 3 || int64_t(a.shape(0)) != tokens)
        refuse(std::string(name) + " is " + shape_text(a.shape_ptr(), a.ndim()) + ", but [" + std::to_string(tokens) +
               ", heads, numbers] is required");
    return part_of(a, name);
}

void check_parts(const AttentionCase& c, const Part& k, const Part& v) {
    if (k.heads != c.kv_heads || k.numbers != c.key_dim || v.heads != c.kv_heads || v.numbers != c.value_dim ||
        k.count != v.count || k.stored != v.stored)
        refuse("keys or values do not have the required shape and type");
}

void paged(const AttentionCase& c, Pool& pool, const Input& q, const Anything& keys, const Anything& values,
           const Ids& starts, const Ids& lengths, const Ids& tables, const std::optional<Input>& sinks,
           const Output& out, float key_scale, float value_scale, const std::optional<Ids>& paths) {
    const Paged k = pages_of(keys, "keys"), v = pages_of(values, "values");
    check_parts(c, k, v);
    if (k.page_tokens != v.page_tokens) refuse("pages of keys and of values differ in size");
    const int64_t tokens = k.page_tokens, size = k.size();
    const KeyValues kv{.stored = k.stored,
                       .keys = k.data,
                       .values = v.data,
                       .pages = k.count,
                       .page_tokens = tokens,
                       .key_page = k.stride,
                       .key_head = k.head(),
                       .key_row = 0,
                       .value_page = v.stride,
                       .value_head = v.head(),
                       .value_row = c.value_dim * size,
                       .transposed = true,
                       .key_scale = c.key_dim * size * tokens,
                       .key_scale_row = 4,
                       .value_scale = c.value_dim * size * tokens,
                       .value_scale_row = 4,
                       .key_factor = factor_of(k.stored, key_scale, "key_scale"),
                       .value_factor = factor_of(v.stored, value_scale, "value_scale")};
    const AttentionStep step = step_of(c, kv, q, sinks, out);
    const Positions at = positions_of(int64_t(q.shape(0)), starts, lengths, tables, paths);
    perform(pool, c, job_of(step, at), q, keys, values, starts, lengths, tables, sinks, out, paths);
}

std::vector<Sequence> dense_sequences(int64_t rows, const int64_t* lengths, int64_t n) {
    std::vector<Sequence> sequences;
    int64_t row = 0;
    for (int64_t i = 0; i < n; row += lengths[i++])
        sequences.push_back(
            {.start = 0, .length = lengths[i], .row = row, .table = nullptr, .table_size = 0, .base = row});
    check_sum(rows, row);
    return sequences;
}

// Attends within whole sequences, one after the other: all their keys and values are one page.
void dense(const AttentionCase& c, Pool& pool, const Input& q, const Anything& keys, const Anything& values,
           const Ids& lengths, const std::optional<Input>& sinks, const Output& out, float key_scale,
           float value_scale) {
    const int64_t tokens = int64_t(q.shape(0)), n = int64_t(lengths.size());
    const Part k = rows_part(keys, "keys", tokens), v = rows_part(values, "values", tokens);
    check_parts(c, k, v);
    const int64_t size = k.size();
    const KeyValues kv{.stored = k.stored,
                       .keys = k.data,
                       .values = v.data,
                       .pages = 1,
                       .page_tokens = std::max<int64_t>(1, tokens),
                       .key_page = 0,
                       .key_head = k.row(),
                       .key_row = k.stride,
                       .value_page = 0,
                       .value_head = v.row(),
                       .value_row = v.stride,
                       .transposed = false,
                       .key_scale = c.key_dim * size,
                       .key_scale_row = k.stride,
                       .value_scale = c.value_dim * size,
                       .value_scale_row = v.stride,
                       .key_factor = factor_of(k.stored, key_scale, "key_scale"),
                       .value_factor = factor_of(v.stored, value_scale, "value_scale")};
    const AttentionStep step = step_of(c, kv, q, sinks, out);
    const auto sequences = dense_sequences(tokens, vector_of(lengths, "lengths", n), n);
    Work work(pool);
    attend(work.hold, step, sequences);
}

// Latents have one row for each token: it is the key of all heads, and its first numbers are their value. Heads are
// divided into groups, so that not all of them need memory at once. Every group reads the same rows.
void check_latents(const AttentionCase& c, const Part& p) {
    if (p.heads != 1 || p.numbers != c.key_dim || c.value_dim > c.key_dim)
        refuse("latents do not have the required shape");
}

void paged_latents(const AttentionCase& c, Pool& pool, const Input& q, const Anything& latents, const Ids& starts,
                   const Ids& lengths, const Ids& tables, const Output& out, float scale,
                   const std::optional<Ids>& paths) {
    const Paged p = pages_of(latents, "latents");
    check_latents(c, p);
    const int64_t row = p.numbers * p.size(), scales = row * p.page_tokens;
    const float factor = factor_of(p.stored, scale, "scale");
    const KeyValues kv{.stored = p.stored,
                       .keys = p.data,
                       .values = p.data,
                       .pages = p.count,
                       .page_tokens = p.page_tokens,
                       .key_page = p.stride,
                       .key_head = 0,
                       .key_row = row,
                       .value_page = p.stride,
                       .value_head = 0,
                       .value_row = row,
                       .transposed = false,
                       .key_scale = scales,
                       .key_scale_row = 4,
                       .value_scale = scales,
                       .value_scale_row = 4,
                       .key_factor = factor,
                       .value_factor = factor};
    const AttentionStep step = step_of(c, kv, q, std::nullopt, out);
    const Positions at = positions_of(int64_t(q.shape(0)), starts, lengths, tables, paths);
    perform(pool, c, job_of(step, at), q, latents, starts, lengths, tables, out, paths);
}

void dense_latents(const AttentionCase& c, Pool& pool, const Input& q, const Anything& latents, const Ids& lengths,
                   const Output& out, float scale) {
    const int64_t tokens = int64_t(q.shape(0)), n = int64_t(lengths.size());
    const Part p = rows_part(latents, "latents", tokens);
    check_latents(c, p);
    const int64_t scales = p.numbers * p.size();
    const float factor = factor_of(p.stored, scale, "scale");
    const KeyValues kv{.stored = p.stored,
                       .keys = p.data,
                       .values = p.data,
                       .pages = 1,
                       .page_tokens = std::max<int64_t>(1, tokens),
                       .key_page = 0,
                       .key_head = 0,
                       .key_row = p.stride,
                       .value_page = 0,
                       .value_head = 0,
                       .value_row = p.stride,
                       .transposed = false,
                       .key_scale = scales,
                       .key_scale_row = p.stride,
                       .value_scale = scales,
                       .value_scale_row = p.stride,
                       .key_factor = factor,
                       .value_factor = factor};
    const AttentionStep step = step_of(c, kv, q, std::nullopt, out);
    const auto sequences = dense_sequences(tokens, vector_of(lengths, "lengths", n), n);
    Work work(pool);
    attend(work.hold, step, sequences);
}

}  // namespace

void bind_attention(nb::module_& m) {
    m.def("write_pages", write, nb::arg("pool"), array("pages"), array("x"), array("write_pages"), array("write_slots"),
          nb::arg("transposed"), nb::arg("scale") = 1.f);
    m.def("move_rows", move, nb::arg("pool"), array("pages"), array("from_pages"), array("from_slots"),
          array("to_pages"), array("to_slots"), nb::arg("transposed"));
    m.def(
        "attends_in_unit", [](const std::string& type) { return attends_in_unit(state_type(type)); }, nb::arg("type"));
    m.def("rounded_refusal", rounded_refusal);
    nb::class_<AttentionCase>(m, "Attention")
        .def("__init__",
             [](AttentionCase* c, int heads, int kv_heads, int key_dim, int value_dim, float scale, float softcap,
                int64_t window, const std::string& pattern, int64_t number, int64_t block) {
                 new (c) AttentionCase(
                     make_case(heads, kv_heads, key_dim, value_dim, scale, softcap, window, pattern, number, block));
             },
             nb::arg("heads"), nb::arg("kv_heads"), nb::arg("key_dim"), nb::arg("value_dim"), nb::arg("scale"),
             nb::arg("softcap"), nb::arg("window"), nb::arg("pattern"), nb::arg("number"), nb::arg("block") = 1)
        .def("paged", paged, nb::arg("pool"), array("q"), array("keys"), array("values"), array("starts"),
             array("lengths"), array("tables"), array("sinks").none(), array("out"), nb::arg("key_scale") = 1.f,
             nb::arg("value_scale") = 1.f, array("paths").none() = nb::none())
        .def("dense", dense, nb::arg("pool"), array("q"), array("keys"), array("values"), array("lengths"),
             array("sinks").none(), array("out"), nb::arg("key_scale") = 1.f, nb::arg("value_scale") = 1.f)
        .def("paged_latents", paged_latents, nb::arg("pool"), array("q"), array("latents"), array("starts"),
             array("lengths"), array("tables"), array("out"), nb::arg("scale") = 1.f,
             array("paths").none() = nb::none())
        .def("dense_latents", dense_latents, nb::arg("pool"), array("q"), array("latents"), array("lengths"),
             array("out"), nb::arg("scale") = 1.f);
}

}  // namespace ridgeline
