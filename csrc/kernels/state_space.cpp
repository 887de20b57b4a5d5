#include "state_space.h"

#include <algorithm>

#include "simd.h"

namespace ridgeline::RL_ISA {
namespace {

constexpr int64_t B = StateSpace::BLOCK;
constexpr int TOGETHER = REGISTERS == 32 ? 4 : 2;                    // tokens
enum Term { A = 0, IN = 2, OUT = 4, E = 6, G = 8, P = 10, Q = 12 };  // h += e Re(p h) + g Re(q h)

// Re(x h) for x with a negated imaginary part, in two chains: one for each part.
struct Real {
    F real, imaginary;
};
RL_INLINE F sum(const Real& r) { return r.real + r.imaginary; }
RL_INLINE void add(Real& r, const float* x, F re, F im) {
    r.real = fma(load(x), re, r.real);
    r.imaginary = fma(load(x + B), im, r.imaginary);
}

// Computes W channels for T tokens, while each number of the state, [modes, 2, 16], is in registers.
template <int T>
RL_INLINE void diagonal(const float* terms, int64_t modes, const F (&u)[T], float* state, F (&out)[T]) {
    Real y[T];
    RL_FOR(t, T) y[t] = {set(0.f), set(0.f)};
    for (int64_t m = 0; m < modes; ++m, terms += 6 * B, state += 2 * B) {
        F re = load(state), im = load(state + B);
        const F a = load(terms), ai = load(terms + B), in = load(terms + IN * B), in_i = load(terms + (IN + 1) * B);
        RL_FOR(t, T) {
            const F next = fma(a, re, fma(-ai, im, in * u[t])), next_i = fma(a, im, fma(ai, re, in_i * u[t]));
            re = next, im = next_i;
            add(y[t], terms + OUT * B, re, im);
        }
        store(state, re), store(state + B, im);
    }
    RL_FOR(t, T) out[t] = sum(y[t]);
}

// Computes one token, since the next one needs sums over the whole state. p, q: Re(p h) and Re(q h), before and after.
RL_INLINE F low_rank(const float* terms, int64_t modes, F u, float* state, Real& p, Real& q) {
    const F ps = sum(p), qs = sum(q);
    Real y{set(0.f), set(0.f)};
    p = q = y;
    for (int64_t m = 0; m < modes; ++m, terms += 14 * B, state += 2 * B) {
        const F re = load(state), im = load(state + B), a = load(terms), ai = load(terms + B);
        F next = load(terms + IN * B) * u, next_i = load(terms + (IN + 1) * B) * u;
        next = fma(load(terms + E * B), ps, next), next_i = fma(load(terms + (E + 1) * B), ps, next_i);
        next = fma(load(terms + G * B), qs, next), next_i = fma(load(terms + (G + 1) * B), qs, next_i);
        next = fma(a, re, fma(-ai, im, next));
        next_i = fma(a, im, fma(ai, re, next_i));
        store(state, next), store(state + B, next_i);
        add(y, terms + OUT * B, next, next_i);
        add(p, terms + P * B, next, next_i), add(q, terms + Q * B, next, next_i);
    }
    return sum(y);
}

// Computes tokens [first, first + T) of W channels, of which n are valid.
template <bool LOW_RANK, int T> RL_INLINE void tokens(const StateSpace& s, int64_t first, int64_t channel, int n,
                                                      const float* terms, float* state, Real& p, Real& q) {
    const F d = load(s.d + channel, n);
    F u[T], y[T];
    RL_FOR(t, T) {
        prefetch(s.u.row(first + t + 8) + channel), prefetch(s.y.row(first + t + 8) + channel);
        u[t] = load(s.u.row(first + t) + channel, n);
    }
    if constexpr (LOW_RANK)
        y[0] = low_rank(terms, s.modes, u[0], state, p, q);
    else
        diagonal(terms, s.modes, u, state, y);
    RL_FOR(t, T) store(s.y.row(first + t) + channel, fma(d, u[t], y[t]), n);
}

template <bool LOW_RANK> void scan_block(const StateSpace& s, int64_t i, int64_t block, float* state) {
    const int64_t at = block * B, first = i * s.s.m;
    const float* before = s.before.of(i);
    float* h = s.h.of(i);
    const float* terms = s.terms + block * s.modes * s.num_terms() * B;
    for (int v = 0; v < V; ++v) {
        const int64_t channel = at + v * W;
        const int n = int(std::clamp<int64_t>(s.channels - channel, 0, W));
        if (!n) return;
        float* own = state + v * W;
        Real p{set(0.f), set(0.f)}, q = p;
        for (int64_t m = 0; m < 2 * s.modes; ++m) store(own + m * B, load(before + m * s.channels + channel, n));
        for (int64_t m = 0; LOW_RANK && m < s.modes; ++m) {
            const F re = load(own + 2 * m * B), im = load(own + (2 * m + 1) * B);
            add(p, terms + (m * 14 + P) * B + v * W, re, im), add(q, terms + (m * 14 + Q) * B + v * W, re, im);
        }
        const int64_t end = first + s.s.lengths[i];
        int64_t t = first;
        if constexpr (!LOW_RANK)
            for (; t + TOGETHER <= end; t += TOGETHER)
                tokens<false, TOGETHER>(s, t, channel, n, terms + v * W, own, p, q);
        for (; t < end; ++t) tokens<LOW_RANK, 1>(s, t, channel, n, terms + v * W, own, p, q);
        for (int64_t m = 0; m < 2 * s.modes; ++m) store(h + m * s.channels + channel, load(own + m * B), n);
    }
}

void scan(const StateSpace& s, int64_t i, int64_t block, float* room) {
    (s.low_rank ? scan_block<true> : scan_block<false>)(s, i, block, room);
}

}  // namespace

extern const StateSpaceKernels state_space_kernels = {scan};

}  // namespace ridgeline::RL_ISA
