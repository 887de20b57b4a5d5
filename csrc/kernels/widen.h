// Codes as floats, for products with exact activations: the numbers of the dequantized matrix, rounded as those are, so
// that a product has the bits of one with that matrix in float32.
#pragma once
#include "block_tiles.h"
#include "codes.h"
#include "tiles.h"

namespace ridgeline::RL_ISA {

// How codes become floats: by one operation, which is fused and rounds as the product of the difference (u - zero) with
// the scale does, since zero * scale is exact; by several; or, as fp8 with a scale for each row, without the scale and
// times 2^-8, where the sum is multiplied with both. Scales and minimums of groups in blocks are exact products of
// float16 with 8 bits, so that one operation rounds there too.
enum Widening { FUSED, APART, BY_ROW, BLOCKS };
RL_INLINE Widening widening_of(const Format& f) {
    if (f.block) return BLOCKS;
    if (f.numbers == Numbers::fp8) return f.group ? FUSED : BY_ROW;
    const bool is_exact = f.offsets == Offsets::none || (f.offsets == Offsets::zero_points && !f.has_wide_scales());
    return is_exact ? FUSED : APART;
}

// Vectors of a group's scales and offsets; `shift` is -zero * scale where it is fused.
struct Lanes {
    F scale[VECTORS], shift[VECTORS], minimum[VECTORS];
};

RL_INLINE void read_lanes(const Matrix& w, const char* tail, Lanes& l) {
    const Format& f = w.format;
    const bool wide = f.has_wide_scales();
    const char* behind = tail + (wide ? 128 : 64);
    RL_FOR(v, VECTORS) {
        l.scale[v] = scale_at(tail, wide, v) * set(w.factor);
        l.shift[v] = set(float(f.zero()));
        if (f.offsets == Offsets::zero_points) l.shift[v] = to_float(zeros_at(behind, f.traits().bits <= 4, v));
        l.minimum[v] = F{};
        if (f.offsets == Offsets::minimums) l.minimum[v] = minimum_at(behind, v) * set(w.factor);
        if (widening_of(f) == FUSED) l.shift[v] = -l.shift[v] * l.scale[v];
        if (f.numbers == Numbers::fp8) l.scale[v] = l.scale[v] * set(256.f);
    }
}

// Readers: each(w, lanes, f) calls f(column, v, vector v of the column) for a piece, columns ascending for each v.

// Whole numbers.
template <class Codes, Widening HOW> struct Whole {
    static constexpr int BYTES = Codes::BYTES;
    static constexpr int N = W == 4 ? 1 : VECTORS;  // vectors at once; less code where it is slow anyway
    template <class Each> RL_INLINE void each(const char* w, const Lanes& l, Each&& f) {
        for (int first = 0; first < VECTORS; first += N)
            Codes::template each<N>(w + first * W * 4, [&](int s, const I(&x)[N]) __attribute__((always_inline)) {
                RL_FOR(j, 4)
                    RL_FOR(i, N) {
                        const int v = first + i;
                        const F u = byte_as_float(x[i], j);
                        f(4 * s + j, v,
                          HOW == FUSED ? fma_exact(u, l.scale[v], l.shift[v])
                                       : (u - l.shift[v]) * l.scale[v] - l.minimum[v]);
                    }
            });
    }
};
// e4m3.
template <Widening HOW> struct Fp8 {
    static constexpr int BYTES = 1024;
    template <class Each> RL_INLINE void each(const char* w, const Lanes& l, Each&& f) {
        for (int k = 0; k < PIECE; k += 2)
            RL_FOR(p, VECTORS / 2) {
                F low[2], high[2];
                from_f8((const uint8_t*)w + k * PANEL + p * W * 4, low, high);
                RL_FOR(i, 2) f(k, 2 * p + i, HOW == FUSED ? low[i] * l.scale[2 * p + i] : low[i]);
                RL_FOR(i, 2) f(k + 1, 2 * p + i, HOW == FUSED ? high[i] * l.scale[2 * p + i] : high[i]);
            }
    }
};

// Whole numbers in blocks.
template <class B> struct InBlocks {
    static constexpr int BYTES = B::Codes::BYTES, N = W == 4 ? 1 : VECTORS;
    struct Lanes {
        F scale[B::GROUPS][VECTORS], shift[B::GROUPS][VECTORS];  // of the groups of a piece
    };
    // tail: of the block. k: the piece's first column in it.
    RL_INLINE void read(const Matrix& w, const char* tail, int64_t k, Lanes& l) {
        const int64_t groups = w.group / B::GROUP, first = k / B::GROUP;
        const char* scales = tail + groups * PANEL * (B::MINIMUMS ? 2 : 1);
        RL_FOR(g, B::GROUPS)
            RL_FOR(v, VECTORS) {
                const char* at = tail + (first + g) * PANEL;
                l.scale[g][v] = scale_at(scales, false, v) * set(w.factor) * to_float(factors_at<B>(at, v));
                if (B::MINIMUMS)
                    l.shift[g][v] = -(minimum_at(scales + PANEL * 2, v) * set(w.factor) *
                                      to_float(factors_at<B>(at + groups * PANEL, v)));
                else
                    l.shift[g][v] = set(-float(w.format.zero())) * l.scale[g][v];
            }
    }
    template <class Each> RL_INLINE void each(const char* w, const Lanes& l, Each&& f) {
        for (int first = 0; first < VECTORS; first += N)
            B::Codes::template each<N>(w + first * W * 4, [&](int s, const I(&x)[N]) __attribute__((always_inline)) {
                const int g = s * 4 / B::GROUP;
                RL_FOR(j, 4)
                    RL_FOR(i, N) {
                        const int v = first + i;
                        f(4 * s + j, v, fma_exact(byte_as_float(x[i], j), l.scale[g][v], l.shift[g][v]));
                    }
            });
    }
};

// Calls f(piece, lanes, column) for the pieces of columns [k0, k1) of blocks.
template <class Reader, class Each>
RL_INLINE void each_block_piece(const Matrix& w, int64_t panel, int64_t k0, int64_t k1, Fetch ahead, Each&& f) {
    for (int64_t k = k0; k < k1; k += PIECE) {
        const char* block = w.panel(panel) + k / w.group * w.group_bytes;
        typename Reader::Lanes lanes;
        Reader::read(w, block + w.code_bytes, k % w.group, lanes);
        fetch<Reader::BYTES / 64 + 2>(ahead, w.group_bytes / (w.group / PIECE));
        f(w.column(panel, k), lanes, k - k0);
    }
}

// Writes columns [k0, k1) of a panel in blocks, [k][32] floats.
template <class B> void widen_blocks(const Matrix& w, int64_t panel, int64_t k0, int64_t k1, float* out, Fetch ahead) {
    using Reader = InBlocks<B>;
    each_block_piece<Reader>(
        w, panel, k0, k1, ahead, [&](const char* codes, const auto& l, int64_t k) __attribute__((always_inline)) {
            float* to = out + k * PANEL;
            Reader::each(codes, l,
                         [&](int i, int v, F y) __attribute__((always_inline)) { store(to + i * PANEL + v * W, y); });
        });
}

// A panel in blocks times one token, without floats in memory. c: [32].
template <class B> void token_blocks(const Matrix& w, int64_t panel, const float* x, float* c, Fetch ahead) {
    using Reader = InBlocks<B>;
    F sum[VECTORS] = {};
    each_block_piece<Reader>(w, panel, 0, w.padded_k, ahead,
                             [&](const char* codes, const auto& l, int64_t k) __attribute__((always_inline)) {
                                 Reader::each(codes, l, [&](int i, int v, F y) __attribute__((always_inline)) {
                                     sum[v] = fma(y, set(x[k + i]), sum[v]);
                                     keep(sum[v]);
                                 });
                             });
    RL_FOR(v, VECTORS) store(c + v * W, sum[v]);
}

// Calls f(piece, lanes, column) for the pieces of columns [k0, k1), multiples of 32.
template <class Reader, class Each>
RL_INLINE void each_piece(const Matrix& w, int64_t panel, int64_t k0, int64_t k1, Fetch ahead, Each&& f) {
    for (int64_t k = k0; k < k1;) {
        const int64_t end = k / w.group * w.group + w.group, stop = end < k1 ? end : k1;
        const char* codes = w.column(panel, k);
        Lanes lanes;
        read_lanes(w, w.panel(panel) + k / w.group * w.group_bytes + w.code_bytes, lanes);
        for (; k < stop; k += PIECE, codes += Reader::BYTES) {
            fetch<Reader::BYTES / 64>(ahead, Reader::BYTES);
            f(codes, lanes, k - k0);
        }
        fetch<2>(ahead, w.group_bytes - w.code_bytes);
    }
}

// Writes columns [k0, k1) of a panel, [k][32] floats.
template <class Reader>
void widen_columns(const Matrix& w, int64_t panel, int64_t k0, int64_t k1, float* out, Fetch ahead) {
    each_piece<Reader>(
        w, panel, k0, k1, ahead, [&](const char* codes, const Lanes& l, int64_t k) __attribute__((always_inline)) {
            float* to = out + k * PANEL;
            Reader::each(codes, l,
                         [&](int i, int v, F y) __attribute__((always_inline)) { store(to + i * PANEL + v * W, y); });
        });
}

// A panel times one token, without floats in memory. c: [32].
template <class Reader> void token_columns(const Matrix& w, int64_t panel, const float* x, float* c, Fetch ahead) {
    F sum[VECTORS] = {};
    each_piece<Reader>(w, panel, 0, w.padded_k, ahead,
                       [&](const char* codes, const Lanes& l, int64_t k) __attribute__((always_inline)) {
                           Reader::each(codes, l, [&](int i, int v, F y) __attribute__((always_inline)) {
                               sum[v] = fma(y, set(x[k + i]), sum[v]);
                               keep(sum[v]);
                           });
                       });
    RL_FOR(v, VECTORS) store(c + v * W, sum[v]);
}

}  // namespace ridgeline::RL_ISA
