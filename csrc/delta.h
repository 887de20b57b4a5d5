// The gated delta rule: the work of one thread.
#pragma once
#include "recurrent.h"

namespace ridgeline {

// S = a S; S = S + beta k (v - S^T k)^T; y = S^T q, where q and k are made unit vectors, q is divided by sqrt(dim),
// a = exp(rate softplus(decay + dt_bias)), and beta is given before its sigmoid, which is multiplied by reach.
struct DeltaScan {
    Sequences s;
    int64_t heads, key_heads, dim, width;  // heads of values; heads of queries and keys; size of a key; size of a value
    bool by_channel;                       // a has a number for each channel of a key, otherwise for each head
    float reach;                           // the largest beta
    Matrix2<const float> q, k, v;          // rows [key_heads * dim], the same, [heads * width]
    Matrix2<const float> decay, beta;      // rows [heads] or [heads * dim], [heads]
    const float *rate, *dt_bias;           // [heads], negative; the size of decay
    States<const float> before;            // [heads, dim, width]
    States<float> h;                       // the state after
    Matrix2<float> y;                      // rows [heads * width]
};

struct DeltaKernels {
    void (*scan)(const DeltaScan&, int64_t sequence, int64_t head, float* room);
    size_t (*room)(int64_t dim);  // in floats
    // One head: y / sqrt(mean(y^2) + eps) weight act(z), act the silu or the sigmoid.
    void (*norm_gate)(const float* y, const float* z, const float* weight, int64_t size, float eps, bool silu,
                      float* out);
};
RL_TABLE(DeltaKernels, delta_kernels)

}  // namespace ridgeline
