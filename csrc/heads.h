// Queries and keys between their projection and attention.
#pragma once
#include "linear.h"

namespace ridgeline {

struct HeadsCase {
    int64_t head_dim;
    int64_t rope_dim = 0;      // elements of a head that turn; 0: none
    bool interleaved = false;  // pairs (2i, 2i + 1) instead of (i, i + rope_dim / 2)
    bool over_all = false;     // one norm over all heads instead of one per head
    int64_t first = 0;         // the first element of a head that turns
};

struct HeadKernels {
    // Heads [begin, end) of one token at x, in place: normalized, then turned. cos, sin: [rope_dim / 2], or null.
    void (*finish)(const HeadsCase&, const NormWeights&, float* x, int64_t begin, int64_t end, const float* cos,
                   const float* sin);
};
RL_TABLE(HeadKernels, head_kernels)

}  // namespace ridgeline
