#include "unit_products.h"

#include "epilogues.h"
#include "group_tiles.h"
#include "matrix_unit.h"
#include "unit_registers.h"

namespace ridgeline::RL_ISA {
namespace {

constexpr int64_t L1_BYTES = 40 << 10;   // tokens that stay in the first cache, and the weights that pass by
constexpr int64_t L2_BYTES = 512 << 10;  // weights that stay in the second cache while tokens pass by
constexpr int64_t LEAST_PANELS = 8;      // that use a tile of tokens, each time it comes from beyond the second cache
constexpr int64_t SQUARE_BYTES = SQUARE * SQUARE * 4;  // sums of a tile of tokens and a panel
constexpr int64_t STEP_BYTES = 2048;                   // of a panel, for the columns of a step; of its tokens likewise

// Tokens of a tile, in whole registers.
int filled(const Activations& a, int64_t t) { return a.first(t + 1) - a.first(t) > 16 ? 32 : 16; }

// ---- sums over whole rows -------------------------------------------------------------------------------------------

// A kind of number in a unit: the number, columns of a step, and the steps of all columns that a unit multiplies.

template <class Unit> struct ByteSteps {
    using Number = int8_t;
    using Sum = int32_t;
    static constexpr int64_t DEPTH = UNIT_DEPTH;
    Unit unit;
    void add(const Number* tokens, const char* panel, int many, int) { unit.add(tokens, panel, many); }
};
template <class Unit> struct Bf16Steps {
    using Number = uint16_t;
    using Sum = float;
    static constexpr int64_t DEPTH = BF16_DEPTH;
    Unit unit;
    void add(const Number* tokens, const char* panel, int many, int slices) {
        unit.add(tokens, panel, many);
        if (slices == 2) unit.add_slice(tokens + SQUARE * DEPTH, many);
    }
};

// How a product is divided. Sums of a panel and a tile wait in memory between two ranges.
struct Ranges {
    int64_t steps;   // of all columns
    int64_t first;   // steps whose tokens stay in the first cache while panels pass by
    int64_t second;  // steps of the panels' weights that stay in the second cache while tokens pass by
    int64_t panels;  // these panels
    bool is_whole() const { return second == steps; }  // whether a tile's sums are complete before the next tile's
};
int64_t even(int64_t steps, int64_t most) {
    const int64_t count = (steps + most - 1) / most;
    return (steps + count - 1) / count;
}
Ranges ranges(const Matrix& w, const Activations& a) {
    const int64_t depth = a.slices ? BF16_DEPTH : UNIT_DEPTH, steps = (w.padded_k + depth - 1) / depth;
    Ranges r{steps, 0, even(steps, L2_BYTES / LEAST_PANELS / STEP_BYTES), 0};
    r.first = even(r.second, L1_BYTES / STEP_BYTES / (1 + std::max(a.slices, 1)));
    r.panels = L2_BYTES / (r.second * STEP_BYTES);
    return r;
}

template <class Steps>
void rows(const Matrix& w, const Activations& a, int64_t begin, int64_t end, const Epilogue& e, char* room) {
    constexpr int64_t DEPTH = Steps::DEPTH, BYTES = DEPTH * PANEL * int64_t(sizeof(typename Steps::Number));
    const Ranges r = ranges(w, a);
    const int slices = std::max(a.slices, 1);
    Steps steps;
    char* tail = room + (r.is_whole() ? 1 : a.tiles) * r.panels * SQUARE_BYTES;
    // The step of a panel; the last one may need zeros behind the columns of the matrix.
    const auto weights = [&](int64_t p, int64_t s) -> const char* {
        const char* from = w.panel(p) + s * BYTES;
        const int64_t left = (w.padded_k - s * DEPTH) * BYTES / DEPTH;
        if (left >= BYTES) return from;
        memset((char*)memcpy(tail, from, size_t(left)) + left, 0, size_t(BYTES - left));
        return tail;
    };
    // Adds steps [s0, s1) of a panel and a tile to their sums.
    const auto add = [&](int64_t p, int64_t t, int64_t s0, int64_t s1, typename Steps::Sum* c) {
        const auto* x = (const typename Steps::Number*)a.data + a.first(t) * a.stride;
        const int many = filled(a, t);
        s0 ? steps.unit.load(c, many) : steps.unit.zero();
        for (int64_t s = s0; s < s1; ++s) steps.add(x + s * slices * SQUARE * DEPTH, weights(p, s), many, slices);
        steps.unit.store(c, many);
        if (s1 == r.steps) deliver(w, a, e, p, t, (float*)c);
    };
    for (int64_t p0 = begin; p0 < end; p0 += r.panels)
        for (int64_t outer = 0; outer < r.steps; outer += r.second)
            for (int64_t t = 0; t < a.tiles; ++t)
                for (int64_t s = outer; s < std::min(outer + r.second, r.steps); s += r.first)
                    for (int64_t p = p0; p < std::min(p0 + r.panels, end); ++p) {
                        char* c = room + ((r.is_whole() ? 0 : t * r.panels) + p - p0) * SQUARE_BYTES;
                        const int64_t stop = std::min({s + r.first, outer + r.second, r.steps});
                        add(p, t, s, stop, (typename Steps::Sum*)c);
                    }
}

// ---- groups with scales -------------------------------------------------------------------------------------------

// Adds a group's sums of whole numbers to the chain over groups, as `group_tile` does.
void fold_group(const Groups& g, const char* tail, const int32_t* offsets, int64_t m, const int32_t* sums, float* total,
                bool first) {
    for (int64_t i = 0; i < m; ++i) {
        I sum[1][VECTORS];
        F chain[1][VECTORS];
        start_sums<Unpacked, 0>(g, tail, 0, offsets + i, sum);
        RL_FOR(v, VECTORS) {
            sum[0][v] += load(sums + i * SQUARE + v * W);
            chain[0][v] = first ? F{} : load(total + i * PANEL + v * W);
        }
        end_sums<Unpacked>(g, tail, 0, offsets + i, sum, chain);
        RL_FOR(v, VECTORS) store(total + i * PANEL + v * W, chain[0][v]);
    }
}

// Groups whose bytes stay in the first cache while tokens pass by.
int64_t groups_at_once(const Matrix& w) {
    const int64_t most = std::max<int64_t>(1, L1_BYTES / 2 / (w.group * PANEL));
    return even(w.padded_k / w.group, most);
}

// Unpacks a panel to bytes once for all tiles.
template <class Unit, int DEPTH> void groups(const Matrix& w, const Activations& a, int64_t begin, int64_t end,
                                             const Epilogue& e, char* room, Unpack unpack) {
    Unit unit;
    int32_t* sums = (int32_t*)room;
    float* totals = (float*)(room + SQUARE_BYTES);
    char *bytes = room + (1 + a.tiles) * SQUARE_BYTES, *tails = bytes + w.padded_k * PANEL;
    const int64_t at_once = groups_at_once(w);
    // Adds groups [i0, i1) of an unpacked panel and a tile to their chain.
    const auto add = [&](const Groups& g, int64_t t, int64_t i0, int64_t i1) {
        const int8_t* x = (const int8_t*)a.data + a.first(t) * a.stride;
        const int64_t m = a.first(t + 1) - a.first(t);
        const int32_t* offsets = a.offset + a.first(t) * a.groups;
        float* total = totals + t * SQUARE * PANEL;
        for (int64_t i = i0; i < i1; ++i) {
            unit.zero();
            for (int64_t k = i * g.size; k < (i + 1) * g.size; k += DEPTH)
                unit.add(x + k / 64 * 64 * SQUARE + k % 64, bytes + k * PANEL, filled(a, t));
            unit.store(sums, filled(a, t));
            fold_group(g, tails + i * Unpacked::BYTES, offsets + i * m, m, sums, total, i == 0);
        }
        return total;
    };
    for (int64_t p = begin; p < end; ++p) {
        const Groups g = groups_of(w, p, 0, w.padded_k);
        unpack(g, bytes, tails, {g.codes + w.panel_bytes, 1});
        for (int64_t i = 0; i < g.count; i += at_once)
            for (int64_t t = 0; t < a.tiles; ++t) {
                const int64_t stop = std::min(i + at_once, g.count);
                float* total = add(g, t, i, stop);
                if (stop == g.count) deliver(w, a, e, p, t, total);
            }
    }
}

// For each kind of numbers; null where the unit is not used.
constexpr Unpack UNPACK[] = {
    nullptr,
    nullptr,
    nullptr,
    unpack_groups<Bytes>,
    unpack_groups<Int4>,
    unpack_groups<Int3>,
    unpack_groups<Int2>,
    nullptr,
    unpack_groups<Int5>,
    unpack_groups<Int6>,
};

template <template <int> class ByteUnit, class Bf16Unit>
void multiply(const Matrix& w, const Activations& a, int64_t begin, int64_t end, const Epilogue& e, char* room) {
    if (a.slices) return rows<Bf16Steps<Bf16Unit>>(w, a, begin, end, e, room);
    if (w.format.is_plain_bytes()) return rows<ByteSteps<ByteUnit<UNIT_DEPTH>>>(w, a, begin, end, e, room);
    const Unpack unpack = UNPACK[int(w.format.numbers)];
    if (w.group % UNIT_DEPTH)
        groups<ByteUnit<UNIT_DEPTH / 2>, UNIT_DEPTH / 2>(w, a, begin, end, e, room, unpack);
    else
        groups<ByteUnit<UNIT_DEPTH>, UNIT_DEPTH>(w, a, begin, end, e, room, unpack);
}

}  // namespace

void unit_multiply(const Matrix& w, const Activations& a, int64_t begin, int64_t end, const Epilogue& e, char* room) {
#if defined(RL_AMX_UNIT)
    if (matrix_unit() == Unit::amx) return multiply<AmxUnit, AmxBf16Unit>(w, a, begin, end, e, room);
#endif
    multiply<EmulatedUnit, EmulatedBf16Unit>(w, a, begin, end, e, room);
}

size_t unit_room_bytes(const Matrix& w, const Activations& a) {
    if (a.slices || w.format.is_plain_bytes()) {
        const Ranges r = ranges(w, a);
        return size_t((r.is_whole() ? 1 : a.tiles) * r.panels * SQUARE_BYTES + STEP_BYTES);
    }
    return size_t((1 + a.tiles) * SQUARE_BYTES + w.padded_k * PANEL + w.padded_k / w.group * Unpacked::BYTES);
}

}  // namespace ridgeline::RL_ISA
