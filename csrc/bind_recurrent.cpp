#include <nanobind/stl/optional.h>

#include "bind.h"
#include "recurrent_calls.h"

namespace ridgeline {
namespace {

// Rows [n * m, columns] of n sequences.
template <class T> Matrix2<T> rows(const Given<T>& a, const char* name, const Sequences& s, int64_t columns) {
    const Rows<T> r = rows_of(a, name, s.n * s.m, columns);
    return {r.data, r.stride};
}

// A dense array of n times `size` numbers.
template <class T> T* each(const Given<T>& a, const char* name, int64_t n, int64_t size) {
    const Rows<T> r = rows_of(a, name, n, size);
    if (r.rows > 1 && r.stride != size) refuse(std::string(name) + " must be dense");
    return r.data;
}

// States of `size` numbers for n sequences. pages: the page of each sequence in the array, or none.
using PageIds = std::optional<Ids>;
template <class T>
States<T> states_of(const Given<T>& a, const char* name, const PageIds& pages, int64_t n, int64_t size) {
    if (!pages) {
        const Rows<T> r = rows_of(a, name, n, size);
        return {r.data, r.stride, nullptr};
    }
    const Rows<T> r = rows_of(a, name);
    if (r.columns != size)
        refuse(std::string(name) + " has pages of " + std::to_string(r.columns) + " numbers, not of " +
               std::to_string(size));
    const int64_t* found = vector_of(*pages, "pages", n);
    for (int64_t i = 0; i < n; ++i)
        if (found[i] < 0 || found[i] >= r.rows)
            refuse("page " + std::to_string(found[i]) + " is not in 0.." + std::to_string(r.rows - 1));
    return {r.data, r.stride, found};
}

Sequences sequences_of(const Ids& lengths, const Input& x) {
    const int64_t n = int64_t(lengths.size()), tokens = x.ndim() ? int64_t(x.shape(0)) : 0;
    const Sequences s{n, n ? tokens / n : 0, vector_of(lengths, "lengths", n)};
    for (int64_t i = 0; i < n; ++i)
        if (s.lengths[i] < 1 || s.lengths[i] > s.m)
            refuse("a length of " + std::to_string(s.lengths[i]) + " is not in 1.." + std::to_string(s.m));
    return s;
}

int64_t columns_of(const Input& x) { return x.ndim() == 2 ? int64_t(x.shape(1)) : 0; }

void short_conv(Pool& pool, const Input& x, const Input& kept, const Input& weight, const std::optional<Input>& bias,
                const Ids& lengths, const Output& y, const Output& left, const PageIds& read, const PageIds& write) {
    const Sequences s = sequences_of(lengths, x);
    const int64_t channels = columns_of(x), before = int64_t(weight.shape(0)) - 1;
    const ShortConv c{.s = s,
                      .channels = channels,
                      .before = before,
                      .x = rows(x, "x", s, channels),
                      .kept = states_of(kept, "before", read, s.n, before * channels),
                      .weight = each(weight, "weight", before + 1, channels),
                      .bias = vector_of(bias, "bias", channels),
                      .y = rows(y, "y", s, channels),
                      .left = states_of(left, "left", write, s.n, before * channels)};
    perform(pool, pool, [c](Pool::Hold& hold) { run(hold, c); }, x, kept, lengths, y, left, read, write);
}

void selective_scan(Pool& pool, const Input& x, const Input& dt, const Input& a, const Input& b, const Input& c,
                    const Input& d, const Input& before, const Ids& lengths, const Output& y, const Output& h,
                    const PageIds& read, const PageIds& write) {
    const Sequences s = sequences_of(lengths, x);
    const int64_t channels = columns_of(x), states = columns_of(b);
    const SelectiveScan scan{.s = s,
                             .channels = channels,
                             .states = states,
                             .x = rows(x, "x", s, channels),
                             .dt = rows(dt, "dt", s, channels),
                             .b = rows(b, "B", s, states),
                             .c = rows(c, "C", s, states),
                             .a = each(a, "A", states, channels),
                             .d = vector_of(d, "D", channels),
                             .before = states_of(before, "the state", read, s.n, states * channels),
                             .h = states_of(h, "h", write, s.n, states * channels),
                             .y = rows(y, "y", s, channels)};
    perform(pool, pool, [scan](Pool::Hold& hold) { run(hold, scan); }, x, dt, b, c, before, lengths, y, h, read, write);
}

void linear_scan(Pool& pool, int64_t groups, const Input& x, const Input& dt, const Input& dt_bias, const Input& a,
                 const Input& b, const Input& c, const Input& d, float least, float most, const Input& before,
                 const Ids& lengths, const Output& y, const Output& h, const PageIds& read, const PageIds& write) {
    const Sequences s = sequences_of(lengths, x);
    const int64_t heads = columns_of(dt);
    if (heads < 1 || groups < 1 || heads % groups || columns_of(x) % heads || columns_of(b) % groups)
        refuse("x, dt or B do not divide into heads");
    const int64_t width = columns_of(x) / heads, states = columns_of(b) / groups, size = heads * states * width;
    const LinearScan scan{.s = s,
                          .heads = heads,
                          .width = width,
                          .states = states,
                          .group = heads / groups,
                          .x = rows(x, "x", s, heads * width),
                          .b = rows(b, "B", s, groups * states),
                          .c = rows(c, "C", s, groups * states),
                          .x_head = width,
                          .b_head = states,
                          .c_head = states,
                          .before = states_of(before, "the state", read, s.n, size),
                          .h = states_of(h, "h", write, s.n, size),
                          .y = rows(y, "y", s, heads * width),
                          .decay = nullptr,
                          .dt = rows(dt, "dt", s, heads),
                          .dt_bias = vector_of(dt_bias, "dt_bias", heads),
                          .a = vector_of(a, "A", heads),
                          .d = vector_of(d, "D", heads),
                          .dt_least = least,
                          .dt_most = most};
    perform(pool, pool, [scan](Pool::Hold& hold) { run(hold, scan); }, x, dt, b, c, before, lengths, y, h, read, write);
}

void lightning_scan(Pool& pool, const Input& q, const Input& k, const Input& v, const Input& decay, const Input& before,
                    const Ids& lengths, const Output& y, const Output& h, const PageIds& read, const PageIds& write) {
    const Sequences s = sequences_of(lengths, q);
    if (q.ndim() != 3) refuse("q must have an axis of heads");
    const int64_t rows_of_all = s.n * s.m, heads = int64_t(q.shape(1)), dim = int64_t(q.shape(2));
    const auto queries = heads_of(q, "q", rows_of_all, heads, dim), keys = heads_of(k, "k", rows_of_all, heads, dim),
               values = heads_of(v, "v", rows_of_all, heads, dim);
    const LinearScan scan{.s = s,
                          .heads = heads,
                          .width = dim,
                          .states = dim,
                          .group = 1,
                          .x = {values.data, values.stride},
                          .b = {keys.data, keys.stride},
                          .c = {queries.data, queries.stride},
                          .x_head = values.head,
                          .b_head = keys.head,
                          .c_head = queries.head,
                          .before = states_of(before, "the state", read, s.n, heads * dim * dim),
                          .h = states_of(h, "h", write, s.n, heads * dim * dim),
                          .y = rows(y, "y", s, heads * dim),
                          .decay = vector_of(decay, "decay", heads)};
    perform(pool, pool, [scan](Pool::Hold& hold) { run(hold, scan); }, q, k, v, before, lengths, y, h, read, write);
}

void delta_scan(Pool& pool, int64_t key_heads, float reach, const Input& q, const Input& k, const Input& v,
                const Input& decay, const Input& beta, const Input& rate, const Input& dt_bias, const Input& before,
                const Ids& lengths, const Output& y, const Output& h, const PageIds& read, const PageIds& write) {
    const Sequences s = sequences_of(lengths, q);
    const int64_t heads = columns_of(beta);
    if (heads < 1 || key_heads < 1 || heads % key_heads || columns_of(q) % key_heads || columns_of(v) % heads)
        refuse("q, v or beta do not divide into heads");
    const int64_t dim = columns_of(q) / key_heads, width = columns_of(v) / heads, size = heads * dim * width;
    const bool by_channel = columns_of(decay) != heads;
    const int64_t decays = by_channel ? heads * dim : heads;
    const DeltaScan scan{.s = s,
                         .heads = heads,
                         .key_heads = key_heads,
                         .dim = dim,
                         .width = width,
                         .by_channel = by_channel,
                         .reach = reach,
                         .q = rows(q, "q", s, key_heads * dim),
                         .k = rows(k, "k", s, key_heads * dim),
                         .v = rows(v, "v", s, heads * width),
                         .decay = rows(decay, "decay", s, decays),
                         .beta = rows(beta, "beta", s, heads),
                         .rate = vector_of(rate, "rate", heads),
                         .dt_bias = vector_of(dt_bias, "dt_bias", decays),
                         .before = states_of(before, "the state", read, s.n, size),
                         .h = states_of(h, "h", write, s.n, size),
                         .y = rows(y, "y", s, heads * width)};
    auto job = [scan](Pool::Hold& hold) { run(hold, scan); };
    perform(pool, pool, job, q, k, v, decay, beta, before, lengths, y, h, read, write);
}

void norm_gate(Pool& pool, bool silu, float eps, const Input& y, const Input& z, const Input& weight,
               const Output& out) {
    const Rows<const float> a = rows_of(y, "y"), b = rows_of(z, "z", a.rows, a.columns);
    const Rows<float> to = rows_of(out, "out", a.rows, a.columns);
    const int64_t size = int64_t(weight.size());
    const float* w = vector_of(weight, "weight", size);
    if (size < 1 || a.columns % size) refuse("y does not divide into heads as wide as the weight");
    auto job = [=](Pool::Hold& hold) {
        hold.split(a.rows, [&](int64_t begin, int64_t end, int) {
            for (int64_t r = begin; r < end; ++r)
                for (int64_t i = 0; i < a.columns; i += size)
                    delta_kernels().norm_gate(a.data + r * a.stride + i, b.data + r * b.stride + i, w, size, eps, silu,
                                              to.data + r * to.stride + i);
        });
    };
    perform(pool, pool, job, y, z, out);
}

// The page that each sequence reads. One that begins gets zeros in the page that it writes, and reads those.
void begin_states(Pool& pool, const Output& pages, const Ids& read, const Ids& fresh, const Ids& write,
                  const Places& found) {
    const Rows<float> to = rows_of(pages, "pages");
    const int64_t n = int64_t(write.size());
    const int64_t *from = vector_of(read, "read", n), *begins = vector_of(fresh, "fresh", n),
                  *page = vector_of(write, "write", n);
    int64_t* reads = vector_of(found, "found", n);
    auto job = [=](Pool::Hold& hold) {
        hold.split(n, [&](int64_t begin, int64_t end, int) {
            for (int64_t i = begin; i < end; ++i) {
                check_id(page[i], to.rows, "page");
                if (begins[i]) std::fill_n(to.data + page[i] * to.stride, to.columns, 0.f);
                reads[i] = begins[i] ? page[i] : from[i];
                check_id(reads[i], to.rows, "page");
            }
        });
    };
    perform(pool, pool, job, pages, read, fresh, write, found);
}

void state_space_scan(Pool& pool, const Input& u, const Input& terms, const Input& d, const Input& before,
                      const Ids& lengths, const Output& y, const Output& h, const PageIds& read, const PageIds& write) {
    const Sequences s = sequences_of(lengths, u);
    if (terms.ndim() != 4 || (terms.shape(2) != 6 && terms.shape(2) != 14))
        refuse("terms are [blocks, modes, 6 or 14, 16]");
    const int64_t channels = columns_of(u), modes = int64_t(terms.shape(1));
    StateSpace scan{.s = s,
                    .channels = channels,
                    .modes = modes,
                    .low_rank = terms.shape(2) == 14,
                    .u = rows(u, "u", s, channels),
                    .terms = nullptr,
                    .d = vector_of(d, "D", channels),
                    .before = states_of(before, "the state", read, s.n, modes * 2 * channels),
                    .h = states_of(h, "h", write, s.n, modes * 2 * channels),
                    .y = rows(y, "y", s, channels)};
    scan.terms = each(terms, "terms", scan.blocks(), modes * scan.num_terms() * StateSpace::BLOCK);
    perform(pool, pool, [scan](Pool::Hold& hold) { run(hold, scan); }, u, before, lengths, y, h, read, write);
}

void gated_lru(Pool& pool, const Input& x, const Input& into, const Input& gate, const Input& decay, const Input& begun,
               const Input& before, const Ids& lengths, const Output& y, const Output& begins, const Output& h,
               const PageIds& begun_read, const PageIds& begun_write, const PageIds& read, const PageIds& write) {
    const Sequences s = sequences_of(lengths, x);
    const int64_t channels = columns_of(x), flags = rows_of(begun, "begun").columns;
    const GatedLru scan{.s = s,
                        .channels = channels,
                        .flags = flags,
                        .x = rows(x, "x", s, channels),
                        .into = rows(into, "the input gate", s, channels),
                        .gate = rows(gate, "the decay gate", s, channels),
                        .decay = vector_of(decay, "decay", channels),
                        .begun = states_of(begun, "begun", begun_read, s.n, flags),
                        .before = states_of(before, "the state", read, s.n, channels),
                        .begins = states_of(begins, "begins", begun_write, s.n, flags),
                        .h = states_of(h, "h", write, s.n, channels),
                        .y = rows(y, "y", s, channels)};
    auto job = [scan](Pool::Hold& hold) { run(hold, scan); };
    perform(pool, pool, job, x, into, gate, begun, before, lengths, y, begins, h, begun_read, begun_write, read, write);
}

void taylor_scan(Pool& pool, int64_t heads, bool is_hedgehog, const Input& q, const Input& k, const Input& v,
                 const Input& before, const Ids& lengths, const Output& y, const Output& h, const PageIds& read,
                 const PageIds& write) {
    const Sequences s = sequences_of(lengths, q);
    if (heads < 1 || columns_of(q) % heads || columns_of(v) % heads) refuse("q or v do not divide into heads");
    const int64_t dim = columns_of(q) / heads, width = columns_of(v) / heads;
    TaylorScan scan{.s = s,
                    .heads = heads,
                    .dim = dim,
                    .width = width,
                    .is_hedgehog = is_hedgehog,
                    .q = rows(q, "q", s, heads * dim),
                    .k = rows(k, "k", s, heads * dim),
                    .v = rows(v, "v", s, heads * width),
                    .before = {},
                    .h = {},
                    .y = rows(y, "y", s, heads * width)};
    const int64_t size = heads * scan.features() * (width + 1);
    scan.before = states_of(before, "the state", read, s.n, size);
    scan.h = states_of(h, "h", write, s.n, size);
    perform(pool, pool, [scan](Pool::Hold& hold) { run(hold, scan); }, q, k, v, before, lengths, y, h, read, write);
}

}  // namespace

void bind_recurrent(nb::module_& m) {
    m.def("short_conv", short_conv, nb::arg("pool"), array("x"), array("before"), array("weight"), array("bias").none(),
          array("lengths"), array("y"), array("left"), array("read").none(), array("write").none());
    m.def("selective_scan", selective_scan, nb::arg("pool"), array("x"), array("dt"), array("a"), array("b"),
          array("c"), array("d"), array("before"), array("lengths"), array("y"), array("h"), array("read").none(),
          array("write").none());
    m.def("linear_scan", linear_scan, nb::arg("pool"), nb::arg("groups"), array("x"), array("dt"), array("dt_bias"),
          array("a"), array("b"), array("c"), array("d"), nb::arg("least"), nb::arg("most"), array("before"),
          array("lengths"), array("y"), array("h"), array("read").none(), array("write").none());
    m.def("lightning_scan", lightning_scan, nb::arg("pool"), array("q"), array("k"), array("v"), array("decay"),
          array("before"), array("lengths"), array("y"), array("h"), array("read").none(), array("write").none());
    m.def("delta_scan", delta_scan, nb::arg("pool"), nb::arg("key_heads"), nb::arg("reach"), array("q"), array("k"),
          array("v"), array("decay"), array("beta"), array("rate"), array("dt_bias"), array("before"), array("lengths"),
          array("y"), array("h"), array("read").none(), array("write").none());
    m.def("begin_states", begin_states, nb::arg("pool"), array("pages"), array("read"), array("fresh"), array("write"),
          array("found"));
    m.def("norm_gate", norm_gate, nb::arg("pool"), nb::arg("silu"), nb::arg("eps"), array("y"), array("z"),
          array("weight"), array("out"));
    m.def("state_space_scan", state_space_scan, nb::arg("pool"), array("u"), array("terms"), array("d"),
          array("before"), array("lengths"), array("y"), array("h"), array("read").none(), array("write").none());
    m.def("gated_lru", gated_lru, nb::arg("pool"), array("x"), array("into"), array("gate"), array("decay"),
          array("begun"), array("before"), array("lengths"), array("y"), array("begins"), array("h"),
          array("begun_read").none(), array("begun_write").none(), array("read").none(), array("write").none());
    m.def("taylor_scan", taylor_scan, nb::arg("pool"), nb::arg("heads"), nb::arg("is_hedgehog"), array("q"), array("k"),
          array("v"), array("before"), array("lengths"), array("y"), array("h"), array("read").none(),
          array("write").none());
}

}  // namespace ridgeline
