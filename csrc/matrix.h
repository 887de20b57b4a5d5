// The packed layout of a matrix, and of the activations that it is multiplied with.
//
// Rows are packed into panels of 32. A panel is one linear stream of bytes, scales included, read from front to back
// once for each tile of tokens. Each row has a fixed lane of the vector registers, so that no sum crosses lanes:
//
//   fp32   for each k:     | r0 | r1 | ... | r31 |                                   128 B
//   fp16   for each k:     | r0 | r1 | ... | r31 |                                    64 B
//   bf16   for each 2 k:   | r0 k0 k1 | r1 k0 k1 | ... | r31 k0 k1 |                 128 B
//   int8   for each 4 k:   | r0 k0..k3 | r1 k0..k3 | ... | r31 k0..k3 |              128 B, u8 = q + 128
//   int4   for each 8 k:   | r0 4 bytes | r1 4 bytes | ... | r31 4 bytes |           128 B, u4 = q + 8
//                          byte c of a row: k = c in the low half, k = 4 + c in the high half
//   int3   for each 32 k:  | r0 4 bytes | ... | r31 4 bytes |, three times           384 B, u3 = q + 4
//                          byte c of the first four: k = c, 4 + c and two bits of 24 + c; of the second: k = 8 + c,
//                          12 + c and two bits of 28 + c; of the third: k = 16 + c, 20 + c and the two last bits
//   int2   for each 16 k:  | r0 4 bytes | r1 4 bytes | ... | r31 4 bytes |           128 B, u2 = q + 2
//                          byte c of a row: k = c, 4 + c, 8 + c and 12 + c, from the lowest bits up
//   int5   for each 32 k:  | r0 4 bytes | ... | r31 4 bytes |, five times            640 B, u5 = q + 16
//                          the four lowest bits as int4 has them; then byte c of a row: bit s of k = 4 s + c
//   int6   for each 16 k:  | r0 4 bytes | ... | r31 4 bytes |, three times           384 B, u6 = q + 32
//                          the four lowest bits as int4 has them; then byte c of a row: two bits of k = c, 4 + c, 8 + c
//                          and 12 + c, from the lowest up
//   fp8    for each 2 k:   | r0 k0 k1 | r1 k0 k1 | ... | r31 k0 k1 |                  64 B, e4m3
//
// Behind the codes of a group of columns (of all columns where a row has one scale) are
//
//          | 32 scales |          fp16: 64 B; for rows and blocks of rows fp32: 128 B
//          | 32 zero points |     with zero points: the code that stands for 0, unsigned as the codes. For codes of 4
//                                 bits or fewer, byte r has those of rows r and 16 + r: 16 B, otherwise 32 B
//          | 32 minimums |        with minimums: fp16, 64 B
//
// In blocks of 256 columns, whose groups multiply one scale with whole numbers, all this is once behind a block:
//
//          | 32 factors |          int8, for each group
//          | 32 factors |          with minimums: those of minimums, for each group
//          | 32 scales |, | 32 minimums |       fp16, 64 B each
//
// Rows are filled up to 32, and k to a whole step, with zeros. A matrix may have several parts, one below the other
// (queries, keys and values of a layer); each begins a panel. Or it is two interleaved parts (gate and up of an MLP): a
// panel is 16 rows of the one and the same 16 of the other.
//
// u = q where groups have minimums: their codes begin at 0, so that a number is u * scale - minimum.
//
// Weights are unsigned and activations signed because processors have instructions for that. The offset of the weights
// adds its product with the sum of a token's activations: one number per token and group, which is computed when the
// activations are rounded.
#pragma once
#include <algorithm>
#include <cstdint>
#include <vector>

#include "threads.h"

