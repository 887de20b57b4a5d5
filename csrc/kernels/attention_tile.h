// One tile of keys and values: where they are, their products with queries, and what weights make of them. T: the type
// in which they are stored.
#pragma once
#include <algorithm>

#include "attention.h"
#include "stored.h"
#include "vmath.h"

namespace ridgeline::RL_ISA {

constexpr int BLOCK = W == 16 ? 12 : 6;  // rows
// Vectors at once: BLOCK * 2 accumulators and what they are made of fit the registers, and fewer rows leave room for
// more.
constexpr int wide(int rows) { return W == 16 && rows <= BLOCK / 2 ? 4 : 2; }
constexpr int VECTORS = TILE / W;  // of a tile

// ---- where the keys and values of a tile are -------------------------------------------------------------------

template <class T> struct Tile {
    bool in_place;                 // keys are read where they are stored; else they stand in a room, turned and wide
    const T* keys[VECTORS];        // of each vector's keys, the first number; the next is `step` on
    const float* turned[VECTORS];  // the same in the room
    int64_t step;
    const T* values[TILE];
    const void* blocks[VECTORS];  // of each vector's keys, the values, where they lie in one piece; else something near
    int first, last;              // keys that some query sees lie in [first, last]
    const float *key_scales, *value_scales;  // [TILE]; null: there are none
};

// Where the tokens [first, last] of the tile at position `at` stand in pages `page` bytes apart, and `slot` in a page.
template <class T> void find(const KeyValues& kv, const Sequence& s, int64_t at, int first, int last, const char* base,
                             int64_t page, int64_t slot, const T** found) {
    for (int j = first; j <= last;) {
        const int64_t position = s.base + at + j, index = position / kv.page_tokens, inside = position % kv.page_tokens;
        const int64_t number = !s.table ? index : index < s.table_size ? s.table[index] : 0;
        const char* p = base + number * page + inside * slot;
        for (int64_t left = kv.page_tokens - inside; left > 0 && j <= last; --left, ++j, p += slot)
            found[j] = (const T*)p;
    }
}

// The scales of the tokens [first, last] of a tile.
inline void take_scales(const KeyValues& kv, const Sequence& s, int64_t at, int first, int last, const char* base,
                        int64_t page, int64_t slot, float* to) {
    const char* found[TILE] = {};
    find(kv, s, at, first, last, base, page, slot, found);
    for (int j = first; j <= last; ++j) memcpy(to + j, found[j], 4);
}

// W rows of keys, turned. Rows that no query sees are null.
template <class T> void turn_rows(const T* const* rows, int64_t numbers, float* to) {
    for (int64_t d = 0; d < numbers; d += W) {
        F x[W];
        const int n = int(numbers - d < W ? numbers - d : W);
        RL_FOR(i, W) x[i] = !rows[i] ? set(0.f) : n == W ? load(rows[i] + d) : load(rows[i] + d, n);
        transpose(x);
        RL_FOR(i, W)
            if (i < n) store(to + (d + i) * TILE, x[i]);
    }
}

// Does a vector of keys lie in one page, and in order?
inline bool in_place(const KeyValues& kv) { return kv.turned && kv.page_tokens % W == 0; }

template <class T> void turn_keys(const KeyValues& kv, int64_t numbers, const T* const* rows, float* to) {
    if (!kv.turned || kv.page_tokens == 1) return turn_rows(rows, numbers, to);
    for (int i = 0; i < W; ++i)
        for (int64_t d = 0; d < numbers; ++d) to[d * TILE + i] = rows[i] ? number(rows[i][d * kv.page_tokens]) : 0.f;
}

template <class T>
void find_keys(const AttentionStep& a, const AttentionWork& w, int head, int64_t at, Tile<T>& t, float* room) {
    const KeyValues& kv = a.kv;
    t.in_place = in_place(kv);
    const int begin = t.first / W, end = t.last / W + 1;
    const T* rows[TILE] = {};
    const int first = t.in_place ? begin * W : t.first, last = t.in_place ? end * W - 1 : t.last;
    const int64_t slot = kv.turned ? int64_t(sizeof(T)) : kv.key_row;
    find(kv, *w.sequence, at, first, last, kv.keys + head * kv.key_head, kv.key_page, slot, rows);
    t.step = t.in_place ? kv.page_tokens : TILE;
    for (int v = begin; v < end; ++v) {
        t.keys[v] = rows[v * W], t.turned[v] = room + v * W;
        if (!t.in_place) turn_keys(kv, a.c.key_dim, rows + v * W, room + v * W);
    }
}

template <class T> void find_values(const AttentionStep& a, const AttentionWork& w, int head, int64_t at, Tile<T>& t) {
    const KeyValues& kv = a.kv;
    find(kv, *w.sequence, at, t.first, t.last, kv.values + head * kv.value_head, kv.value_page, kv.value_row, t.values);
    const bool dense = kv.value_row == int64_t(sizeof(T)) * a.c.value_dim && kv.page_tokens % W == 0;
    for (int v = t.first / W; v <= t.last / W; ++v)
        t.blocks[v] = dense           ? t.values[v * W < t.first ? t.first : v * W]
                      : t.in_place    ? (const void*)t.keys[v]
                                      : (const void*)t.turned[v];
    std::fill(t.values, t.values + t.first, t.values[t.first]);
    std::fill(t.values + t.last + 1, t.values + TILE, t.values[t.last]);
}

inline void find_scales(const AttentionStep& a, const AttentionWork& w, int head, int64_t at, Tile<int8_t>& t,
                        float* keys, float* values) {
    const KeyValues& kv = a.kv;
    take_scales(kv, *w.sequence, at, t.first, t.last, kv.keys + head * kv.key_head + kv.key_scale, kv.key_page,
                kv.key_scale_row, keys);
    take_scales(kv, *w.sequence, at, t.first, t.last, kv.values + head * kv.value_head + kv.value_scale, kv.value_page,
                kv.value_scale_row, values);
    t.key_scales = keys, t.value_scales = values;
}

// The memory of the keys that come next, a key's worth at a time; `t`'s values, which are there already, where none
// do.
template <class T> void keys_ahead(const AttentionStep& a, const AttentionWork& w, int head, int64_t at,
                                   const Tile<T>& t, const T** lines) {
    const KeyValues& kv = a.kv;
    if (++head == w.head_end) head = w.head, at += TILE;
    std::copy_n(t.values, TILE, lines);
    if (at > w.sequence->start + w.last - 1) return;
    const int64_t slot = kv.turned ? kv.key_head / kv.page_tokens : kv.key_row;
    find(kv, *w.sequence, at, 0, TILE - 1, kv.keys + head * kv.key_head, kv.key_page, slot, lines);
}

// The same tile in float32, in rooms of [numbers][TILE] and [TILE][numbers]: for many rows, which would convert it
// again and again.
template <class T> Tile<float> widened(const AttentionStep& a, const Tile<T>& t, float* keys, float* values) {
    Tile<float> out;
    out.in_place = false, out.step = TILE, out.first = t.first, out.last = t.last;
    out.key_scales = t.key_scales, out.value_scales = t.value_scales;
    for (int v = t.first / W; v <= t.last / W; ++v) {
        out.turned[v] = keys + v * W, out.blocks[v] = out.turned[v];
        if (t.in_place)
            for (int64_t d = 0; d < a.c.key_dim; ++d) store(keys + d * TILE + v * W, load(t.keys[v] + d * t.step));
    }
    const int64_t numbers = a.c.value_dim;
    for (int j = t.first; j <= t.last; ++j) {
        float* to = values + j * numbers;
        int64_t d = 0;
        for (; d + W <= numbers; d += W) store(to + d, load(t.values[j] + d));
        for (; d < numbers; ++d) to[d] = number(t.values[j][d]);
    }
    for (int j = 0; j < TILE; ++j) out.values[j] = values + std::clamp(j, t.first, t.last) * numbers;
    return out;
}

// ---- products --------------------------------------------------------------------------------------------------

// Pages lie anywhere, so that no hardware sees what comes next: the loop over keys asks for the same tile's values, and
// the loop over values for the next keys, both `ahead`; for each line of memory once.

// N vectors of scores of R rows. q: [numbers][R]. T: of the values ahead.
template <class T, int R, int N, class K> void scores(const K* const* keys, const void* const* ahead, int64_t step,
                                                      int64_t numbers, const float* q, float* to) {
    constexpr int EACH = 4 / sizeof(T);  // numbers of W keys for which one line of values comes
    F acc[R][N];
    RL_FOR(r, R)
        RL_FOR(v, N) acc[r][v] = set(0.f);
    const K* k[N];
    const char* next[N];
    RL_FOR(v, N) k[v] = keys[v], next[v] = (const char*)ahead[v];
    const auto one = [&] __attribute__((always_inline)) {
        F x[N];
        RL_FOR(v, N) x[v] = load(k[v]), k[v] += step;
        RL_FOR(r, R) {
            const F y = set(q[r]);
            RL_FOR(v, N) acc[r][v] = fma(x[v], y, acc[r][v]);
        }
        q += R;
    };
    int64_t d = 0;
    for (; d + EACH <= numbers; d += EACH) {
        RL_FOR(v, N) prefetch_far(next[v]), next[v] += W * 4;
        RL_FOR(i, EACH) one();
    }
    for (; d < numbers; ++d) one();
    RL_FOR(r, R)
        RL_FOR(v, N) store(to + r * TILE + v * W, acc[r][v]);
}

// The values of N vectors of numbers from d on, into R rows: rescaled, then key after key. SOME: rows do not see all
// keys. A: the type of the keys ahead, whose rows are as long.
template <class T, int R, int N, bool SOME, class A>
void add_values(const Tile<T>& t, const A* const* ahead, int64_t d, int64_t numbers, const float* weights,
                const float* rescale, float* to, int64_t width) {
    constexpr int EACH = 64 / (W * sizeof(A)) > 1 ? 64 / (W * sizeof(A)) : 1;  // vectors in a line of memory
    F acc[R][N];
    RL_FOR(r, R)
        RL_FOR(v, N) acc[r][v] = load(to + r * width + d + v * W) * set(rescale[r]);
    const int n = int(numbers - d);
    for (int j = t.first; j <= t.last; ++j) {
        F x[N];
        RL_FOR(v, N) x[v] = N > 1 || n >= W ? load(t.values[j] + d + v * W) : load(t.values[j] + d, n);
        RL_FOR(v, N)
            if (v % EACH == 0) prefetch_far(ahead[j] + d + v * W);
        RL_FOR(r, R) {
            const F p = set(weights[r * TILE + j]);
            RL_FOR(v, N) {
                const F y = fma(p, x[v], acc[r][v]);
                acc[r][v] = SOME ? select(p != set(0.f), y, acc[r][v]) : y;
            }
        }
    }
    RL_FOR(r, R)
        RL_FOR(v, N) store(to + r * width + d + v * W, acc[r][v]);
}

}  // namespace ridgeline::RL_ISA
