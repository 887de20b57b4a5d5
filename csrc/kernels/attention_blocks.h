// Rows of a piece in blocks, and the keys of a tile that a block uses: for attention in vectors.
#pragma once
#include "kernels/attention_rows.h"
#include "kernels/attention_tile.h"

namespace ridgeline::RL_ISA {

constexpr int FEW = BLOCK / 2;  // up to this many rows read stored numbers; for more, a tile is converted once

// Divides rows into blocks of nearly equal size, at most `most`. Block b begins at row begin(b).
struct Blocks {
    int64_t rows, count;
    explicit Blocks(int64_t rows, int64_t most = BLOCK) : rows(rows), count((rows + most - 1) / most) {}
    int64_t begin(int64_t b) const { return rows * b / count; }
};

// Returns the ranges of keys for rows with these masks, of which at least one is not empty.
inline Span span_of(uint64_t any, uint64_t all) {
    const int first = __builtin_ctzll(any), last = TILE - 1 - __builtin_clzll(any);
    if (!all) return {first, last, last + 1, last + 1};
    const int begin = __builtin_ctzll(all);
    const uint64_t after = ~(all >> begin);  // keys after the first range that all rows use
    return {first, last, begin, after ? begin + __builtin_ctzll(after) : TILE};
}

// Calls f(n, v) for groups of n vectors from v on: N, and fewer where fewer are left.
template <int N, class Each> RL_INLINE void in_groups(int64_t v, int64_t end, Each&& f) {
    for (; v + N <= end; v += N) f(std::integral_constant<int, N>{}, v);
    if constexpr (N > 1)
        if (v < end) in_groups<N / 2>(v, end, f);
}

struct Scales {
    const float *keys, *values;  // scales of a tile's keys and values; null if there are none
};

// Computes masked scores of a row against vectors [begin, end) of keys, in powers of 2. Returns the largest.
inline float mask_scores(const AttentionStep& a, const Scales& scales, uint64_t mask, int begin, int end,
                         float* scores) {
    F top = set(NONE);
    const auto run = [&](auto some) __attribute__((always_inline)) {
        for (int v = begin; v < end; ++v) {
            F x = load(scores + v * W);
            if (scales.keys) x = x * load(scales.keys + v * W);
            x = in_powers(a, x);
            if (some()) x = masked(x, mask >> (v * W));
            top = max(top, x);
            store(scores + v * W, x);
        }
    };
    if (~mask)
        run(std::true_type{});
    else
        run(std::false_type{});
    return largest(top);
}

// Masks the scores of a block of R rows. most: largest scores of the segment so far, which are updated. rescale:
// factors for the results so far.
template <int R> void mask_rows(const AttentionStep& a, const Scales& scales, const uint64_t* masks, int begin, int end,
                                float* scores, float* most, float* rescale) {
    float high[(R + W - 1) / W * W] = {};
    for (int r = 0; r < R; ++r) high[r] = mask_scores(a, scales, masks[r], begin, end, scores + r * TILE);
    RL_UNROLL for (int r = 0; r < R; r += W) {
        const int n = R - r < W ? R - r : W;
        const F old = load(most + r, n), now = max(old, load(high + r));
        store(rescale + r, select(now == old, set(1.f), exp2_down(old - now)), n);
        store(most + r, now, n);
    }
}

// Transposes queries, in blocks of rows. put(row, n, d, r, x, count): gets numbers [d, d + count) of the rows from r on
// of a block of n rows, whose first one is `row`; zeros follow them in x. It may store whole vectors, which is faster
// than parts of them: what is past a row comes later.
template <class Put> void turn_queries(const AttentionStep& a, const AttentionWork& w, Put&& put) {
    const int64_t numbers = a.c.key_dim, own = (w.last - w.first) * a.c.group();
    const Blocks blocks(own);
    for (int64_t start = 0; start < w.rows(a.c); start += own)
        for (int64_t b = 0; b < blocks.count; ++b) {
            const int64_t row = start + blocks.begin(b), n = start + blocks.begin(b + 1) - row;
            const float* from[BLOCK];
            for (int64_t r = 0; r < n; ++r) {
                const QueryRow query(a, w, row + r);
                from[r] = a.q + query.token * a.q_stride + query.head * numbers;
            }
            for (int64_t d = 0; d < numbers; d += W)
                for (int64_t r = (n - 1) / W * W; r >= 0; r -= W) {
                    F x[W] = {};
                    const int count = int(std::min<int64_t>(W, numbers - d)), some = int(std::min<int64_t>(W, n - r));
                    for (int i = 0; i < some; ++i) x[i] = load(from[r + i] + d, count);
                    transpose(x);
                    put(row, n, d, r, x, count);
                }
        }
}

}  // namespace ridgeline::RL_ISA
