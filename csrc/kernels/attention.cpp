// Attention of a few queries of one sequence and one key head: see attention.h for the arithmetic.
//
// A row is one query of one head of the group that shares the keys. Rows go through a tile of keys in blocks of up to
// BLOCK, whose accumulators stay in registers.
#include "attention.h"

#include <algorithm>
#include <array>
#include <limits>
#include <utility>

#include "vmath.h"

namespace ridgeline::RL_ISA {
namespace {

constexpr int BLOCK = W == 16 ? 12 : 6;  // rows
// Vectors at once: BLOCK * 2 accumulators and what they are made of fit the registers, and fewer rows leave room for
// more.
constexpr int wide(int rows) { return W == 16 && rows <= BLOCK / 2 ? 4 : 2; }
constexpr int VECTORS = TILE / W;  // of a tile
constexpr float NONE = -std::numeric_limits<float>::infinity();

int64_t rounded(int64_t n) { return (n + 15) / 16 * 16; }

// A thread's room, as arrays. Rows of values are padded to whole vectors.
struct Room {
    int64_t width;
    float *q, *keys, *scores, *rescale;
    float *most, *sums, *values;             // of the segment: [rows], [rows, 16], [rows, width]
    float *all_most, *all_sum, *all_values;  // of the segments before

    Room(float* at, const AttentionCase& c, int64_t rows) : width(rounded(c.value_dim)) {
        float** const parts[] = {&q, &keys, &scores, &rescale, &most, &sums, &values, &all_most, &all_sum, &all_values};
        const Sizes s = sizes(c, rows);
        for (size_t i = 0; i < s.size(); ++i) {
            *parts[i] = at;
            at += rounded(s[i]);
        }
    }
    using Sizes = std::array<int64_t, 10>;
    static Sizes sizes(const AttentionCase& c, int64_t rows) {
        const int64_t values = rows * rounded(c.value_dim);
        return {rows * c.key_dim, TILE * c.key_dim, BLOCK * TILE, BLOCK, rows, rows * 16, values, rows, rows, values};
    }
};

size_t room_floats(const AttentionCase& c, int64_t rows) {
    size_t floats = 0;
    for (int64_t n : Room::sizes(c, rows)) floats += size_t(rounded(n));
    return floats;
}

// Rows in blocks of sizes as equal as can be: block b begins at row begin(b).
struct Blocks {
    int64_t rows, count;
    explicit Blocks(int64_t rows) : rows(rows), count((rows + BLOCK - 1) / BLOCK) {}
    int64_t begin(int64_t b) const { return rows * b / count; }
};

// Scores are in powers of 2. A weight of 0 is that of a key that is not seen: exp2_down gives none.
float weight(float x) { return exp2_down(set(x))[0]; }

// ---- which keys a query sees -----------------------------------------------------------------------------------

uint64_t range(int64_t from, int64_t to) {  // bits [from, to) of a tile
    from = from < 0 ? 0 : from;
    to = to > TILE ? TILE : to;
    if (from >= to) return 0;
    return (to == TILE ? ~uint64_t(0) : (uint64_t(1) << to) - 1) & ~((uint64_t(1) << from) - 1);
}

uint64_t comb(int64_t last, int64_t step) {  // bits last, last - step, ...
    int64_t at = last >= TILE ? last - (last - TILE + step) / step * step : last;
    uint64_t bits = 0;
    for (; at >= 0; at -= step) bits |= uint64_t(1) << at;
    return bits;
}

// Of the keys of the tile that begins at position `tile`.
uint64_t seen(const AttentionCase& c, int64_t query, int64_t tile) {
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

// ---- where the keys and values of a tile are -------------------------------------------------------------------

struct Tile {
    const float* keys[VECTORS];  // of each vector's keys, the first number; the next is `step` on
    int64_t step;
    const float* values[TILE];
    const float*
        blocks[VECTORS];  // of each vector's keys, the values, where they lie in one piece; else something near
    int first, last;      // keys that some query sees lie in [first, last]
};

// Where the tokens [first, last] of the tile at position `at` stand in pages `page` numbers apart, and `slot` in a
// page.
void find(const KeyValues& kv, const Sequence& s, int64_t at, int first, int last, const float* base, int64_t page,
          int64_t slot, const float** found) {
    for (int j = first; j <= last;) {
        const int64_t position = s.base + at + j, index = position / kv.page_tokens, inside = position % kv.page_tokens;
        const int64_t number = !s.table ? index : index < s.table_size ? s.table[index] : 0;
        const float* p = base + number * page + inside * slot;
        for (int64_t left = kv.page_tokens - inside; left > 0 && j <= last; --left, ++j, p += slot) found[j] = p;
    }
}

// W rows of keys, turned. Rows that no query sees are null.
void turn_rows(const float* const* rows, int64_t numbers, float* to) {
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
bool in_place(const KeyValues& kv) { return kv.turned && kv.page_tokens % W == 0; }

void find_keys(const AttentionStep& a, const AttentionWork& w, int head, int64_t at, Tile& t, float* room) {
    const KeyValues& kv = a.kv;
    const float* base = kv.keys + head * kv.key_head;
    const bool there = in_place(kv);
    const int begin = t.first / W, end = t.last / W + 1;
    const float* rows[TILE] = {};
    const int first = there ? begin * W : t.first, last = there ? end * W - 1 : t.last;
    find(kv, *w.sequence, at, first, last, base, kv.key_page, kv.turned ? 1 : kv.key_row, rows);
    t.step = there ? kv.page_tokens : TILE;
    for (int v = begin; v < end; ++v) {
        t.keys[v] = there ? rows[v * W] : room + v * W;
        if (there) continue;
        if (!kv.turned || kv.page_tokens == 1) {
            turn_rows(rows + v * W, a.c.key_dim, room + v * W);
            continue;
        }
        for (int j = v * W; j < (v + 1) * W; ++j)
            for (int64_t d = 0; d < a.c.key_dim; ++d) room[d * TILE + j] = rows[j] ? rows[j][d * kv.page_tokens] : 0.f;
    }
}

void find_values(const AttentionStep& a, const AttentionWork& w, int head, int64_t at, Tile& t) {
    const KeyValues& kv = a.kv;
    find(kv, *w.sequence, at, t.first, t.last, kv.values + head * kv.value_head, kv.value_page, kv.value_row, t.values);
    const bool dense = kv.value_row == a.c.value_dim && kv.page_tokens % W == 0;
    for (int v = t.first / W; v <= t.last / W; ++v)
        t.blocks[v] = dense ? t.values[v * W < t.first ? t.first : v * W] : t.keys[v];
    std::fill(t.values, t.values + t.first, t.values[t.first]);
    std::fill(t.values + t.last + 1, t.values + TILE, t.values[t.last]);
}

// The memory of the keys that come next, a key's worth at a time; `t`'s values, which are there already, where none do.
void keys_ahead(const AttentionStep& a, const AttentionWork& w, int head, int64_t at, const Tile& t,
                const float** lines) {
    const KeyValues& kv = a.kv;
    if (++head == w.head_end) head = w.head, at += TILE;
    std::copy_n(t.values, TILE, lines);
    if (at > w.sequence->start + w.last - 1) return;
    const float* base = kv.keys + head * kv.key_head;
    find(kv, *w.sequence, at, 0, TILE - 1, base, kv.key_page, kv.turned ? a.c.key_dim : kv.key_row, lines);
}

// ---- the three parts of a tile ---------------------------------------------------------------------------------

// Pages lie anywhere, so that no hardware sees what comes next: the loop over keys asks for the same tile's values, and
// the loop over values for the next keys, both `ahead`.

// N vectors of scores of R rows. q: [numbers][R].
template <int R, int N> void scores(const float* const* keys, const float* const* ahead, int64_t step, int64_t numbers,
                                    const float* q, float* to) {
    F acc[R][N];
    RL_FOR(r, R)
        RL_FOR(v, N) acc[r][v] = set(0.f);
    const float *k[N], *next[N];
    RL_FOR(v, N) k[v] = keys[v], next[v] = ahead[v];
    for (int64_t d = 0; d < numbers; ++d, q += R) {
        F x[N];
        RL_FOR(v, N) x[v] = load(k[v]), k[v] += step, prefetch_far(next[v]), next[v] += W;
        RL_FOR(r, R) {
            const F y = set(q[r]);
            RL_FOR(v, N) acc[r][v] = fma(x[v], y, acc[r][v]);
        }
    }
    RL_FOR(r, R)
        RL_FOR(v, N) store(to + r * TILE + v * W, acc[r][v]);
}

// The values of N vectors of numbers from d on, into R rows: rescaled, then key after key. SOME: rows do not see all
// keys.
template <int R, int N, bool SOME> void add_values(const Tile& t, const float* const* ahead, int64_t d, int64_t numbers,
                                                   const float* weights, const float* rescale, float* to,
                                                   int64_t width) {
    F acc[R][N];
    RL_FOR(r, R)
        RL_FOR(v, N) acc[r][v] = load(to + r * width + d + v * W) * set(rescale[r]);
    const int n = int(numbers - d);
    for (int j = t.first; j <= t.last; ++j) {
        F x[N];
        RL_FOR(v, N) x[v] = N > 1 || n >= W ? load(t.values[j] + d + v * W) : load(t.values[j] + d, n);
        RL_FOR(v, N) prefetch_far(ahead[j] + d + v * W);
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

// Scores of a row become weights; the segment's largest score and sums go on.
float weigh(const AttentionCase& c, uint64_t mask, float* scores, float& most, float* sums) {
    constexpr int32_t ONE = 1;
    I lane = {};
    for (int i = 0; i < W; ++i) lane[i] = ONE << i;
    F top = set(NONE);
    RL_FOR(v, VECTORS) {
        F x = load(scores + v * W);
        x = c.softcap > 0 ? set(c.softcap * LOG2_E) * tanh(x * set(c.scale) / set(c.softcap))
                          : x * set(c.scale * LOG2_E);
        x = select((set(int32_t(mask >> (v * W) & 0xffff)) & lane) != set(0), x, set(NONE));
        top = max(top, x);
        store(scores + v * W, x);
    }
    const float high = largest(top), now = most > high ? most : high;
    const float rescale = now == most ? 1.f : weight(most - now);
    most = now;
    Sum16 total;
    RL_FOR(i, V) total.v[i] = load(sums + i * W) * set(rescale);
    RL_UNROLL for (int at = 0; at < VECTORS; at += 4) {
        F p[4];
        RL_FOR(v, 4) p[v] = load(scores + (at + v) * W) - set(now);
        exp2_down(p);
        RL_FOR(v, 4) {
            float* x = scores + (at + v) * W;
            p[v] = select(load(x) == set(NONE), set(0.f), p[v]);
            total.v[(at + v) % V] += p[v];
            store(x, p[v]);
        }
    }
    RL_FOR(i, V) store(sums + i * W, total.v[i]);
    return rescale;
}

template <int R> void tile_rows(const AttentionStep& a, const Tile& t, const float* const* ahead, const uint64_t* masks,
                                int64_t own, const float* q, int64_t row, Room& m) {
    constexpr int WIDE = wide(R);
    const int begin = t.first / W, end = t.last / W + 1;
    int v = begin;
    for (; v + WIDE <= end; v += WIDE)
        scores<R, WIDE>(t.keys + v, t.blocks + v, t.step, a.c.key_dim, q, m.scores + v * W);
    for (; v < end; ++v) scores<R, 1>(t.keys + v, t.blocks + v, t.step, a.c.key_dim, q, m.scores + v * W);
    bool some = t.first > 0 || t.last < TILE - 1;
    for (int r = 0; r < R; ++r) {
        const uint64_t mask = masks[(own + r) / a.c.group()];
        some |= mask != ~uint64_t(0);
        float* p = m.scores + r * TILE;
        if (mask)
            m.rescale[r] = weigh(a.c, mask, p, m.most[row + r], m.sums + (row + r) * 16);
        else
            m.rescale[r] = 1.f, memset(p, 0, TILE * 4);
    }
    const int64_t numbers = a.c.value_dim;
    float* to = m.values + row * m.width;
    int64_t d = 0;
    for (; d + WIDE * W <= numbers; d += WIDE * W)
        (some ? add_values<R, WIDE, true> : add_values<R, WIDE, false>)(t, ahead, d, numbers, m.scores, m.rescale, to,
                                                                        m.width);
    for (; d < numbers; d += W)
        (some ? add_values<R, 1, true> : add_values<R, 1, false>)(t, ahead, d, numbers, m.scores, m.rescale, to,
                                                                  m.width);
}

template <int... R> constexpr std::array<decltype(&tile_rows<1>), BLOCK> all_rows(std::integer_sequence<int, R...>) {
    return {tile_rows<R + 1>...};
}
constexpr auto TILE_ROWS = all_rows(std::make_integer_sequence<int, BLOCK>());

// ---- segments --------------------------------------------------------------------------------------------------

void run_tile(const AttentionStep& a, const AttentionWork& w, int64_t at, Room& m) {
    const int64_t queries = w.last - w.first, group = a.c.group();
    uint64_t masks[QUERIES], any = 0;
    for (int64_t i = 0; i < queries; ++i) any |= masks[i] = seen(a.c, w.sequence->start + w.first + i, at);
    if (!any) return;
    // Head after head, and then the next keys: pages are read as they lie.
    for (int head = w.head; head < w.head_end; ++head) {
        Tile t;
        t.first = __builtin_ctzll(any), t.last = TILE - 1 - __builtin_clzll(any);
        find_keys(a, w, head, at, t, m.keys);
        find_values(a, w, head, at, t);
        const float* ahead[TILE];
        keys_ahead(a, w, head, at, t, ahead);
        const Blocks blocks(queries * group);
        for (int64_t b = 0; b < blocks.count; ++b) {
            const int64_t own = blocks.begin(b), n = blocks.begin(b + 1) - own,
                          row = (head - w.head) * queries * group + own;
            TILE_ROWS[size_t(n - 1)](a, t, b == 0 ? ahead : t.values, masks, own, m.q + row * a.c.key_dim, row, m);
        }
    }
}

// Of a row: its token of the step, and its head among all of the queries'.
struct Place {
    int64_t token, head;
    Place(const AttentionStep& a, const AttentionWork& w, int64_t row) {
        const int64_t group = a.c.group(), own = (w.last - w.first) * group;
        token = w.sequence->row + w.first + row % own / group;
        head = (w.head + row / own) * group + row % group;
    }
};

// Queries by blocks of rows: [numbers][rows] each.
void load_queries(const AttentionStep& a, const AttentionWork& w, Room& m) {
    const int64_t numbers = a.c.key_dim, own = (w.last - w.first) * a.c.group();
    const Blocks blocks(own);
    for (int64_t start = 0; start < w.rows(a.c); start += own)
        for (int64_t b = 0; b < blocks.count; ++b) {
            const int64_t row = start + blocks.begin(b), n = start + blocks.begin(b + 1) - row;
            for (int64_t r = 0; r < n; ++r) {
                const Place place(a, w, row + r);
                const float* from = a.q + place.token * a.q_stride + place.head * numbers;
                for (int64_t d = 0; d < numbers; ++d) m.q[row * numbers + d * n + r] = from[d];
            }
        }
}

// A segment's result joins those before.
void join(float most, float sum, const float* values, int64_t width, float& all_most, float& all_sum,
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

void write_out(const AttentionStep& a, const AttentionWork& w, int64_t row, const Room& m) {
    const Place place(a, w, row);
    float most = m.all_most[row], sum = m.all_sum[row], old = 1.f;
    if (a.sinks) {
        const float sink = a.sinks[place.head] * LOG2_E, now = most > sink ? most : sink;
        old = most == now ? 1.f : weight(most - now);
        sum = sum * old + (sink == now ? 1.f : weight(sink - now));
    }
    const float factor = old / sum;
    float* to = a.out + place.token * a.out_stride + place.head * a.c.value_dim;
    const float* from = m.all_values + row * m.width;
    for (int64_t d = 0; d < a.c.value_dim; d += W) store(to + d, load(from + d) * set(factor), int(a.c.value_dim - d));
}

void attend(const AttentionStep& a, const AttentionWork& w, float* room) {
    const int64_t rows = w.rows(a.c);
    Room m(room, a.c, rows);
    load_queries(a, w, m);
    for (int64_t r = 0; r < rows; ++r) m.all_most[r] = NONE, m.all_sum[r] = 0;
    memset(m.all_values, 0, size_t(rows * m.width) * 4);
    float* partial = w.partial;
    for (int64_t segment = w.begin; segment < w.end; ++segment) {
        for (int64_t r = 0; r < rows; ++r) m.most[r] = NONE;
        memset(m.sums, 0, size_t(rows) * 16 * 4);
        memset(m.values, 0, size_t(rows * m.width) * 4);
        for (int64_t at = segment * SEGMENT; at < (segment + 1) * SEGMENT && at <= w.sequence->start + w.last - 1;
             at += TILE)
            run_tile(a, w, at, m);
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
    if (!partial)
        for (int64_t r = 0; r < rows; ++r) write_out(a, w, r, m);
}

void merge(const AttentionStep& a, const AttentionWork& w, float* room) {
    const int64_t rows = w.rows(a.c);
    Room m(room, a.c, rows);
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

void write_turned(const float* x, int64_t stride, int64_t n, int64_t numbers, int64_t page_tokens, float* to) {
    for (int64_t d = 0; d < numbers; ++d)
        for (int64_t i = 0; i < n; ++i) to[d * page_tokens + i] = x[i * stride + d];
}

}  // namespace

extern const AttentionKernels attention_kernels = {attend, merge, room_floats, write_turned};

}  // namespace ridgeline::RL_ISA
