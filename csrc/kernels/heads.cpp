#include "heads.h"

#include "simd.h"

namespace ridgeline::RL_ISA {
namespace {

void turn_halves(float* x, int64_t pairs, const float* cos, const float* sin) {
    for (int64_t i = 0; i < pairs; i += W) {
        const int n = int(pairs - i < W ? pairs - i : W);
        F a = load(x + i, n), b = load(x + pairs + i, n), c = load(cos + i, n), s = load(sin + i, n);
        store(x + i, a * c - b * s, n);
        store(x + pairs + i, b * c + a * s, n);
    }
}

void turn_neighbors(float* x, int64_t pairs, const float* cos, const float* sin) {
    for (int64_t i = 0; i < pairs; ++i) {
        const float a = x[2 * i], b = x[2 * i + 1];
        x[2 * i] = a * cos[i] - b * sin[i];
        x[2 * i + 1] = b * cos[i] + a * sin[i];
    }
}

void finish(const HeadsCase& h, const NormWeights& norm, float* x, int64_t begin, int64_t end, const float* cos,
            const float* sin) {
    const bool normed = norm.kind != NormKind::none;
    if (normed && h.over_all) source_kernels.norm(norm, x, end * h.head_dim, x);
    for (int64_t i = begin; i < end; ++i) {
        float* head = x + i * h.head_dim;
        if (normed && !h.over_all) source_kernels.norm(norm, head, h.head_dim, head);
        if (!cos) continue;
        head += h.first;
        if (h.interleaved)
            turn_neighbors(head, h.rope_dim / 2, cos, sin);
        else
            turn_halves(head, h.rope_dim / 2, cos, sin);
    }
}

}  // namespace

extern const HeadKernels head_kernels = {finish};

}  // namespace ridgeline::RL_ISA
