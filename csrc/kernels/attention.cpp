// Attention of few queries of one sequence, in vectors; attention.h describes the arithmetic.
//
// Rows go through a tile of keys in blocks of up to BLOCK, whose accumulators stay in registers.
#include <array>
#include <utility>

#include "kernels/attention_blocks.h"

namespace ridgeline::RL_ISA {
namespace {

// The scratch memory of a thread.
struct Room : Results {
    float *q, *keys, *wide, *scores, *rescale;  // wide: values in float32, if they are stored in another type
    float* own;                                 // queries of one draft of a tree

    Room(Space& space, const AttentionCase& c, StateType stored, int64_t rows) : Results(space, c, rows) {
        q = space.take(rows * c.key_dim + W), keys = space.take(TILE * c.key_dim);
        wide = space.take(stored == StateType::float32 ? 0 : TILE * c.value_dim);
        scores = space.take(BLOCK * TILE), rescale = space.take(BLOCK), own = space.take(BLOCK * c.key_dim);
    }
};

size_t room_floats(const AttentionCase& c, StateType stored, int64_t rows) {
    Space space{nullptr};
    Room(space, c, stored, rows);
    return size_t(space.used);
}

// ---- a tile ----------------------------------------------------------------------------------------------------

// Computes weights from a row's scores, with `most` the largest score so far, and adds them to the sums. Scores include
// the scales of keys, and weights include the scales of values.
void weigh(const Scales& scales, int begin, int end, float most, float rescale, float* scores, float* sums) {
    Sum16 total;
    RL_FOR(i, V) total.v[i] = load(sums + i * W) * set(rescale);
    for (int v = begin; v < end; ++v) {
        float* at = scores + v * W;
        const F x = load(at);
        F p = select(x == set(NONE), set(0.f), exp2_down(x - set(most)));
        total.v[v % V] += p;
        if (scales.values) p = select(p == set(0.f), p, p * load(scales.values + v * W));
        store(at, p);
    }
    RL_FOR(i, V) store(sums + i * W, total.v[i]);
}

// Does both for a block of R rows. Each pass covers all rows, because passes over one row wait for each other. most,
// sums: results of the segment so far, which are updated. rescale: factors for the rows' values so far.
template <int R> void weigh_rows(const AttentionStep& a, const Scales& scales, const uint64_t* masks, const Span& span,
                                 float* scores, float* most, float* sums, float* rescale) {
    const int begin = span.first / W, end = span.last / W + 1;
    mask_rows<R>(a, scales, masks, begin, end, scores, most, rescale);
    for (int r = 0; r < R; ++r) weigh(scales, begin, end, most[r], rescale[r], scores + r * TILE, sums + r * 16);
}

template <int R, class T> void tile_rows(const AttentionStep& a, const Tile<T>& t, const T* const* ahead,
                                         int64_t offset, const uint64_t* masks, int64_t own, const float* q,
                                         int64_t row, Room& m) {
    constexpr int WIDE = wide(R);
    uint64_t seen_by[R], any = 0, all = ~uint64_t(0);
    for (int r = 0; r < R; ++r) {
        const uint64_t mask = seen_by[r] = masks[(own + r) / a.c.group()];
        any |= mask, all &= mask;
    }
    if (!any) return;
    const Span span = span_of(any, all);
    const int end = span.last / W + 1;
    in_groups<WIDE>(span.first / W, end, [&](auto n, int64_t v) __attribute__((always_inline)) {
        scores<R, n()>(t, int(v), a.c.key_dim, q, m.scores + v * W);
    });
    weigh_rows<R>(a, {t.key_scales, t.value_scales}, seen_by, span, m.scores, m.most + row, m.sums + row * 16,
                  m.rescale);
    const int64_t numbers = a.c.value_dim;
    float* to = m.values + row * m.width;
    const bool some = ~all;
    const auto add = [&](auto n, int64_t v) __attribute__((always_inline)) {
        (some ? add_values<T, R, n(), true> : add_values<T, R, n(), false>)(t, span, ahead, offset, v * W, numbers,
                                                                            m.scores, m.rescale, to, m.width);
    };
    in_groups<WIDE>(0, numbers / W, add);
    if (numbers % W) add(std::integral_constant<int, 1>{}, numbers / W);
}

template <class T, int... R>
constexpr std::array<decltype(&tile_rows<1, T>), sizeof...(R)> all_rows(std::integer_sequence<int, R...>) {
    return {tile_rows<R + 1, T>...};
}
template <class T> constexpr auto TILE_ROWS =
    all_rows<T>(std::make_integer_sequence<int, std::is_same_v<T, float> ? BLOCK : FEW>());

// ---- segments --------------------------------------------------------------------------------------------------

template <class T> void run_rows(const AttentionStep& a, const AttentionWork& w, const Tile<T>& t,
                                 const T* const* ahead, int64_t offset, const uint64_t* masks, int head, Room& m) {
    const int64_t rows = (w.last - w.first) * a.c.group();
    const Blocks blocks(rows);
    for (int64_t b = 0; b < blocks.count; ++b) {
        const int64_t own = blocks.begin(b), n = blocks.begin(b + 1) - own, row = (head - w.head) * rows + own;
        TILE_ROWS<T>[size_t(n - 1)](a, t, b == 0 ? ahead : t.values, b == 0 ? offset : t.value, masks, own,
                                    m.q + row* a.c.key_dim, row, m);
    }
}

template <class T> void run_tile(const AttentionStep& a, const AttentionWork& w, int64_t at, Room& m) {
    const KeyValues& kv = a.kv;
    const int64_t queries = w.last - w.first, size = sizeof(T);
    uint64_t masks[QUERIES];
    const uint64_t any = seen_by(a.c, w, at, masks);
    if (!any) return;
    const bool many = !std::is_same_v<T, float> && queries * a.c.group() > FEW;
    Tile<T> t;
    float scales[2][TILE] = {};
    const T *lines[TILE], *next[TILE];  // lines of this tile and of the next one
    t.first = __builtin_ctzll(any), t.last = TILE - 1 - __builtin_clzll(any);
    t.key_scales = t.value_scales = nullptr;
    find_keys(a.c, kv, *w.sequence, at, t);
    if (!many) find_lines(a, w, at + TILE, t, next);
    if (!many && w.head_end - w.head > 1) find_lines(a, w, at, t, lines);
    // Head after head, then the next keys: pages are read sequentially.
    for (int head = w.head; head < w.head_end; ++head) {
        t.key = head * kv.key_head / size, t.value = head * kv.value_head / size;
        turn_keys(a.c, kv, t, m.keys);
        if constexpr (std::is_same_v<T, int8_t>) {
            find_scales(kv, *w.sequence, at, t.first, t.last, head, scales[0], scales[1]);
            t.key_scales = scales[0], t.value_scales = scales[1];
        }
        if constexpr (!std::is_same_v<T, float>)
            if (many) {
                const Tile<float> wide = widened(a.c, t, m.keys, m.wide);
                run_rows(a, w, wide, wide.values, 0, masks, head, m);
                continue;
            }
        const bool last = head + 1 == w.head_end;
        if (t.key_scales) scales_ahead(kv, *w.sequence, last ? at + TILE : at, last ? w.head : head + 1);
        run_rows(a, w, t, last ? next : lines, (last ? w.head : head + 1) * kv.key_head / size, masks, head, m);
    }
}

// ---- trees of drafts -------------------------------------------------------------------------------------------

// Writes rows [own, own + n) of one query as load_queries does.
void load_rows(const AttentionStep& a, const AttentionWork& w, int64_t row, int64_t n, float* to) {
    for (int64_t r = 0; r < n; ++r) {
        const QueryRow query(a, w, row + r);
        const float* from = a.q + query.token * a.q_stride + query.head * a.c.key_dim;
        for (int64_t d = 0; d < a.c.key_dim; ++d) to[d * n + r] = from[d];
    }
}

// Runs the tile at a position that has drafts: each query with the keys of its own path.
template <class T> void run_tree_tile(const AttentionStep& a, const AttentionWork& w, int64_t at, Room& m) {
    const KeyValues& kv = a.kv;
    const Sequence& s = *w.sequence;
    const int64_t queries = w.last - w.first, group = a.c.group(), size = sizeof(T);
    uint64_t masks[QUERIES];
    const uint64_t any = seen_by(a.c, w, at, masks);
    if (!any) return;
    Tile<T> t;
    float scales[2][TILE] = {};
    t.first = __builtin_ctzll(any), t.last = TILE - 1 - __builtin_clzll(any);
    const int known = find_known(kv, s, at, t);
    for (int head = w.head; head < w.head_end; ++head) {
        t.key = head * kv.key_head / size, t.value = head * kv.value_head / size;
        t.key_scales = t.value_scales = nullptr;
        turn_keys(a.c, kv, t, m.keys);
        if constexpr (std::is_same_v<T, int8_t>) {
            if (t.first < known) find_scales(kv, s, at, t.first, known - 1, head, scales[0], scales[1]);
            t.key_scales = scales[0], t.value_scales = scales[1];
        }
        for (int64_t i = 0; i < queries; ++i) {
            if (!masks[i]) continue;
            place_path(a, s, s.path(w.first + i), at, __builtin_ctzll(masks[i]), TILE - 1 - __builtin_clzll(masks[i]),
                       head, t, m.keys, scales);
            const Blocks blocks(group, std::is_same_v<T, float> ? BLOCK : FEW);
            for (int64_t b = 0; b < blocks.count; ++b) {
                const int64_t own = blocks.begin(b), n = blocks.begin(b + 1) - own;
                const int64_t row = ((head - w.head) * queries + i) * group + own;
                load_rows(a, w, row, n, m.own);
                TILE_ROWS<T>[size_t(n - 1)](a, t, t.values, t.value, masks + i, own, m.own, row, m);
            }
        }
    }
}

template <class T> void attend(const AttentionStep& a, const AttentionWork& w, float* room) {
    Space space{room};
    Room m(space, a.c, a.kv.stored, w.rows(a.c));
    turn_queries(a, w, [&](int64_t row, int64_t n, int64_t d, int64_t r, const F(&x)[W], int count) {
        float* to = m.q + row * a.c.key_dim + r;
        for (int i = 0; i < count; ++i) store(to + (d + i) * n, x[i]);
    });
    const bool tree = w.sequence->paths;
    run_segments(a, w, m, [&](int64_t at) {
        (tree && at + TILE > w.sequence->limit ? run_tree_tile<T> : run_tile<T>)(a, w, at, m);
    });
}

void merge(const AttentionStep& a, const AttentionWork& w, float* room) {
    const int64_t rows = w.rows(a.c);
    Space space{room};
    const Results m(space, a.c, rows);
    for (int64_t r = 0; r < rows; ++r) {
        m.all_most[r] = NONE, m.all_sum[r] = 0;
        memset(m.all_values + r * m.width, 0, size_t(m.width) * 4);
        for (int64_t s = 0; s < w.end - w.begin; ++s) {
            const float* p = w.partial + (s * rows + r) * (m.width + 2);
            join(p[0], p[1], p + 2, m.width, m.all_most[r], m.all_sum[r], m.all_values + r * m.width);
        }
        write_out(a, w, r, m);
    }
}

}  // namespace

extern const AttentionKernels attention_kernels = {
    {attend<float>, attend<BFloat16>, attend<Float16>, attend<int8_t>, attend<E4m3>}, merge, room_floats};

}  // namespace ridgeline::RL_ISA