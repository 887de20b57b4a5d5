// Dot products of four bytes, or of two numbers of bf16, in each lane, for one instruction set.
#pragma once
#include "simd.h"

namespace ridgeline::RL_ISA {

typedef int16_t S __attribute__((vector_size(W * 4)));

// The sum of the two products of 16 bits in each lane.
RL_INLINE I pairs(I a, I b) {
#if defined(__AVX512F__)
    return (I)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
    return (I)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#elif defined(__SSE2__)
    return (I)_mm_madd_epi16((__m128i)a, (__m128i)b);
#elif defined(RL_NEON)
    const int16x8_t x = (int16x8_t)a, y = (int16x8_t)b;
    return (I)vpaddq_s32(vmull_s16(vget_low_s16(x), vget_low_s16(y)), vmull_high_s16(x, y));
#else
    return ((a << 16) >> 16) * ((b << 16) >> 16) + (a >> 16) * (b >> 16);
#endif
}

// dot(c, unsigned bytes, signed bytes): c + the sum of the four products in each lane, exactly for signed bytes above
// -128. Unsigned bytes from `unsigned4` count as DOT_ZERO less than they are, those from `small4`, which are below 128,
// as they are. Without an instruction for it, bytes are converted first, so that nothing saturates; `Unsigned4` and
// `Signed4` hold these.
#if defined(__AVX512VNNI__)
constexpr int DOT_ZERO = 0;
typedef I Unsigned4;
typedef I Signed4;
RL_INLINE Unsigned4 unsigned4(I x) { return x; }
RL_INLINE Unsigned4 small4(I x) { return x; }
RL_INLINE Signed4 signed4(I x) { return x; }
// asm, because g++ 12 copies each accumulator of the intrinsic to another register, and to the stack and back.
RL_INLINE void dot(I& c, Unsigned4 a, Signed4 b) { asm("vpdpbusd %2, %1, %0" : "+v"(c) : "v"(a), "v"(b)); }
// dot with four bytes for all lanes, loaded by the instruction itself: more loads, but fewer issue slots.
constexpr bool FOLDS = true;
RL_INLINE void dot_folded(I& c, Unsigned4 a, const int32_t& b) {
    asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(c) : "v"(a), "m"(b));
}
#elif defined(__AVX512BW__)
// Magnitudes of bytes minus 128 times activations with the signs of these: two products of at most 128 * 127 fit into
// 16 bits. It takes four operations, none of them for the activation alone; even and odd bytes as 16 bits take more.
constexpr int DOT_ZERO = 128;
struct Magnitudes {
    I magnitude;
    __mmask64 is_negative;
};
typedef Magnitudes Unsigned4;
typedef I Signed4;
RL_INLINE Unsigned4 unsigned4(I x) {
    const __m512i number = (__m512i)(x ^ (int32_t)0x80808080);
    return {(I)_mm512_abs_epi8(number), _mm512_movepi8_mask(number)};
}
RL_INLINE Unsigned4 small4(I x) { return {x, 0}; }
RL_INLINE Signed4 signed4(I x) { return x; }
RL_INLINE void keep(Unsigned4& x) { keep(x.magnitude); }
RL_INLINE void dot(I& c, Unsigned4 a, Signed4 b) {
    const __m512i turned = _mm512_mask_sub_epi8((__m512i)b, a.is_negative, _mm512_setzero_si512(), (__m512i)b);
    c += pairs((I)_mm512_maddubs_epi16((__m512i)a.magnitude, turned), set(0x00010001));
    keep(c);  // otherwise g++ delays the sums and spills the products
}
constexpr bool FOLDS = false;
RL_INLINE void dot_folded(I& c, Unsigned4 a, const int32_t& b) { dot(c, a, set(b)); }
#elif defined(RL_NEON)
typedef I Unsigned4;
typedef I Signed4;
#if defined(__ARM_FEATURE_MATMUL_INT8)
// Products of whole tiles (usmmla) want 8 columns of a row in neighboring bytes, but panels have 4: for 4 tokens and 16
// rows they would take 26 operations where these take 32, 10 of them to move bytes.
constexpr int DOT_ZERO = 0;
RL_INLINE Unsigned4 unsigned4(I x) { return x; }
RL_INLINE void dot(I& c, Unsigned4 a, Signed4 b) {
    c = (I)vusdotq_s32((int32x4_t)c, (uint8x16_t)a, (int8x16_t)b);
    keep(c);  // otherwise g++ delays the sums and spills the bytes
}
#else
constexpr int DOT_ZERO = 128;
RL_INLINE Unsigned4 unsigned4(I x) { return x ^ (int32_t)0x80808080; }
RL_INLINE void dot(I& c, Unsigned4 a, Signed4 b) {
    const int8x16_t x = (int8x16_t)a, y = (int8x16_t)b;
#if defined(__ARM_FEATURE_DOTPROD)
    c = (I)vdotq_s32((int32x4_t)c, x, y);
#else  // two products of at most 128 * 127 fit into 16 bits
    const int16x8_t two = vpaddq_s16(vmull_s8(vget_low_s8(x), vget_low_s8(y)), vmull_high_s8(x, y));
    c = (I)vpadalq_s16((int32x4_t)c, two);
#endif
    keep(c);  // likewise
}
#endif
RL_INLINE Unsigned4 small4(I x) { return x; }
RL_INLINE Signed4 signed4(I x) { return x; }
constexpr bool FOLDS = false;
RL_INLINE void dot_folded(I& c, Unsigned4 a, const int32_t& b) { dot(c, a, set(b)); }
#else
constexpr int DOT_ZERO = 0;
struct Unsigned4 {
    I even, odd;
};
struct Signed4 {
    I even, odd;
};
RL_INLINE Unsigned4 unsigned4(I x) { return {x & 0x00ff00ff, (I)((U)x >> 8) & 0x00ff00ff}; }
RL_INLINE Unsigned4 small4(I x) { return unsigned4(x); }
RL_INLINE Signed4 signed4(I x) { return {(I)(((S)x << 8) >> 8), (I)((S)x >> 8)}; }
RL_INLINE void keep(Unsigned4& x) {
    keep(x.even);
    keep(x.odd);
}
RL_INLINE void keep(Signed4& x) {
    keep(x.even);
    keep(x.odd);
}
RL_INLINE void dot(I& c, Unsigned4 a, Signed4 b) {
    c += pairs(a.even, b.even) + pairs(a.odd, b.odd);
    keep(c);  // otherwise g++ delays the sums and spills the products
}
constexpr bool FOLDS = false;
RL_INLINE void dot_folded(I& c, Unsigned4 a, const int32_t& b) { dot(c, a, signed4(set(b))); }
#endif

