// Attention in pairs of bf16, in vectors, for keys and values of 16 bits; attention.h describes the arithmetic.
//
// Few rows read pages, and convert numbers in registers. For more rows, or where pages do not allow it, a tile is
// packed as pairs once.
#include <array>
#include <utility>

#include "dots.h"
#include "kernels/attention_blocks.h"

namespace ridgeline::RL_ISA {

#if defined(RL_BF16_DOTS)
namespace {

constexpr int PAIRS = TILE / 2;       // of the keys of a tile
constexpr int32_t ONES = 0x3f803f80;  // a pair
constexpr int32_t LOWER = 0xffff, UPPER = int32_t(0xffff0000);

int64_t pairs_in(int64_t numbers) { return (numbers + 1) / 2; }

// The scratch memory of a thread.
struct Room : Results {
    int32_t *q, *own;               // queries in blocks of rows, [pairs of numbers][rows]; those of one draft of a tree
    float* copy;                    // keys in float32, [numbers][TILE], if they are not read in place
    int32_t *keys, *packed_values;  // [pairs of numbers][TILE], and [PAIRS][width]
    float *scores, *rescale;

    Room(Space& space, const AttentionCase& c, int64_t rows) : Results(space, c, rows) {
        const int64_t pairs = pairs_in(c.key_dim);
        q = (int32_t*)space.take(rows * pairs + W), own = (int32_t*)space.take(BLOCK * pairs);
        copy = space.take(TILE * c.key_dim);
        keys = (int32_t*)space.take(TILE * pairs), packed_values = (int32_t*)space.take(PAIRS * width);
        scores = space.take(BLOCK * TILE), rescale = space.take(BLOCK);
    }
};

// ---- pairs of stored numbers -------------------------------------------------------------------------------------

template <class T> RL_INLINE I pairs_at(const T* x, const T* y) {
    if constexpr (std::is_same_v<T, BFloat16>)
        return pairs_bf16(&x->bits, &y->bits);
    else
        return pairs_bf16(load(x), load(y));
}

// Pairs of the first n numbers (n >= W: of W), and zeros.
template <class T> RL_INLINE I pairs_at(const T* x, const T* y, int64_t n) {
    return n >= W ? pairs_at(x, y) : pairs_bf16(load(x, int(n)), load(y, int(n)));
}

// Pairs of N * W numbers.
template <int N, class T> RL_INLINE void pairs_at(const T* x, const T* y, I (&to)[N]) {
    if constexpr (std::is_same_v<T, BFloat16> && N % 2 == 0)
        RL_FOR(v, N / 2) pairs_bf16(&x[v * 2 * W].bits, &y[v * 2 * W].bits, to[2 * v], to[2 * v + 1]);
    else
        RL_FOR(v, N) to[v] = pairs_at(x + v * W, y + v * W);
}

// Keys and values of a tile for one key head, in pages whose keys are read in place. Pages are not in order, so that
// hardware cannot prefetch: the loop over keys prefetches the tile's values, and the loop over values the next keys.
template <class T> struct InPages {
    const Tile<T>& t;
    const T* const* ahead;  // the lines that the loop over values fetches
    int64_t offset;

    // Passes pairs of numbers of N vectors of keys from vector v on to add(pairs), in order.
    template <int N, class Add> RL_INLINE_MEMBER void keys(int v, int64_t numbers, Add&& add) const {
        const T* k[N];
        const char* next[N];
        RL_FOR(i, N) k[i] = t.keys[(v + i) * W] + t.key, next[i] = (const char*)block_of(t, v + i);
        I x[N];
        for (int64_t d = 0; d + 2 <= numbers; d += 2) {
            RL_FOR(i, N) {
                prefetch_far(next[i]), next[i] += W * 4;
                x[i] = pairs_at(k[i], k[i] + t.step), k[i] += 2 * t.step;
            }
            add(x);
        }
        if (numbers % 2 == 0) return;
        RL_FOR(i, N) x[i] = pairs_bf16(load(k[i]), F{});
        add(x);
    }
    // Sets x to values d, d + 1 ... of a pair of keys. n: numbers from d on.
    template <int N> RL_INLINE_MEMBER void values(int pair, int64_t d, int64_t n, I (&x)[N]) const {
        const T *low = t.values[2 * pair] + t.value + d, *high = t.values[2 * pair + 1] + t.value + d;
        RL_FOR(i, 2)
            RL_UNROLL for (int v = 0; v < N; v += 2) prefetch_far(ahead[2 * pair + i] + offset + d + v * W);
        if constexpr (N == 1)
            x[0] = pairs_at(low, high, n);
        else
            pairs_at(low, high, x);
    }
};

// Both as they are packed.
struct Packed {
    const int32_t *tile_keys, *tile_values;
    int64_t width;

