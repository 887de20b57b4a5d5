// Latent attention: products of each head with a matrix of its own. (Attention over latents is in bind_attention.cpp.)
#include <nanobind/stl/vector.h>

#include "bind.h"
#include "stages.h"

namespace ridgeline {
namespace {

// [tokens, heads, columns], the last axis dense.
template <class T> struct Heads3 {
    T* data;
    int64_t stride, head;
};
template <class T>
Heads3<T> heads_of(const Given<T>& a, const char* name, int64_t tokens, int64_t heads, int64_t columns) {
    const bool shaped = a.ndim() == 3 && int64_t(a.shape(0)) == tokens && int64_t(a.shape(1)) == heads &&
                        int64_t(a.shape(2)) == columns;
    if (!shaped || (columns > 1 && a.stride(2) != 1))
        refuse(std::string(name) + " is " + shape_text(a.shape_ptr(), a.ndim()) + ", but " + std::to_string(tokens) +
               " tokens of " + std::to_string(heads) + " heads of " + std::to_string(columns) +
               " numbers side by side are asked for");
    return {a.data(), int64_t(a.stride(0)), int64_t(a.stride(1))};
}

void multiply_heads(Pool& pool, const std::vector<Matrix*>& matrices, const Input& x, const Output& out) {
    if (matrices.empty()) refuse("there are no heads");
    const int64_t heads = int64_t(matrices.size()), tokens = x.ndim() ? int64_t(x.shape(0)) : 0,
                  rows = matrices[0]->parts[0].rows;
    for (const Matrix* m : matrices)
        if (m->parts.size() != 1 || m->k != matrices[0]->k || m->parts[0].rows != rows)
            refuse("the heads' matrices are not of one shape");
    const Heads3<const float> from = heads_of(x, "x", tokens, heads, matrices[0]->k);
    const Heads3<float> to = heads_of(out, "out", tokens, heads, rows);
    Work work(pool);
    for (int64_t h = 0; h < heads; ++h) {
        Stream s{};
        s.tokens = tokens;
        s.source.x = from.data + h * from.head;
        s.source.stride = from.stride;
        const Epilogue::Out place{to.data + h * to.head, to.stride};
        Projection{*matrices[size_t(h)], {}, 1, {}}.run(work.hold, s, &place);
    }
}

}  // namespace

void bind_latent(nb::module_& m) {
    m.def("multiply_heads", multiply_heads, nb::arg("pool"), nb::arg("matrices"), array("x"), array("out"));
}

}  // namespace ridgeline
