// One pass over the state for each token computes its write, its result, and the product of the next token's key with
// the state, so that each number of the state is read and written once per token.
#include "delta.h"

#include <algorithm>
#include <cmath>

#include "vmath.h"

namespace ridgeline::RL_ISA {
namespace {

constexpr int64_t CHUNK = 16;     // tokens that are prepared together
constexpr int N = 2;              // vectors of a value that are computed at once
constexpr int64_t LANES = N * W;  // dim * LANES numbers of a state stay in the first cache
constexpr float UNIT_EPS = 1e-6f;

int64_t padded(int64_t dim) { return (dim + 15) / 16 * 16; }

// Inputs of some tokens and a head, each [CHUNK, padded dim], except beta [CHUNK].
struct Ready {
    float *q, *k, *decay, *found;  // found: decay * k, which is multiplied with the state
    float *beta, *tile;            // tile: [dim, LANES]
};

Ready arrays_in(int64_t dim, float* room) {
    const int64_t all = CHUNK * padded(dim);
    return {room, room + all, room + 2 * all, room + 3 * all, room + 4 * all, room + 4 * all + CHUNK};
}

// factor x / |x|
void unit(const float* x, int64_t dim, float factor, float* to) {
    Sum16 sum = Sum16::zero();
    for (int64_t i = 0; i < dim; i += 16)
        RL_FOR(v, V) {
            const F a = load(x + i + v * W, int(std::clamp<int64_t>(dim - i - v * W, 0, W)));
            sum.v[v] = fma(a, a, sum.v[v]);
        }
    const F scale = set(factor / std::sqrt(total(sum) + UNIT_EPS));
    for (int64_t i = 0; i < dim; i += W) store(to + i, load(x + i, int(std::min<int64_t>(W, dim - i))) * scale);
}

RL_INLINE F decay_of(F given, F bias, F rate) {
    const F x = softplus(given + bias) * rate * set(LOG2_E);
    return select(x < set(-126.f), set(0.f), exp2_down(x));
}

void make_ready(const DeltaScan& s, int64_t head, int64_t row, int64_t tokens, const Ready& r) {
    const int64_t stride = padded(s.dim), key = head / (s.heads / s.key_heads) * s.dim;
    const F rate = set(s.rate[head]);
    float betas[CHUNK] = {}, decays[CHUNK] = {};
    for (int64_t t = 0; t < tokens; ++t) {
        betas[t] = s.beta.row(row + t)[head];
        if (!s.by_channel) decays[t] = s.decay.row(row + t)[head];
    }
    for (int64_t t = 0; t < CHUNK; t += W) {
        store(r.beta + t, set(s.reach) * sigmoid(load(betas + t)));
        if (!s.by_channel) store(decays + t, decay_of(load(decays + t), set(s.dt_bias[head]), rate));
    }
    for (int64_t t = 0; t < tokens; ++t) {
        unit(s.q.row(row + t) + key, s.dim, 1.f / std::sqrt(float(s.dim)), r.q + t * stride);
        unit(s.k.row(row + t) + key, s.dim, 1.f, r.k + t * stride);
        const float* given = s.by_channel ? s.decay.row(row + t) + head * s.dim : nullptr;
        for (int64_t i = 0; i < s.dim; i += W) {
            const int n = int(std::min<int64_t>(W, s.dim - i));
            const F a =
                given ? decay_of(load(given + i, n), load(s.dt_bias + head * s.dim + i, n), rate) : set(decays[t]);
            store(r.decay + t * stride + i, a);
            store(r.found + t * stride + i, a * load(r.k + t * stride + i));
        }
    }
}

// Multiplies a key with a state that has not decayed yet.
RL_INLINE void find(const float* found, int64_t dim, const float* from, int64_t stride, int n, F (&e)[N]) {
    RL_FOR(v, N) e[v] = set(0.f);
    for (int64_t i = 0; i < dim; ++i)
        RL_FOR(v, N) e[v] = fma(set(found[i]), load(from + i * stride + v * W, n - v * W), e[v]);
}

// Computes one token. written: beta (v - e). e: k S of the next token, if `next` is not null.
template <bool WHOLE, bool NEXT> RL_INLINE void pass(const float* q, const float* k, const float* decay,
                                                     const float* next, int64_t dim, const float* from,
                                                     int64_t from_stride, float* to, int64_t to_stride, int n,
                                                     const F (&written)[N], F (&y)[N], F (&e)[N]) {
    RL_FOR(v, N) y[v] = e[v] = set(0.f);
    for (int64_t i = 0; i < dim; ++i, from += from_stride, to += to_stride) {
        const F ks = set(k[i]), qs = set(q[i]), as = set(decay[i]), ns = set(NEXT ? next[i] : 0.f);
        RL_FOR(v, N) {
            const F before = WHOLE ? load(from + v * W) : load(from + v * W, n - v * W);
            const F h = fma(ks, written[v], before * as);
            y[v] = fma(qs, h, y[v]);
            if (NEXT) e[v] = fma(ns, h, e[v]);
            if (WHOLE)
                store(to + v * W, h);
            else
                store(to + v * W, h, n - v * W);
        }
    }
}

// Computes channels [at, at + n) of a head's values for some tokens. Several tokens keep the state in the tile.
template <bool WHOLE> void block(const DeltaScan& s, const Ready& r, int64_t head, int64_t row, int64_t tokens,
                                 const float* before, float* h, int64_t at, int n) {
    const int64_t stride = padded(s.dim), column = head * s.width + at;
    F e[N], y[N], written[N];
    find(r.found, s.dim, before, s.width, n, e);
    for (int64_t t = 0; t < tokens; ++t) {
        RL_FOR(v, N) written[v] = set(r.beta[t]) * (load(s.v.row(row + t) + column + v * W, n - v * W) - e[v]);
        const float *q = r.q + t * stride, *k = r.k + t * stride, *decay = r.decay + t * stride;
        const float* from = t ? r.tile : before;
        const int64_t from_stride = t ? LANES : s.width;
        if (t + 1 < tokens)
            pass<WHOLE, true>(q, k, decay, r.found + (t + 1) * stride, s.dim, from, from_stride, r.tile, LANES, n,
                              written, y, e);
        else
            pass<WHOLE, false>(q, k, decay, nullptr, s.dim, from, from_stride, h, s.width, n, written, y, e);
        RL_FOR(v, N) store(s.y.row(row + t) + column + v * W, y[v], n - v * W);
    }
}

void scan(const DeltaScan& s, int64_t i, int64_t head, float* room) {
    const Ready r = arrays_in(s.dim, room);
    const int64_t state = head * s.dim * s.width;
    float* h = s.h.of(i) + state;
    for (int64_t t = 0; t < s.s.lengths[i]; t += CHUNK) {
        const int64_t row = i * s.s.m + t, tokens = std::min(CHUNK, s.s.lengths[i] - t);
        make_ready(s, head, row, tokens, r);
        for (int64_t at = 0; at < s.width; at += LANES) {
            const int n = int(std::min(LANES, s.width - at));
            const float* before = (t ? h : s.before.of(i) + state) + at;
            (n == LANES ? block<true> : block<false>)(s, r, head, row, tokens, before, h + at, at, n);
        }
    }
}

size_t room(int64_t dim) { return size_t(4 * CHUNK * padded(dim) + CHUNK + dim * LANES); }

void norm_gate(const float* y, const float* z, const float* weight, int64_t size, float eps, bool silu, float* out) {
    Sum16 sum = Sum16::zero();
    for (int64_t i = 0; i < size; i += 16)
        RL_FOR(v, V) {
            const F a = load(y + i + v * W, int(std::clamp<int64_t>(size - i - v * W, 0, W)));
            sum.v[v] = fma(a, a, sum.v[v]);
        }
    const F scale = set(1.f / std::sqrt(total(sum) / float(size) + eps));
    for (int64_t i = 0; i < size; i += W) {
        const int n = int(std::min<int64_t>(W, size - i));
        const F gate = load(z + i, n), act = sigmoid(gate);
        store(out + i, load(y + i, n) * scale * load(weight + i, n) * (silu ? gate * act : act), n);
    }
}

}  // namespace

extern const DeltaKernels delta_kernels = {scan, room, norm_gate};

}  // namespace ridgeline::RL_ISA
