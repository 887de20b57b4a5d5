// Functions of the elements of a vector. Errors are relative to float64, in units of 2^-24 (u).
#pragma once
#include "activation.h"
#include "simd.h"

namespace ridgeline::RL_ISA {

constexpr float LOG2_E = 1.44269504f;

// e^x within 1.3 units in the last place; 0 below -87.33 (no denormals), infinity above 88.72, NaN for NaN.
RL_INLINE F exp(F x) {
    const F low = set(-87.33654f), high = set(88.72283f);
    F inside = min(max(x, low), high);
    F n = to_float(round(inside * set(1.44269504f)));
    F r = fma(n, set(-0.693359375f), inside);  // ln 2 in two parts, the first of few bits, so that n * it is exact
    r = fma(n, set(2.12194440e-4f), r);
    F p = set(1.9875691500e-4f);
    p = fma(p, r, set(1.3981999507e-3f));
    p = fma(p, r, set(8.3334519073e-3f));
    p = fma(p, r, set(4.1665795894e-2f));
    p = fma(p, r, set(1.6666665459e-1f));
    p = fma(p, r, set(5.0000001201e-1f));
    p = fma(p, r * r, r) + set(1.f);
    I k = round(n), half = k >> 1;  // 2^k in two factors: 2^128 is no float
    p = p * floats((half + 127) << 23) * floats((k - half + 127) << 23);
    p = select(x > high, set(__builtin_inff()), p);
    p = select(x < low, set(0.f), p);
    return select(x == x, p, x);
}

// 2^x for x <= 0, at least 2^-126 and so never 0; NaN for NaN. 1.3 u; coefficients: own fit, least relative error.
// For K vectors at once: computed one after the other, each would wait for the latency of the one before.
template <int K> RL_INLINE void exp2_down(F (&x)[K]) {
    constexpr float C[] = {
        1.53533416e-4f, 1.33988704e-3f, 9.61843785e-3f, 5.55033237e-2f, 2.40226477e-1f, 6.93147182e-1f, 1.f};
    I n[K];
    F r[K];
    RL_FOR(i, K) n[i] = round(x[i] = max(set(-126.f), x[i]));
    RL_FOR(i, K) r[i] = x[i] - to_float(n[i]), x[i] = set(C[0]);
    RL_UNROLL for (int c = 1; c < 7; ++c) RL_FOR(i, K) x[i] = fma(x[i], r[i], set(C[c]));
    RL_FOR(i, K) x[i] = floats(bits(x[i]) + (n[i] << 23));
}
RL_INLINE F exp2_down(F x) {
    F one[1] = {x};
    exp2_down(one);
    return one[0];
}

// log(1 + e^x), 4 u. log(1 + u) = 2 artanh(u / (2 + u)); coefficients: own fit, least relative error.
RL_INLINE F softplus(F x) {
    const F u = exp2_down(-abs(x) * set(LOG2_E)), t = u / (set(2.f) + u), z = t * t;
    F p = set(0.24389511f);
    p = fma(p, z, set(0.21390578f));
    p = fma(p, z, set(0.28622124f));
    p = fma(p, z, set(0.39998570f));
    p = fma(p, z, set(0.66666681f));
    p = fma(p, z, set(2.f));
    return fma(p, t, max(set(0.f), x));
}

// 1 / (1 + e^-x), 4 u.
RL_INLINE F sigmoid(F x) { return set(1.f) / (set(1.f) + exp(-x)); }

// tanh, 4 u. An odd polynomial near 0, exp elsewhere; coefficients: own fit, least relative error.
RL_INLINE F tanh(F x) {
    F a = abs(x), z = x * x;
    F p = set(-6.096931174e-3f);
    p = fma(p, z, set(2.099734917e-2f));
    p = fma(p, z, set(-5.385095254e-2f));
    p = fma(p, z, set(1.333277076e-1f));
    p = fma(p, z, set(-3.333332837e-1f));
    F small = fma(p * z, x, x);
    F large = set(1.f) - set(2.f) / (exp(a + a) + set(1.f));
    large = floats(bits(large) | (bits(x) & (int32_t)0x80000000));
    F r = select(a < set(0.625f), small, large);
    return select(x == x, r, x);
}

// The distribution function of the standard normal, (1 + erf(x / sqrt 2)) / 2: e^(-z^2) t q(t) with z = |x| / sqrt 2,
// t = 1 / (1 + z / 2) is half of its complement. The absolute error is 2 u.
RL_INLINE F normal_cdf(F x) {
    F z = abs(x) * set(0.70710678f);
    F t = set(1.f) / fma(z, set(0.5f), set(1.f));
    F q = set(-5.906921625e-2f);
    q = fma(q, t, set(2.845761776e-1f));
    q = fma(q, t, set(-4.872022867e-1f));
    q = fma(q, t, set(2.780697942e-1f));
    q = fma(q, t, set(-2.662738413e-2f));
    q = fma(q, t, set(2.026875615e-1f));
    q = fma(q, t, set(2.431036085e-1f));
    q = fma(q, t, set(2.823753357e-1f));
    q = fma(q, t, set(2.820864022e-1f));
    F tail = set(0.5f) * exp(-z * z) * t * q;
    return select(x > set(0.f), set(1.f) - tail, tail);
}

RL_INLINE F gelu_tanh(F x) {  // x (1 + tanh u) / 2 = x sigmoid(2 u)
    F u = set(0.7978845608f) * fma(set(0.044715f) * x * x, x, x);
    return x * sigmoid(u + u);
}

RL_INLINE F relu(F x) { return select(x < set(0.f), set(0.f), x); }  // a NaN stays a NaN

// With one argument, for an MLP.
RL_INLINE F activate(Activation act, F x) {
    switch (act) {
        case Activation::silu: return x * sigmoid(x);
        case Activation::gelu: return x * normal_cdf(x);
        case Activation::gelu_tanh: return gelu_tanh(x);
        case Activation::relu2: return relu(x) * relu(x);
        default: return relu(x);
    }
}

// With two arguments, for a gated MLP.
RL_INLINE F activate(const Gate& gate, F g, F up) {
    if (gate.activation != Activation::clamped_swiglu) return activate(gate.activation, g) * up;
    F limit = set(gate.limit);
    g = select(g > limit, limit, g);
    up = select(up > limit, limit, select(up < -limit, -limit, up));
    return g * sigmoid(set(gate.alpha) * g) * (up + set(1.f));
}

}  // namespace ridgeline::RL_ISA
