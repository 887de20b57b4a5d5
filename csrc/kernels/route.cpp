#include "route.h"

#include <algorithm>
#include <cmath>

#include "vmath.h"

namespace ridgeline::RL_ISA {
namespace {

constexpr float TAKEN = __builtin_nanf(""), MOST = __builtin_inff();

int64_t whole(int64_t n) { return (n + ROUTE_BLOCK - 1) / ROUTE_BLOCK * ROUTE_BLOCK; }

// Computes the softmax of n numbers in place.
void softmax(float* x, int64_t n) {
    float top = -MOST;
    for (int64_t i = 0; i < n; ++i) top = x[i] > top ? x[i] : top;
    Sum16 sum = Sum16::zero();
    for (int64_t i = 0; i < n; i += 16)
        RL_FOR(v, V) {
            const int64_t at = i + v * W;
            const int count = int(std::clamp<int64_t>(n - at, 0, W));
            float e[W] = {};
            store(e, exp(load(x + at, count) - set(top)), count);
            store(x + at, load(e), count);
            sum.v[v] += load(e);
        }
    const F all = set(total(sum));
    for (int64_t i = 0; i < n; i += W) store(x + i, load(x + i, int(n - i)) / all, int(n - i));
}

// Pads to whole blocks with scores that are never chosen. NaN is chosen first.
void ready(float* rated, int64_t n) {
    for (int64_t i = 0; i < n; ++i) rated[i] = rated[i] == rated[i] ? rated[i] : MOST;
    std::fill(rated + n, rated + whole(n), TAKEN);
}

// Takes the largest number, the first of equal ones, and returns its index.
int64_t take_best(float* rated, int64_t n) {
    F best = set(-MOST);
    for (int64_t i = 0; i < n; i += W) best = max(load(rated + i), best);
    const F top = set(largest(best));
    for (int64_t i = 0;; i += W) {
        if (!total(load(rated + i) == top)) continue;
        while (rated[i] != top[0]) ++i;
        rated[i] = TAKEN;
        return i;
    }
}

// Experts outside of the best groups are chosen last.
void close_groups(const RouteCase& c, float* rated, float* scores) {
    const int64_t size = c.experts / c.groups;
    for (int64_t g = 0; g < c.groups; ++g) {
        float best = -MOST, second = -MOST;
        for (int64_t i = g * size; i < (g + 1) * size; ++i) {
            if (rated[i] > best)
                second = best, best = rated[i];
            else if (rated[i] > second)
                second = rated[i];
        }
        scores[g] = c.best_two ? best + second : best;
    }
    ready(scores, c.groups);
    for (int64_t i = 0; i < c.open; ++i) take_best(scores, c.groups);
    for (int64_t g = 0; g < c.groups; ++g)
        if (scores[g] == scores[g]) std::fill_n(rated + g * size, size, -MOST);
}

void route(const RouteCase& c, const float* logits, const float* bias, int64_t* ids, float* weights, float* room) {
    float *scores = room, *rated = scores + whole(c.experts), *groups = rated + whole(c.experts);
    const int64_t n = c.experts;
    // Where only the order matters, logits decide: a softmax rounds some unequal logits to equal scores.
    const bool plain = !c.sigmoid && !bias && !c.groups;
    std::copy_n(logits, n, scores);
    if (c.sigmoid)
        for (int64_t i = 0; i < n; i += W) store(scores + i, sigmoid(load(scores + i, int(n - i))), int(n - i));
    else if (!plain || !c.normalize)
        softmax(scores, n);
    for (int64_t i = 0; i < n; ++i) rated[i] = plain ? logits[i] : bias ? scores[i] + bias[i] : scores[i];
    ready(rated, n);
    if (c.groups) close_groups(c, rated, groups);
    float sum = 0;
    for (int64_t j = 0; j < c.choices; ++j) {
        ids[j] = take_best(rated, n);
        weights[j] = scores[ids[j]];
        sum += weights[j];
    }
    if (c.normalize && plain)
        softmax(weights, c.choices);
    else if (c.normalize)
        for (int64_t j = 0; j < c.choices; ++j) weights[j] /= sum;
    if (c.scale != 1.f)
        for (int64_t j = 0; j < c.choices; ++j) weights[j] *= c.scale;
}

}  // namespace

extern const RouteKernels route_kernels = {route};

}  // namespace ridgeline::RL_ISA
