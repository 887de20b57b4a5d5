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

// Of each of n sequences, `size` numbers, in one piece.
template <class T> T* each(const Given<T>& a, const char* name, int64_t n, int64_t size) {
    const Rows<T> r = rows_of(a, name, n, size);
    if (r.rows > 1 && r.stride != size) refuse(std::string(name) + " must be dense");
    return r.data;
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
                const Ids& lengths, const Output& y, const Output& left) {
    const Sequences s = sequences_of(lengths, x);
    const int64_t channels = columns_of(x), before = int64_t(weight.shape(0)) - 1;
    const ShortConv c{s,
                      channels,
                      before,
                      rows(x, "x", s, channels),
                      each(kept, "before", s.n, before * channels),
                      each(weight, "weight", before + 1, channels),
                      vector_of(bias, "bias", channels),
                      rows(y, "y", s, channels),
                      each(left, "left", s.n, before * channels)};
    Work work(pool);
    run(work.hold, c);
}

void selective_scan(Pool& pool, const Input& x, const Input& dt, const Input& a, const Input& b, const Input& c,
                    const Input& d, const Input& before, const Ids& lengths, const Output& y, const Output& h) {
    const Sequences s = sequences_of(lengths, x);
    const int64_t channels = columns_of(x), states = columns_of(b);
    const SelectiveScan scan{s,
                             channels,
                             states,
                             rows(x, "x", s, channels),
                             rows(dt, "dt", s, channels),
                             rows(b, "B", s, states),
                             rows(c, "C", s, states),
                             each(a, "A", states, channels),
                             vector_of(d, "D", channels),
                             each(before, "the state", s.n, states * channels),
                             each(h, "h", s.n, states * channels),
                             rows(y, "y", s, channels)};
    Work work(pool);
    run(work.hold, scan);
}

void linear_scan(Pool& pool, int64_t groups, const Input& x, const Input& dt, const Input& dt_bias, const Input& a,
                 const Input& b, const Input& c, const Input& d, float least, float most, const Input& before,
                 const Ids& lengths, const Output& y, const Output& h) {
    const Sequences s = sequences_of(lengths, x);
    const int64_t heads = columns_of(dt);
    if (heads < 1 || groups < 1 || heads % groups || columns_of(x) % heads || columns_of(b) % groups)
        refuse("x, dt or B do not divide into heads");
    const int64_t width = columns_of(x) / heads, states = columns_of(b) / groups, size = heads * states * width;
    const LinearScan scan{s,
                          heads,
                          width,
                          states,
                          heads / groups,
                          rows(x, "x", s, heads * width),
                          rows(b, "B", s, groups * states),
                          rows(c, "C", s, groups * states),
                          each(before, "the state", s.n, size),
                          each(h, "h", s.n, size),
                          rows(y, "y", s, heads * width),
                          rows(dt, "dt", s, heads),
                          vector_of(dt_bias, "dt_bias", heads),
                          vector_of(a, "A", heads),
                          vector_of(d, "D", heads),
                          least,
                          most};
    Work work(pool);
    run(work.hold, scan);
}

void taylor_scan(Pool& pool, int64_t heads, const Input& q, const Input& k, const Input& v, const Input& before,
                 const Ids& lengths, const Output& y, const Output& h) {
    const Sequences s = sequences_of(lengths, q);
    if (heads < 1 || columns_of(q) % heads || columns_of(v) % heads) refuse("q or v do not divide into heads");
    const int64_t dim = columns_of(q) / heads, width = columns_of(v) / heads,
                  size = heads * (1 + dim + dim * dim) * (width + 1);
    const TaylorScan scan{s,
                          heads,
                          dim,
                          width,
                          rows(q, "q", s, heads * dim),
                          rows(k, "k", s, heads * dim),
                          rows(v, "v", s, heads * width),
                          each(before, "the state", s.n, size),
                          each(h, "h", s.n, size),
                          rows(y, "y", s, heads * width)};
    Work work(pool);
    run(work.hold, scan);
}

}  // namespace

void bind_recurrent(nb::module_& m) {
    m.def("short_conv", short_conv, nb::arg("pool"), array("x"), array("before"), array("weight"), array("bias").none(),
          array("lengths"), array("y"), array("left"));
    m.def("selective_scan", selective_scan, nb::arg("pool"), array("x"), array("dt"), array("a"), array("b"),
          array("c"), array("d"), array("before"), array("lengths"), array("y"), array("h"));
    m.def("linear_scan", linear_scan, nb::arg("pool"), nb::arg("groups"), array("x"), array("dt"), array("dt_bias"),
          array("a"), array("b"), array("c"), array("d"), nb::arg("least"), nb::arg("most"), array("before"),
          array("lengths"), array("y"), array("h"));
    m.def("taylor_scan", taylor_scan, nb::arg("pool"), nb::arg("heads"), array("q"), array("k"), array("v"),
          array("before"), array("lengths"), array("y"), array("h"));
}

}  // namespace ridgeline
