// The inner loops: a tile of m tokens times one panel, over a range of k. Sums continue from `c`, [m][32], so that k
// may be divided anywhere and each sum is still one ascending chain: a token's result does not depend on its batch.
//
// Rules for speed, from the compiler's output (after any change, look for stores to the stack):
//   - every loop over tokens or vectors is unrolled completely, also before and after the loop over k;
//   - a tile and the weights of a step fit into the registers: 12 tokens of 32 rows with 32 registers of 16 lanes,
//     otherwise 4 tokens and the largest number of rows that fits (a pass);
//   - each step prefetches for a later one: `fetch` moves by `ahead` bytes a step.
#pragma once
#include "matrix.h"
#include "simd.h"

namespace ridgeline::RL_ISA {

constexpr int VECTORS = PANEL / W;  // vectors of a panel
constexpr int TILE = W == 16 ? 12 : 4;

// Vectors of a panel in one pass: all, if they and the tile fit into the registers.
constexpr int pass_vectors(int m) { return W == 16 ? VECTORS : m == 1 ? VECTORS : 2; }

struct Fetch {
    const char* at;
    int64_t step;
};

template <int LINES> RL_INLINE void fetch(Fetch& f) {
    RL_FOR(i, LINES) prefetch(f.at + i * 64);
    f.at += f.step;
}

RL_INLINE void fetch_line(Fetch& f) {
    prefetch(f.at);
    f.at += 64;
}

struct Fp32 {
    static constexpr int STEP = 1, BYTES = 128;  // k and bytes of a step
    RL_INLINE void weights(const char* w, int v, F (&out)[STEP]) { out[0] = load((const float*)w + v * W); }
};
struct Bf16 {
    static constexpr int STEP = 2, BYTES = 128;
    RL_INLINE void weights(const char* w, int v, F (&out)[STEP]) {
        I both = load((const int32_t*)w + v * W);
        out[0] = floats(both << 16);
        out[1] = floats(both & (int32_t)0xffff0000);
    }
};
struct Fp16 {
    static constexpr int STEP = 1, BYTES = 64;
    RL_INLINE void weights(const char* w, int v, F (&out)[STEP]) { out[0] = from_f16((const uint16_t*)w + v * W); }
};

// a: [k][m]. Sums begin at 0 for the first range of k.
template <class Type, int m>
void float_tile(const char* panel, const float* activations, int64_t k, float* c, bool first, Fetch ahead) {
    constexpr int N = pass_vectors(m), STEP = Type::STEP;
    for (int pass = 0; pass < VECTORS; pass += N) {
        const char* w = panel;
        const float* a = activations;
        F sum[m][N];
        RL_FOR(i, m)
            RL_FOR(v, N) sum[i][v] = first ? F{} : load(c + i * PANEL + (pass + v) * W);
        for (int64_t s = 0; s < k; s += STEP, w += Type::BYTES, a += STEP * m) {
            fetch<Type::BYTES / 64>(ahead);
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

// Adds four k of all tokens: sum += bytes of weights * bytes of activations. a: [m] dwords.
template <int m, int N> RL_INLINE void dot_step(I (&sum)[m][N], const I (&w)[N], const int32_t* a) {
    Unsigned4 x[N];
    RL_FOR(v, N) x[v] = unsigned4(w[v]);
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

// a: [k / 4][m][4]. k: a multiple of 8.
template <int m>
void byte_tile(const char* panel, const int8_t* activations, int64_t k, int32_t* c, bool first, Fetch ahead) {
    constexpr int N = pass_vectors(m);
    for (int pass = 0; pass < VECTORS; pass += N) {
        const char* w = panel;
        const int32_t* a = (const int32_t*)activations;
        I sum[m][N];
        RL_FOR(i, m)
            RL_FOR(v, N) sum[i][v] = first ? I{} : load(c + i * PANEL + (pass + v) * W);
        for (int64_t s = 0; s < k; s += 8, w += 256, a += 2 * m) {
            fetch<4>(ahead);
            for (int h = 0; h < 2; ++h) {
                I x[N];
                RL_FOR(v, N) x[v] = load((const int32_t*)(w + h * 128) + (pass + v) * W);
                dot_step(sum, x, a + h * m);
            }
        }
        RL_FOR(i, m)
            RL_FOR(v, N) store(c + i * PANEL + (pass + v) * W, sum[i][v]);
    }
}

// 4-bit weights as stored (w: groups with their scales), and after `unpack_groups` (w: bytes like int8; scales:
// separate floats). Unpacking takes more instructions than the products of a few tokens.
struct Nibbles {
    static constexpr int BYTES = 128, SCALES = 64;  // bytes of 8 k, and of a group's scales
    RL_INLINE void weights(const char* w, int v, I& low, I& high) {
        const I both = load((const int32_t*)w + v * W);
        low = both & 0x0f0f0f0f;
        high = (both >> 4) & 0x0f0f0f0f;
    }
    RL_INLINE F scale(const char* end, const float*, int v) { return from_f16((const uint16_t*)end + v * W); }
};
struct Unpacked {
    static constexpr int BYTES = 256, SCALES = 0;
    RL_INLINE void weights(const char* w, int v, I& low, I& high) {
        low = load((const int32_t*)w + v * W);
        high = load((const int32_t*)(w + 128) + v * W);
    }
    RL_INLINE F scale(const char*, const float* scales, int v) { return load(scales + v * W); }
};

// A range of groups. offsets: [groups][m], the initial values of a group's sums.
struct Groups {
    const char* w;
    const float* scales;  // [groups][32]
    const int8_t* activations;
    const int32_t* offsets;
    int64_t count;
    int size;
};

// Computes n of a tile's m tokens from `from` on, few enough that a group's exact sums and the chain over groups both
// stay in registers. Adding them in memory takes twice as long.
template <class Type, int m, int from, int n>
RL_INLINE void group_part(const Groups& groups, float* c, bool first, Fetch ahead) {
    constexpr int N = pass_vectors(n);
    for (int pass = 0; pass < VECTORS; pass += N) {
        const char* w = groups.w;
        const int32_t *a = (const int32_t*)groups.activations + from, *begin = groups.offsets + from;
        const float* scales = groups.scales;
        F total[n][N];
        RL_FOR(i, n)
            RL_FOR(v, N) total[i][v] = first ? F{} : load(c + (from + i) * PANEL + (pass + v) * W);
        for (int64_t g = 0; g < groups.count; ++g, begin += m, scales += PANEL) {
            I sum[n][N];
            RL_FOR(i, n)
                RL_FOR(v, N) sum[i][v] = set(begin[i]);
            for (int k = 0; k < groups.size; k += 8, w += Type::BYTES, a += 2 * m) {
                fetch<2>(ahead);
                I low[N], high[N];
                RL_FOR(v, N) Type::weights(w, pass + v, low[v], high[v]);
                dot_step(sum, low, a);
                dot_step(sum, high, a + m);
            }
            fetch_line(ahead);
            RL_FOR(v, N) {
                const F scale = Type::scale(w, scales, pass + v);
                RL_FOR(i, n) total[i][v] = fma_exact(to_float(sum[i][v]), scale, total[i][v]);
            }
            w += Type::SCALES;
        }
        RL_FOR(i, n)
            RL_FOR(v, N) store(c + (from + i) * PANEL + (pass + v) * W, total[i][v]);
    }
}

template <class Type, int m> void group_tile(const Groups& groups, float* c, bool first, Fetch ahead) {
    constexpr int most = W == 16 ? 6 : 2, half = m > most ? (m + 1) / 2 : m;
    group_part<Type, m, 0, half>(groups, c, first, ahead);
    if constexpr (half < m) group_part<Type, m, half, m - half>(groups, c, first, {groups.w, 0});
}

RL_INLINE void unpack_groups(const char* w, int64_t groups, int group, char* bytes, float* scales, Fetch ahead) {
    for (int64_t g = 0; g < groups; ++g, w += 64) {
        for (int k = 0; k < group; k += 8, w += 128, bytes += 256) {
            fetch<2>(ahead);
            RL_FOR(v, VECTORS) {
                I both = load((const int32_t*)w + v * W);
                store((int32_t*)bytes + v * W, both & 0x0f0f0f0f);
                store((int32_t*)(bytes + 128) + v * W, (both >> 4) & 0x0f0f0f0f);
            }
        }
        fetch_line(ahead);
        RL_FOR(v, VECTORS) store(scales + g * PANEL + v * W, from_f16((const uint16_t*)w + v * W));
    }
}

}  // namespace ridgeline::RL_ISA
