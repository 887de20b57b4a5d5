// Rows of a piece of attention, in the arithmetic of vectors and in that of a matrix unit: which keys a query uses, its
// results so far, and its segments.
//
// A row is one query of one head of the group that shares the keys. Rows are in the order of key heads, queries and
// heads of the group.
#pragma once
#include <algorithm>
#include <limits>

#include "attention.h"
#include "vmath.h"

namespace ridgeline::RL_ISA {

constexpr float NONE = -std::numeric_limits<float>::infinity();

// Scores are in powers of 2. A weight of 0 means that the key is masked: exp2_down never returns 0.
inline float weight(float x) { return exp2_down(set(x))[0]; }

// Divides the scratch memory of a thread; without memory it only counts the floats.
struct Space {
    float* at;
    int64_t used = 0;
    static int64_t rounded(int64_t n) { return (n + 15) / 16 * 16; }
    float* take(int64_t floats) {
        const int64_t from = used;
        used += rounded(floats);
        return at ? at + from : nullptr;
    }
};

// ---- masks of keys --------------------------------------------------------------------------------------------

inline uint64_t range(int64_t from, int64_t to) {  // bits [from, to) of a tile
    from = from < 0 ? 0 : from;
    to = to > TILE ? TILE : to;
    if (from >= to) return 0;
    return (to == TILE ? ~uint64_t(0) : (uint64_t(1) << to) - 1) & ~((uint64_t(1) << from) - 1);
}

inline uint64_t comb(int64_t last, int64_t step) {  // bits last, last - step, ...
    int64_t at = last >= TILE ? last - (last - TILE + step) / step * step : last;
    uint64_t bits = 0;
    for (; at >= 0; at -= step) bits |= uint64_t(1) << at;
    return bits;
}

// Returns the mask of the keys of the tile that begins at position `tile`.
inline uint64_t seen(const AttentionCase& c, int64_t query, int64_t tile) {
    const int64_t at = query - tile;
    if (c.window == 0) return range(0, at + 1);
    switch (c.pattern) {
        case Pattern::none: return range(at - c.window + 1, at + 1);
        case Pattern::first_tokens:
            return range(at - c.window + 1, at + 1) | (range(0, c.number - tile) & range(0, at + 1));
        case Pattern::dilated: return at < 0 ? 0 : range(at - c.lookback(), at + 1) & comb(at, c.number);
        default: return at < 0 ? 0 : range(at - c.window + 1, at + 1) | comb(at, c.number);
    }
}

// A score in powers of 2.
RL_INLINE F in_powers(const AttentionStep& a, F x) {
    const float scale = a.c.scale * a.kv.key_factor;
    return a.c.softcap > 0 ? set(a.c.softcap * LOG2_E) * tanh(x * set(scale) / set(a.c.softcap))
                           : x * set(scale * LOG2_E);
}
// NONE for keys that the mask, whose first bits are those of the vector, does not have.
RL_INLINE F masked(F x, uint64_t mask) {
    constexpr int32_t ONE = 1;
    I lane = {};
    RL_FOR(i, W) lane[i] = ONE << i;
    return select((set(int32_t(mask & 0xffff)) & lane) != set(0), x, set(NONE));
}

// Writes the masks of a piece's queries for the tile at a position. Returns the keys that some query uses.
inline uint64_t seen_by(const AttentionCase& c, const AttentionWork& w, int64_t at, uint64_t* masks) {
    const Sequence& s = *w.sequence;
    uint64_t any = 0;
    for (int64_t i = 0; i < w.last - w.first; ++i)
        any |= masks[i] = seen(c, s.end_of_block(s.position(w.first + i), c.block), at);
    return any;
}

// ---- results ----------------------------------------------------------------------------------------------------

// Returns the token of a row in the step, and its query head.
struct QueryRow {
    int64_t token, head;
    QueryRow(const AttentionStep& a, const AttentionWork& w, int64_t row) {
        const int64_t group = a.c.group(), own = (w.last - w.first) * group;
        token = w.sequence->row + w.first + row % own / group;
        head = (w.head + row / own) * group + row % group;
    }
};

// Rows of values are padded to whole vectors.
struct Results {
    int64_t width;
    float *most, *sums, *values;             // of the segment: [rows], [rows, 16], [rows, width]
    float *all_most, *all_sum, *all_values;  // of the segments before

