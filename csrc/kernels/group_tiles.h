// The inner loop of codes whose groups have their own scales, times rounded tokens: a group's sum of whole numbers is
// exact, and is multiplied with the scale and added to the sum of the groups before it, with a rounding each.
#pragma once
#include "codes.h"
#include "tiles.h"

namespace ridgeline::RL_ISA {

// A range of groups of a panel, or of blocks. Unpacked groups have their codes as bytes, and their tails as floats: 32
// scales, then 32 zero points as int32 or 32 minimums.
struct Groups {
    const char* codes;
    int64_t code_stride;  // bytes from a group to the next
    const char* tail;
    int64_t tail_stride;
    const int8_t* activations;
    const int32_t* offsets;  // [groups][m]
    int64_t count, size;     // groups, and columns of each
    int64_t piece_bytes;     // of the stored codes of 32 columns, with their part of the tail
    Offsets kind;
    bool wide, halves;  // scales are fp32; zero points have 4 bits
    bool in_blocks;     // each is a block, whose tail `block_tile` reads as it is stored
};

// Groups, or blocks, of columns [k0, k1) of a panel, for a kernel that adds the activations of its tile.
inline Groups groups_of(const Matrix& w, int64_t panel, int64_t k0, int64_t k1) {
    const char* from = w.column(panel, k0);
    return {.codes = from,
            .code_stride = w.group_bytes,
            .tail = from + w.code_bytes,
            .tail_stride = w.group_bytes,
            .activations = nullptr,
            .offsets = nullptr,
            .count = (k1 - k0) / w.group,
            .size = w.group,
            .piece_bytes = w.group_bytes / (w.group / PIECE),
            .kind = w.format.offsets,
            .wide = w.format.has_wide_scales(),
            .halves = w.format.traits().bits <= 4,
            .in_blocks = w.format.block > 0};
}

// Tiles from which on codes are unpacked once for all of them: measured with AVX2, counted for 16 lanes (docs/log).
constexpr int64_t UNPACKED_FROM = W == 16 ? 3 : 4;

constexpr int64_t SHORT_GROUP = 256;  // columns whose activations add up to no more than 16 bits: 256 * 127 < 2^15

struct Stored {
    static constexpr bool IS_UNPACKED = false;
    RL_INLINE F scale(const Groups& g, const char* tail, int v) { return scale_at(tail, g.wide, v); }
    RL_INLINE I zeros(const Groups& g, const char* tail, int v) {
        return zeros_at(tail + (g.wide ? 128 : 64), g.halves, v);
    }
    RL_INLINE F minimum(const Groups& g, const char* tail, int v) { return minimum_at(tail + (g.wide ? 128 : 64), v); }
};
struct Unpacked {
    static constexpr bool IS_UNPACKED = true;  // in the first cache
    static constexpr int BYTES = 2 * PANEL * 4;
    RL_INLINE F scale(const Groups&, const char* tail, int v) { return load((const float*)tail + v * W); }
    RL_INLINE I zeros(const Groups&, const char* tail, int v) { return load((const int32_t*)tail + PANEL + v * W); }
    RL_INLINE F minimum(const Groups&, const char* tail, int v) { return load((const float*)tail + PANEL + v * W); }
};

// Writes the tail of a group as `Unpacked` reads it.
RL_INLINE void unpack_tail(const Groups& g, const char* tail, char* to) {
    RL_FOR(v, VECTORS) {
        store((float*)to + v * W, Stored::scale(g, tail, v));
        if (g.kind == Offsets::zero_points) store((int32_t*)to + PANEL + v * W, Stored::zeros(g, tail, v));
        if (g.kind == Offsets::minimums) store((float*)to + PANEL + v * W, Stored::minimum(g, tail, v));
    }
}

// zero: what the products leave out of each code.
template <class Tail, int zero, int m, int N>
RL_INLINE void start_sums(const Groups& g, const char* tail, int pass, const int32_t* begin, I (&sum)[m][N]) {
    if (g.kind != Offsets::zero_points) {
        RL_FOR(i, m)
            RL_FOR(v, N) {
                const int32_t none = zero ? 0 : begin[i];  // codes of 8 bits: the zero is theirs
                sum[i][v] = set(g.kind == Offsets::none ? none : zero * begin[i]);
            }
        return;
    }
    RL_FOR(v, N) {
        const I zeros = Tail::zeros(g, tail, pass + v) - zero, low = zeros & 0xffff;
        RL_FOR(i, m) sum[i][v] = g.size <= SHORT_GROUP ? pairs(low, set(begin[i])) : zeros * set(begin[i]);
    }
}

// Copies codes that `tokens` products use: g++ would load them again for each.
template <int tokens, int N> RL_INLINE void hold(const I (&x)[N], I (&held)[N]) {
    RL_FOR(v, N) {
        held[v] = x[v];
        if (tokens > 1) keep(held[v]);
    }
}

// Adds 32 columns of m tokens to their sums. stride: tokens of the tile.
template <class Codes, int m, int N>
RL_INLINE void add_piece(const char* w, const int32_t* a, int stride, I (&sum)[m][N]) {
    if constexpr (SHORT && Codes::STEPS) {
        S part[m][N];
        Codes::template each<N>(w, [&](int s, const I(&x)[N]) __attribute__((always_inline)) {
            I held[N];
            hold<m>(x, held);
            RL_FOR(i, m) {
                const I y = set(a[s * stride + i]);
                RL_FOR(v, N) {
                    const S two = short_products(held[v], y);
                    part[i][v] = s % Codes::STEPS ? part[i][v] + two : two;
                    keep(part[i][v]);  // otherwise g++ delays the sums and spills the products
                }
            }
            if (s % Codes::STEPS != Codes::STEPS - 1) return;
            RL_FOR(i, m)
                RL_FOR(v, N) sum[i][v] += pairs((I)part[i][v], set(0x00010001));
        });
    } else {
        Codes::template each<N>(w, [&](int s, const I(&x)[N]) __attribute__((always_inline)) {
            dot_step<(Codes::STEPS > 0)>(sum, x, a + s * stride);
        });
    }
}

template <class Tail, int m, int N> RL_INLINE void end_sums(const Groups& g, const char* tail, int pass,
                                                            const int32_t* begin, const I (&sum)[m][N],
                                                            F (&total)[m][N]) {
    RL_FOR(v, N) {
        const F scale = Tail::scale(g, tail, pass + v);
        RL_FOR(i, m) total[i][v] += to_float(sum[i][v]) * scale;
    }
    if (g.kind != Offsets::minimums) return;
    RL_FOR(v, N) {
        const F minimum = Tail::minimum(g, tail, pass + v);
        RL_FOR(i, m) total[i][v] -= set(float(begin[i])) * minimum;
    }
}

// Whether registers are too few for a group's exact sums, the sums of 16 bits that they consist of, and the chains over
// groups. Then groups of one piece have exact sums at their end only, and chains over larger groups stay in memory.
constexpr bool IS_TIGHT = SHORT && REGISTERS == 16;

// Computes n of a tile's m tokens from `from` on, few enough that a group's sums stay in registers. ONE: a group has
// one piece.
template <class Codes, class Tail, int m, int from, int n, bool ONE, bool FETCHES>
RL_INLINE void group_part(const Groups& g, float* c, bool first, Fetch ahead) {
    constexpr int N = IS_TIGHT && n > 2 ? 1 : pass_vectors(n) < 4 ? pass_vectors(n) : 4;
    constexpr bool IS_LATE = IS_TIGHT && n > 1, IN_MEMORY = IS_LATE && !ONE;
    // Each pass fetches its share of what the tile fetches, two lines more than the codes of a piece have in all. Codes
    // that were unpacked had at most 1,024 bytes.
    constexpr int PASSES = VECTORS / N, SHARES = Tail::IS_UNPACKED ? PASSES * int(UNPACKED_FROM) : PASSES;
    constexpr int LINES = (Codes::BYTES / 64 + 1 + SHARES) / SHARES;
    const int64_t fetch_step = g.piece_bytes / (ahead.tiles * PASSES), size = ONE ? PIECE : g.size;
    for (int pass = 0; pass < VECTORS; pass += N) {
        const char *codes = g.codes + pass * W * 4, *tail = g.tail;
        const int32_t *a = (const int32_t*)g.activations + from, *begin = g.offsets + from;
        float* to = c + from * PANEL + pass * W;
        F total[n][N];
        RL_FOR(i, n)
            RL_FOR(v, N) total[i][v] = first ? F{} : load(to + i * PANEL + v * W);
        for (int64_t group = 0; group < g.count; ++group, begin += m, codes += g.code_stride, tail += g.tail_stride) {
            I sum[n][N] = {};
            if (!IS_LATE) start_sums<Tail, Codes::STEPS ? 0 : DOT_ZERO>(g, tail, pass, begin, sum);
            const char* w = codes;
            for (int64_t k = 0; k < size; k += PIECE, w += Codes::BYTES, a += m * PIECE / 4) {
                if (FETCHES) fetch<LINES>(ahead, fetch_step);
                add_piece<Codes>(w, a, m, sum);
            }
            if (IS_LATE) {
                I start[n][N];
                start_sums<Tail, Codes::STEPS ? 0 : DOT_ZERO>(g, tail, pass, begin, start);
                RL_FOR(i, n)
                    RL_FOR(v, N) sum[i][v] += start[i][v];
            }
            if (IN_MEMORY && (group || !first))
                RL_FOR(i, n)
                    RL_FOR(v, N) total[i][v] = load(to + i * PANEL + v * W);
            end_sums<Tail>(g, tail, pass, begin, sum, total);
            if (IN_MEMORY)
                RL_FOR(i, n)
                    RL_FOR(v, N) store(to + i * PANEL + v * W, total[i][v]);
        }
        if (!IN_MEMORY)
            RL_FOR(i, n)
                RL_FOR(v, N) store(to + i * PANEL + v * W, total[i][v]);
    }
}

template <class Codes, class Tail, int m, bool ONE>
RL_INLINE void group_parts(const Groups& g, float* c, bool first, Fetch ahead) {
    constexpr int most = W == 16 ? 6 : IS_TIGHT && !Tail::IS_UNPACKED ? 4 : 2, half = m > most ? (m + 1) / 2 : m;
    group_part<Codes, Tail, m, 0, half, ONE, true>(g, c, first, ahead);
    if constexpr (half < m) group_part<Codes, Tail, m, half, m - half, ONE, false>(g, c, first, ahead);
}

template <class Codes, class Tail, int m> void group_tile(const Groups& g, float* c, bool first, Fetch ahead) {
    if (IS_TIGHT && g.size == PIECE) return group_parts<Codes, Tail, m, IS_TIGHT>(g, c, first, ahead);
    group_parts<Codes, Tail, m, false>(g, c, first, ahead);
}

using Unpack = void (*)(const Groups&, char* bytes, char* tails, Fetch);

// Writes the codes of a range of groups as bytes, [columns / 4][32][4], and their tails.
template <class Codes> void unpack_groups(const Groups& g, char* bytes, char* tails, Fetch ahead) {
    for (int64_t group = 0; group < g.count; ++group) {
        const char* w = g.codes + group * g.code_stride;
        for (int64_t k = 0; k < g.size; k += PIECE, w += Codes::BYTES, bytes += Bytes::BYTES) {
            fetch<Codes::BYTES / 64 + 2>(ahead, g.piece_bytes / ahead.tiles);
            RL_FOR(v, VECTORS)
                Codes::template each<1>(w + v * W * 4, [&](int s, const I(&x)[1]) __attribute__((always_inline)) {
                    store((int32_t*)(bytes + s * 128) + v * W, x[0]);
                });
        }
        if (!g.in_blocks) unpack_tail(g, g.tail + group * g.tail_stride, tails + group * Unpacked::BYTES);
    }
}

}  // namespace ridgeline::RL_ISA
