// The packed layout of a matrix, and of the activations that it is multiplied with.
//
// Rows are packed into panels of 32. A panel is one linear stream of bytes, scales included, read from front to back
// once for each tile of tokens. Each row has a fixed lane of the vector registers, so that no sum crosses lanes:
//
//   fp32   for each k:     | r0 | r1 | ... | r31 |                                   128 B
//   fp16   for each k:     | r0 | r1 | ... | r31 |                                    64 B
//   bf16   for each 2 k:   | r0 k0 k1 | r1 k0 k1 | ... | r31 k0 k1 |                 128 B
//   int8   for each 4 k:   | r0 k0..k3 | r1 k0..k3 | ... | r31 k0..k3 |              128 B, u8 = q + 128
//          at the end:     | 32 fp32 scales, one a row |                             128 B
//   int4   for each 8 k:   | r0 4 bytes | r1 4 bytes | ... | r31 4 bytes |           128 B, u4 = q + 8
//                          byte c of a row: k = c in the low half, k = 4 + c in the high half
//          after a group:  | 32 fp16 scales, one a row |                              64 B
//
// Rows are filled up to 32, and k to a whole step, with zeros. A matrix may have several parts, one below the other
// (queries, keys and values of a layer); each begins a panel. Or it is two interleaved parts (gate and up of an MLP): a
// panel is 16 rows of the one and the same 16 of the other.
//
// Weights are unsigned and activations signed because processors have instructions for that. The offset of the weights
// adds its product with the sum of a token's activations: one number per token (int8), or per token and group (int4),
// which is computed when the activations are quantized.
#pragma once
#include <cstdint>
#include <vector>

#include "threads.h"

namespace ridgeline {

constexpr int PANEL = 32;

enum class Format { fp32, bf16, fp16, int8, int4 };

inline int64_t round_up(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }

struct Part {
    int64_t rows, first_panel;
};

struct Matrix {
    Format format;
    int64_t k, padded_k;
    int group = 0;  // int4: columns that share a scale
    bool interleaved = false;
    std::vector<Part> parts;
    int64_t panels = 0;
    int64_t panel_bytes = 0;
    Share data;
    std::vector<float> bias;  // in the order of the panels, [panels * 32], or empty

    Matrix(Pool&, Format format, int64_t k, int group, bool interleaved, const std::vector<int64_t>& part_rows);

    bool quantized() const { return format == Format::int8 || format == Format::int4; }
    char* panel(int64_t p) const { return data.data + p * panel_bytes; }
    // Returns the panel of row r of a part, and the row's index in that panel.
    std::pair<int64_t, int> locate(int part, int64_t r) const {
        if (interleaved) return {r / 16, int(part * 16 + r % 16)};
        return {parts[part].first_panel + r / PANEL, int(r % PANEL)};
    }
};

enum class Kind { float32, bfloat16, float16, codes };

// A part as the checkpoint stores it, row r at data + r * stride elements. Codes (int8) come with float32 scales, row r
// at scales + r * scale_stride: one for each group of int4, one for the row of int8.
struct SourceRows {
    const void* data;
    Kind kind;
    int64_t rows, stride;
    const float* scales = nullptr;
    int64_t scale_stride = 0;
};

// The packed layout of a step's tokens: tiles of at most `tile` tokens, k by k:
//   floats         [padded k][tokens of the tile]
//   quantized      [padded k / 4][tokens of the tile][4] bytes, and for each token its scale
//   offset         int8: [tokens]; int4: [groups][tokens of the tile] of each tile: what the weights' offset adds
// Tiles are as equal in size as whole units of 4 tokens allow.
struct Activations {
    int64_t tokens, padded_k, tiles;
    int64_t groups;  // offsets per token
    void* data;
    float* scale;
    int32_t* offset;

    static constexpr int UNIT = 4;
    int64_t units() const { return (tokens + UNIT - 1) / UNIT; }
    int64_t first(int64_t tile) const {  // token of a tile
        int64_t t = UNIT * (units() * tile / tiles);
        return t < tokens ? t : tokens;
    }
    int64_t tile_of(int64_t token) const { return ((token / UNIT + 1) * tiles - 1) / units(); }
};

}  // namespace ridgeline
