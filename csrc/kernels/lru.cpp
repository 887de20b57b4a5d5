#include "lru.h"

#include <algorithm>

#include "vmath.h"

namespace ridgeline::RL_ISA {
namespace {

constexpr int N = 2;  // vectors of channels that are computed at once
constexpr int64_t CHANNELS = N * W;

// sqrt(1 - e^(-2 z)) for z >= 0, where a difference of two squares would lose what it asks for: with t = tanh z it is
// sqrt(2 t / (1 + t)).
RL_INLINE F size_of(F z) {
    const F t = tanh(z);
    return sqrt((t + t) / (set(1.f) + t));
}

void block(const GatedLru& s, int64_t i, int64_t at) {
    F h[N], decay[N];
    const int n = int(std::min(CHANNELS, s.channels - at));
    RL_FOR(v, N) {
        h[v] = load(s.before.of(i) + at + v * W, n - v * W);
        decay[v] = load(s.decay + at + v * W, n - v * W);
    }
    bool first = *s.begun.of(i) == 0.f;
    for (int64_t t = i * s.s.m; t < i * s.s.m + s.s.lengths[i]; ++t, first = false)
        RL_FOR(v, N) {
            const int left = n - v * W;
            const F log = decay[v] * sigmoid(load(s.gate.row(t) + at + v * W, left));
            const F in = sigmoid(load(s.into.row(t) + at + v * W, left)) * load(s.x.row(t) + at + v * W, left);
            h[v] = fma(exp(log), h[v], first ? in : size_of(-log) * in);
            store(s.y.row(t) + at + v * W, h[v], left);
        }
    RL_FOR(v, N) store(s.h.of(i) + at + v * W, h[v], n - v * W);
}

void scan(const GatedLru& s, int64_t i, int64_t first, int64_t last) {
    for (int64_t at = first; at < last; at += CHANNELS) block(s, i, at);
}

}  // namespace

extern const GatedLruKernels gated_lru_kernels = {scan, CHANNELS};

}  // namespace ridgeline::RL_ISA