namespace ridgeline {

constexpr int PANEL = 32;
constexpr int SQUARE = 32;      // tokens that a matrix unit multiplies with a panel at once
constexpr int UNIT_DEPTH = 64;  // columns of bytes that it multiplies at once
constexpr int BF16_DEPTH = 32;  // columns of bf16
constexpr int64_t NEVER = INT64_MAX;

enum class Numbers { fp32, bf16, fp16, int8, int4, int3, int2, fp8, int5, int6 };
enum class Offsets { none, zero_points, minimums };
enum class Inputs { exact, bf16, int8 };  // how activations are taken: as floats, or rounded

struct Traits {
    int bits;     // of a number
    int step;     // columns of the smallest piece of a panel
    int bytes;    // of that piece
    int zero;     // what is added to a code so that it is unsigned
    float steps;  // a group's largest magnitude divided by its scale, where floats are rounded here
};
constexpr Traits TRAITS[] = {
    {32, 1, 128, 0, 0},   {16, 2, 128, 0, 0},   {16, 1, 64, 0, 0},   {8, 8, 256, 128, 127},  {4, 32, 512, 8, 7.5},
    {3, 32, 384, 4, 3.5}, {2, 32, 256, 2, 1.5}, {8, 32, 1024, 0, 0}, {5, 32, 640, 16, 15.5}, {6, 32, 768, 32, 31.5},
};

inline int64_t round_up(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }

// How a matrix is stored and multiplied with.
struct Format {
    Numbers numbers;
    int group = 0;  // columns that share a scale; 0: all of a row
    Offsets offsets = Offsets::none;
    Inputs inputs = Inputs::exact;
    bool wide = false;  // scales of groups are fp32
    int block = 0;      // columns whose groups multiply one scale with their factors; 0: groups have scales

    bool operator==(const Format&) const = default;
    const Traits& traits() const { return TRAITS[int(numbers)]; }
    bool is_coded() const { return numbers >= Numbers::int8; }
    bool rounds_tokens() const { return is_coded() && inputs == Inputs::int8; }  // to whole numbers
    // The unsigned code that stands for 0 where groups have no zero points. Codes with minimums are unsigned already.
    int zero() const { return offsets == Offsets::minimums ? 0 : traits().zero; }
    // Sums of whole numbers over a whole row of bytes, which need no work at the end of a group.
    bool is_plain_bytes() const {
        return rounds_tokens() && numbers == Numbers::int8 && !group && offsets == Offsets::none;
    }
    bool has_wide_scales() const { return wide || !group; }
};

struct Part {
    int64_t rows, first_panel;
};

struct Matrix {
    Format format;
    int64_t k, padded_k;
    // Columns that share a scale, a group or a block; bytes of their codes in a panel, and with all that follows.
    int64_t group, code_bytes, group_bytes;
    bool interleaved = false;
    std::vector<Part> parts;
    int64_t panels = 0;
    int64_t panel_bytes = 0;
    Share data;
    std::vector<float> bias;           // in the order of the panels, [panels * 32], or empty
    std::vector<int32_t> permutation;  // column j multiplies element permutation[j] of a token; or empty
    float factor = 1;                  // what all scales and minimums are multiplied with, a power of two
    float input_scale = 0;             // scale of rounded activations; 0: each token has its own
    // How a matrix unit takes part (matrix_unit.h): the least tokens for which it is used; and whether the products of
    // a matrix of bf16 have its arithmetic, with and without it.
    int64_t unit_from = NEVER;
    bool in_tiles = false;
    bool in_dots = false;  // whether products of bf16 with bf16 are the processor's dot products (bf16_dots.h)

    Matrix(Pool&, Format format, int64_t k, bool interleaved, const std::vector<int64_t>& part_rows);

