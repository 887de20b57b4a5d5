// Norms and rotations of queries and keys.
#pragma once
#include "linear.h"

namespace ridgeline {

struct HeadsCase {
    int64_t head_dim;
    int64_t rope_dim = 0;      // rotated elements of a head; 0: none
    bool interleaved = false;  // pairs (2i, 2i + 1) instead of (i, i + rope_dim / 2)
    bool over_all = false;     // one norm over all heads instead of one per head
    int64_t first = 0;         // the first rotated element of a head
};

struct HeadKernels {
    // Normalizes and rotates heads [begin, end) of one token at x, in place. cos, sin: [rope_dim / 2], or null.
    void (*finish)(const HeadsCase&, const NormWeights&, float* x, int64_t begin, int64_t end, const float* cos,
                   const float* sin);
};
RL_TABLE(HeadKernels, head_kernels)

}  // namespace ridgeline
