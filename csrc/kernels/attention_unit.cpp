// Attention in a matrix unit, for keys and values of 16 bits; attention.h describes the arithmetic.
//
// Rows go through a tile of keys in blocks of up to 32. The unit computes the products of a block while vectors compute
// the weights of the block before.
#include <cstring>
#include <type_traits>

#include "dots.h"
#include "kernels/attention_rows.h"
#include "kernels/attention_tile.h"
#include "matrix_unit.h"
#include "unit_registers.h"

namespace ridgeline::RL_ISA {
namespace {

constexpr int HALVES = TILE / SQUARE;             // of a tile: the keys of a square
constexpr int PAIRS = BF16_DEPTH / 2;             // columns i and i + PAIRS of 32 are a pair in the unit
constexpr int64_t LINE = SQUARE * 4;              // bytes of one pair of all 32 keys or numbers
constexpr int64_t CHUNK = PAIRS * LINE;           // bytes of 32 columns times 32 keys or numbers
constexpr int64_t SCORES = TILE * SQUARE;         // of a block, [HALVES][32 rows][32 keys]
constexpr int64_t WEIGHTS = SQUARE * BF16_DEPTH;  // of a slice of a half

int64_t blocks_of(int64_t columns) { return (columns + BF16_DEPTH - 1) / BF16_DEPTH; }

// ---- slices ------------------------------------------------------------------------------------------------------

// How many slices stand for a number: of queries and weights (TOKENS), and of keys and values (KEYS). WHOLE: those of
// keys and values have no error.
template <class T> struct Exact {
    using Stored = T;
    static constexpr int TOKENS = 2, KEYS = std::is_same_v<T, Float16> ? 2 : 1;
    static constexpr bool WHOLE = true;
};
template <class T> struct Rounded {
    using Stored = T;
    static constexpr int TOKENS = 1, KEYS = 1;
    static constexpr bool WHOLE = std::is_same_v<T, BFloat16>;
};

// The bits of the nearest bf16.
RL_INLINE I nearest(F x) { return (I)((U)x + 0x8000u) & int32_t(0xffff0000); }

// Writes pairs as slices that are `apart` bytes apart. The first is the nearest bf16, and the second, if there is one,
// the nearest to the rest. WHOLE: the number is one bf16, or its rest is, as for halves. (A NaN is in the rest then.)
template <int SLICES, bool WHOLE> RL_INLINE void put_slices(F x, F y, char* to, int64_t apart) {
    if constexpr (SLICES == 1) {
        store((int32_t*)to, WHOLE ? pairs_of(bits(x), bits(y)) : pairs_of(upper_bf16(x), upper_bf16(y)));
    } else {
        const I first = nearest(x), second = nearest(y);
        const F a = x - floats(first), b = y - floats(second);
        store((int32_t*)to, pairs_of(first, second));
        store((int32_t*)(to + apart), WHOLE ? pairs_of(bits(a), bits(b)) : pairs_of(nearest(a), nearest(b)));
    }
}

// ---- scratch memory ----------------------------------------------------------------------------------------------

template <class S> struct Room : Results {
    int64_t key_blocks, value_blocks;   // of 32 numbers; numbers past the last one are zeros
    float* copy;                        // keys in float32, [numbers][TILE], if they are not read in place
    uint16_t* q;                        // [key heads][key_blocks][TOKENS][rows of a key head][32]
    char *packed_keys, *packed_values;  // [HALVES][key_blocks][KEYS] and [value_blocks][HALVES][KEYS] of CHUNK
    float* scores;                      // of two blocks
    uint16_t* weights;                  // [HALVES][TOKENS][32 rows][32 keys]
    float *squares, *rescale;           // two squares of results

    // rows: of all key heads. The unit reads up to 31 rows past the last one.
    Room(Space& space, const AttentionCase& c, int64_t rows)
        : Results(space, c, rows), key_blocks(blocks_of(c.key_dim)), value_blocks(blocks_of(c.value_dim)) {
        copy = space.take(TILE * c.key_dim);
        q = (uint16_t*)space.take((rows * key_blocks + SQUARE) * BF16_DEPTH);
        packed_keys = (char*)space.take(HALVES * key_blocks * S::KEYS * CHUNK / 4);
        packed_values = (char*)space.take(HALVES * value_blocks * S::KEYS * CHUNK / 4);
        scores = space.take(2 * SCORES), weights = (uint16_t*)space.take(HALVES * WEIGHTS);
        squares = space.take(2 * SQUARE * SQUARE), rescale = space.take(SQUARE);
    }
};

template <int TOKENS>
void load_queries(const AttentionStep& a, const AttentionWork& w, int64_t key_blocks, uint16_t* q) {
    const int64_t rows = (w.last - w.first) * a.c.group(), numbers = a.c.key_dim;
    const F nan = set(__builtin_nanf(""));  // others may be lost in slices
    for (int64_t r = 0; r < w.rows(a.c); ++r) {
        const QueryRow query(a, w, r);
        const float* from = a.q + query.token * a.q_stride + query.head * numbers;
        for (int64_t b = 0; b < key_blocks; ++b) {
            char* to = (char*)(q + ((r / rows * key_blocks + b) * TOKENS * rows + r % rows) * BF16_DEPTH);
            for (int i = 0; i < PAIRS; i += W) {
                const int64_t d = b * BF16_DEPTH + i;
                const F x = load(from + d, int(numbers - d)), y = load(from + d + PAIRS, int(numbers - d - PAIRS));
                put_slices<TOKENS, false>(select(x == x, x, nan), select(y == y, y, nan), to + i * 4,
                                          rows * BF16_DEPTH * 2);
            }
        }
    }
}

// ---- keys and values of a tile -----------------------------------------------------------------------------------

// Packs W keys from `key` on. from: their first number, the next one is `step` on; null: no query uses them. ahead:
// rows of values, which are fetched.
template <class S, class T, class K> void pack_vector(const K* from, int64_t step, int64_t numbers, int key,
                                                      const T* const* ahead, int64_t offset, const Room<S>& m) {
    const auto take = [&](int64_t d) __attribute__((always_inline)) {
        return from && d < numbers ? load(from + d * step) : set(0.f);
    };
    for (int64_t b = 0; b < m.key_blocks; ++b) {
        char* to = m.packed_keys + (key / SQUARE * m.key_blocks + b) * S::KEYS * CHUNK + key % SQUARE * 4;
        for (int i = 0; i < PAIRS; ++i) {
            const int64_t d = b * BF16_DEPTH + i;
            if (i < W) prefetch_far(ahead[i] + offset + b * BF16_DEPTH);
            put_slices<S::KEYS, S::WHOLE>(take(d), take(d + PAIRS), to + i * LINE, CHUNK);
        }
    }
}

template <class S, class T> void pack_keys(const AttentionCase& c, const Tile<T>& t, const Room<S>& m) {
    for (int v = 0; v < TILE / W; ++v) {
        const bool used = v >= t.first / W && v <= t.last / W;
        const T* const* ahead = t.values + v * W;
        if (used && t.in_place)
            pack_vector(t.keys[v * W] + t.key, t.step, c.key_dim, v * W, ahead, t.value, m);
        else
            pack_vector(used ? t.transposed[v] : nullptr, TILE, c.key_dim, v * W, ahead, t.value, m);
    }
}

// Packs the values of the keys in `mask`, and zeros for others, whose memory may hold anything. Returns whether all are
// finite. ahead: rows of the next keys, which are fetched.
template <class S, class T> bool pack_values(const AttentionCase& c, const Tile<T>& t, uint64_t mask,
                                             const T* const* ahead, int64_t offset, const Room<S>& m) {
    F zeros[2] = {set(0.f), set(0.f)};  // NaN after a number that is not finite
    for (int j = 0; j < TILE; j += j % SQUARE == PAIRS - 1 ? PAIRS + 1 : 1) {
        const T* rows[2];
        RL_FOR(i, 2) rows[i] = mask >> (j + i * PAIRS) & 1 ? t.values[j + i * PAIRS] + t.value : nullptr;
        for (int64_t d = 0; d < m.value_blocks * BF16_DEPTH; d += W) {
            const int64_t chunk = (d / BF16_DEPTH * HALVES + j / SQUARE) * S::KEYS, n = c.value_dim - d;
            F x[2];
            RL_FOR(i, 2) {
                x[i] = !rows[i] || n <= 0 ? set(0.f) : n >= W ? load(rows[i] + d) : load(rows[i] + d, int(n));
                zeros[i] = fma(x[i], set(0.f), zeros[i]);
                if (d % BF16_DEPTH == 0) prefetch_far(ahead[j + i * PAIRS] + offset + d);
            }
            put_slices<S::KEYS, S::WHOLE>(
                x[0], x[1], m.packed_values + chunk * CHUNK + j % SQUARE * LINE + d % BF16_DEPTH * 4, CHUNK);
        }
    }
    const F sum = zeros[0] + zeros[1];
    return !any(sum != sum);
}

// ---- a block of rows ---------------------------------------------------------------------------------------------

// Rows [own, own + n) of a key head, of which some use keys of the halves. No rows: n is 0.
struct Block {
    int64_t own = 0;
    int n = 0;
    bool half[HALVES] = {};
    int filled() const { return n > 16 ? 32 : 16; }
};

// Returns the first block of rows [own, end) that uses keys of the tile.
Block next_block(const uint64_t* masks, int64_t group, int64_t own, int64_t end) {
    for (; own < end; own += SQUARE) {
        Block b{own, int(std::min<int64_t>(SQUARE, end - own))};
        uint64_t any = 0;
        for (int64_t query = own / group; query * group < own + b.n; ++query) any |= masks[query];
        for (int h = 0; h < HALVES; ++h) b.half[h] = any >> (h * SQUARE) & ~uint32_t(0);
        if (any) return b;
    }
    return {};
}

// The scores of a block, in steps of 32 numbers, so that vectors can work between them.
template <class Unit, class S> struct Scoring {
    Unit& unit;
    const Room<S>& m;
    const Block& b;
    const uint16_t* q;  // of the block's first row
    int64_t slice;      // distance of the second slices
    float* scores;
    int half = 0;
    int64_t block = 0;

    bool step() {
        while (half < HALVES && !b.half[half]) ++half;
        if (half == HALVES) return false;
        const int rows = b.filled();
        const char* k = m.packed_keys + (half * m.key_blocks + block) * S::KEYS * CHUNK;
        const uint16_t* x = q + block * S::TOKENS * slice;
        if (block == 0) unit.zero();
        unit.add(x, k, rows);
        if constexpr (S::TOKENS == 2) unit.add_slice(x + slice, rows);
        if constexpr (S::KEYS == 2) unit.add(x, k + CHUNK, rows);
        if (++block == m.key_blocks) unit.store(scores + half * SQUARE * SQUARE, rows), block = 0, ++half;
        return true;
    }
};

// Masks a row's scores. Returns the largest.
float mask_scores(const AttentionStep& a, const Block& b, uint64_t mask, float* scores) {
    F top = set(NONE);
    for (int h = 0; h < HALVES; ++h)
        for (int i = 0; b.half[h] && i < SQUARE; i += W) {
            float* at = scores + h * SQUARE * SQUARE + i;
            const F x = masked(in_powers(a, load(at)), mask >> (h * SQUARE + i));
            top = max(top, x);
            store(at, x);
        }
    return largest(top);
}

// Computes a row's weights, as slices, and adds them to its sums.
template <int TOKENS>
void weigh_row(const Block& b, float most, float rescale, const float* scores, float* sums, uint16_t* weights) {
    Sum16 total;
    RL_FOR(i, V) total.v[i] = load(sums + i * W) * set(rescale);
    for (int h = 0; h < HALVES; ++h)
        for (int i = 0; b.half[h] && i < PAIRS; i += W) {
            F x[2], p[2];
            RL_FOR(k, 2) {
                x[k] = load(scores + h * SQUARE * SQUARE + k * PAIRS + i);
                p[k] = x[k] - set(most);
            }
            exp2_down(p);
            RL_FOR(k, 2) {
                p[k] = select(x[k] == set(NONE), set(0.f), p[k]);
                total.v[i / W] += TOKENS == 1 ? floats(upper_bf16(p[k])) : p[k];
            }
            put_slices<TOKENS, false>(p[0], p[1], (char*)(weights + h * TOKENS * WEIGHTS + i * 2), WEIGHTS * 2);
        }
    RL_FOR(i, V) store(sums + i * W, total.v[i]);
}

// Turns the scores of a block into weights. row: its first row in the results. between(): called after each row.
template <class S, class Between> void weigh(const AttentionStep& a, const Block& b, const uint64_t* masks,
                                             float* scores, int64_t row, const Room<S>& m, Between&& between) {
    float high[SQUARE] = {};
    for (int r = 0; r < b.n; ++r) {
        high[r] = mask_scores(a, b, masks[(b.own + r) / a.c.group()], scores + r * SQUARE);
        between();
    }
    for (int r = 0; r < b.n; r += W) {
        const F old = load(m.most + row + r, b.n - r), now = max(old, load(high + r));
        store(m.rescale + r, select(now == old, set(1.f), exp2_down(old - now)));
        store(m.most + row + r, now, b.n - r);
    }
    for (int r = 0; r < b.n; ++r) {
        weigh_row<S::TOKENS>(b, m.most[row + r], m.rescale[r], scores + r * SQUARE, m.sums + (row + r) * 16,
                             m.weights + r * BF16_DEPTH);
        between();
    }
}

// Adds a square of sums to 32 numbers of the block's rescaled results.
template <class S> void fold_square(const Block& b, int64_t panel, int64_t row, const Room<S>& m) {
    const float* from = m.squares + panel % 2 * SQUARE * SQUARE;
    const int64_t first = panel * SQUARE, n = std::min<int64_t>(SQUARE, m.width - first);
    for (int r = 0; r < b.n; ++r) {
        float* to = m.values + (row + r) * m.width + first;
        for (int64_t i = 0; i < n; i += W)
            store(to + i, fma(load(to + i), set(m.rescale[r]), load(from + r * SQUARE + i)));
    }
}

// Adds the products of a block's weights with the tile's values to its results. Vectors fold a square while the unit
// computes the next one.
template <class Unit, class S> void add_values(Unit& unit, const Block& b, int64_t row, const Room<S>& m) {
    const int rows = b.filled();
    for (int64_t panel = 0; panel < m.value_blocks; ++panel) {
        unit.zero();
        for (int h = 0; h < HALVES; ++h) {
            if (!b.half[h]) continue;
            const char* v = m.packed_values + (panel * HALVES + h) * S::KEYS * CHUNK;
            const uint16_t* p = m.weights + h * S::TOKENS * WEIGHTS;
            unit.add(p, v, rows);
            if constexpr (S::TOKENS == 2) unit.add_slice(p + WEIGHTS, rows);
            if constexpr (S::KEYS == 2) unit.add(p, v + CHUNK, rows);
        }
        unit.store(m.squares + panel % 2 * SQUARE * SQUARE, rows);
        if (panel > 0) fold_square(b, panel - 1, row, m);
    }
    fold_square(b, m.value_blocks - 1, row, m);
}

// ---- a tile ------------------------------------------------------------------------------------------------------

// The work of a thread on one piece.
template <class Unit, class S> struct Worker {
    using T = typename S::Stored;
    const AttentionStep& a;
    const AttentionWork& w;
    Room<S>& m;
    Unit& unit;
    const int64_t queries = w.last - w.first, group = a.c.group();

    // Adds a tile whose keys and values are packed to rows [begin, end) of a key head.
    void run_rows(const uint64_t* masks, int head, int64_t begin, int64_t end) {
        const int64_t rows = queries * group, first = (head - w.head) * rows;
        const int64_t slice = rows * BF16_DEPTH;
        const uint16_t* q = m.q + first * m.key_blocks * S::TOKENS * BF16_DEPTH;
        Block b = next_block(masks, group, begin, end);
        Scoring<Unit, S> scoring{unit, m, b, q + b.own * BF16_DEPTH, slice, m.scores};
        while (scoring.step()) {
        }
        for (int turn = 0; b.n; turn ^= 1) {
            const Block next = next_block(masks, group, b.own + SQUARE, end);
            Scoring<Unit, S> ahead{unit, m, next, q + next.own * BF16_DEPTH, slice, m.scores + (turn ^ 1) * SCORES};
            weigh(a, b, masks, m.scores + turn * SCORES, first + b.own, m, [&] { ahead.step(); });
            while (ahead.step()) {
            }
            add_values(unit, b, first + b.own, m);
            b = next;
        }
    }

    void run_tile(int64_t at) {
        const KeyValues& kv = a.kv;
        uint64_t masks[UNIT_ROWS];
        const uint64_t any = seen_by(a.c, w, at, masks);
        if (!any) return;
        Tile<T> t;
        const T *lines[TILE], *next[TILE];
        t.first = __builtin_ctzll(any), t.last = TILE - 1 - __builtin_clzll(any);
        find_keys(a.c, kv, *w.sequence, at, t);
        find_lines(a, w, at, t, lines);
        find_lines(a, w, at + TILE, t, next);
        const bool equal = std::all_of(masks, masks + queries, [&](uint64_t mask) { return mask == any; });
        for (int head = w.head; head < w.head_end; ++head) {
            const bool last = head + 1 == w.head_end;
            const T* const* ahead = last ? next : lines;
            const int64_t offset = (last ? w.head : head + 1) * kv.key_head / int64_t(sizeof(T));
            select_head(t, head);
            pack_keys(a.c, t, m);
            if (pack_values(a.c, t, any, ahead, offset, m) || equal) {
                run_rows(masks, head, 0, queries * group);
                continue;
            }
            // A weight of 0 times a value that is not finite is NaN: each query gets the values of its keys alone.
            for (int64_t i = 0; i < queries; ++i) {
                pack_values(a.c, t, masks[i], t.values, t.value, m);
                run_rows(masks, head, i * group, (i + 1) * group);
            }
        }
    }

    void run_tree_tile(int64_t at) {
        uint64_t masks[UNIT_ROWS];
        const uint64_t any = seen_by(a.c, w, at, masks);
        auto select = [&](Tile<T>& t, int head) { select_head(t, head); };
        run_paths<T>(a, w, at, masks, any, m.copy, select, [&](const Tile<T>& t, int head, int64_t i) {
            pack_keys(a.c, t, m);
            pack_values(a.c, t, masks[i], t.values, t.value, m);
            run_rows(masks, head, i * group, (i + 1) * group);
        });
    }

    void select_head(Tile<T>& t, int head) {
        const int64_t size = sizeof(T);
        t.key = head * a.kv.key_head / size, t.value = head * a.kv.value_head / size;
        t.key_scales = t.value_scales = nullptr;
        turn_keys(a.c, a.kv, t, m.copy);
    }
};

template <class Unit, class S> void attend_in(const AttentionStep& a, const AttentionWork& w, float* memory) {
    Space space{memory};
    Room<S> m(space, a.c, w.rows(a.c));
    load_queries<S::TOKENS>(a, w, m.key_blocks, m.q);
    Unit unit;
    Worker<Unit, S> worker{a, w, m, unit};
    run_segments(a, w, m, [&](int64_t at) {
        w.sequence->paths&& at + TILE > w.sequence->limit ? worker.run_tree_tile(at) : worker.run_tile(at);
    });
}

template <class S> void attend(const AttentionStep& a, const AttentionWork& w, float* memory) {
#if defined(RL_AMX_UNIT)
    if (matrix_unit() == Unit::amx) return attend_in<AmxBf16Unit, S>(a, w, memory);
#endif
    attend_in<EmulatedBf16Unit, S>(a, w, memory);
}

template <class S> size_t room_floats(const AttentionCase& c, int64_t rows) {
    Space space{nullptr};
    Room<S>(space, c, rows);
    return size_t(space.used);
}

template <template <class> class S> constexpr UnitAttention WAY = {
    {nullptr, attend<S<BFloat16>>, attend<S<Float16>>, nullptr, nullptr},
    {nullptr, room_floats<S<BFloat16>>, room_floats<S<Float16>>, nullptr, nullptr}};

}  // namespace

extern const UnitAttentionKernels unit_attention_kernels = {WAY<Exact>, WAY<Rounded>};

}  // namespace ridgeline::RL_ISA