    char* panel(int64_t p) const { return data.data + p * panel_bytes; }
    // All panels, of which a thread reads whole grains.
    Ahead ahead(int64_t grain) const { return {data.data, (panels + grain - 1) / grain, panel_bytes * grain}; }
    // Returns where column k of a panel begins: a whole step of the format, for codes 32 columns.
    char* column(int64_t p, int64_t k) const {
        if (k == 0) return panel(p);
        if (k == padded_k) return panel(p + 1);
        const Traits& t = format.traits();
        if (!format.is_coded()) return panel(p) + k / t.step * t.bytes;
        return panel(p) + k / group * group_bytes + k % group * t.bits * (PANEL / 8);
    }
    // Returns the panel of row r of a part, and the row's index in that panel.
    std::pair<int64_t, int> locate(int part, int64_t r) const {
        if (interleaved) return {r / 16, int(part * 16 + r % 16)};
        return {parts[part].first_panel + r / PANEL, int(r % PANEL)};
    }
};

enum class Kind { float32, bfloat16, float16, codes };

// A part as the checkpoint stores it, row r at data + r * stride elements. Codes come with a row of float32 scales for
// each row, one for each group, and with zero points (int8) or minimums (float32) in the same shape.
struct SourceRows {
    const void* data;
    Kind kind;
    int64_t rows, stride;
    const float* scales = nullptr;
    int64_t scale_stride = 0;
    const int8_t* zero_points = nullptr;
    const float* minimums = nullptr;
    int64_t offset_stride = 0;
    const int8_t* factors = nullptr;  // of each group, in blocks
    const int8_t* min_factors = nullptr;
    int64_t factor_stride = 0;
};

// The packed layout of a step's tokens: tiles of at most `tile` tokens, k by k:
//   floats         [padded k][tokens of the tile]
//   bf16           [padded k / 2][tokens of the tile][2], for dot products of bf16
//   rounded        [padded k / 4][tokens of the tile][4] bytes, and for each token its scale
//   offset         [groups][tokens of the tile] of each tile: what the weights' offset adds; with zero points, of which
//                  each row has its own, what an offset of 1 would add; with minimums, the sum of the token's numbers;
//                  in blocks, two numbers of 16 bits: that sum and 0, or the offset of each half of a lane
// Tiles are as equal in size as whole units of 4 tokens allow.
//
// For a matrix unit, tiles have 32 tokens, in blocks of 64 columns: [padded k / 64][32][64] bytes. The last block is
// filled up with zeros, and rows of missing tokens are undefined.
//
// With the arithmetic of a matrix unit for bf16, a token is the sum of one or two numbers of bf16, its slices: the
// token rounded to bf16, and then the rest rounded to bf16. They come in blocks of 32 columns, of which the last is
// filled up with zeros: for the unit [padded k / 32][slices][32 tokens][32] bf16, and for vectors
// [padded k / 32][slices][32][tokens of the tile] floats.
//
// Where products of bytes must fit into 16 bits (dots.h), the second of two neighbors whose sum is too large is 0 in
// the tile, and is listed apart: `surplus` [tokens][padded k / 4], of which the first `num_surplus` of each token are
// used.
struct Surplus {
    uint16_t step;          // k / 4; rows of bytes have at most 65,536 columns
    int8_t second, fourth;  // of four numbers, of which the others are 0
};
struct Activations {
    int64_t tokens, padded_k, tiles;
    int64_t groups;  // offsets per token
    bool for_unit;   // packed for a matrix unit
    int slices;      // of a token of bf16, with the arithmetic of a matrix unit; otherwise 0
    int64_t stride;  // numbers of a token in memory
    void* data;
    float* scale;
    int32_t* offset;
    Surplus* surplus;      // null: all products of bytes fit
    int32_t* num_surplus;  // [tokens]

    static constexpr int UNIT = 4;
    int64_t units() const { return (tokens + UNIT - 1) / UNIT; }
    // Returns the first token of a tile.
    int64_t first(int64_t tile) const {
        if (for_unit) return std::min(tile * SQUARE, tokens);
        if (tiles == 1) return tile ? tokens : 0;  // no division, which takes as long as a tenth of a short panel
        int64_t t = UNIT * (units() * tile / tiles);
        return t < tokens ? t : tokens;
    }
    int64_t tile_of(int64_t token) const {
        return for_unit ? token / SQUARE : ((token / UNIT + 1) * tiles - 1) / units();
    }
};

}  // namespace ridgeline
