// The choice of the keys that a query attends to, by an indexer.
#pragma once
#include <cstdint>

#include "dispatch.h"

namespace ridgeline {

// A key's score for a query: the sum over heads of weight[h] * max(0, q[h] . key).
struct SelectCase {
    int64_t heads, numbers;
};

struct SelectKernels {
    // One query, transposed to [numbers, heads], and `count` keys [numbers] each -> scores. sums: room, [heads].
    void (*score)(const SelectCase&, const float* q, const float* weights, const float* keys, int64_t count,
                  float* sums, float* scores);
};
RL_TABLE(SelectKernels, select_kernels)

}  // namespace ridgeline
