// The inner loops: a tile of m tokens times one panel, over a range of k. Sums continue from `c`, [m][32], so that k
// may be divided anywhere and each sum is still one ascending chain: a token's result does not depend on its batch.
//
// Rules for speed, from the compiler's output (after any change, look for stores to the stack):
//   - every loop over tokens or vectors is unrolled completely, also before and after the loop over k;
//   - a tile and the weights of a step fit into the registers: 12 tokens of 32 rows with 32 registers of 16 lanes,
//     otherwise 4 tokens and the largest number of rows that fits (a pass);
//   - each step prefetches for a later one.
#pragma once
#include "codes.h"
#include "dots.h"

namespace ridgeline::RL_ISA {

constexpr int TILE = W == 16 ? 12 : 4;

// Vectors of a panel in one pass: all, if they and the tile fit into the registers.
constexpr int pass_vectors(int m) { return W == 16 || m == 1 ? VECTORS : REGISTERS / 8; }

// What is fetched into the cache for later: of `tiles` tiles with the same weights, each fetches its share.
struct Fetch {
    const char* at;
    int64_t tiles;
};
constexpr int64_t NOWHERE = 1 << 30;  // as a number of tiles: nothing

// step: bytes to move on.
template <int LINES> RL_INLINE void fetch(Fetch& f, int64_t step) {
    RL_FOR(i, LINES) prefetch(f.at + i * 64);
    f.at += step;
}

struct Fp32 {
    static constexpr int STEP = 1, BYTES = 128, LINES = 2;  // k and bytes of a step, lines that it prefetches
    RL_INLINE void weights(const char* w, int v, F (&out)[STEP]) { out[0] = load((const float*)w + v * W); }
};
struct Widened : Fp32 {
    static constexpr int LINES = 0;  // floats that were codes are in the first cache
};
struct Bf16 {
    static constexpr int STEP = 2, BYTES = 128, LINES = 2;
    RL_INLINE void weights(const char* w, int v, F (&out)[STEP]) {
        I both = load((const int32_t*)w + v * W);
        out[0] = floats(both << 16);
        out[1] = floats(both & (int32_t)0xffff0000);
    }
};
struct Fp16 {
    static constexpr int STEP = 1, BYTES = 64, LINES = 1;
    RL_INLINE void weights(const char* w, int v, F (&out)[STEP]) { out[0] = from_f16((const uint16_t*)w + v * W); }
};

// a: [k][m]. Sums begin at 0 for the first range of k. LINES: that a step prefetches.
template <class Type, int m, int LINES>
RL_INLINE void float_sums(const char* panel, const float* activations, int64_t k, float* c, bool first, Fetch ahead) {
    constexpr int N = pass_vectors(m), STEP = Type::STEP;
    const int64_t step = Type::BYTES / ahead.tiles;
    for (int pass = 0; pass < VECTORS; pass += N) {
        const char* w = panel;
        const float* a = activations;
        F sum[m][N];
        RL_FOR(i, m)
            RL_FOR(v, N) sum[i][v] = first ? F{} : load(c + i * PANEL + (pass + v) * W);
        for (int64_t s = 0; s < k; s += STEP, w += Type::BYTES, a += STEP * m) {
            fetch<LINES>(ahead, step);
            F x[N][STEP];
            RL_FOR(v, N) Type::weights(w, pass + v, x[v]);
            RL_FOR(j, STEP)
                RL_FOR(i, m) {
                    const F y = set(a[j * m + i]);
                    RL_FOR(v, N) sum[i][v] = fma(x[v][j], y, sum[i][v]);
                }
        }
        RL_FOR(i, m)
            RL_FOR(v, N) store(c + i * PANEL + (pass + v) * W, sum[i][v]);
    }
}
template <class Type, int m>
void float_tile(const char* panel, const float* activations, int64_t k, float* c, bool first, Fetch ahead) {
    if (Type::LINES == 0 || ahead.tiles == NOWHERE)
        float_sums<Type, m, 0>(panel, activations, k, c, first, ahead);
    else
        float_sums<Type, m, Type::LINES>(panel, activations, k, c, first, ahead);
}

// a: [k / 2][m][2] bf16. LINES: that a step prefetches.
template <int m, int LINES>
RL_INLINE void bf16_sums(const char* w, const uint16_t* activations, int64_t k, float* c, bool first, Fetch ahead) {
    const int32_t* a = (const int32_t*)activations;
    const int64_t step = 128 / ahead.tiles;
    F sum[m][VECTORS];
    RL_FOR(i, m)
        RL_FOR(v, VECTORS) sum[i][v] = first ? F{} : load(c + i * PANEL + v * W);
    for (int64_t s = 0; s < k; s += 2, w += 128, a += m) {
        fetch<LINES>(ahead, step);
        I x[VECTORS];
        RL_FOR(v, VECTORS) x[v] = load((const int32_t*)w + v * W);
        RL_FOR(i, m) {
            if (i % 2) {  // see `dot_step`
                RL_FOR(v, VECTORS) dot_bf16_folded(sum[i][v], x[v], a[i]);
                continue;
            }
            const I y = set(a[i]);
            RL_FOR(v, VECTORS) dot_bf16(sum[i][v], x[v], y);
        }
    }
    RL_FOR(i, m)
        RL_FOR(v, VECTORS) store(c + i * PANEL + v * W, sum[i][v]);
}
template <int m>
void bf16_tile(const char* panel, const uint16_t* activations, int64_t k, float* c, bool first, Fetch ahead) {
    if (ahead.tiles == NOWHERE)
        bf16_sums<m, 0>(panel, activations, k, c, first, ahead);
    else
        bf16_sums<m, 2>(panel, activations, k, c, first, ahead);
}

// Adds four k of all tokens: sum += bytes of weights * bytes of activations. a: [m] dwords. SMALL: weights are below
// 128.
template <bool SMALL, int m, int N> RL_INLINE void dot_step(I (&sum)[m][N], const I (&w)[N], const int32_t* a) {
    Unsigned4 x[N];
    RL_FOR(v, N) x[v] = SMALL ? small4(w[v]) : unsigned4(w[v]);
    RL_FOR(i, m) {
        // A broadcast inside of the two products takes two loads and two operations; a separate one takes one load and
        // three operations. Alternating them uses load ports and issue slots equally.
        if (FOLDS && i % 2) {
            RL_FOR(v, N) dot_folded(sum[i][v], x[v], a[i]);
            continue;
        }
        const Signed4 y = signed4(set(a[i]));
        RL_FOR(v, N) dot(sum[i][v], x[v], y);
    }
}

// `dot_step` for plain bytes of all values, which count as BYTE_ZERO less than they are. What does not fit into 16 bits
// is no part of `a`, but of `add_surplus`.
constexpr int BYTE_ZERO = SHORT ? 0 : DOT_ZERO;
template <int m, int N> RL_INLINE void byte_step(I (&sum)[m][N], const I (&w)[N], const int32_t* a) {
    if constexpr (SHORT) {
        RL_FOR(i, m) {
            const I y = set(a[i]);
            RL_FOR(v, N) dot_short(sum[i][v], w[v], y);
        }
    } else {
        dot_step<false>(sum, w, a);
    }
}

// Adds the surplus of one token to its sums. c: [32].
RL_INLINE void add_surplus(const char* panel, const Surplus* surplus, int64_t count, int32_t* c) {
    I sum[VECTORS];
    RL_FOR(v, VECTORS) sum[v] = load(c + v * W);
    for (const Surplus* s = surplus; s < surplus + count; ++s) {
        const int32_t* w = (const int32_t*)(panel + int64_t(s->step) * 128);
        const I y = set(int32_t(uint32_t(uint8_t(s->second)) << 8 | uint32_t(uint8_t(s->fourth)) << 24));
        RL_FOR(v, VECTORS) dot_short(sum[v], load(w + v * W), y);
    }
    RL_FOR(v, VECTORS) store(c + v * W, sum[v]);
}

// a: [k / 4][m][4]. k: a multiple of 8. LINES: that a step prefetches.
template <int m, int LINES>
RL_INLINE void byte_sums(const char* panel, const int8_t* activations, int64_t k, int32_t* c, bool first, Fetch ahead) {
    constexpr int N = pass_vectors(m);
    const int64_t step = 256 / ahead.tiles;
    for (int pass = 0; pass < VECTORS; pass += N) {
        const char* w = panel;
        const int32_t* a = (const int32_t*)activations;
        I sum[m][N];
        RL_FOR(i, m)
            RL_FOR(v, N) sum[i][v] = first ? I{} : load(c + i * PANEL + (pass + v) * W);
        for (int64_t s = 0; s < k; s += 8, w += 256, a += 2 * m) {
            fetch<LINES>(ahead, step);
            for (int h = 0; h < 2; ++h) {
                I x[N];
                RL_FOR(v, N) x[v] = load((const int32_t*)(w + h * 128) + (pass + v) * W);
                byte_step(sum, x, a + h * m);
            }
        }
        RL_FOR(i, m)
            RL_FOR(v, N) store(c + i * PANEL + (pass + v) * W, sum[i][v]);
    }
}
template <int m>
void byte_tile(const char* panel, const int8_t* activations, int64_t k, int32_t* c, bool first, Fetch ahead) {
    if (ahead.tiles == NOWHERE)
        byte_sums<m, 0>(panel, activations, k, c, first, ahead);
    else
        byte_sums<m, 4>(panel, activations, k, c, first, ahead);
}

}  // namespace ridgeline::RL_ISA
