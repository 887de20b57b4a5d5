// Draws tokens with noise of their own for every token id: src/ridgeline/sample/noise.py says how and why.
#pragma once
#include <cstdint>

#include "dispatch.h"

namespace ridgeline {

// Two words of 32 random bits for a token id come from the same rounds with these parts, 3 for each.
struct DrawKey {
    uint32_t parts[6];
};

struct DrawKernels {
    // Returns the index of the largest (x[i] - top) / temperature + noise of id i; of equals the first one. top: the
    // largest x. temperature: above 1e-30.
    int64_t (*logits)(const float* x, int64_t n, float top, double temperature, const DrawKey& key);
    // Returns the index of the largest scores[i] + noise of ids[i], where ids may be null: i. scores: at most 0.
    int64_t (*scores)(const double* scores, const int64_t* ids, int64_t n, const DrawKey& key);
    // Writes the indices of the scores (x[i] - top) / temperature that are at least `least`, up to rounding in float,
    // to `found` [n + 1]; returns their number. Adds e^score of all to `total`. least: above -80.
    int64_t (*likely)(const float* x, int64_t n, float top, double temperature, float least, int64_t* found,
                      double& total);
};
RL_TABLE(DrawKernels, draw_kernels)

}  // namespace ridgeline
