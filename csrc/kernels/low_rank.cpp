#include "low_rank.h"

#include <algorithm>

#include "simd.h"

namespace ridgeline::RL_ISA {
namespace {

void inner(const LowRankTerm& term, const float* x, float* inner) {
    for (int64_t r = 0; r < term.rank; ++r) {
        const float* row = term.down + r * term.columns;
        Sum16 sum = Sum16::zero();
        for (int64_t i = 0; i < term.columns; i += 16)
            RL_FOR(v, V) {
                const int64_t at = i + v * W;
                const int n = int(std::clamp<int64_t>(term.columns - at, 0, W));
                sum.v[v] = fma(load(row + at, n), load(x + at, n), sum.v[v]);
            }
        inner[r] = total(sum);
    }
}

void outer(const LowRankTerm& term, const float* y, const float* inner, int64_t begin, int64_t end, float* out) {
    for (int64_t i = begin; i < end; i += W) {
        const int n = int(std::min<int64_t>(W, end - i));
        F sum = fma(load(term.gain + i, n), load(y + i, n), load(term.add + i, n));
        for (int64_t r = 0; r < term.rank; ++r) sum = fma(set(inner[r]), load(term.up + r * term.rows + i, n), sum);
        store(out + i, sum, n);
    }
}

}  // namespace

extern const LowRankKernels low_rank_kernels = {inner, outer};

}  // namespace ridgeline::RL_ISA
