#include "unit_products.h"

#include "epilogues.h"
#include "group_tiles.h"
#include "matrix_unit.h"
#include "unit_registers.h"

namespace ridgeline::RL_ISA {
namespace {

constexpr int64_t L2_BYTES = 512 << 10;                // weights that stay in the second cache while tokens pass by
constexpr int64_t SQUARE_BYTES = SQUARE * SQUARE * 4;  // sums of a tile of tokens and a panel

// Tokens of a tile, in whole registers.
int filled(const Activations& a, int64_t t) { return a.first(t + 1) - a.first(t) > 16 ? 32 : 16; }
const int8_t* tokens_of(const Activations& a, int64_t t) { return (const int8_t*)a.data + a.first(t) * a.stride; }

// ---- rows of bytes with one scale ---------------------------------------------------------------------------------

// Columns beyond those of the matrix are read from what follows it, and multiply zeros.
template <class Unit>
void rows(const Matrix& w, const Activations& a, int64_t begin, int64_t end, const Epilogue& e, char* room) {
    Unit unit;
    int32_t* c = (int32_t*)room;
    const int64_t panels = std::max<int64_t>(1, L2_BYTES / w.panel_bytes);
    for (int64_t p0 = begin; p0 < end; p0 += panels)
        for (int64_t t = 0; t < a.tiles; ++t) {
            const int8_t* x = tokens_of(a, t);
            const int many = filled(a, t);
            for (int64_t p = p0; p < std::min(p0 + panels, end); ++p) {
                const char* codes = w.panel(p);
                unit.zero();
                for (int64_t k = 0; k < a.stride; k += UNIT_DEPTH) unit.add(x + k * SQUARE, codes + k * PANEL, many);
                unit.store(c, many);
                deliver(w, a, e, p, t, (float*)c);
            }
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

// Unpacks a panel to bytes once for all tiles.
template <class Unit, int DEPTH> void groups(const Matrix& w, const Activations& a, int64_t begin, int64_t end,
                                             const Epilogue& e, char* room, Unpack unpack) {
    Unit unit;
    int32_t* sums = (int32_t*)room;
    float* total = (float*)(room + SQUARE_BYTES);
    char *bytes = room + 2 * SQUARE_BYTES, *tails = bytes + w.padded_k * PANEL;
    for (int64_t p = begin; p < end; ++p) {
        const Groups g = groups_of(w, p, 0, w.padded_k);
        unpack(g, bytes, tails, {g.codes + w.panel_bytes, 1});
        for (int64_t t = 0; t < a.tiles; ++t) {
            const int8_t* x = tokens_of(a, t);
            const int64_t m = a.first(t + 1) - a.first(t);
            const int32_t* offsets = a.offset + a.first(t) * a.groups;
            for (int64_t i = 0; i < g.count; ++i) {
                unit.zero();
                for (int64_t k = i * g.size; k < (i + 1) * g.size; k += DEPTH)
                    unit.add(x + k / 64 * 64 * SQUARE + k % 64, bytes + k * PANEL, filled(a, t));
                unit.store(sums, filled(a, t));
                fold_group(g, tails + i * Unpacked::BYTES, offsets + i * m, m, sums, total, i == 0);
            }
            deliver(w, a, e, p, t, total);
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

template <template <int> class Unit>
void multiply(const Matrix& w, const Activations& a, int64_t begin, int64_t end, const Epilogue& e, char* room) {
    if (w.format.is_plain_bytes()) return rows<Unit<UNIT_DEPTH>>(w, a, begin, end, e, room);
    const Unpack unpack = UNPACK[int(w.format.numbers)];
    if (w.group % UNIT_DEPTH)
        groups<Unit<UNIT_DEPTH / 2>, UNIT_DEPTH / 2>(w, a, begin, end, e, room, unpack);
    else
        groups<Unit<UNIT_DEPTH>, UNIT_DEPTH>(w, a, begin, end, e, room, unpack);
}

}  // namespace

void unit_multiply(const Matrix& w, const Activations& a, int64_t begin, int64_t end, const Epilogue& e, char* room) {
#if defined(RL_AMX_UNIT)
    if (matrix_unit() == Unit::amx) return multiply<AmxUnit>(w, a, begin, end, e, room);
#endif
    multiply<EmulatedUnit>(w, a, begin, end, e, room);
}

size_t unit_room_bytes(const Matrix& w) {
    if (w.format.is_plain_bytes()) return size_t(SQUARE_BYTES);
    return size_t(2 * SQUARE_BYTES + w.padded_k * PANEL + w.padded_k / w.group * Unpacked::BYTES);
}

}  // namespace ridgeline::RL_ISA