    template <int N, class Add> RL_INLINE_MEMBER void keys(int v, int64_t numbers, Add&& add) const {
        const int32_t* from = tile_keys + v * W;
        for (int64_t d = 0; d < numbers; d += 2, from += TILE) {
            I x[N];
            RL_FOR(i, N) x[i] = load(from + i * W);
            add(x);
        }
    }
    template <int N> RL_INLINE_MEMBER void values(int pair, int64_t d, int64_t, I (&x)[N]) const {
        RL_FOR(i, N) x[i] = load(tile_values + pair * width + d + i * W);
    }
};

// Packs the keys that some query uses, and fetches their values.
template <class T> void pack_keys(const AttentionCase& c, const Tile<T>& t, int32_t* to) {
    const auto pack = [&](const auto* const* from, int apart, int64_t offset, int64_t step) {
        for (int64_t d = 0; d < c.key_dim; d += 2, to += TILE)
            for (int v = t.first / W; v <= t.last / W; ++v) {
                const auto* x = from[v * apart] + offset + d * step;
                if (d % 32 < W) prefetch_far(t.values[v * W + d % 32] + t.value + d / 32 * 32);
                if (d % 32 < W) prefetch_far(t.values[v * W + d % 32 + 1] + t.value + d / 32 * 32);
                store(to + v * W, d + 1 < c.key_dim ? pairs_at(x, x + step) : pairs_bf16(load(x), F{}));
            }
    };
    if (t.in_place)
        pack(t.keys, W, t.key, t.step);
    else
        pack(t.transposed, 1, 0, TILE);
}

// ahead, offset: rows of the next keys, which are fetched.
template <class T> void pack_values(const AttentionCase& c, const Tile<T>& t, const T* const* ahead, int64_t offset,
                                    int32_t* to, int64_t width) {
    for (int pair = t.first / 2; pair <= t.last / 2; ++pair) {
        const T *low = t.values[2 * pair] + t.value, *high = t.values[2 * pair + 1] + t.value;
        int64_t d = 0;
        for (; d + 2 * W <= c.value_dim; d += 2 * W) {
            RL_FOR(i, 2) prefetch_far(ahead[2 * pair + i] + offset + d);
            I x[2];
            pairs_at(low + d, high + d, x);
            RL_FOR(v, 2) store(to + pair * width + d + v * W, x[v]);
        }
        for (; d < c.value_dim; d += W) store(to + pair * width + d, pairs_at(low + d, high + d, c.value_dim - d));
    }
}

// ---- a block of rows ---------------------------------------------------------------------------------------------

// Adds the products of N vectors of pairs with a pair of each row. The pair of row r is y[r * apart].
template <int R, int N> RL_INLINE void add_dots(F (&acc)[R][N], const I (&x)[N], const int32_t* y, int apart) {
    RL_FOR(r, R) {
        const I pair = set(y[r * apart]);
        RL_FOR(i, N) dot_bf16(acc[r][i], x[i], pair);
    }
}

// Computes scores of R rows against N vectors of keys from vector v on. q: [pairs][R].
template <int R, int N, class Source>
RL_INLINE void score(const Source& source, int v, int64_t numbers, const int32_t* q, float* to) {
    F acc[R][N] = {};
    source.template keys<N>(v, numbers, [&](const I(&x)[N]) __attribute__((always_inline)) {
        add_dots(acc, x, q, 1);
        q += R;
    });
    RL_FOR(r, R)
        RL_FOR(i, N) store(to + r * TILE + i * W, acc[r][i]);
}

// 2^x for x up to 0 or so, to 2^-18, which is 0 below the smallest float; NaN for NaN. For K vectors at once, because
// each would wait for the one before. Coefficients: own fit, least relative error.
template <int K> RL_INLINE void exp2_short(F (&x)[K]) {
    constexpr float C[] = {1.3534168e-2f, 5.201146e-2f, 0.24144275f, 0.69300383f, 1.0000026f};
    F part[K], p[K];
    RL_FOR(k, K) part[k] = above_floor(x[k]), p[k] = set(C[0]);
    RL_UNROLL for (int i = 1; i < 5; ++i) RL_FOR(k, K) p[k] = fma(p[k], part[k], set(C[i]));
    RL_FOR(k, K) x[k] = times_power(p[k], x[k]);
}

// Turns a row's scores against vectors [begin, end) of keys into pairs of weights, in the same memory, and adds these
// to the sums. most: the largest score so far.
void weigh(int begin, int end, float most, float rescale, float* scores, float* sums) {
    F total = load(sums) * set(rescale);
    const F top = set(most == NONE ? 0.f : most);
    for (int g = begin / 2; g < (end + 1) / 2; ++g) {
        F x[2];
        RL_FOR(k, 2) {
            const int v = 2 * g + k;
            x[k] = (v >= begin && v < end ? load(scores + v * W) : set(NONE)) - top;
        }
        exp2_short(x);
        const I p = both_bf16(x[0], x[1]);
        store((int32_t*)scores + g * W, p);
        dot_bf16(total, p, set(ONES));
    }
    store(sums, total);
}

// Adds the values of pairs of keys [begin, end) that all rows use. weights: of the first row.
template <int R, int N, class Source> RL_INLINE void add_pairs(F (&acc)[R][N], const Source& source, int begin, int end,
                                                               int64_t d, int64_t numbers, const int32_t* weights) {
    for (int j = begin; j < end; ++j) {
        I x[N];
        source.values(j, d, numbers - d, x);
        add_dots(acc, x, weights + j, TILE);
    }
}

// Likewise, where some keys are masked: their values may hold anything, and a row skips a pair that it does not use.
template <int R, int N, class Source>
RL_INLINE void add_some_pairs(F (&acc)[R][N], const Source& source, int begin, int end, int64_t d, int64_t numbers,
                              const int32_t* weights, const uint64_t* masks) {
    for (int j = begin; j < end; ++j) {
        I x[N];
        source.values(j, d, numbers - d, x);
        RL_FOR(r, R) {
            const I p = set(weights[r * TILE + j]);
            const int used = int(masks[r] >> (2 * j) & 3);
            const I kept = set((used & 1 ? LOWER : 0) | (used & 2 ? UPPER : 0));
            RL_FOR(v, N) {
                F y = acc[r][v];
                dot_bf16(y, x[v] & kept, p);
                acc[r][v] = used ? y : acc[r][v];
            }
        }
    }
}

// Adds N vectors of values from number d on to R rows: rescaled, then pair after pair of keys. SOME: some are masked.
template <int R, int N, bool SOME, class Source>
void add_values(const Source& source, const Span& span, const uint64_t* masks, int64_t d, int64_t numbers,
                const float* weights, const float* rescale, float* to, int64_t width) {
    const int32_t* pairs = (const int32_t*)weights;
    F acc[R][N];
    RL_FOR(r, R)
        RL_FOR(v, N) acc[r][v] = load(to + r * width + d + v * W) * set(rescale[r]);
    if constexpr (SOME) {
        const int all = (span.all + 1) / 2, end = std::max(all, span.end / 2);
        add_some_pairs(acc, source, span.first / 2, all, d, numbers, pairs, masks);
        add_pairs(acc, source, all, end, d, numbers, pairs);
        add_some_pairs(acc, source, end, span.last / 2 + 1, d, numbers, pairs, masks);
    } else {
        add_pairs(acc, source, 0, PAIRS, d, numbers, pairs);
    }
    RL_FOR(r, R)
        RL_FOR(v, N) store(to + r * width + d + v * W, acc[r][v]);
}

template <int R, class Source> void tile_rows(const AttentionStep& a, const Source& source, const uint64_t* masks,
                                              int64_t own, const int32_t* q, int64_t row, Room& m) {
    constexpr int WIDE = wide(R);
    uint64_t seen_by[R], any = 0, every = ~uint64_t(0);
    for (int r = 0; r < R; ++r) {
        const uint64_t mask = seen_by[r] = masks[(own + r) / a.c.group()];
        any |= mask, every &= mask;
    }
    if (!any) return;
    const Span span = span_of(any, every);
    const int begin = span.first / W, end = span.last / W + 1;
    in_groups<WIDE>(begin, end, [&](auto n, int64_t v) __attribute__((always_inline)) {
        score<R, n()>(source, int(v), a.c.key_dim, q, m.scores + v * W);
    });
    mask_rows<R>(a, {nullptr, nullptr}, seen_by, begin, end, m.scores, m.most + row, m.rescale);
    for (int r = 0; r < R; ++r)
        weigh(begin, end, m.most[row + r], m.rescale[r], m.scores + r * TILE, m.sums + (row + r) * 16);
    const int64_t numbers = a.c.value_dim;
    const auto add = [&](auto n, int64_t v) __attribute__((always_inline)) {
        (~every ? add_values<R, n(), true, Source> : add_values<R, n(), false, Source>)(
            source, span, seen_by, v * W, numbers, m.scores, m.rescale, m.values + row * m.width, m.width);
    };
    in_groups<WIDE>(0, numbers / W, add);
    if (numbers % W) add(std::integral_constant<int, 1>{}, numbers / W);
}

template <class Source, int... R>
constexpr std::array<decltype(&tile_rows<1, Source>), sizeof...(R)> all_rows(std::integer_sequence<int, R...>) {
    return {tile_rows<R + 1, Source>...};
}
template <class Source> constexpr auto TILE_ROWS =
    all_rows<Source>(std::make_integer_sequence<int, std::is_same_v<Source, Packed> ? BLOCK : FEW>());

// ---- a tile ------------------------------------------------------------------------------------------------------

// The work of a thread on one piece.
template <class T> struct Worker {
    const AttentionStep& a;
    const AttentionWork& w;
    Room& m;
    const int64_t queries = w.last - w.first, rows = queries * a.c.group();

    // Adds a tile to the rows of a key head. source(b): keys and values for block b.
    template <class Get> void run_rows(const uint64_t* masks, int head, Get&& source) {
        const Blocks blocks(rows);
        for (int64_t b = 0; b < blocks.count; ++b) {
            const int64_t own = blocks.begin(b), n = blocks.begin(b + 1) - own, row = (head - w.head) * rows + own;
            const auto from = source(b);
            TILE_ROWS<std::remove_const_t<decltype(from)>>[size_t(n - 1)](a, from, masks, own,
                                                                        m.q + row * pairs_in(a.c.key_dim), row, m);
        }
    }

    void run_tile(int64_t at) {
        const KeyValues& kv = a.kv;
        uint64_t masks[QUERIES];
        const uint64_t any = seen_by(a.c, w, at, masks);
        if (!any) return;
        Tile<T> t;
        const T *lines[TILE], *next[TILE];  // lines of this tile and of the next one
        t.first = __builtin_ctzll(any), t.last = TILE - 1 - __builtin_clzll(any);
        find_keys(a.c, kv, *w.sequence, at, t);
        find_lines(a, w, at + TILE, t, next);
        if (w.head_end - w.head > 1) find_lines(a, w, at, t, lines);
        for (int head = w.head; head < w.head_end; ++head) {
            const bool last = head + 1 == w.head_end;
            const T* const* ahead = last ? next : lines;
            const int64_t offset = (last ? w.head : head + 1) * kv.key_head / int64_t(sizeof(T));
            select_head(t, head);
            if (t.in_place && rows <= FEW) {
                run_rows(masks, head, [&](int64_t b) {
                    return b == 0 ? InPages<T>{t, ahead, offset} : InPages<T>{t, t.values, t.value};
                });
                continue;
            }
            pack_keys(a.c, t, m.keys);
            pack_values(a.c, t, ahead, offset, m.packed_values, m.width);
            run_rows(masks, head, [&](int64_t) { return packed(); });
        }
    }

    void run_tree_tile(int64_t at) {
        const Blocks blocks(a.c.group());
        uint64_t masks[QUERIES];
        const uint64_t any = seen_by(a.c, w, at, masks);
        auto select = [&](Tile<T>& t, int head) { select_head(t, head); };
        run_paths<T>(a, w, at, masks, any, m.copy, select, [&](const Tile<T>& t, int head, int64_t i) {
            pack_keys(a.c, t, m.keys);
            pack_values(a.c, t, t.values, t.value, m.packed_values, m.width);
            for (int64_t b = 0; b < blocks.count; ++b) {
                const int64_t own = blocks.begin(b), n = blocks.begin(b + 1) - own;
                const int64_t row = ((head - w.head) * queries + i) * a.c.group() + own;
                load_rows(row, n);
                TILE_ROWS<Packed>[size_t(n - 1)](a, packed(), masks + i, own, m.own, row, m);
            }
        });
    }

    // Writes rows [row, row + n) of one query as blocks of rows are.
    void load_rows(int64_t row, int64_t n) {
        for (int64_t r = 0; r < n; ++r) {
            const QueryRow query(a, w, row + r);
            const float* from = a.q + query.token * a.q_stride + query.head * a.c.key_dim;
            for (int64_t d = 0; d < a.c.key_dim; d += 2) {
                const uint32_t second = d + 1 < a.c.key_dim ? to_bf16(from[d + 1]) : 0;
                m.own[d / 2 * n + r] = int32_t(to_bf16(from[d]) | second << 16);
            }
        }
    }

    void select_head(Tile<T>& t, int head) {
        const int64_t size = sizeof(T);
        t.key = head * a.kv.key_head / size, t.value = head * a.kv.value_head / size;
        t.key_scales = t.value_scales = nullptr;
        turn_keys(a.c, a.kv, t, m.copy);
    }

    Packed packed() const { return {m.keys, m.packed_values, m.width}; }
};

template <class T> void attend(const AttentionStep& a, const AttentionWork& w, float* room) {
    Space space{room};
    Room m(space, a.c, w.rows(a.c));
    const int64_t pairs = pairs_in(a.c.key_dim);
    turn_queries(a, w, [&](int64_t row, int64_t n, int64_t d, int64_t r, const F(&x)[W], int count) {
        int32_t* to = m.q + row * pairs + d / 2 * n + r;
        for (int i = 0; i < count; i += 2, to += n) store(to, pairs_bf16(x[i], x[i + 1]));
    });
    Worker<T> worker{a, w, m};
    run_segments(a, w, m, [&](int64_t at) {
        w.sequence->paths && at + TILE > w.sequence->limit ? worker.run_tree_tile(at) : worker.run_tile(at);
    });
}

size_t room_floats(const AttentionCase& c, int64_t rows) {
    Space space{nullptr};
    Room(space, c, rows);
    return size_t(space.used);
}

}  // namespace

extern const RoundedAttentionKernels rounded_attention_kernels = {
    {nullptr, attend<BFloat16>, attend<Float16>, nullptr, nullptr}, room_floats};
#else
extern const RoundedAttentionKernels rounded_attention_kernels = {};
#endif

}  // namespace ridgeline::RL_ISA
