#include "recurrent.h"

#include <algorithm>
#include <cmath>

#include "vmath.h"

namespace ridgeline::RL_ISA {
namespace {

constexpr int64_t CHUNK = 64;                  // tokens whose inputs are in scratch memory at once
constexpr int N = 2;                           // vectors of channels that are computed at once
constexpr int HELD = REGISTERS == 32 ? 8 : 4;  // states whose N vectors stay in registers over several tokens
constexpr int64_t CHANNELS = N * W;

// 2^x for x <= 0, for a decay that may be 0.
RL_INLINE F decay(F x) { return select(x < set(-126.f), set(0.f), exp2_down(x)); }

// ---- short convolution -----------------------------------------------------------------------------------------

void conv(const ShortConv& c, int64_t i, int64_t first, int64_t last) {
    const float* kept = c.kept.of(i);
    for (int64_t t = first; t < last; ++t) {
        float* y = c.y.row(i * c.s.m + t);
        for (int64_t at = 0; at < c.channels; at += W) {
            const int n = int(std::min<int64_t>(W, c.channels - at));
            F sum = set(0.f);
            for (int64_t j = 0; j <= c.before; ++j) {
                const int64_t seen = t + j - c.before;
                const float* from = seen < 0 ? kept + (seen + c.before) * c.channels : c.x.row(i * c.s.m + seen);
                sum = fma(load(from + at, n), load(c.weight + j * c.channels + at, n), sum);
            }
            store(y + at, c.bias ? sum + load(c.bias + at, n) : sum, n);
        }
    }
}

// Row j is computed from row j + 1 or a later one, so that input and output may be one array.
void left(const ShortConv& c, int64_t i) {
    const float* kept = c.kept.of(i);
    float* left = c.left.of(i);
    for (int64_t j = 0; j < c.before; ++j) {
        const int64_t seen = c.s.lengths[i] + j - c.before;
        const float* from = seen < 0 ? kept + (seen + c.before) * c.channels : c.x.row(i * c.s.m + seen);
        std::copy_n(from, c.channels, left + j * c.channels);
    }
}

// ---- Mamba -----------------------------------------------------------------------------------------------------

// Advances K states of N vectors of channels by a token, and adds them to its result. held: each state and its A,
// [K, 2, CHANNELS].
template <int K>
RL_INLINE void go_on(const F (&dt)[N], const F (&dx)[N], const float* b, const float* c, float* held, F (&y)[N]) {
    F a[K * N];
    I whole[K * N];  // where the decay is 0
    RL_FOR(j, K)
        RL_FOR(v, N) a[j * N + v] = dt[v] * load(held + (2 * j + 1) * CHANNELS + v * W);
    RL_FOR(i, K * N) whole[i] = a[i] < set(-126.f);
    exp2_down(a);
    RL_FOR(j, K) {
        const F bs = set(b[j]), cs = set(c[j]);
        RL_FOR(v, N) {
            float* state = held + 2 * j * CHANNELS + v * W;
            const F h = fma(dx[v], bs, load(state) * select(whole[j * N + v], set(0.f), a[j * N + v]));
            y[v] = fma(h, cs, y[v]);
            store(state, h);
        }
    }
}

// Computes channels from `at` on. room: the `held` of go_on, [states, 2, CHANNELS].
void selective_block(const SelectiveScan& s, int64_t i, int64_t at, float* room) {
    constexpr int64_t PAIR = 2 * CHANNELS;
    const int n = int(std::min(CHANNELS, s.channels - at));
    const float* before = s.before.of(i) + at;
    float* h = s.h.of(i) + at;
    for (int64_t j = 0; j < s.states; ++j)
        for (int v = 0; v < N; ++v) {
            const int64_t from = j * s.channels + v * W;
            store(room + j * PAIR + v * W, load(before + from, n - v * W));
            store(room + j * PAIR + CHANNELS + v * W, load(s.a + at + from, n - v * W) * set(LOG2_E));
        }
    for (int64_t t = i * s.s.m; t < i * s.s.m + s.s.lengths[i]; ++t) {
        const float *b = s.b.row(t), *c = s.c.row(t);
        // Each row has few lines, so that hardware does not prefetch them.
        for (const float* next : {s.x.row(t + 8) + at, s.dt.row(t + 8) + at, (const float*)s.y.row(t + 8) + at})
            for (int64_t line = 0; line < CHANNELS; line += 16) prefetch(next + line);
        F x[N], dt[N], dx[N], y[N];
        RL_FOR(v, N) {
            x[v] = load(s.x.row(t) + at + v * W, n - v * W);
            dt[v] = softplus(load(s.dt.row(t) + at + v * W, n - v * W));
            dx[v] = dt[v] * x[v], y[v] = set(0.f);
        }
        int64_t j = 0;
        for (; j + 2 <= s.states; j += 2) go_on<2>(dt, dx, b + j, c + j, room + j * PAIR, y);
        for (; j < s.states; ++j) go_on<1>(dt, dx, b + j, c + j, room + j * PAIR, y);
        RL_FOR(v, N) store(s.y.row(t) + at + v * W, fma(load(s.d + at + v * W, n - v * W), x[v], y[v]), n - v * W);
    }
    for (int64_t j = 0; j < s.states; ++j)
        for (int v = 0; v < N; ++v) store(h + j * s.channels + v * W, load(room + j * PAIR + v * W), n - v * W);
}

void selective(const SelectiveScan& s, int64_t i, int64_t first, int64_t last, float* room) {
    for (int64_t at = first; at < last; at += CHANNELS) selective_block(s, i, at, room);
}

// ---- states with a shared decay -------------------------------------------------------------------------------

// Inputs of T tokens for N vectors of channels.
struct Chunk {
    int64_t tokens;
    const float* x;      // [tokens, CHANNELS]
    const float* decay;  // [tokens], or null: 1
    const float *b, *c;  // for the first state; the next token's are b_stride and c_stride further
    int64_t b_stride, c_stride;
    float* y;  // [tokens, CHANNELS]
};

// Computes S states, each with `channels` neighboring channels.
template <int S, bool DECAYS>
void scan(const Chunk& k, int64_t state, const float* before, float* h, int64_t stride, int channels) {
    F held[S][N];
    RL_FOR(s, S)
        RL_FOR(v, N) held[s][v] = load(before + s * stride + v * W, channels - v * W);
    const float *b = k.b + state, *c = k.c + state;
    for (int64_t t = 0; t < k.tokens; ++t, b += k.b_stride, c += k.c_stride) {
        F x[N], y[N];
        RL_FOR(v, N) x[v] = load(k.x + t * CHANNELS + v * W), y[v] = load(k.y + t * CHANNELS + v * W);
        const F a = set(DECAYS ? k.decay[t] : 1.f);
        RL_FOR(s, S) {
            const F bs = set(b[s]), cs = set(c[s]);
            RL_FOR(v, N) {
                held[s][v] = fma(x[v], bs, DECAYS ? held[s][v] * a : held[s][v]);
                y[v] = fma(held[s][v], cs, y[v]);
            }
        }
        RL_FOR(v, N) store(k.y + t * CHANNELS + v * W, y[v]);
    }
    RL_FOR(s, S)
        RL_FOR(v, N) store(h + s * stride + v * W, held[s][v], channels - v * W);
}

template <bool DECAYS>
void scan_all(const Chunk& k, int64_t states, const float* before, float* h, int64_t stride, int channels) {
    std::fill_n(k.y, k.tokens * CHANNELS, 0.f);
    int64_t s = 0;
    for (; s + HELD <= states; s += HELD)
        scan<HELD, DECAYS>(k, s, before + s * stride, h + s * stride, stride, channels);
    for (; s < states; ++s) scan<1, DECAYS>(k, s, before + s * stride, h + s * stride, stride, channels);
}

// ---- Mamba-2 ---------------------------------------------------------------------------------------------------

// Computes dt and decay of a head for some tokens.
void steps(const LinearScan& s, int64_t head, int64_t row, int64_t tokens, float* dt, float* decays) {
    if (s.decay) {
        std::fill_n(dt, tokens, 1.f), std::fill_n(decays, tokens, s.decay[head]);
        return;
    }
    const F bias = set(s.dt_bias[head]), a = set(s.a[head] * LOG2_E), least = set(s.dt_least), most = set(s.dt_most);
    for (int64_t t = 0; t < tokens; t += W) {
        float given[W] = {};
        for (int j = 0; j < W && t + j < tokens; ++j) given[j] = s.dt.row(row + t + j)[head];
        F x = softplus(load(given) + bias);
        x = select(x < least, least, select(x > most, most, x));
        store(dt + t, x);
        store(decays + t, decay(x * a));
    }
}

// Computes channels [first, last) of a head, CHANNELS at a time.
void linear_block(const LinearScan& s, int64_t i, int64_t head, int64_t first, int channels, float* room) {
    float *x = room, *y = x + CHUNK * CHANNELS, *dt = y + CHUNK * CHANNELS, *decays = dt + CHUNK;
    const int64_t state = head * s.states * s.width + first;
    const float* before = s.before.of(i) + state;
    float* h = s.h.of(i) + state;
    const int64_t from = head * s.x_head + first, to = head * s.width + first, group = head / s.group;
    for (int64_t t0 = 0; t0 < s.s.lengths[i]; t0 += CHUNK) {
        const int64_t row = i * s.s.m + t0, tokens = std::min(CHUNK, s.s.lengths[i] - t0);
        steps(s, head, row, tokens, dt, decays);
        for (int64_t t = 0; t < tokens; ++t)
            RL_FOR(v, N)
                store(x + t * CHANNELS + v * W, load(s.x.row(row + t) + from + v * W, channels - v * W) * set(dt[t]));
        const float *b = s.b.row(row) + group * s.b_head, *c = s.c.row(row) + group * s.c_head;
        const Chunk k{tokens, x, decays, b, c, s.b.stride, s.c.stride, y};
        scan_all<true>(k, s.states, t0 ? h : before, h, s.width, channels);
        const F d = set(s.d ? s.d[head] : 0.f);
        for (int64_t t = 0; t < tokens; ++t)
            RL_FOR(v, N) {
                const int n = channels - v * W;
                const F own = load(y + t * CHANNELS + v * W);
                store(s.y.row(row + t) + to + v * W, s.d ? fma(d, load(s.x.row(row + t) + from + v * W, n), own) : own,
                      n);
            }
    }
}

void linear(const LinearScan& s, int64_t i, int64_t head, int64_t first, int64_t last, float* room) {
    for (int64_t at = first; at < last; at += CHANNELS)
        linear_block(s, i, head, at, int(std::min(CHANNELS, last - at)), room);
}

// ---- BASED, Hedgehog ---------------------------------------------------------------------------------------

// Features whose product is 1 + s + s^2 / 2, where s = q k / sqrt(dim).
void features(const float* x, int64_t dim, float factor, float* to) {
    to[0] = 1.f;
    for (int64_t i = 0; i < dim; ++i) to[1 + i] = x[i] * factor;
    for (int64_t i = 0; i < dim; ++i)
        for (int64_t j = 0; j < dim; ++j) to[1 + dim + i * dim + j] = to[1 + i] * to[1 + j] * 0.70710678f;
}

// A feature of Hedgehog is at least this, so that no sum of weights is 0; spec/taylor.py has the same number.
constexpr float LEAST_FEATURE = 1e-30f;

// Features: softmax(sign x), dim numbers.
void softmax(const float* x, int64_t dim, float sign, float* to) {
    float most = sign * x[0], sum = 0;
    for (int64_t i = 1; i < dim; ++i) most = std::max(most, sign * x[i]);
    for (int64_t i = 0; i < dim; i += W) {
        const int n = int(std::min<int64_t>(W, dim - i));
        store(to + i, exp2_down((set(sign) * load(x + i, n) - set(most)) * set(LOG2_E)), n);
    }
    for (int64_t i = 0; i < dim; ++i) sum += to[i];
    for (int64_t i = 0; i < dim; ++i) to[i] = std::max(to[i] / sum, LEAST_FEATURE);
}

void taylor(const TaylorScan& s, int64_t i, int64_t head, float* room) {
    const int64_t count = s.features(), all = s.width + 1;
    float *x = room, *y = x + CHUNK * CHANNELS, *sums = y + CHUNK * CHANNELS, *q = sums + CHUNK, *k = q + CHUNK * count;
    const float* before = s.before.of(i) + head * count * all;
    float* h = s.h.of(i) + head * count * all;
    const float factor = 1.f / std::sqrt(std::sqrt(float(s.dim)));
    const auto expand = [&](const float* x, float* to) {
        if (s.is_hedgehog)
            softmax(x, s.dim, 1.f, to), softmax(x, s.dim, -1.f, to + s.dim);
        else
            features(x, s.dim, factor, to);
    };
    for (int64_t t0 = 0; t0 < s.s.lengths[i]; t0 += CHUNK) {
        const int64_t row = i * s.s.m + t0, tokens = std::min(CHUNK, s.s.lengths[i] - t0);
        for (int64_t t = 0; t < tokens; ++t) {
            expand(s.q.row(row + t) + head * s.dim, q + t * count);
            expand(s.k.row(row + t) + head * s.dim, k + t * count);
        }
        for (int64_t at = (all - 1) / CHANNELS * CHANNELS; at >= 0;
             at -= CHANNELS) {  // the last block contains the sums of weights
            const int channels = int(std::min(CHANNELS, all - at)), own = int(std::min(CHANNELS, s.width - at));
            for (int64_t t = 0; t < tokens; ++t) {
                float* to = x + t * CHANNELS;
                std::fill_n(to, CHANNELS, 0.f);
                std::copy_n(s.v.row(row + t) + head * s.width + at, own, to);
                if (own < channels) to[own] = 1.f;
            }
            const Chunk chunk{tokens, x, nullptr, k, q, count, count, y};
            scan_all<false>(chunk, count, (t0 ? h : before) + at, h + at, all, channels);
            for (int64_t t = 0; t < tokens; ++t) {
                if (own < channels) sums[t] = y[t * CHANNELS + own];
                for (int v = 0; v < N; ++v)
                    store(s.y.row(row + t) + head * s.width + at + v * W, load(y + t * CHANNELS + v * W) / set(sums[t]),
                          own - v * W);
            }
        }
    }
}

size_t room(int64_t states) {
    return size_t(2 * CHUNK * CHANNELS + 3 * CHUNK + 2 * states * std::max(CHUNK, CHANNELS));
}

}  // namespace

extern const RecurrentKernels recurrent_kernels = {conv, left, selective, linear, taylor, CHANNELS, room};

}  // namespace ridgeline::RL_ISA
