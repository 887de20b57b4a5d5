#include "elementwise.h"

#include <algorithm>
#include <cmath>

#include "vmath.h"

namespace ridgeline::RL_ISA {
namespace {

template <class Of> RL_INLINE void each(const float* a, const float* b, int64_t n, float* out, Of&& of) {
    for (int64_t i = 0; i < n; i += W) {
        const int count = int(std::min<int64_t>(W, n - i));
        store(out + i, of(load(a + i, count), b ? load(b + i, count) : set(0.f)), count);
    }
}

void activate_all(const Gate& gate, const float* a, const float* b, int64_t n, float* out) {
    switch (gate.activation) {  // outside of the loop
#define RL_EACH(name)                                                                       \
    case Activation::name:                                                                  \
        if (b)                                                                              \
            each(a, b, n, out, [](F x, F y) { return activate(Activation::name, x) * y; }); \
        else                                                                                \
            each(a, b, n, out, [](F x, F) { return activate(Activation::name, x); });       \
        break;
        RL_EACH(silu)
        RL_EACH(gelu)
        RL_EACH(gelu_tanh)
        RL_EACH(relu)
        RL_EACH(relu2)
#undef RL_EACH
        default: each(a, b, n, out, [&](F x, F y) { return activate(gate, x, y); });
    }
}

void map(const MapCase& c, const float* a, const float* b, int64_t n, float* out) {
    const F number = set(c.number);
    switch (c.kind) {
        case Map::gate: each(a, b, n, out, [](F y, F z) { return y * (z * sigmoid(z)); }); break;
        case Map::sigmoid_gate: each(a, b, n, out, [](F y, F z) { return y * sigmoid(z); }); break;
        case Map::softcap: each(a, b, n, out, [&](F x, F) { return number * tanh(x / number); }); break;
        case Map::scale: each(a, b, n, out, [&](F x, F) { return x * number; }); break;
        case Map::add: each(a, b, n, out, [&](F x, F y) { return x + number * y; }); break;
        case Map::multiply: each(a, b, n, out, [](F x, F y) { return x * y; }); break;
        default: activate_all(c.gate, a, b, n, out);
    }
}

void gated_norm(const float* y, const float* z, const float* weight, int64_t groups, int64_t size, float eps,
                float* out) {
    for (int64_t g = 0; g < groups; ++g, y += size, z += size, weight += size, out += size) {
        Sum16 sum = Sum16::zero();
        for (int64_t i = 0; i < size; i += 16)
            RL_FOR(v, V) {
                const int64_t at = i + v * W;
                const int n = int(std::clamp<int64_t>(size - at, 0, W));
                const F gate = load(z + at, n), x = load(y + at, n) * (gate * sigmoid(gate));
                store(out + at, x, n);
                sum.v[v] = fma(x, x, sum.v[v]);
            }
        const F scale = set(1.f / std::sqrt(total(sum) / float(size) + eps));
        for (int64_t i = 0; i < size; i += W) {
            const int n = int(std::min<int64_t>(W, size - i));
            store(out + i, load(out + i, n) * scale * load(weight + i, n), n);
        }
    }
}

float largest(const float* x, int64_t n) {
    F best = set(x[0]);
    I numbers = set(-1);
    int64_t i = 0;
    for (; i + W <= n; i += W) {
        const F each = load(x + i);
        best = each > best ? each : best;
        numbers &= (I)(each == each);
    }
    bool is_number = true;
    float found = x[0];
    for (int lane = 0; lane < W; ++lane) {
        is_number &= numbers[lane] != 0;
        found = best[lane] > found ? best[lane] : found;
    }
    for (; i < n; ++i) {
        is_number &= x[i] == x[i];
        found = x[i] > found ? x[i] : found;
    }
    return is_number ? found : NAN;
}

}  // namespace

extern const ElementwiseKernels elementwise_kernels = {map, gated_norm, largest};

}  // namespace ridgeline::RL_ISA
