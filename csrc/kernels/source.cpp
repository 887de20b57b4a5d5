// Prepares the tokens of a product: residual sum, norm, quantization, and the layout of tiles.
#include <array>
#include <cmath>
#include <type_traits>

#include "dots.h"
#include "linear.h"

namespace ridgeline::RL_ISA {
namespace {

typedef float F4 __attribute__((vector_size(16)));
typedef int32_t I4 __attribute__((vector_size(16)));

// Calls f(k, vector of k .. k + W, valid lanes) over n elements in blocks of 16. The number of lanes is a constant for
// all blocks but the last, so that they need no masks.
template <class Each> RL_INLINE void blocks(int64_t n, Each&& f) {
    int64_t k = 0;
    for (; k + 16 <= n; k += 16)
        RL_FOR(v, V) f(k + v * W, v, 16 - v * W);
    if (k < n)
        RL_FOR(v, V) f(k + v * W, v, int(n - k) - v * W);
}

float mean_square(const float* x, int64_t n, float shift) {
    Sum16 sum = Sum16::zero();
    const int64_t whole = n / 16 * 16;
    for (int64_t k = 0; k < whole; k += 16)
        RL_FOR(v, V) {
            F a = load(x + k + v * W) - set(shift);
            sum.v[v] = fma(a, a, sum.v[v]);
        }
    if (whole < n)
        RL_FOR(v, V) {
            const int rest = int(n - whole) - v * W;
            float tail[W];
            for (int i = 0; i < W; ++i) tail[i] = i < rest ? x[whole + v * W + i] - shift : 0.f;
            F a = load(tail);
            sum.v[v] = fma(a, a, sum.v[v]);
        }
    return total(sum) / float(n);
}

float mean(const float* x, int64_t n) {
    Sum16 sum = Sum16::zero();
    blocks(n, [&](int64_t k, int v, int count) __attribute__((always_inline)) { sum.v[v] += load(x + k, count); });
    return total(sum) / float(n);
}

void norm(const NormWeights& w, const float* x, int64_t n, float* out) {
    const float shift = w.kind == NormKind::layer ? mean(x, n) : 0.f;
    const float scale = 1.f / std::sqrt(mean_square(x, n, shift) + w.eps);
    const F vscale = set(scale), vshift = set(shift);
    blocks(n, [&](int64_t k, int, int count) __attribute__((always_inline)) {
        F y = (load(x + k, count) - vshift) * vscale * load(w.weight + k, count);
        if (w.bias) y += load(w.bias + k, count);
        store(out + k, y, count);
    });
}

const float* prepare(const Source& s, int64_t i, float* room, bool keep) {
    const int64_t row = s.rows ? s.rows[i] : i;
    const float* x = s.x + row * s.stride;
    if (s.delta) {
        const float* delta = s.delta + row * s.delta_stride;
        float* sum = keep && s.residual ? s.residual + i * s.residual_stride : room;
        const F scale = set(s.scale);
        blocks(s.k, [&](int64_t k, int, int count) __attribute__((always_inline)) {
            store(sum + k, load(x + k, count) + scale * load(delta + k, count), count);
        });
        x = sum;
    }
    if (s.norm.kind == NormKind::none) return x;
    norm(s.norm, x, s.k, room);
    return room;
}

// ---- floats: [k][tokens of the tile] ------------------------------------------------------------------------------

template <class X> RL_INLINE void transpose(X (&a)[4]) {
    X b0 = __builtin_shufflevector(a[0], a[1], 0, 4, 1, 5), b1 = __builtin_shufflevector(a[0], a[1], 2, 6, 3, 7);
    X b2 = __builtin_shufflevector(a[2], a[3], 0, 4, 1, 5), b3 = __builtin_shufflevector(a[2], a[3], 2, 6, 3, 7);
    a[0] = __builtin_shufflevector(b0, b2, 0, 1, 4, 5);
    a[1] = __builtin_shufflevector(b0, b2, 2, 3, 6, 7);
    a[2] = __builtin_shufflevector(b1, b3, 0, 1, 4, 5);
    a[3] = __builtin_shufflevector(b1, b3, 2, 3, 6, 7);
}

// The nearest numbers of bf16, as floats, ties to even. Numbers that are too large become infinite, a NaN stays one.
RL_INLINE F4 to_bf16(F4 x) {
    typedef uint32_t U4 __attribute__((vector_size(16)));
    const U4 u = (U4)x;
    return (F4)((x == x ? u + 0x7fff + ((u >> 16) & 1) : u | 0x400000) & 0xffff0000);
}

// The next four of `left` numbers; zeros behind the last.
RL_INLINE F4 load_four(const float* x, int64_t left) {
    F4 a = {};
    if (left >= 4)
        memcpy(&a, x, 16);
    else if (left > 0)
        memcpy(&a, x, size_t(left) * 4);
    return a;
}

// BF16: whether numbers are rounded to bf16.
template <int n, bool BF16>
void load_floats(float* out, int64_t m, int64_t k, int64_t padded, const float* const* tokens) {
    int64_t at = 0;
    if (m == 1 && !BF16) {
        memcpy(out, tokens[0], size_t(k) * 4);
        memset(out + k, 0, size_t(padded - k) * 4);
        return;
    }
    for (; at < padded; at += 4) {
        F4 a[4] = {};
        RL_FOR(i, n) {
            a[i] = load_four(tokens[i] + at, k - at);
            if (BF16) a[i] = to_bf16(a[i]);
        }
        transpose(a);
        if (at + 4 <= padded) {
            RL_FOR(j, 4) memcpy(out + (at + j) * m, &a[j], n * 4);
        } else {
            for (int j = 0; j < padded - at; ++j) memcpy(out + (at + j) * m, &a[j], n * 4);
        }
    }
}

// ---- bf16 for dot products: [k / 2][tokens of the tile][2] ----------------------------------------------------------

// The upper halves of eight numbers.
RL_INLINE I4 upper(F4 a, F4 b) {
    typedef uint16_t U8 __attribute__((vector_size(16)));
    return (I4)__builtin_shufflevector((U8)a, (U8)b, 1, 3, 5, 7, 9, 11, 13, 15);
}

template <int n> void load_bf16(int32_t* out, int64_t m, int64_t k, int64_t padded, const float* const* tokens) {
    for (int64_t at = 0; at < padded; at += 8) {
        I4 a[4] = {};
        RL_FOR(i, n) {
            const float* x = tokens[i] + at;
            a[i] = upper(to_bf16(load_four(x, k - at)), to_bf16(load_four(x + 4, k - at - 4)));
        }
        transpose(a);
        const int rows = int(padded - at < 8 ? padded - at : 8) / 2;
        for (int j = 0; j < rows; ++j) memcpy(out + (at / 2 + j) * m, &a[j], n * 4);
    }
}

// ---- slices of bf16, for the arithmetic of a matrix unit ------------------------------------------------------------

// What x is rounded to, and the rest. A finite number that would become infinite is cut off instead.
RL_INLINE void cut(F4 x, F4& high, F4& low) {
    const F4 nearest = to_bf16(x), below = (F4)((I4)x & (int32_t)0xffff0000);
    const I4 overflows = (((I4)nearest & 0x7fffffff) == 0x7f800000) & (((I4)x & 0x7fffffff) != 0x7f800000);
    high = overflows ? below : nearest;
    low = to_bf16(high == x ? F4{} : x - high);  // the rest of an infinity is 0
}

// Calls put(slice, column, numbers of four tokens) for each four columns up to `end`, the rest of them zeros.
template <int n, class Put>
RL_INLINE void each_slice(int slices, int64_t k, int64_t end, const float* const* tokens, Put&& put) {
    for (int64_t at = 0; at < end; at += 4) {
        F4 high[4] = {}, low[4] = {};
        RL_FOR(i, n) {
            const F4 x = load_four(tokens[i] + at, k - at);
            if (slices == 1)
                high[i] = to_bf16(x);
            else
                cut(x, high[i], low[i]);
        }
        put(0, at, high);
        if (slices == 2) put(1, at, low);
    }
}

// [blocks of 32 columns][slices][32 columns][m]
template <int n>
void load_sliced(float* out, int64_t m, int slices, int64_t k, int64_t end, const float* const* tokens) {
    each_slice<n>(slices, k, end, tokens, [&](int slice, int64_t at, F4(&a)[4]) __attribute__((always_inline)) {
        float* to = out + ((at / BF16_DEPTH * slices + slice) * BF16_DEPTH + at % BF16_DEPTH) * m;
        transpose(a);
        RL_FOR(j, 4) memcpy(to + j * m, &a[j], n * 4);
    });
}

// [blocks of 32 columns][slices][32 tokens][32]
template <int n> void load_squares(uint16_t* out, int slices, int64_t k, int64_t end, const float* const* tokens) {
    each_slice<n>(slices, k, end, tokens, [&](int slice, int64_t at, F4(&a)[4]) __attribute__((always_inline)) {
        uint16_t* to = out + (at / BF16_DEPTH * slices + slice) * SQUARE * BF16_DEPTH + at % BF16_DEPTH;
        RL_FOR(i, n) {
            const I4 halves = upper(a[i], a[i]);
            memcpy(to + i * BF16_DEPTH, &halves, 8);
        }
    });
}

// ---- bytes: [k / 4][tokens of the tile][4] ------------------------------------------------------------------------

struct Scale {
    float scale, inverse;
    int32_t mask;   // 0 for a token with a number that is not finite: it becomes zeros with the scale NaN
    bool is_given;  // larger numbers than the scale allows become 127
};

// Symmetric rounding: the largest magnitude becomes 127, unless a scale is given. Magnitudes are compared as bits, of
// which infinity and NaN are the largest.
Scale scale_of(const float* x, int64_t k, float given) {
    I best = {};
    blocks(k, [&](int64_t at, int, int count)
                  __attribute__((always_inline)) { best = max(best, bits(abs(load(x + at, count)))); });
    const int32_t top = largest(best);
    if (top >= 0x7f800000) return {__builtin_nanf(""), 0.f, 0, false};
    if (given > 0) return {given, 1.f / given, -1, true};
    float peak;
    memcpy(&peak, &top, 4);
    peak = peak > 0x1p-100f ? peak : 0x1p-100f;  // otherwise its inverse would be infinite
    return {peak / 127.f, 127.f / peak, -1, false};
}

// Rounds 16 elements of one token to bytes, and adds up their sum.
RL_INLINE I4 quantize16(const float* x, int count, const Scale& s, I (&sum)[V]) {
    alignas(16) int8_t bytes[16];
    RL_FOR(v, V) {
        F y = load(x + v * W, count - v * W) * set(s.inverse);
        if (s.is_given) y = min(max(y, set(-127.f)), set(127.f));
        I q = round(y) & s.mask;
        sum[v] += q;
        store_i8(bytes + v * W, q);
    }
    I4 r;
    memcpy(&r, bytes, 16);
    return r;
}

// Moves the second of two neighbors whose sum is beyond PAIR to the token's surplus. at: column of the 16 numbers.
RL_INLINE void split_pairs(I4& x, int64_t at, Surplus* surplus, int32_t& count) {
    typedef int16_t S8 __attribute__((vector_size(16)));
    typedef uint16_t U8 __attribute__((vector_size(16)));
    const S8 first = ((S8)x << 8) >> 8, second = (S8)x >> 8;
    const S8 above = (S8)((U8)(first + second + PAIR) > 2 * PAIR);
    int64_t any[2];
    memcpy(any, &above, 16);
    if (!(any[0] | any[1])) return;
    const I4 moved = x & (I4)(above & (int16_t)0xff00);
    for (int j = 0; j < 4; ++j)
        if (moved[j]) surplus[count++] = {uint16_t(at / 4 + j), int8_t(moved[j] >> 8), int8_t(moved[j] >> 24)};
    x ^= moved;
}

RL_INLINE int32_t total_of(I (&sum)[V]) {
    I all = sum[0];
    for (int v = 1; v < V; ++v) all += sum[v];
    return total(all);
}

// The offset of a group of a block, from the sums of its elements by their position modulo 16. Halves of a lane have
// the elements 0 and 1, or 2 and 3, of each four.
RL_INLINE int32_t offset_in_block(const Format& f, I (&sum)[V]) {
    const int32_t all = total_of(sum);
    if (f.offsets == Offsets::minimums) return all & 0xffff;
    RL_FOR(v, V)
        RL_FOR(j, W) sum[v][j] = j % 4 < 2 ? sum[v][j] : 0;
    const int32_t first = total_of(sum);
    return int32_t(uint32_t(-f.zero() * first) & 0xffff) | int32_t(uint32_t(-f.zero() * (all - first)) << 16);
}

// Where the bytes of n neighbors go. put(at, bytes, quads): 16 columns of each from `at` on, of which the tile has the
// first 4 * quads.

struct InColumns {  // [k / 4][m][4]
    int8_t* out;
    int64_t m;
    template <int n> RL_INLINE_MEMBER void put(int64_t at, I4 (&bytes)[4], int quads) const {
        int32_t* to = (int32_t*)(out + at * m);
        if (m == 1) {
            memcpy(to, &bytes[0], size_t(quads) * 4);
            return;
        }
        transpose(bytes);
        for (int j = 0; j < quads; ++j) memcpy(to + j * m, &bytes[j], n * 4);
    }
};
struct InSquares {  // [k / 64][32][64]
    int8_t* out;
    template <int n> RL_INLINE_MEMBER void put(int64_t at, I4 (&bytes)[4], int quads) const {
        int8_t* to = out + at / UNIT_DEPTH * UNIT_DEPTH * SQUARE + at % UNIT_DEPTH;
        RL_FOR(i, n) memcpy(to + i * UNIT_DEPTH, &bytes[i], size_t(quads) * 4);
    }
    // Fills columns [k, end) with zeros.
    void clear(int64_t k, int64_t end, int n) const {
        for (; k < end; ++k)
            for (int i = 0; i < n; ++i) out[k / UNIT_DEPTH * UNIT_DEPTH * SQUARE + i * UNIT_DEPTH + k % UNIT_DEPTH] = 0;
    }
};

// group: elements that share an offset; 0: the whole token. offsets: [groups][m]. surplus: of these tokens, or null.
template <int n, class To> void load_bytes(const To& to, int64_t m, int64_t k, int64_t padded, int group,
                                           const Format& f, float given, const float* const* tokens, float* scales,
                                           int32_t* offsets, Surplus* surplus, int32_t* num_surplus) {
    const int weight_offset = f.offsets == Offsets::zero_points ? 1 : f.offsets == Offsets::minimums ? -1 : f.zero();
    Scale scale[n];
    I sum[n][V] = {};
    int32_t count_surplus[n] = {};
    RL_FOR(i, n) {
        scale[i] = scale_of(tokens[i], k, given);
        scales[i] = scale[i].scale;
    }
    // count, quads: elements of the 16 at `at` that the token has, and fours of them that the tile has.
    const auto block = [&](int64_t at, int count, int quads) __attribute__((always_inline)) {
        I4 a[4] = {};
        RL_FOR(i, n) a[i] = quantize16(tokens[i] + at, count, scale[i], sum[i]);
        if (SHORT && surplus)
            RL_FOR(i, n) split_pairs(a[i], at, surplus + i * (padded / 4), count_surplus[i]);
        to.template put<n>(at, a, quads);
        if (group && (at + 16) % group == 0)
            RL_FOR(i, n) {
                offsets[at / group * m + i] = f.block ? offset_in_block(f, sum[i]) : -weight_offset * total_of(sum[i]);
                RL_FOR(v, V) sum[i][v] = I{};
            }
    };
    int64_t at = 0;
    for (; at + 16 <= k; at += 16) block(at, 16, 4);
    for (; at < padded; at += 16) block(at, int(k > at ? k - at : 0), int(padded - at < 16 ? padded - at : 16) / 4);
    if (!group)
        RL_FOR(i, n) offsets[i] = -weight_offset * total_of(sum[i]);
    if (SHORT && surplus)
        RL_FOR(i, n) num_surplus[i] = count_surplus[i];
}

// begin, m: the tile of the tokens. place: of the first of n of them in the tile.
void load_slices(const Activations& a, int64_t k, const float* const* tokens, int64_t begin, int64_t m, int64_t place,
                 int n) {
    const size_t size = size_t(n - 1);
    const int64_t end = a.stride / a.slices;
    if (a.for_unit) {
        const std::array all = {load_squares<1>, load_squares<2>, load_squares<3>, load_squares<4>};
        return all[size]((uint16_t*)a.data + begin * a.stride + place * BF16_DEPTH, a.slices, k, end, tokens);
    }
    const std::array all = {load_sliced<1>, load_sliced<2>, load_sliced<3>, load_sliced<4>};
    all[size]((float*)a.data + begin * a.stride + place, m, a.slices, k, end, tokens);
}

void load(const Activations& a, const Matrix& w, const float* const* tokens, int64_t first, int n) {
    const int64_t tile = a.tile_of(first), begin = a.first(tile), m = a.first(tile + 1) - begin, place = first - begin;
    if (a.slices) return load_slices(a, w.k, tokens, begin, m, place, n);
    if (w.in_dots) {
        const std::array all = {load_bf16<1>, load_bf16<2>, load_bf16<3>, load_bf16<4>};
        int32_t* out = (int32_t*)a.data + begin * a.padded_k / 2 + place;
        return all[size_t(n - 1)](out, m, w.k, a.padded_k, tokens);
    }
    if (!w.format.rounds_tokens()) {
        const auto all = w.format.inputs == Inputs::bf16 ? std::array{load_floats<1, true>, load_floats<2, true>,
                                                                      load_floats<3, true>, load_floats<4, true>}
                                                         : std::array{load_floats<1, false>, load_floats<2, false>,
                                                                      load_floats<3, false>, load_floats<4, false>};
        return all[size_t(n - 1)]((float*)a.data + begin * a.padded_k + place, m, w.k, a.padded_k, tokens);
    }
    float* scales = a.scale + first;
    int32_t* offsets = a.offset + begin * a.groups + place;
    const int group = w.format.block ? w.format.group : w.group < w.padded_k ? int(w.group) : 0;
    Surplus* surplus = a.surplus ? a.surplus + first * (a.padded_k / 4) : nullptr;
    const auto run = [&](const auto& to) {
        using To = std::remove_cvref_t<decltype(to)>;
        const auto load = n == 4   ? load_bytes<4, To>
                          : n == 3 ? load_bytes<3, To>
                          : n == 2 ? load_bytes<2, To>
                                   : load_bytes<1, To>;
        load(to, m, w.k, a.padded_k, group, w.format, w.input_scale, tokens, scales, offsets, surplus,
             a.num_surplus + first);
    };
    int8_t* out = (int8_t*)a.data + begin * a.stride;
    if (!a.for_unit) return run(InColumns{out + place * 4, m});
    const InSquares squares{out + place * UNIT_DEPTH};
    run(squares);
    squares.clear(a.padded_k, a.stride, n);
}

}  // namespace

extern const SourceKernels source_kernels = {prepare, load, norm};

}  // namespace ridgeline::RL_ISA
