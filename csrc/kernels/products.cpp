// Panels times tiles: the loops around the inner loops.
#include <algorithm>
#include <array>
#include <utility>

#include "epilogues.h"
#include "group_tiles.h"
#include "unit_products.h"

namespace ridgeline::RL_ISA {
namespace {

// Bytes that a single stream is prefetched: measured with AVX2 (docs/log), and with AVX-512 on another machine.
constexpr int64_t AHEAD = W == 16 ? 4096 : 1024;
constexpr int64_t L1_BYTES = 16 << 10;   // weights that stay in the first cache while tiles use them
constexpr int64_t L2_BYTES = 256 << 10;  // weights that stay in the second cache

// ---- a tile of m tokens as a table over m -------------------------------------------------------------------------

using FloatTile = void (*)(const char*, const float*, int64_t, float*, bool, Fetch);
using ByteTile = void (*)(const char*, const int8_t*, int64_t, int32_t*, bool, Fetch);
using Bf16Tile = void (*)(const char*, const uint16_t*, int64_t, float*, bool, Fetch);
using GroupTile = void (*)(const Groups&, float*, bool, Fetch);
using Widen = void (*)(const Matrix&, int64_t, int64_t, int64_t, float*, Fetch);
using WidenedToken = void (*)(const Matrix&, int64_t, const float*, float*, Fetch);

using Sizes = std::make_integer_sequence<int, TILE>;
template <class Type, int... I> constexpr std::array<FloatTile, TILE> float_tiles(std::integer_sequence<int, I...>) {
    return {&float_tile<Type, I + 1>...};
}
template <int... I> constexpr std::array<ByteTile, TILE> byte_tiles(std::integer_sequence<int, I...>) {
    return {&byte_tile<I + 1>...};
}
// Null where no CPU has dot products of bf16.
template <int... I> constexpr std::array<Bf16Tile, TILE> bf16_tiles(std::integer_sequence<int, I...>) {
    if constexpr (MAY_DOT_BF16) return {&bf16_tile<I + 1>...};
    return {};
}
template <class Codes, class Tail, int... I>
constexpr std::array<GroupTile, TILE> group_tiles(std::integer_sequence<int, I...>) {
    return {&group_tile<Codes, Tail, I + 1>...};
}

// The loops of each kind of numbers; those that it has no use for are null.
struct Loops {
    std::array<FloatTile, TILE> floats{};
    std::array<GroupTile, TILE> stored{}, unpacked{};
    Unpack unpack = nullptr;
    Widen widen[4] = {};  // for each `Widening`
    WidenedToken token[4] = {};
    std::array<GroupTile, TILE> blocks{}, unpacked_blocks{};
};
template <class Type> constexpr Loops float_loops() { return {.floats = float_tiles<Type>(Sizes{})}; }
template <class Codes> constexpr Loops code_loops() {
    using Plain = SmallBytes<Codes::STEPS>;
    return {.stored = group_tiles<Codes, Stored>(Sizes{}),
            .unpacked = group_tiles<Plain, Unpacked>(Sizes{}),
            .unpack = unpack_groups<Codes>,
            .widen = {widen_columns<Whole<Codes, FUSED>>, widen_columns<Whole<Codes, APART>>},
            .token = {token_columns<Whole<Codes, FUSED>>, token_columns<Whole<Codes, APART>>}};
}
template <class B, int... I> constexpr std::array<GroupTile, TILE> block_tiles(std::integer_sequence<int, I...>) {
    return {&block_tile<B, I + 1>...};
}
// Codes that also come in blocks of a kind.
template <class B> constexpr Loops block_loops() {
    Loops loops = code_loops<typename B::Codes>();
    loops.widen[BLOCKS] = widen_blocks<B>;
    loops.token[BLOCKS] = token_blocks<B>;
    loops.blocks = block_tiles<B>(Sizes{});
    loops.unpacked_blocks = block_tiles<InBytes<B>>(Sizes{});
    return loops;
}
constexpr Loops fp8_loops() {
    return {.widen = {widen_columns<Fp8<FUSED>>, nullptr, widen_columns<Fp8<BY_ROW>>},
            .token = {token_columns<Fp8<FUSED>>, nullptr, token_columns<Fp8<BY_ROW>>}};
}
constexpr std::array<ByteTile, TILE> BYTE_TILES = byte_tiles(Sizes{});
constexpr std::array<Bf16Tile, TILE> BF16_TILES = bf16_tiles(Sizes{});
constexpr std::array<FloatTile, TILE> WIDENED_TILES = float_tiles<Widened>(Sizes{});
constexpr Loops LOOPS[] = {
    float_loops<Fp32>(), float_loops<Bf16>(), float_loops<Fp16>(), code_loops<Bytes>(), block_loops<Q4K>(),
    code_loops<Int3>(),  code_loops<Int2>(),  fp8_loops(),         block_loops<Q5K>(),  block_loops<Q6K>(),
};
const Loops& loops_of(const Matrix& w) { return LOOPS[int(w.format.numbers)]; }

// ---- the loops ----------------------------------------------------------------------------------------------------

// How the panels of a matrix are multiplied.
enum class Path { floats, dots, bytes, groups, widened };
Path path_of(const Matrix& w) {
    if (!w.format.is_coded()) return w.in_dots ? Path::dots : Path::floats;
    if (!w.format.rounds_tokens()) return Path::widened;
    return w.format.is_plain_bytes() ? Path::bytes : Path::groups;
}

// Columns that are not divided.
int64_t step_of(const Matrix& w, Path path) {
    return path == Path::groups ? w.group : path == Path::widened ? PIECE : w.format.traits().step;
}

Groups with_tile(const Matrix& w, const Activations& a, int64_t panel, int64_t t, int64_t k0, int64_t k1) {
    const int64_t begin = a.first(t), m = a.first(t + 1) - begin;
    Groups g = groups_of(w, panel, k0, k1);
    g.activations = (const int8_t*)a.data + begin * a.padded_k + k0 * m;
    g.offsets = a.offset + begin * a.groups + k0 * a.groups / w.padded_k * m;
    return g;
}

// Computes a range of k of one panel and one tile.
void tile(const Matrix& w, const Activations& a, int64_t panel, int64_t t, int64_t k0, int64_t k1, float* c,
          Fetch ahead) {
    const int64_t begin = a.first(t), m = a.first(t + 1) - begin, at = begin * a.padded_k + k0 * m;
    const size_t size = size_t(m - 1);
    switch (path_of(w)) {
        case Path::groups: {
            const auto& tiles = w.format.block ? loops_of(w).blocks : loops_of(w).stored;
            return tiles[size](with_tile(w, a, panel, t, k0, k1), c, k0 == 0, ahead);
        }
        case Path::bytes:
            return BYTE_TILES[size](w.column(panel, k0), (const int8_t*)a.data + at, k1 - k0, (int32_t*)c, k0 == 0,
                                    ahead);
        case Path::dots:
            return BF16_TILES[size](w.column(panel, k0), (const uint16_t*)a.data + at, k1 - k0, c, k0 == 0, ahead);
        default:
            return loops_of(w).floats[size](w.column(panel, k0), (const float*)a.data + at, k1 - k0, c, k0 == 0, ahead);
    }
}

struct Blocks {
    int64_t k, panels;  // k of a range, panels that are computed together
};
// Divides k into equal ranges of at most `most`, in whole steps. Each range is prefetched while the one before is used.
int64_t even(const Matrix& w, int64_t most, int64_t step) {
    most = std::max(most, step);
    const int64_t count = (w.padded_k + most - 1) / most;
    return round_up((w.padded_k + count - 1) / count, step);
}
Blocks blocks(const Matrix& w, const Activations& a) {
    const Path path = path_of(w);
    const int64_t step = step_of(w, path), bytes = path == Path::groups ? w.group_bytes : w.format.traits().bytes;
    // The range's floats stay in the first cache, and the codes of the next range arrive meanwhile.
    if (path == Path::widened) return {even(w, (a.tiles == 1 ? L1_BYTES / 2 : L1_BYTES) / (PANEL * 4), step), 1};
    // Two parts of each tile read codes of few bits, even for a single tile. They have half the bytes of unpacked ones.
    if (path == Path::groups) return {even(w, L1_BYTES / 2 / bytes * step, step), 1};
    if (a.tiles == 1) return {w.padded_k, 1};
    if (a.tiles <= FEW_TILES) return {even(w, L1_BYTES / bytes * step, step), 1};
    // Many tokens: a tile's activations stay in the first cache, and the panels' weights in the second.
    const int64_t number = path == Path::bytes ? 1 : path == Path::dots ? 2 : 4;  // bytes
    const int64_t k = even(w, 2 * L1_BYTES / (TILE * number) / step * step, step);
    return {k, std::max<int64_t>(1, L2_BYTES / (k / step * bytes))};
}

// A single stream of weights is prefetched a fixed distance ahead. Tiles that use a range each prefetch a share of the
// next range, so that memory is busy during the computation.
void few_tiles(const Matrix& w, const Activations& a, int64_t begin, int64_t end, const Epilogue& e, float* c) {
    const Blocks b = blocks(w, a);
    const bool is_stream = a.tiles == 1 && (a.tokens == 1 || w.format.block || path_of(w) != Path::groups);
    for (int64_t p = begin; p < end; ++p)
        for (int64_t k = 0; k < w.padded_k; k += b.k) {
            const int64_t stop = std::min(k + b.k, w.padded_k);
            const char *from = w.column(p, k), *next = w.column(p, stop);
            const int64_t share = (next - from) / a.tiles / 64 * 64;
            for (int64_t t = 0; t < a.tiles; ++t) {
                float* sums = c + t * TILE * PANEL;
                tile(w, a, p, t, k, stop, sums, {is_stream ? from + AHEAD : next + t * share, a.tiles});
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
                    tile(w, a, p, t, k, stop, sums, {w.panel(p), NOWHERE});
                    if (stop == w.padded_k) deliver(w, a, e, p, t, sums);
                }
        }
    }
}

// Unpacks codes to bytes once for all tiles.
void unpacked(const Matrix& w, const Activations& a, int64_t begin, int64_t end, const Epilogue& e, char* room) {
    const Blocks b = blocks(w, a);
    const Loops& loops = loops_of(w);
    char *bytes = room, *tails = room + b.k * PANEL;
    float* c = (float*)(tails + b.k / w.group * Unpacked::BYTES);
    for (int64_t p = begin; p < end; ++p)
        for (int64_t k = 0; k < w.padded_k; k += b.k) {
            const int64_t stop = std::min(k + b.k, w.padded_k);
            const char* next = w.column(p, stop);
            const int64_t share = (next - w.column(p, k)) / a.tiles / 64 * 64;
            loops.unpack(groups_of(w, p, k, stop), bytes, tails, {bytes, NOWHERE});
            for (int64_t t = 0; t < a.tiles; ++t) {
                float* sums = c + t * TILE * PANEL;
                Groups g = with_tile(w, a, p, t, k, stop);
                g.codes = bytes, g.code_stride = w.group * PANEL;
                if (!w.format.block) g.tail = tails, g.tail_stride = Unpacked::BYTES;
                const auto& tiles_of = w.format.block ? loops.unpacked_blocks : loops.unpacked;
                tiles_of[size_t(a.first(t + 1) - a.first(t) - 1)](g, sums, k == 0, {next + t * share, a.tiles});
                if (stop == w.padded_k) deliver(w, a, e, p, t, sums);
            }
        }
}

// Converts codes to floats once for all tiles.
void widened(const Matrix& w, const Activations& a, int64_t begin, int64_t end, const Epilogue& e, float* floats) {
    const Blocks b = blocks(w, a);
    const Loops& loops = loops_of(w);
    float* c = floats + b.k * PANEL;
    const Widening how = widening_of(w.format);
    for (int64_t p = begin; p < end && a.tokens == 1; ++p) {
        loops.token[how](w, p, (const float*)a.data, c, {w.panel(p) + AHEAD, 1});
        deliver(w, a, e, p, 0, c);
    }
    for (int64_t p = begin; p < end && a.tokens > 1; ++p)
        for (int64_t k = 0; k < w.padded_k; k += b.k) {
            const int64_t stop = std::min(k + b.k, w.padded_k);
            loops.widen[how](w, p, k, stop, floats, {w.column(p, k) + AHEAD, 1});
            for (int64_t t = 0; t < a.tiles; ++t) {
                const int64_t first = a.first(t), m = a.first(t + 1) - first;
                float* sums = c + t * TILE * PANEL;
                const float* x = (const float*)a.data + first * a.padded_k + k * m;
                WIDENED_TILES[size_t(m - 1)]((const char*)floats, x, stop - k, sums, k == 0, {(char*)floats, NOWHERE});
                if (stop == w.padded_k) deliver(w, a, e, p, t, sums);
            }
        }
}

size_t room_bytes(const Matrix& w, const Activations& a) {
    if (a.for_unit) return unit_room_bytes(w, a);
    if (a.slices) return sliced_room_bytes(a);
    const Blocks b = blocks(w, a);
    const size_t sums = size_t(a.tiles) * TILE * PANEL * 4;
    switch (path_of(w)) {
        case Path::widened: return size_t(b.k) * PANEL * 4 + sums;
        case Path::groups: return size_t(b.k) * PANEL + size_t(b.k / w.group) * Unpacked::BYTES + sums;
        default: return sums * size_t(b.panels);
    }
}

void multiply(const Matrix& w, const Activations& a, int64_t begin, int64_t end, const Epilogue& e, char* room) {
    if (a.for_unit) return unit_multiply(w, a, begin, end, e, room);
    if (a.slices) return sliced_multiply(w, a, begin, end, e, room);
    const Path path = path_of(w);
    if (path == Path::widened) return widened(w, a, begin, end, e, (float*)room);
    // In blocks, factors take so much time that unpacking pays later.
    const bool is_packed = path != Path::groups || a.tiles < (w.format.block ? FEW_TILES + 1 : UNPACKED_FROM);
    if (!is_packed) return unpacked(w, a, begin, end, e, room);
    if (a.tiles <= FEW_TILES) return few_tiles(w, a, begin, end, e, (float*)room);
    many_tiles(w, a, begin, end, e, (float*)room);
}

}  // namespace

extern const ProductKernels product_kernels = {TILE, SHORT, multiply, room_bytes};

}  // namespace ridgeline::RL_ISA
