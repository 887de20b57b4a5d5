// One tile of keys and values: addresses, scores, and weighted sums. T: the stored type.
#pragma once
#include <algorithm>
#include <type_traits>

#include "attention.h"
#include "stored.h"
#include "vmath.h"

namespace ridgeline::RL_ISA {

constexpr int BLOCK = REGISTERS == 32 ? 12 : 6;  // largest number of rows
// Vectors at once. BLOCK * 2 accumulators and their operands fit into the registers, and fewer rows allow more vectors:
// products wait for each other unless there are eight accumulators, and a line of memory should be read in one pass.
constexpr int wide(int rows) {
    if (REGISTERS == 32) return rows <= BLOCK / 2 ? 4 : 2;
    return rows == 1 ? 8 : rows <= 3 ? 4 : 2;
}
constexpr int VECTORS = TILE / W;  // vectors of a tile

// ---- addresses of keys and values -----------------------------------------------------------------------------

// Addresses are found once for a tile, for key head 0; other heads are at an offset.
template <class T> struct Tile {
    int first, last;                   // keys that some query uses are in [first, last]
    bool in_place;                     // keys are read in their pages; else from a float32 copy, transposed
    const T* keys[TILE];               // first number of each key; the next number of a vector's keys is at `step`
    const float* transposed[VECTORS];  // addresses of vectors of keys in the copy
    int64_t step;
    const T* values[TILE];
    bool blocks;                             // the values of a vector's keys are contiguous
    int64_t key, value;                      // offset of the current head from head 0
    const float *key_scales, *value_scales;  // scales of the current head, [TILE]; null if there are none
};

// Finds the tokens [first, last] of the tile at position `at` in pages that are `page` bytes apart, with slots `slot`
// bytes apart.
template <class T> void find(const KeyValues& kv, const Sequence& s, int64_t at, int first, int last, const char* base,
                             int64_t page, int64_t slot, const T** found) {
    int64_t index = (s.base + at + first) / kv.page_tokens, inside = (s.base + at + first) % kv.page_tokens;
    for (int j = first; j <= last; ++index, inside = 0) {
        const int64_t number = !s.table ? index : index < s.table_size ? s.table[index] : 0;
        const char* p = base + number * page + inside * slot;
        const int end = int(std::min<int64_t>(last + 1, j + kv.page_tokens - inside));
        for (; j < end; ++j, p += slot) found[j] = (const T*)p;
    }
}

// Copies n scales that are `step` bytes apart.
inline void take_scales(const char* from, int64_t step, int64_t n, float* to) {
    int64_t i = 0;
    if (step == 4)
        for (; i + W <= n; i += W) store(to + i, load((const float*)(from + i * 4)));
    for (; i < n; ++i) memcpy(to + i, from + i * step, 4);
}

// Reads the scales of tokens [first, last] of a tile for one key head.
inline void find_scales(const KeyValues& kv, const Sequence& s, int64_t at, int first, int last, int head, float* keys,
                        float* values) {
    int64_t index = (s.base + at + first) / kv.page_tokens, inside = (s.base + at + first) % kv.page_tokens;
    const char* key_scales = kv.keys + head * kv.key_head + kv.key_scale;
    const char* value_scales = kv.values + head * kv.value_head + kv.value_scale;
    for (int j = first; j <= last; ++index, inside = 0) {
        const int64_t number = !s.table ? index : index < s.table_size ? s.table[index] : 0;
        const int64_t n = std::min<int64_t>(last + 1 - j, kv.page_tokens - inside);
        take_scales(key_scales + number * kv.key_page + inside * kv.key_scale_row, kv.key_scale_row, n, keys + j);
        take_scales(value_scales + number * kv.value_page + inside * kv.value_scale_row, kv.value_scale_row, n,
                    values + j);
        j += int(n);
    }
}

// Prefetches the scales of the tile at a position.
inline void scales_ahead(const KeyValues& kv, const Sequence& s, int64_t at, int head) {
    if (!s.table) return;
    const char* key_scales = kv.keys + head * kv.key_head + kv.key_scale;
    const char* value_scales = kv.values + head * kv.value_head + kv.value_scale;
    for (int64_t index = at / kv.page_tokens; index * kv.page_tokens < at + TILE && index < s.table_size; ++index) {
        prefetch(key_scales + s.table[index] * kv.key_page);
        prefetch(value_scales + s.table[index] * kv.value_page);
    }
}

// Transposes W rows of keys. Rows that no query uses are null.
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

// Returns whether a vector of keys is contiguous in one page.
inline bool in_place(const KeyValues& kv) { return kv.transposed && kv.page_tokens % W == 0; }

template <class T> void turn_vector(const KeyValues& kv, int64_t numbers, const T* const* rows, float* to) {
    if (!kv.transposed || kv.page_tokens == 1) return turn_rows(rows, numbers, to);
    for (int i = 0; i < W; ++i)
        for (int64_t d = 0; d < numbers; ++d) to[d * TILE + i] = rows[i] ? number(rows[i][d * kv.page_tokens]) : 0.f;
}

template <class T>
void find_keys(const AttentionCase& c, const KeyValues& kv, const Sequence& s, int64_t at, Tile<T>& t) {
    t.in_place = in_place(kv);
    const int begin = t.first / W * W, end = (t.last / W + 1) * W;
    std::fill_n(t.keys, TILE, nullptr);
    find(kv, s, at, t.in_place ? begin : t.first, t.in_place ? end - 1 : t.last, kv.keys, kv.key_page,
         kv.transposed ? int64_t(sizeof(T)) : kv.key_row, t.keys);
    t.step = t.in_place ? kv.page_tokens : TILE;
    find(kv, s, at, t.first, t.last, kv.values, kv.value_page, kv.value_row, t.values);
    t.blocks = kv.value_row == int64_t(sizeof(T)) * c.value_dim && kv.page_tokens % W == 0;
    std::fill(t.values, t.values + t.first, t.values[t.first]);
    std::fill(t.values + t.last + 1, t.values + TILE, t.values[t.last]);
}

// Copies the keys of the current head if they are not read in place.
template <class T> void turn_keys(const AttentionCase& c, const KeyValues& kv, Tile<T>& t, float* room) {
    for (int v = t.first / W; v <= t.last / W; ++v) {
        t.transposed[v] = room + v * W;
        if (t.in_place) continue;
        const T* rows[W];
        RL_FOR(i, W) rows[i] = t.keys[v * W + i] ? t.keys[v * W + i] + t.key : nullptr;
        turn_vector(kv, c.key_dim, rows, room + v * W);
    }
}

// Returns the addresses of the keys of the tile at a position; past the end, those of `t`'s values, which are cached.
template <class T>
void find_lines(const AttentionStep& a, const AttentionWork& w, int64_t at, const Tile<T>& t, const T** lines) {
    const KeyValues& kv = a.kv;
    std::copy_n(t.values, TILE, lines);
    if (at > w.sequence->last_slot(w.last - 1, a.c.block)) return;
    const int64_t slot = kv.transposed ? kv.key_head / kv.page_tokens : kv.key_row;
    find(kv, *w.sequence, at, 0, TILE - 1, kv.keys, kv.key_page, slot, lines);
}

// Returns the address of the values of a vector's keys if they are contiguous; else a nearby address.
template <class T> const void* block_of(const Tile<T>& t, int v) {
    if (t.blocks) return t.values[v * W < t.first ? t.first : v * W] + t.value;
    return t.in_place ? (const void*)(t.keys[v * W] + t.key) : (const void*)t.transposed[v];
}

// Converts a tile to float32, [numbers][TILE] and [TILE][numbers], for many rows, each of which would convert it again.
template <class T> Tile<float> widened(const AttentionCase& c, const Tile<T>& t, float* keys, float* values) {
    Tile<float> out;
    out.first = t.first, out.last = t.last;
    out.in_place = false, out.step = TILE, out.blocks = true, out.key = out.value = 0;
    out.key_scales = t.key_scales, out.value_scales = t.value_scales;
    for (int v = t.first / W; v <= t.last / W; ++v) {
        out.transposed[v] = keys + v * W;
        const T* from = t.keys[v * W] + t.key;
        if (t.in_place)
            for (int64_t d = 0; d < c.key_dim; ++d) store(keys + d * TILE + v * W, load(from + d * t.step));
    }
    const int64_t numbers = c.value_dim;
    for (int j = t.first; j <= t.last; ++j) {
        const T* from = t.values[j] + t.value;
        float* to = values + j * numbers;
        int64_t d = 0;
        for (; d + W <= numbers; d += W) store(to + d, load(from + d));
        for (; d < numbers; ++d) to[d] = number(from[d]);
    }
    for (int j = 0; j < TILE; ++j) out.values[j] = values + std::clamp(j, t.first, t.last) * numbers;
    return out;
}

// Finds the keys and values of a tile with drafts that are none. Returns the number of the first draft in the tile.
template <class T> int find_known(const KeyValues& kv, const Sequence& s, int64_t at, Tile<T>& t) {
    t.in_place = t.blocks = false, t.step = TILE;
    std::fill_n(t.keys, TILE, nullptr);
    std::fill_n(t.values, TILE, (const T*)kv.values);
    const int known = int(std::clamp<int64_t>(s.limit - at, 0, t.last + 1));
    find(kv, s, at, t.first, known - 1, kv.keys, kv.key_page, kv.transposed ? int64_t(sizeof(T)) : kv.key_row, t.keys);
    find(kv, s, at, t.first, known - 1, kv.values, kv.value_page, kv.value_row, t.values);
    return known;
}

// Places the drafts on a query's path in the tile at position `at`, beside its known keys: those among [first, last].
template <class T> void place_path(const AttentionStep& a, const Sequence& s, uint64_t path, int64_t at, int first,
                                   int last, int head, Tile<T>& t, float* keys, float (*scales)[TILE]) {
    const KeyValues& kv = a.kv;
    int64_t j = s.limit - at;
    for (; path; path &= path - 1, ++j) {
        if (j < first || j > last) continue;
        const int64_t slot = s.base + s.limit + __builtin_ctzll(path), inside = slot % kv.page_tokens;
        const int64_t index = slot / kv.page_tokens, number_of = s.table ? s.table[index] : index;
        const char* key = kv.keys + number_of * kv.key_page + head * kv.key_head;
        const char* value = kv.values + number_of * kv.value_page + head * kv.value_head;
        const T* from = (const T*)(key + inside * (kv.transposed ? int64_t(sizeof(T)) : kv.key_row));
        const int64_t step = kv.transposed ? kv.page_tokens : 1;
        for (int64_t d = 0; d < a.c.key_dim; ++d) keys[d * TILE + j] = number(from[d * step]);
        t.values[j] = (const T*)(value + inside * kv.value_row) - t.value;
        if (!t.key_scales) continue;
        memcpy(&scales[0][j], key + kv.key_scale + inside * kv.key_scale_row, 4);
        memcpy(&scales[1][j], value + kv.value_scale + inside * kv.value_scale_row, 4);
    }
}

// Runs the tile at a position that has drafts: each query with the keys of its own path. masks: of each query; any: all
// of them together. copy: room for turned keys. select(t, head) turns to a head; run(t, head, i) computes query i.
template <class T, class Select, class Run>
void run_paths(const AttentionStep& a, const AttentionWork& w, int64_t at, const uint64_t* masks, uint64_t any,
               float* copy, const Select& select, const Run& run) {
    if (!any) return;
    const Sequence& s = *w.sequence;
    Tile<T> t;
    t.first = __builtin_ctzll(any), t.last = TILE - 1 - __builtin_clzll(any);
    find_known(a.kv, s, at, t);
    for (int head = w.head; head < w.head_end; ++head) {
        select(t, head);
        for (int64_t i = 0; i < w.last - w.first; ++i) {
            if (!masks[i]) continue;
            place_path(a, s, s.path(w.first + i), at, __builtin_ctzll(masks[i]), TILE - 1 - __builtin_clzll(masks[i]),
                       head, t, copy, nullptr);
            run(t, head, i);
        }
    }
}

// ---- products --------------------------------------------------------------------------------------------------

// Pages are not in order, so that hardware cannot prefetch. The loop over keys prefetches the same tile's values, and
// the loop over values the next keys; each line of memory once.

// keys[v * apart] + offset: the first number of vector v's keys, the next is `step` on. T: type of the values ahead.
template <class T, int R, int N, class K> void score_vectors(const K* const* keys, int apart, int64_t offset,
                                                             const void* const* ahead, int64_t step, int64_t numbers,
                                                             const float* q, float* to) {
    constexpr int EACH = 4 / sizeof(T);  // numbers of W keys for each prefetched line of values
    F acc[R][N];
    RL_FOR(r, R)
        RL_FOR(v, N) acc[r][v] = set(0.f);
    const K* k[N];
    const char* next[N];
    RL_FOR(v, N) k[v] = keys[v * apart] + offset, next[v] = (const char*)ahead[v];
    const auto one = [&]() __attribute__((always_inline)) {
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

// Computes scores of R rows against the N vectors of keys from `first` on. q: [numbers][R].
template <int R, int N, class T> void scores(const Tile<T>& t, int first, int64_t numbers, const float* q, float* to) {
    const void* ahead[N];
    RL_FOR(v, N) ahead[v] = block_of(t, first + v);
    if (!t.in_place) return score_vectors<T, R, N>(t.transposed + first, 1, 0, ahead, t.step, numbers, q, to);
    score_vectors<T, R, N>(t.keys + first * W, W, t.key, ahead, t.step, numbers, q, to);
}

// Keys of a tile: some row of a block uses each key in [first, last], all rows use the keys in [all, end).
struct Span {
    int first, last, all, end;
};

// Adds N vectors of values from number d on to R rows: rescaled, then key after key. SOME: some keys are masked; masked
// values may hold anything. ahead, offset: addresses of the next keys.
template <class T, int R, int N, bool SOME>
void add_values(const Tile<T>& t, const Span& span, const T* const* ahead, int64_t offset, int64_t d, int64_t numbers,
                const float* weights, const float* rescale, float* to, int64_t width) {
    constexpr int EACH = 64 / (W * sizeof(T)) > 1 ? 64 / (W * sizeof(T)) : 1;  // vectors in a line of memory
    F acc[R][N];
    RL_FOR(r, R)
        RL_FOR(v, N) acc[r][v] = load(to + r * width + d + v * W) * set(rescale[r]);
    const int n = int(numbers - d);
    const int64_t from = t.value + d, next = offset + d;
    const auto add = [&](int begin, int end, auto some) __attribute__((always_inline)) {
        for (int j = begin; j < end; ++j) {
            F x[N];
            RL_FOR(v, N) x[v] = N > 1 || n >= W ? load(t.values[j] + from + v * W) : load(t.values[j] + from, n);
            RL_FOR(v, N)
                if (v % EACH == 0) prefetch_far(ahead[j] + next + v * W);
            RL_FOR(r, R) {
                const F p = set(weights[r * TILE + j]);
                RL_FOR(v, N) {
                    const F y = fma(p, x[v], acc[r][v]);
                    acc[r][v] = some() ? select(p != set(0.f), y, acc[r][v]) : y;
                }
            }
        }
    };
    if constexpr (SOME) add(span.first, span.all, std::true_type{});
    add(SOME ? span.all : 0, SOME ? span.end : TILE, std::false_type{});
    if constexpr (SOME) add(span.end, span.last + 1, std::true_type{});
    RL_FOR(r, R)
        RL_FOR(v, N) store(to + r * width + d + v * W, acc[r][v]);
}

}  // namespace ridgeline::RL_ISA
