// Products of few tokens in slices of bf16, with the bits of a matrix unit.
#include <array>
#include <utility>

#include "epilogues.h"
#include "unit_products.h"
#include "unit_registers.h"
#include "unit_vectors.h"

namespace ridgeline::RL_ISA {
namespace {

constexpr int64_t AHEAD = 4096;         // bytes that a single stream is prefetched
constexpr int64_t L1_BYTES = 16 << 10;  // weights that stay in the first cache while tiles use them

using SlicedTile = void (*)(const char*, const float*, int64_t, int, float*, bool, Fetch);
template <int... I> constexpr std::array<SlicedTile, TILE> sliced_tiles(std::integer_sequence<int, I...>) {
    return {&sliced_tile<I + 1>...};
}
constexpr auto TILES = sliced_tiles(std::make_integer_sequence<int, TILE>{});

}  // namespace

void sliced_multiply(const Matrix& w, const Activations& a, int64_t begin, int64_t end, const Epilogue& e, char* room) {
    const int64_t whole = w.padded_k / BF16_DEPTH, left = w.panel_bytes - whole * BF16_BLOCK;
    char* tail = room + a.tiles * TILE * PANEL * 4;
    memset(tail, 0, BF16_BLOCK);
    // Adds blocks [b0, b1) of a panel, which begin at `from`, to the sums of all tiles.
    const auto add = [&](const char* from, int64_t b0, int64_t b1, Fetch ahead) {
        [[maybe_unused]] const Flushing flushing;
        for (int64_t t = 0; t < a.tiles; ++t) {
            const int64_t first = a.first(t), m = a.first(t + 1) - first;
            const float* x = (const float*)a.data + first * a.stride + b0 * a.slices * BF16_DEPTH * m;
            float* c = (float*)room + t * TILE * PANEL;
            TILES[size_t(m - 1)](from, x, b1 - b0, a.slices, c, b0 == 0, ahead);
        }
    };
    for (int64_t p = begin; p < end; ++p) {
        for (int64_t b = 0; b < whole; b += L1_BYTES / BF16_BLOCK) {
            const char* from = w.panel(p) + b * BF16_BLOCK;
            add(from, b, std::min(b + L1_BYTES / BF16_BLOCK, whole), {from + AHEAD, a.tiles == 1 ? 1 : NOWHERE});
        }
        if (left) {
            memcpy(tail, w.panel(p) + whole * BF16_BLOCK, size_t(left));
            add(tail, whole, whole + 1, {tail, NOWHERE});
        }
        for (int64_t t = 0; t < a.tiles; ++t) deliver(w, a, e, p, t, (float*)room + t * TILE * PANEL);
    }
}

size_t sliced_room_bytes(const Activations& a) { return size_t(a.tiles * TILE * PANEL * 4 + BF16_BLOCK); }

}  // namespace ridgeline::RL_ISA
