// The inner loop of codes in blocks, times rounded tokens. The groups of a block multiply its one scale with whole
// numbers, their factors, so that the sum over a block is of whole numbers too, and exact. It is multiplied with the
// scale and added to the sum of the blocks before it, with a rounding each.
#pragma once
#include "group_tiles.h"

namespace ridgeline::RL_ISA {

// A kind of block. GROUP: columns of a group. MINIMUMS: whether groups have minimums; otherwise the unsigned code of 0
// is a number above 0. STEPS: steps of 4 columns whose products add up to 16 bits in each half of a lane.
template <class CodesType, int COLUMNS, bool HAS_MINIMUMS, int MOST> struct Block {
    using Codes = CodesType;
    static constexpr int GROUP = COLUMNS, GROUPS = PIECE / COLUMNS, STEPS = MOST;
    static constexpr bool MINIMUMS = HAS_MINIMUMS;
};
using Q4K = Block<Int4, 32, true, 8>;   // 16 columns of a half lane: 16 * 15 * 127 < 2^15
using Q5K = Block<Int5, 32, true, 4>;   // 8 * 31 * 127 < 2^15
using Q6K = Block<Int6, 16, false, 4>;  // less the offset 8 * 32 * 127 < 2^15; sums on the way may wrap around
template <class B> using InBytes = Block<Bytes, B::GROUP, B::MINIMUMS, B::STEPS>;

// Vector v of the factors of a group. at: its 32 bytes.
template <class B> RL_INLINE I factors_at(const char* at, int v) {
    return B::MINIMUMS ? from_u8((const uint8_t*)at + v * W) : from_i8((const int8_t*)at + v * W);
}

// Adds 32 columns of n tokens, times their factors. begin: offsets of the first token, a row of m for each group.
template <class B, int m, int n, int N> RL_INLINE void add_block_piece(const char* w, const int32_t* a,
                                                                       const char* factors, const int32_t* begin,
                                                                       int pass, I (&sum)[n][N]) {
    using Part = std::conditional_t<SHORT, S, I>;
    constexpr int STEPS = SHORT ? B::STEPS : B::GROUP / 4;
    Part part[n][N];
    B::Codes::template each<N>(w, [&](int s, const I(&x)[N]) __attribute__((always_inline)) {
        const int group = s * 4 / B::GROUP;
        if (s % STEPS == 0) {
            RL_FOR(i, n) {
                I start = {};
                if (!B::MINIMUMS) start = set(begin[group * m + i]);
                if (!B::MINIMUMS && !SHORT) start = pairs(start, set(0x00010001));
                RL_FOR(v, N) part[i][v] = (Part)start;
            }
        }
        if constexpr (SHORT) {
            I held[N];
            hold<(std::is_same_v<typename B::Codes, Bytes> ? n : 1)>(x, held);
            RL_FOR(i, n) {
                const I y = set(a[s * m + i]);
                RL_FOR(v, N) {
                    part[i][v] += short_products(held[v], y);
                    keep(part[i][v]);  // otherwise g++ delays the sums and spills the products
                }
            }
        } else {
            dot_step<true>(part, x, a + s * m);
        }
        if (s % STEPS != STEPS - 1) return;
        RL_FOR(v, N) {
            const I factor = factors_at<B>(factors + group * PANEL, pass + v);
            const I both = (B::MINIMUMS ? factor : factor & 0xffff) | (factor << 16);
            RL_FOR(i, n) {
                if constexpr (SHORT)
                    sum[i][v] += pairs((I)part[i][v], both);
                else
                    sum[i][v] += part[i][v] * factor;
            }
        }
    });
}

// Adds the sums of a block to `c`. tail: behind the factors. begin: the offsets of the block.
template <class B, int m, int from, int n, int N> RL_INLINE void end_block(const char* tail, int groups,
                                                                           const int32_t* begin, int pass, bool first,
                                                                           const I (&sum)[n][N], float* c) {
    const char* scales = tail + (B::MINIMUMS ? groups * PANEL : 0);
    I low[n][N] = {};
    if (B::MINIMUMS)
        for (int g = 0; g < groups; ++g)
            RL_FOR(v, N) {
                const I factor = from_u8((const uint8_t*)tail + g * PANEL + (pass + v) * W);
                RL_FOR(i, n) low[i][v] += pairs(factor, set(begin[g * m + i]));
            }
    RL_FOR(v, N) {
        const F scale = scale_at(scales, false, pass + v);
        F minimum = {};
        if (B::MINIMUMS) minimum = minimum_at(scales + PANEL * 2, pass + v);
        RL_FOR(i, n) {
            float* at = c + (from + i) * PANEL + (pass + v) * W;
            F total = (first ? F{} : load(at)) + to_float(sum[i][v]) * scale;
            if (B::MINIMUMS) total -= to_float(low[i][v]) * minimum;
            store(at, total);
        }
    }
}

// Computes n of a tile's m tokens from `from` on.
template <class B, int m, int from, int n>
RL_INLINE void block_part(const Groups& g, float* c, bool first, Fetch ahead) {
    using Codes = typename B::Codes;
    constexpr int N = pass_vectors(n), TAIL = B::GROUPS * (B::MINIMUMS ? 2 : 1) * PANEL / 64;
    const int64_t step = Codes::BYTES / ahead.tiles, tail_step = TAIL * 64 / ahead.tiles;
    const int groups = int(g.size / B::GROUP);
    for (int pass = 0; pass < VECTORS; pass += N) {
        const char *codes = g.codes + pass * W * 4, *tail = g.tail;
        const int32_t *a = (const int32_t*)g.activations + from, *begin = g.offsets + from;
        for (int64_t block = 0; block < g.count; ++block) {
            I sum[n][N] = {};
            const char *w = codes, *factors = tail;
            const int32_t* offsets = begin;
            for (int64_t k = 0; k < g.size; k += PIECE) {
                fetch<Codes::BYTES / 64>(ahead, step);
                fetch<TAIL>(ahead, tail_step);
                add_block_piece<B, m>(w, a, factors, offsets, pass, sum);
                w += Codes::BYTES, a += m * PIECE / 4, factors += B::GROUPS * PANEL, offsets += B::GROUPS * m;
            }
            fetch<2>(ahead, 128 / ahead.tiles);
            end_block<B, m, from>(factors, groups, begin, pass, first && block == 0, sum, c);
            codes += g.code_stride, tail += g.tail_stride, begin += groups * m;
        }
    }
}

template <class B, int m> void block_tile(const Groups& g, float* c, bool first, Fetch ahead) {
    constexpr int most = W == 16 ? 6 : 2, half = m > most ? (m + 1) / 2 : m;
    block_part<B, m, 0, half>(g, c, first, ahead);
    if constexpr (half < m) block_part<B, m, half, m - half>(g, c, first, {g.codes, NOWHERE});
}

}  // namespace ridgeline::RL_ISA
