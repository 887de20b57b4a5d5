// S4 and S4D, state spaces with fixed coefficients: the work of one thread.
#pragma once
#include "recurrent.h"

namespace ridgeline {

// Each channel has `modes` complex numbers of state: h = a h + b u, y = Re(c h) + d u. S4 (`low_rank`) also adds
// e Re(p h) + g Re(q h) to h, computed from the h before. Coefficients come in blocks of 16 channels, filled up
// with zeros: [blocks, modes, terms, 16] with the terms a, b, c (6), for S4 also e, g, p, q (14), each real and
// imaginary, the imaginary parts of c, p and q negated.
struct StateSpace {
    Sequences s;
    int64_t channels, modes;
    bool low_rank;
    Matrix2<const float> u;
    const float* terms;
    const float* d;              // [channels]
    States<const float> before;  // [modes, 2, channels]
    States<float> h;
    Matrix2<float> y;

    static constexpr int64_t BLOCK = 16;
    int64_t blocks() const { return (channels + BLOCK - 1) / BLOCK; }
    int64_t num_terms() const { return low_rank ? 14 : 6; }
};

struct StateSpaceKernels {
    void (*scan)(const StateSpace&, int64_t sequence, int64_t block, float* room);  // room: 2 * modes * 16 floats
};
RL_TABLE(StateSpaceKernels, state_space_kernels)

}  // namespace ridgeline
