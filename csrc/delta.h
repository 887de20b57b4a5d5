// The gated delta rule: what one thread does.
#pragma once
#include "recurrent.h"

namespace ridgeline {

// S = a S; S = S + beta k (v - S^T k)^T; y = S^T q, where q and k are made unit vectors, q is divided by sqrt(dim),
// a = exp(rate softplus(decay + dt_bias)) and beta is the sigmoid of what is given.
struct DeltaScan {
    Sequences s;
    int64_t heads, key_heads, dim, width;  // of values; of queries and keys; of a key; of a value
    bool by_channel;                       // a is a number of each channel of a key, otherwise of a head
    Matrix2<const float> q, k, v;          // rows [key_heads * dim], the same, [heads * width]
    Matrix2<const float> decay, beta;      // rows [heads] or [heads * dim], [heads]
    const float *rate, *dt_bias;           // [heads], negative; of the decay's size
    States<const float> before;            // [heads, dim, width]
    States<float> h;                       // the same, after
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
