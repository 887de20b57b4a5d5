// Latent attention: products of each head with its own matrix. (Attention over latents is in bind_attention.cpp.)
#include <algorithm>

#include <nanobind/stl/vector.h>

#include "bind.h"
#include "stages.h"

namespace ridgeline {
namespace {

void multiply_heads(Pool& pool, const std::vector<Matrix*>& matrices, const Input& x, const Output& out) {
    if (matrices.empty()) refuse("there are no heads");
    const int64_t heads = int64_t(matrices.size()), tokens = x.ndim() ? int64_t(x.shape(0)) : 0,
                  rows = matrices[0]->parts[0].rows;
    for (const Matrix* m : matrices)
        if (m->parts.size() != 1 || m->k != matrices[0]->k || m->parts[0].rows != rows)
            refuse("the heads' matrices must have one shape");
    const int64_t columns = matrices[0]->k, rest = x.ndim() == 3 ? int64_t(x.shape(2)) - columns : 0;
    const Heads3<const float> from = heads_of(x, "x", tokens, heads, columns + std::max<int64_t>(0, rest));
    const Heads3<float> to = heads_of(out, "out", tokens, heads, rows + std::max<int64_t>(0, rest));
    auto job = [matrices, heads, tokens, from, to, columns, rows, rest](Pool::Hold& hold) {
        for (int64_t h = 0; h < heads; ++h) {
            Stream s{};
            s.tokens = tokens;
            s.source.x = from.data + h * from.head;
            s.source.stride = from.stride;
            const Epilogue::Out place{to.data + h * to.head, to.stride};
            Projection{*matrices[size_t(h)], {}, 1, {}}.run(hold, s, &place);
        }
        if (rest < 1) return;
        hold.split(tokens, [&](int64_t begin, int64_t end, int) {
            for (int64_t t = begin; t < end; ++t)
                for (int64_t h = 0; h < heads; ++h)
                    std::copy_n(from.data + t * from.stride + h * from.head + columns, rest,
                                to.data + t * to.stride + h * to.head + rows);
        });
    };
    if (Program* program = Program::of(pool))
        for (const Matrix* m : matrices) program->keep(nb::find(m));
    perform(pool, pool, job, x, out);
}

}  // namespace

void bind_latent(nb::module_& m) {
    m.def("multiply_heads", multiply_heads, nb::arg("pool"), nb::arg("matrices"), array("x"), array("out"));
}

}  // namespace ridgeline