// dot_bf16(c, weights, tokens): c + the two products of bf16 in each lane. This is VDPBF16PS: c + the product of the
// upper halves, rounded, then + that of the lower halves, rounded again. Each is a fused multiply-add that rounds to
// nearest even, and takes and gives zeros for denormal numbers, whatever MXCSR says. Only where CPUs may have the
// instruction (bf16_dots.h).
#if defined(__AVX512VNNI__) && defined(RL_HAS_BF16_DOTS)
constexpr bool MAY_DOT_BF16 = true;
RL_INLINE void dot_bf16(F& c, I a, I b) { asm("vdpbf16ps %2, %1, %0" : "+v"(c) : "v"(a), "v"(b)); }
RL_INLINE void dot_bf16_folded(F& c, I a, const int32_t& b) {
    asm("vdpbf16ps %2%{1to16%}, %1, %0" : "+v"(c) : "v"(a), "m"(b));
}
#else
constexpr bool MAY_DOT_BF16 = false;
RL_INLINE void dot_bf16(F&, I, I) {}
RL_INLINE void dot_bf16_folded(F&, I, const int32_t&) {}
#endif

// The nearest numbers of bf16, ties to even, in the upper half of each lane; a NaN stays a NaN.
RL_INLINE I upper_bf16(F x) {
    const I u = bits(x), rounded = u + (int32_t)0x7fff + ((I)((U)u >> 16) & 1), quiet = u | (int32_t)0x400000;
    return (x == x ? rounded : quiet) & (int32_t)0xffff0000;
}
// Pairs of bf16: in the lower half of each lane a number of the first vector, in the upper half one of the second.
// Both vectors have their numbers in upper halves.
RL_INLINE I pairs_of(I x, I y) { return (I)((U)x >> 16) | (y & (int32_t)0xffff0000); }

