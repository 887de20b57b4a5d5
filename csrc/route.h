// The choice of experts and their weights for each token.
#pragma once
#include <cstdint>

#include "dispatch.h"

namespace ridgeline {

// Scores are a softmax of the logits or a sigmoid of each. A bias is added for the choice alone. Experts are chosen
// from the best `open` groups (0 groups: from all). Of equal scores the lower expert wins; NaN counts as the largest.
struct RouteCase {
    int64_t experts, choices;
    int64_t groups, open;
    bool best_two;  // a group's score: the sum of its two best, or its best
    bool sigmoid, normalize;
    float scale;
};

struct RouteKernels {
    // One token: logits, bias [experts] (or null) -> ids, weights [choices]. room: route_room floats.
    void (*route)(const RouteCase&, const float* logits, const float* bias, int64_t* ids, float* weights, float* room);
};
RL_TABLE(RouteKernels, route_kernels)

constexpr int64_t ROUTE_BLOCK = 16;  // experts and groups are filled up to whole blocks
inline int64_t route_room(const RouteCase& c) { return 2 * (c.experts + ROUTE_BLOCK) + c.groups + ROUTE_BLOCK; }

}  // namespace ridgeline
