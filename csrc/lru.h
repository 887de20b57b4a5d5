// The real-gated linear recurrent unit: the work of one thread.
#pragma once
#include "recurrent.h"

namespace ridgeline {

// a = exp(decay sigmoid(gate)); h = a h + sqrt(1 - a^2) sigmoid(into) x, without the root at the first token of a
// sequence that has not begun; y = h.
struct GatedLru {
    Sequences s;
    int64_t channels, flags;
    Matrix2<const float> x, into, gate;
    const float* decay;          // [channels], negative
    States<const float> begun;   // [flags], 0 before the first token
    States<const float> before;  // [channels]
    States<float> begins;        // begun after the tokens
    States<float> h;
    Matrix2<float> y;
};

struct GatedLruKernels {
    void (*scan)(const GatedLru&, int64_t sequence, int64_t first, int64_t last);  // channels
    int64_t channels;  // pieces of work are multiples of this, except for the last
};
RL_TABLE(GatedLruKernels, gated_lru_kernels)

}  // namespace ridgeline
