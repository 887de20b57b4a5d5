// Packs the input tokens of a product, in blocks and four at a time.
#pragma once
#include <algorithm>

#include "linear.h"

namespace ridgeline {

// Tokens that are packed at once, in whole tiles. This bounds memory and changes no result.
constexpr int64_t BLOCK = 516;

enum Slot { ACTIVATIONS, ROWS, TILES, HIDDEN, CHOSEN };  // slots of a pool's scratch memory

inline bool uses_unit(const Matrix& w, int64_t tokens) { return tokens >= w.unit_from; }
// Tokens of a tile.
inline int64_t tile_size(const Matrix& w, int64_t tokens) {
    return uses_unit(w, tokens) ? SQUARE : product_kernels().tile;
}

// Numbers of bf16 whose sum a token is where products have the arithmetic of a matrix unit.
inline int slices_of(const Matrix& w) { return !w.in_tiles ? 0 : w.format.inputs == Inputs::bf16 ? 1 : 2; }

// Bytes of the activations of `tokens`, and their layout in `room`.
inline size_t data_bytes(const Matrix& w, int64_t tokens) {
    if (w.in_tiles) {
        const int64_t numbers = round_up(w.padded_k, BF16_DEPTH) * slices_of(w);
        return size_t(uses_unit(w, tokens) ? round_up(tokens, SQUARE) * numbers * 2
                                           : round_up(tokens * numbers * 4, 64));
    }
    if (uses_unit(w, tokens)) return size_t(round_up(tokens, SQUARE) * round_up(w.padded_k, UNIT_DEPTH));
    const int64_t number = w.format.rounds_tokens() ? 1 : w.in_dots ? 2 : 4;
    return size_t(round_up(tokens * w.padded_k * number, 64));
}
inline int64_t offsets_of(const Matrix& w) {
    if (!w.format.rounds_tokens()) return 1;
    return w.padded_k / (w.format.block ? w.format.group : w.group);
}
inline bool splits_pairs(const Matrix& w, int64_t tokens) {
    return w.format.is_plain_bytes() && product_kernels().splits_pairs && !uses_unit(w, tokens);
}
inline size_t activation_bytes(const Matrix& w, int64_t tokens) {
    const size_t each = size_t(round_up(tokens * 4, 64));
    const size_t known = data_bytes(w, tokens) + each + size_t(round_up(tokens * offsets_of(w) * 4, 64));
    return splits_pairs(w, tokens) ? known + each + size_t(tokens * w.padded_k / 4) * sizeof(Surplus) : known;
}

inline Activations activations(const Matrix& w, int64_t tokens, void* room) {
    Activations a;
    const int64_t tile = tile_size(w, tokens);
    a.tokens = tokens;
    a.padded_k = w.padded_k;
    a.groups = offsets_of(w);
    a.for_unit = uses_unit(w, tokens);
    a.slices = slices_of(w);
    a.stride = a.slices     ? round_up(w.padded_k, BF16_DEPTH) * a.slices
               : a.for_unit ? round_up(w.padded_k, UNIT_DEPTH)
                            : w.padded_k;
    a.tiles = (tokens + tile - 1) / tile;
    a.data = room;
    a.scale = (float*)((char*)room + data_bytes(w, tokens));
    a.offset = (int32_t*)((char*)a.scale + round_up(tokens * 4, 64));
    a.num_surplus = (int32_t*)((char*)a.offset + round_up(tokens * a.groups * 4, 64));
    a.surplus = splits_pairs(w, tokens) ? (Surplus*)((char*)a.num_surplus + round_up(tokens * 4, 64)) : nullptr;
    return a;
}

// Floats that `load_unit` needs: four tokens, and a permuted copy of each.
inline int64_t unit_floats(const Matrix& w) { return Activations::UNIT * w.k * (w.permutation.empty() ? 1 : 2); }

// Packs four tokens, or the rest. rows: `unit_floats`. keep: write the residual sum.
inline void load_unit(const Matrix& w, const Source& source, const Activations& a, int64_t unit, float* rows,
                      bool keep) {
    const float* tokens[Activations::UNIT];
    const int64_t first = unit * Activations::UNIT;
    const int n = int(std::min<int64_t>(Activations::UNIT, a.tokens - first));
    for (int i = 0; i < n; ++i) {
        tokens[i] = source_kernels().prepare(source, first + i, rows + i * w.k, keep);
        if (w.permutation.empty()) continue;
        float* moved = rows + (Activations::UNIT + i) * w.k;
        for (int64_t j = 0; j < w.k; ++j) moved[j] = tokens[i][w.permutation[size_t(j)]];
        tokens[i] = moved;
    }
    source_kernels().load(a, w, tokens, first, n);
}

}  // namespace ridgeline
