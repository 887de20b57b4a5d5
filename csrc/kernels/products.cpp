// Panels times tiles: the loops around the inner loops, and the epilogues of a finished tile.
#include <algorithm>
#include <array>
#include <utility>

#include "linear.h"
#include "tiles.h"
#include "vmath.h"

namespace ridgeline::RL_ISA {
namespace {

constexpr int64_t AHEAD = 4096;          // bytes that a single stream is prefetched
constexpr int64_t L1_BYTES = 16 << 10;   // weights that stay in the first cache while tiles use them
constexpr int64_t L2_BYTES = 256 << 10;  // weights that stay in the second cache
constexpr int64_t FEW_TILES = 8;         // tiles whose computation still takes less time than fetching a panel

// ---- a tile of m tokens as a table over m -------------------------------------------------------------------------

using FloatTile = void (*)(const char*, const float*, int64_t, float*, bool, Fetch);
using ByteTile = void (*)(const char*, const int8_t*, int64_t, int32_t*, bool, Fetch);
using GroupTile = void (*)(const Groups&, float*, bool, Fetch);

template <class Type, int... I>
constexpr std::array<FloatTile, sizeof...(I)> float_tiles(std::integer_sequence<int, I...>) {
    return {&float_tile<Type, I + 1>...};
}
template <int... I> constexpr std::array<ByteTile, sizeof...(I)> byte_tiles(std::integer_sequence<int, I...>) {
    return {&byte_tile<I + 1>...};
}
template <class Type, int... I>
constexpr std::array<GroupTile, sizeof...(I)> group_tiles(std::integer_sequence<int, I...>) {
    return {&group_tile<Type, I + 1>...};
}
using Sizes = std::make_integer_sequence<int, TILE>;
template <class Type> FloatTile float_tile_of(int64_t m) {
    static constexpr auto table = float_tiles<Type>(Sizes{});
    return table[size_t(m - 1)];
}
ByteTile byte_tile_of(int64_t m) {
    static constexpr auto table = byte_tiles(Sizes{});
    return table[size_t(m - 1)];
}
template <class Type> GroupTile group_tile_of(int64_t m) {
    static constexpr auto table = group_tiles<Type>(Sizes{});
    return table[size_t(m - 1)];
}

// ---- epilogues ----------------------------------------------------------------------------------------------------

// Converts the raw sums of a tile to floats, in place.
void finish(const Matrix& w, const Activations& a, int64_t panel, int64_t begin, int64_t m, float* c) {
    if (!w.quantized()) return;
    for (int64_t i = 0; i < m; ++i) {
        const F token = set(a.scale[begin + i]);
        RL_FOR(v, VECTORS) {
            float* at = c + i * PANEL + v * W;
            if (w.format == Format::int4) {
                store(at, load(at) * token);
            } else {
                const F row = load((const float*)(w.panel(panel) + w.padded_k / 4 * 128) + v * W);
                store(at, to_float(load((const int32_t*)at) + set(a.offset[begin + i])) * (row * token));
            }
        }
    }
}

void store_gated(const Matrix& w, const Epilogue& e, int64_t panel, int64_t begin, int64_t m, const float* c) {
    const int64_t column = panel * 16;
    const int count = int(std::min<int64_t>(16, w.parts[0].rows - column));
    for (int64_t i = 0; i < m; ++i)
        RL_FOR(v, V) {
            F gate = load(c + i * PANEL + v * W), up = load(c + i * PANEL + 16 + v * W);
            store(e.out[0].data + (begin + i) * e.out[0].stride + column + v * W, activate(e.gate, gate, up),
                  count - v * W);
        }
}

F plain(const Epilogue& e, F x) {
    if (e.kind == Epilogue::unary) return activate(e.gate.activation, x);
    if (e.scale != 1.f) x = x * set(e.scale);
    return e.softcap > 0 ? set(e.softcap) * tanh(x / set(e.softcap)) : x;
}

void store_rows(const Matrix& w, const Epilogue& e, int64_t panel, int64_t begin, int64_t m, const float* c) {
    size_t part = 0;
    while (part + 1 < w.parts.size() && w.parts[part + 1].first_panel <= panel) ++part;
    const int64_t column = (panel - w.parts[part].first_panel) * PANEL;
    const int count = int(std::min<int64_t>(PANEL, w.parts[part].rows - column));
    const bool bare = e.kind == Epilogue::plain && e.scale == 1.f && e.softcap <= 0;
    for (int64_t i = 0; i < m; ++i) {
        float* out = e.out[part].data + (begin + i) * e.out[part].stride + column;
        RL_FOR(v, VECTORS) {
            F x = load(c + i * PANEL + v * W);
            store(out + v * W, bare ? x : plain(e, x), count - v * W);
        }
    }
}

void deliver(const Matrix& w, const Activations& a, const Epilogue& e, int64_t panel, int64_t tile, float* c) {
    const int64_t begin = a.first(tile), m = a.first(tile + 1) - begin;
    finish(w, a, panel, begin, m, c);
    if (!w.bias.empty())
        for (int64_t i = 0; i < m; ++i)
            RL_FOR(v, VECTORS) {
                float* at = c + i * PANEL + v * W;
                store(at, load(at) + load(w.bias.data() + panel * PANEL + v * W));
            }
    if (e.kind == Epilogue::gated)
        store_gated(w, e, panel, begin, m, c);
    else
        store_rows(w, e, panel, begin, m, c);
}

// ---- the loops ----------------------------------------------------------------------------------------------------

struct Layout {
    int64_t step, bytes;  // k and bytes of a step of the panel's stream
};
Layout layout(const Matrix& w) {
    switch (w.format) {
        case Format::fp32: return {1, 128};
        case Format::bf16: return {2, 128};
        case Format::fp16: return {1, 64};
        case Format::int8: return {8, 256};
        default: return {w.group, w.group / 8 * 128 + 64};
    }
}

// Computes a range of k of one panel and one tile.
void tile(const Matrix& w, const Activations& a, int64_t panel, int64_t t, int64_t k0, int64_t k1, float* c,
          Fetch ahead) {
    const int64_t begin = a.first(t), m = a.first(t + 1) - begin;
    const Layout l = layout(w);
    const char* from = w.panel(panel) + k0 / l.step * l.bytes;
    const bool first = k0 == 0;
    if (w.format == Format::int8) {
        const int8_t* x = (const int8_t*)a.data + begin * a.padded_k + k0 * m;
        return byte_tile_of(m)(from, x, k1 - k0, (int32_t*)c, first, ahead);
    }
    if (w.format == Format::int4) {
        const int8_t* x = (const int8_t*)a.data + begin * a.padded_k + k0 * m;
        const int32_t* offsets = a.offset + begin * a.groups + k0 / w.group * m;
        return group_tile_of<Nibbles>(m)({from, nullptr, x, offsets, (k1 - k0) / w.group, w.group}, c, first, ahead);
    }
    const float* x = (const float*)a.data + begin * a.padded_k + k0 * m;
    const auto run = w.format == Format::fp32   ? float_tile_of<Fp32>(m)
                     : w.format == Format::bf16 ? float_tile_of<Bf16>(m)
                                                : float_tile_of<Fp16>(m);
    run(from, x, k1 - k0, c, first, ahead);
}

struct Blocks {
    int64_t k, panels;  // k of a range, panels that are computed together
};
// Divides k into equal ranges of at most `most`, in whole steps. Each range is prefetched while the one before is used.
int64_t even(const Matrix& w, int64_t most) {
    const int64_t step = layout(w).step, count = (w.padded_k + most - 1) / std::max(most, step);
    return round_up((w.padded_k + count - 1) / count, step);
}
Blocks blocks(const Matrix& w, const Activations& a) {
    const Layout l = layout(w);
    // Two parts of each tile read 4-bit weights, even for a single tile. They have half the bytes of unpacked weights.
    if (w.format == Format::int4) return {even(w, L1_BYTES / 2 / l.bytes * l.step), 1};
    if (a.tiles == 1) return {w.padded_k, 1};
    if (a.tiles <= FEW_TILES) return {even(w, L1_BYTES / l.bytes * l.step), 1};
    // Many tokens: a tile's activations stay in the first cache, and the panels' weights in the second.
    const int64_t k = even(w, 2 * L1_BYTES / (TILE * (w.quantized() ? 1 : 4)) / l.step * l.step);
    return {k, std::max<int64_t>(1, L2_BYTES / (k / l.step * l.bytes))};
}

// A single tile prefetches its stream a fixed distance ahead. Of several tiles, each prefetches its share of the next
// range, so that memory is busy during the computation.
void few_tiles(const Matrix& w, const Activations& a, int64_t begin, int64_t end, const Epilogue& e, float* c) {
    const Layout l = layout(w);
    const Blocks b = blocks(w, a);
    const int64_t stretch = b.k / l.step * l.bytes, share = stretch / a.tiles / 64 * 64;
    const int64_t step = (w.format == Format::int4 ? Nibbles::BYTES : l.bytes) / a.tiles;
    for (int64_t p = begin; p < end; ++p)
        for (int64_t k = 0; k < w.padded_k; k += b.k) {
            const int64_t stop = std::min(k + b.k, w.padded_k);
            const char *from = w.panel(p) + k / l.step * l.bytes, *next = w.panel(p) + stop / l.step * l.bytes;
            for (int64_t t = 0; t < a.tiles; ++t) {
                float* sums = c + t * TILE * PANEL;
                tile(w, a, p, t, k, stop, sums, {a.tiles == 1 ? from + AHEAD : next + t * share, step});
                if (stop == w.padded_k) deliver(w, a, e, p, t, sums);
            }
        }
}

void many_tiles(const Matrix& w, const Activations& a, int64_t begin, int64_t end, const Epilogue& e, float* c) {
    const Blocks b = blocks(w, a);
    for (int64_t p0 = begin; p0 < end; p0 += b.panels) {
        const int64_t p1 = std::min(p0 + b.panels, end);
        for (int64_t k = 0; k < w.padded_k; k += b.k) {
            const int64_t stop = std::min(k + b.k, w.padded_k);
            for (int64_t t = 0; t < a.tiles; ++t)
                for (int64_t p = p0; p < p1; ++p) {
                    float* sums = c + ((p - p0) * a.tiles + t) * TILE * PANEL;
                    tile(w, a, p, t, k, stop, sums, {w.panel(p), 0});
                    if (stop == w.padded_k) deliver(w, a, e, p, t, sums);
                }
        }
    }
}

// Unpacks 4-bit weights to bytes once for all tiles.
void unpacked(const Matrix& w, const Activations& a, int64_t begin, int64_t end, const Epilogue& e, char* room) {
    const Layout l = layout(w);
    const Blocks b = blocks(w, a);
    char* bytes = room;
    float* scales = (float*)(room + b.k * PANEL);
    float* c = scales + b.k / w.group * PANEL;
    for (int64_t p = begin; p < end; ++p)
        for (int64_t k = 0; k < w.padded_k; k += b.k) {
            const int64_t stop = std::min(k + b.k, w.padded_k), groups = (stop - k) / w.group;
            const char* from = w.panel(p) + k / l.step * l.bytes;
            unpack_groups(from, groups, w.group, bytes, scales, {from + (stop - k) / l.step * l.bytes, 128});
            for (int64_t t = 0; t < a.tiles; ++t) {
                const int64_t first = a.first(t), m = a.first(t + 1) - first;
                float* sums = c + t * TILE * PANEL;
                const int8_t* x = (const int8_t*)a.data + first * a.padded_k + k * m;
                const int32_t* offsets = a.offset + first * a.groups + k / w.group * m;
                group_tile_of<Unpacked>(m)({bytes, scales, x, offsets, groups, w.group}, sums, k == 0, {bytes, 0});
                if (stop == w.padded_k) deliver(w, a, e, p, t, sums);
            }
        }
}

size_t room_bytes(const Matrix& w, const Activations& a) {
    const Blocks b = blocks(w, a);
    const size_t sums = size_t(a.tiles) * TILE * PANEL * 4;
    if (w.format == Format::int4) return size_t(b.k) * PANEL + size_t(b.k / w.group) * PANEL * 4 + sums;
    return sums * size_t(b.panels);
}

void multiply(const Matrix& w, const Activations& a, int64_t begin, int64_t end, const Epilogue& e, char* room) {
    if (a.tiles <= FEW_TILES)
        few_tiles(w, a, begin, end, e, (float*)room);
    else if (w.format == Format::int4)
        unpacked(w, a, begin, end, e, room);
    else
        many_tiles(w, a, begin, end, e, (float*)room);
}

}  // namespace

extern const ProductKernels product_kernels = {TILE, multiply, room_bytes};

}  // namespace ridgeline::RL_ISA
