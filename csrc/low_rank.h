// Low-rank terms of several adapters: each row of a product has the term of its own slot, or none.
#pragma once
#include <cstdint>

#include "dispatch.h"

namespace ridgeline {

// The terms of one slot for one matrix [rows, columns]. down: [rank, columns]. up: [rank, rows].
struct LowRankTerm {
    const float *down, *up, *gain, *add;
    int64_t rank, rows, columns;
};

struct LowRankKernels {
    // inner[r] = down[r] x, in one order of sums that depends on the number of columns only.
    void (*inner)(const LowRankTerm&, const float* x, float* inner);
    // out[i] = gain[i] y[i] + add[i] + sum over r of inner[r] up[r, i], for i in [begin, end).
    void (*outer)(const LowRankTerm&, const float* y, const float* inner, int64_t begin, int64_t end, float* out);
};
RL_TABLE(LowRankKernels, low_rank_kernels)

}  // namespace ridgeline
