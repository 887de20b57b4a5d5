// Packs the input tokens of a product, in blocks and four at a time.
#pragma once
#include <algorithm>

#include "linear.h"

namespace ridgeline {

// Tokens that are packed at once, in whole tiles. This bounds memory and changes no result.
constexpr int64_t BLOCK = 516;

enum Slot { ACTIVATIONS, ROWS, TILES, HIDDEN, CHOSEN };  // slots of a pool's scratch memory

// Bytes of the activations of `tokens`, and their layout in `room`.
inline size_t activation_bytes(const Matrix& w, int64_t tokens) {
    const int64_t groups = w.format == Format::int4 ? w.padded_k / w.group : 1;
    const size_t data = size_t(tokens * w.padded_k) * (w.quantized() ? 1 : 4);
    return size_t(round_up(int64_t(data), 64)) + size_t(round_up(tokens * 4, 64)) +
           size_t(round_up(tokens * groups * 4, 64));
}

inline Activations activations(const Matrix& w, int64_t tokens, void* room) {
    Activations a;
    const int64_t tile = product_kernels().tile;
    a.tokens = tokens;
    a.padded_k = w.padded_k;
    a.groups = w.format == Format::int4 ? w.padded_k / w.group : 1;
    a.tiles = (tokens + tile - 1) / tile;
    a.data = room;
    const size_t data = size_t(tokens * w.padded_k) * (w.quantized() ? 1 : 4);
    a.scale = (float*)((char*)room + round_up(int64_t(data), 64));
    a.offset = (int32_t*)((char*)a.scale + round_up(tokens * 4, 64));
    return a;
}

// Packs four tokens, or the rest. rows: [4, k]. keep: write the residual sum.
inline void load_unit(const Matrix& w, const Source& source, const Activations& a, int64_t unit, float* rows,
                      bool keep) {
    const float* tokens[Activations::UNIT];
    const int64_t first = unit * Activations::UNIT;
    const int n = int(std::min<int64_t>(Activations::UNIT, a.tokens - first));
    for (int i = 0; i < n; ++i) tokens[i] = source_kernels().prepare(source, first + i, rows + i * w.k, keep);
    source_kernels().load(a, w.format, w.group, w.k, tokens, first, n);
}

}  // namespace ridgeline