    Results(Space& space, const AttentionCase& c, int64_t rows) : width(Space::rounded(c.value_dim)) {
        most = space.take(rows), sums = space.take(rows * 16), values = space.take(rows * width);
        all_most = space.take(rows), all_sum = space.take(rows), all_values = space.take(rows * width);
    }
};

// Merges a segment's result into those before.
inline void join(float most, float sum, const float* values, int64_t width, float& all_most, float& all_sum,
                 float* all_values) {
    if (most == NONE) return;
    if (all_most == NONE) {
        all_most = most, all_sum = sum;
        memcpy(all_values, values, size_t(width) * 4);
        return;
    }
    const float now = all_most > most ? all_most : most;
    const float old = all_most == now ? 1.f : weight(all_most - now), fresh = most == now ? 1.f : weight(most - now);
    all_most = now, all_sum = all_sum * old + sum * fresh;
    for (int64_t d = 0; d < width; d += W)
        store(all_values + d, fma(load(values + d), set(fresh), load(all_values + d) * set(old)));
}

inline void write_out(const AttentionStep& a, const AttentionWork& w, int64_t row, const Results& m) {
    const QueryRow query(a, w, row);
    float most = m.all_most[row], sum = m.all_sum[row], old = 1.f;
    if (a.sinks) {
        const float sink = a.sinks[query.head] * LOG2_E, now = most > sink ? most : sink;
        old = most == now ? 1.f : weight(most - now);
        sum = sum * old + (sink == now ? 1.f : weight(sink - now));
    }
    const float factor = old / sum * a.kv.value_factor;
    float* to = a.out + query.token * a.out_stride + query.head * a.c.value_dim;
    const float* from = m.all_values + row * m.width;
    for (int64_t d = 0; d < a.c.value_dim; d += W) store(to + d, load(from + d) * set(factor), int(a.c.value_dim - d));
}

// Computes the segments of a piece. run_tile(at): adds the tile at a position to the results of the segment.
template <class RunTile>
void run_segments(const AttentionStep& a, const AttentionWork& w, Results& m, RunTile&& run_tile) {
    const int64_t rows = w.rows(a.c);
    for (int64_t r = 0; r < rows; ++r) m.all_most[r] = NONE, m.all_sum[r] = 0;
    memset(m.all_values, 0, size_t(rows * m.width) * 4);
    float* partial = w.partial;
    const int64_t end = w.sequence->last_slot(w.last - 1, a.c.block);
    for (int64_t segment = w.begin; segment < w.end; ++segment) {
        for (int64_t r = 0; r < rows; ++r) m.most[r] = NONE;
        memset(m.sums, 0, size_t(rows) * 16 * 4);
        memset(m.values, 0, size_t(rows * m.width) * 4);
        for (int64_t at = segment * SEGMENT; at < (segment + 1) * SEGMENT && at <= end; at += TILE) run_tile(at);
        for (int64_t r = 0; r < rows; ++r) {
            const float sum = fold(m.sums + r * 16);
            if (!partial) {
                join(m.most[r], sum, m.values + r * m.width, m.width, m.all_most[r], m.all_sum[r],
                     m.all_values + r * m.width);
                continue;
            }
            partial[0] = m.most[r], partial[1] = sum;
            memcpy(partial + 2, m.values + r * m.width, size_t(m.width) * 4);
            partial += m.width + 2;
        }
    }
    if (!w.partial)
        for (int64_t r = 0; r < rows; ++r) write_out(a, w, r, m);
}

}  // namespace ridgeline::RL_ISA