#if defined(__AVX512VNNI__) && defined(RL_HAS_BF16_DOTS)
#define RL_BF16_DOTS  // attention in pairs of bf16 (kernels/attention_rounded.cpp)
RL_INLINE I zipped(__m512i x) {  // lane i: numbers i and i + 16 of 16 bits
    I order = {};
    RL_FOR(i, W) order[i] = i | (i + 16) << 16;
    return (I)_mm512_permutexvar_epi16((__m512i)order, x);
}
// The nearest numbers of bf16, those of x first: lane i has numbers 2 i and 2 i + 1 of 2 W. Denormal numbers become
// zeros.
RL_INLINE I both_bf16(F x, F y) {
    I both;
    asm("vcvtne2ps2bf16 %2, %1, %0" : "=v"(both) : "v"(y), "v"(x));
    return both;
}
RL_INLINE I pairs_bf16(F x, F y) { return zipped((__m512i)both_bf16(x, y)); }
// Pairs of numbers that are stored as bf16.
RL_INLINE I pairs_bf16(const uint16_t* x, const uint16_t* y) {
    const __m512i first = _mm512_castsi256_si512(_mm256_loadu_si256((const __m256i*)x));
    return zipped(_mm512_inserti64x4(first, _mm256_loadu_si256((const __m256i*)y), 1));
}
RL_INLINE void pairs_bf16(const uint16_t* x, const uint16_t* y, I& low, I& high) {  // of 2 W numbers
    const __m512i a = _mm512_loadu_si512(x), b = _mm512_loadu_si512(y);
    I order = {};
    RL_FOR(i, W) order[i] = i | (i + 32) << 16;
    low = (I)_mm512_permutex2var_epi16(a, (__m512i)order, b);
    high = (I)_mm512_permutex2var_epi16(a, (__m512i)(order + 0x00100010), b);
}
// x less the largest whole number up to x; 0 for an infinity.
RL_INLINE F above_floor(F x) { return (F)_mm512_reduce_ps((__m512)x, 0x09); }
// x * 2^n, for the largest whole number n up to the exponent.
RL_INLINE F times_power(F x, F exponent) { return (F)_mm512_scalef_ps((__m512)x, (__m512)exponent); }
#endif

// Where four bytes have no instruction of their own: sums of two products in 16 bits, for unsigned bytes of at most 63
// and signed ones above -128. Sums of some of them fit into 16 bits too; `pairs` with ones adds up neighbors.
#if defined(__AVX512BW__) && !defined(__AVX512VNNI__)
constexpr bool SHORT = true;
RL_INLINE S short_products(I a, I b) { return (S)_mm512_maddubs_epi16((__m512i)a, (__m512i)b); }
#elif defined(__AVX2__) && !defined(__AVX512VNNI__)
constexpr bool SHORT = true;
RL_INLINE S short_products(I a, I b) { return (S)_mm256_maddubs_epi16((__m256i)a, (__m256i)b); }
#else
constexpr bool SHORT = false;
RL_INLINE S short_products(I, I) { return S{}; }
#endif

// c + the sum of the four products in each lane, in three operations. It is exact for all unsigned bytes if neighbors
// among the signed ones add up to at most PAIR in magnitude: 255 * 128 < 2^15. `split_pairs` makes them so.
constexpr int PAIR = 128;
RL_INLINE void dot_short(I& c, I a, I b) {
    c += pairs((I)short_products(a, b), set(0x00010001));
    keep(c);  // otherwise g++ delays the sums and spills the products
}

}  // namespace ridgeline::RL_ISA
