// Element-wise functions of rows.
#pragma once
#include <cstdint>

#include "activation.h"
#include "dispatch.h"

namespace ridgeline {

// gate: a silu(b); sigmoid_gate: a sigmoid(b)
enum class Map { activate, gated, gate, sigmoid_gate, softcap, scale, add, multiply };

struct MapCase {
    Map kind;
    Gate gate;     // used by `activate` and `gated`
    float number;  // used by `softcap`, `scale` and `add`: a + number b
};

struct ElementwiseKernels {
    void (*map)(const MapCase&, const float* a, const float* b, int64_t n, float* out);
    // norm(y silu(z)) by groups: out = x / sqrt(mean(x^2) + eps) weight. size: columns of a group.
    void (*gated_norm)(const float* y, const float* z, const float* weight, int64_t groups, int64_t size, float eps,
                       float* out);
    // Returns the largest of n > 0 numbers; NaN if any is NaN.
    float (*largest)(const float* x, int64_t n);
};
RL_TABLE(ElementwiseKernels, elementwise_kernels)

}  // namespace ridgeline
