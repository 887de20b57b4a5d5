// Vectors of floats and integers for one instruction set. Only this file, dots.h and
// unit_registers.h name instructions.
//
// It is included by files that are compiled once per instruction set (RL_ISA: dispatch.h lists them), and everything is
// in a namespace of that name. A vector has W lanes. The arithmetic of a lane is the same for every W,
// and sums over lanes (Sum16) have one fixed order, so that results do not depend on the instruction set, with one
// exception: `portable` on a machine without fused multiply-add rounds `fma` twice (`fma_exact` never does).
#pragma once
#include <cstdint>
#include <cstring>
#include <utility>
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(RL_NEON)  // all compilers for aarch64 have these instructions on, so that `portable` needs another name
#include <arm_neon.h>
#endif

#define RL_INLINE static inline __attribute__((always_inline))
#define RL_INLINE_MEMBER inline __attribute__((always_inline))
// A loop over i = 0 .. n - 1 that is unrolled completely. Otherwise an array of accumulators, indexed by a variable,
// would be in memory instead of registers.
#if defined(__clang__)
#define RL_UNROLL _Pragma("clang loop unroll(full)")
#else
#define RL_UNROLL _Pragma("GCC unroll 32")
#endif
#define RL_FOR(i, n) RL_UNROLL for (int i = 0; i < (n); ++i)

namespace ridgeline::RL_ISA {

#if defined(__AVX512F__)
constexpr int W = 16;
#elif defined(__AVX2__)
constexpr int W = 8;
#else
constexpr int W = 4;
#endif
constexpr int V = 16 / W;  // vectors in a block of 16 lanes
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int REGISTERS = 32;
#else
constexpr int REGISTERS = 16;
#endif

typedef float F __attribute__((vector_size(W * 4)));
typedef int32_t I __attribute__((vector_size(W * 4)));
typedef uint32_t U __attribute__((vector_size(W * 4)));
typedef double D __attribute__((vector_size(W * 8)));

// ---- memory with any alignment -------------------------------------------------------------------------------------

RL_INLINE F load(const float* p) {
    F x;
    memcpy(&x, p, sizeof x);
    return x;
}
RL_INLINE I load(const int32_t* p) {
    I x;
    memcpy(&x, p, sizeof x);
    return x;
}
RL_INLINE void store(float* p, F x) { memcpy(p, &x, sizeof x); }
RL_INLINE void store(int32_t* p, I x) { memcpy(p, &x, sizeof x); }

RL_INLINE F set(float x) { return x - F{}; }  // a sum would lose the sign of -0
RL_INLINE I set(int32_t x) { return x - I{}; }
RL_INLINE I bits(F x) { return (I)x; }
RL_INLINE F floats(I x) { return (F)x; }

// The first n lanes (n >= W: all; n <= 0: none); the others are 0, and their memory is not touched.
#if defined(__AVX512F__)
RL_INLINE __mmask16 lanes(int n) {
    return n >= 16 ? __mmask16(0xffff) : n <= 0 ? __mmask16(0) : __mmask16((1u << n) - 1);
}
RL_INLINE F load(const float* p, int n) { return _mm512_maskz_loadu_ps(lanes(n), p); }
RL_INLINE void store(float* p, F x, int n) { _mm512_mask_storeu_ps(p, lanes(n), x); }
#elif defined(__AVX2__)  // masked stores take some 40 operations on processors of AMD
RL_INLINE __m256i lanes(int n) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
RL_INLINE F load(const float* p, int n) { return n >= W ? load(p) : _mm256_maskload_ps(p, lanes(n)); }
RL_INLINE void store(float* p, F x, int n) { n >= W ? store(p, x) : _mm256_maskstore_ps(p, lanes(n), x); }
#else
RL_INLINE F load(const float* p, int n) {
    F x = {};
    for (int i = 0; i < W && i < n; ++i) x[i] = p[i];
    return x;
}
RL_INLINE void store(float* p, F x, int n) {
    for (int i = 0; i < W && i < n; ++i) p[i] = x[i];
}
#endif

// Forces the value into a register, for loops that measure speed.
template <class X> RL_INLINE void keep(X& x) {
#if defined(__AVX512F__)
    asm volatile("" : "+v"(x));
#elif defined(__x86_64__)
    asm volatile("" : "+x"(x));
#else
    asm volatile("" : "+w"(x));
#endif
}

// Makes the compiler load again what it has read from p before: it would rather spill it than load it.
RL_INLINE const char* again(const char* p) {
    asm volatile("" : "+r"(p));
    return p;
}

RL_INLINE void prefetch(const void* p) { __builtin_prefetch(p, 0, 3); }
// Fetches into the second cache: far ahead, the first one has too little space and too few lines in flight.
RL_INLINE void prefetch_far(const void* p) { __builtin_prefetch(p, 0, 2); }

// ---- arithmetic -------------------------------------------------------------------------------------------------

// a * b + c, rounded once if the machine has an instruction for it.
RL_INLINE F fma(F a, F b, F c) {
#if defined(__AVX512F__)
    return _mm512_fmadd_ps(a, b, c);
#elif defined(__FMA__)
    return _mm256_fmadd_ps(a, b, c);
#elif defined(RL_NEON)
    return (F)vfmaq_f32(c, a, b);
#elif defined(__FP_FAST_FMAF)
    F r;
    for (int i = 0; i < W; ++i) r[i] = __builtin_fmaf(a[i], b[i], c[i]);
    return r;
#else
    return a * b + c;
#endif
}

// a + b, rounded to odd: rounding it again to float gives the sum rounded once (Boldo and Melquiond, Emulation of FMA
// and correctly rounded sums, 2008).
RL_INLINE double sum_to_odd(double a, double b) {
    const double s = a + b, t = s - a, error = (a - (s - t)) + (b - t);
    int64_t u;
    memcpy(&u, &s, 8);
    // The error of an infinite sum is neither.
    const bool is_rounded = (error < 0) | (error > 0);
    u += (is_rounded & !(u & 1)) ? ((error > 0) == (s > 0) ? 1 : -1) : 0;
    double odd;
    memcpy(&odd, &u, 8);
    return odd;
}

// a * b + c, rounded once everywhere.
#if defined(__AVX512F__) || defined(__FMA__) || defined(__FP_FAST_FMAF)
RL_INLINE F fma_exact(F a, F b, F c) { return fma(a, b, c); }
#else
static inline __attribute__((noinline)) F fma_exact(F a, F b, F c) {
    F r;  // the product of two floats is exact in double
    for (int i = 0; i < W; ++i) r[i] = float(sum_to_odd(double(a[i]) * double(b[i]), c[i]));
    return r;
}
#endif

// The second operand if either is NaN.
RL_INLINE F max(F a, F b) { return a > b ? a : b; }
RL_INLINE F min(F a, F b) { return a < b ? a : b; }
RL_INLINE I max(I a, I b) { return a > b ? a : b; }
RL_INLINE F abs(F x) { return floats(bits(x) & 0x7fffffff); }
// Whether any lane of a comparison's result is true.
RL_INLINE bool any(I condition) {
#if defined(__AVX512F__)
    return _mm512_test_epi32_mask((__m512i)condition, (__m512i)condition);
#elif defined(__AVX2__)
    return !_mm256_testz_si256((__m256i)condition, (__m256i)condition);
#elif defined(RL_NEON)
    return vmaxvq_u32((uint32x4_t)condition);
#else
    int32_t found = 0;
    for (int i = 0; i < W; ++i) found |= condition[i];
    return found;
#endif
}
RL_INLINE F select(I condition, F a, F b) { return condition ? a : b; }  // condition: a comparison's result

RL_INLINE F sqrt(F x) {
#if defined(__AVX512F__)
    return _mm512_sqrt_ps(x);
#elif defined(__AVX2__)
    return _mm256_sqrt_ps(x);
#elif defined(RL_NEON)
    return (F)vsqrtq_f32(x);
#else
    F r;
    for (int i = 0; i < W; ++i) r[i] = __builtin_sqrtf(x[i]);
    return r;
#endif
}

// Exchanges the off-diagonal parts of a square of 2 * half.
template <int half, int... i> RL_INLINE void exchange(F& x, F& y, std::integer_sequence<int, i...>) {
    const F a = x, b = y;
    x = __builtin_shufflevector(a, b, (i & half ? i - half + W : i)...);
    y = __builtin_shufflevector(a, b, (i & half ? i + W : i + half)...);
}
// Row i of W rows becomes column i.
template <int half = 1> RL_INLINE void transpose(F (&x)[W]) {
    RL_FOR(i, W)
        if (!(i & half)) exchange<half>(x[i], x[i + half], std::make_integer_sequence<int, W>{});
    if constexpr (2 * half < W) transpose<2 * half>(x);
}

RL_INLINE F to_float(I x) { return __builtin_convertvector(x, F); }

// Byte j of each lane, unsigned, as a float. A shuffle leaves the ports free that shifts share with products.
RL_INLINE F byte_as_float(I x, int j) {
#if defined(__AVX2__)
    I from = {};  // for each lane of 128 bits: byte 4 * lane + j, and three zeros
    RL_FOR(i, W) from[i] = int32_t(0x80808000u) + 4 * (i % 4) + j;
#if defined(__AVX512F__)
    return to_float((I)_mm512_shuffle_epi8((__m512i)x, (__m512i)from));
#else
    return to_float((I)_mm256_shuffle_epi8((__m256i)x, (__m256i)from));
#endif
#elif defined(RL_NEON)
    I from = {};  // an index beyond the vector gives 0
    RL_FOR(i, W) from[i] = int32_t(0xffffff00u) + 4 * i + j;
    return to_float((I)vqtbl1q_u8((uint8x16_t)x, (uint8x16_t)from));
#else
    return to_float((x >> (8 * j)) & 255);
#endif
}

// Nearest integer, ties to even. |x| < 2^22.
RL_INLINE I round(F x) {
#if defined(__AVX512F__)
    return (I)_mm512_cvtps_epi32(x);
#elif defined(__AVX2__)
    return (I)_mm256_cvtps_epi32(x);
#elif defined(RL_NEON)
    return (I)vcvtnq_s32_f32(x);
#else
    const F magic = set(12582912.f);  // 1.5 * 2^23: the last bit of the sum is 1
    return bits(x + magic) - bits(magic);
#endif
}

// A sum or a maximum over numbers in blocks of 16: lane i takes every 16th number, then the 16 are folded in halves.
// Results are equal for every W.
struct Sum16 {
    F v[V];
    RL_INLINE Sum16 zero() {
        Sum16 s;
        RL_FOR(i, V) s.v[i] = set(0.f);
        return s;
    }
};
RL_INLINE float fold(const float* x) {
    float a[8];
    RL_FOR(i, 8) a[i] = x[i] + x[i + 8];
    RL_FOR(i, 4) a[i] += a[i + 4];
    return (a[0] + a[2]) + (a[1] + a[3]);
}
RL_INLINE float total(const Sum16& s) {
    float x[16];
    RL_FOR(i, V) store(x + i * W, s.v[i]);
    return fold(x);
}
RL_INLINE int32_t total(I x) {
    int32_t sum = 0;
    for (int i = 0; i < W; ++i) sum += x[i];
    return sum;
}
RL_INLINE int32_t largest(I x) {
    int32_t best = x[0];
    for (int i = 1; i < W; ++i) best = x[i] > best ? x[i] : best;
    return best;
}
template <int half, int... i> RL_INLINE F turned(F x, std::integer_sequence<int, i...>) {
    return __builtin_shufflevector(x, x, (i ^ half)...);
}
template <int half = W / 2> RL_INLINE float largest(F x) {
    x = max(x, turned<half>(x, std::make_integer_sequence<int, W>{}));
    if constexpr (half > 1) return largest<half / 2>(x);
    return x[0];
}

// ---- other number types ---------------------------------------------------------------------------------------

RL_INLINE F from_bf16(const uint16_t* p) {
#if defined(__AVX512F__)
    return (F)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16);
#elif defined(__AVX2__)
    return (F)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16);
#elif defined(RL_NEON)
    uint64_t halves;  // files have no alignment
    memcpy(&halves, p, 8);
    return (F)vshll_n_u16(vcreate_u16(halves), 16);
#else
    uint16_t halves[W];
    memcpy(halves, p, sizeof halves);
    I x;
    for (int i = 0; i < W; ++i) x[i] = int32_t(uint32_t(halves[i]) << 16);
    return floats(x);
#endif
}

RL_INLINE float from_f16(uint16_t h) {
#if defined(__F16C__)
    return _cvtsh_ss(h);
#elif defined(RL_NEON)
    __fp16 x;
    memcpy(&x, &h, 2);
    return x;
#else
    // Read as a float, the bits are too small by exactly 2^112, for subnormal numbers too.
    uint32_t u = uint32_t(h & 0x7fff) << 13;
    float x;
    memcpy(&x, &u, 4);
    x *= 0x1p112f;
    memcpy(&u, &x, 4);
    if ((h & 0x7c00) == 0x7c00) u |= 0x7f800000;
    u |= uint32_t(h & 0x8000) << 16;
    memcpy(&x, &u, 4);
    return x;
#endif
}
RL_INLINE F from_f16(const uint16_t* p) {
#if defined(__AVX512F__)
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
#elif defined(__F16C__)
    return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
#elif defined(RL_NEON)
    uint64_t halves;
    memcpy(&halves, p, 8);
    return (F)vcvt_f32_f16((float16x4_t)vcreate_u16(halves));
#else
    uint16_t halves[W];
    memcpy(halves, p, sizeof halves);
    F x;
    for (int i = 0; i < W; ++i) x[i] = from_f16(halves[i]);
    return x;
#endif
}

// Numbers of e4m3 times 2^-8: their bits are those of halves whose exponent is 8 too small, and subnormal numbers are
// converted too. Each 16 bits of p have two neighbors of a lane, of 2 W lanes: `low` and `high`.
RL_INLINE float from_f8(uint8_t x) { return from_f16(uint16_t((x & 0x80) << 8 | (x & 0x7f) << 7)); }
RL_INLINE void from_f8(const uint8_t* p, F (&low)[2], F (&high)[2]) {
#if defined(__AVX512F__)
    const __m512i both = _mm512_loadu_si512(p), mask = _mm512_set1_epi16((int16_t)0xbf80);
    const __m512i l = _mm512_and_si512(_mm512_srai_epi16(_mm512_slli_epi16(both, 8), 1), mask);
    const __m512i h = _mm512_and_si512(_mm512_srai_epi16(both, 1), mask);
    low[0] = _mm512_cvtph_ps(_mm512_castsi512_si256(l)), low[1] = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(l, 1));
    high[0] = _mm512_cvtph_ps(_mm512_castsi512_si256(h)), high[1] = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(h, 1));
#elif defined(__F16C__)
    const __m256i both = _mm256_loadu_si256((const __m256i*)p), mask = _mm256_set1_epi16((int16_t)0xbf80);
    const __m256i l = _mm256_and_si256(_mm256_srai_epi16(_mm256_slli_epi16(both, 8), 1), mask);
    const __m256i h = _mm256_and_si256(_mm256_srai_epi16(both, 1), mask);
    low[0] = _mm256_cvtph_ps(_mm256_castsi256_si128(l)), low[1] = _mm256_cvtph_ps(_mm256_extracti128_si256(l, 1));
    high[0] = _mm256_cvtph_ps(_mm256_castsi256_si128(h)), high[1] = _mm256_cvtph_ps(_mm256_extracti128_si256(h, 1));
#elif defined(RL_NEON)
    int16x8_t both;
    memcpy(&both, p, 16);
    const int16x8_t mask = vdupq_n_s16((int16_t)0xbf80);
    const float16x8_t l = (float16x8_t)vandq_s16(vshrq_n_s16(vshlq_n_s16(both, 8), 1), mask);
    const float16x8_t h = (float16x8_t)vandq_s16(vshrq_n_s16(both, 1), mask);
    low[0] = (F)vcvt_f32_f16(vget_low_f16(l)), low[1] = (F)vcvt_high_f32_f16(l);
    high[0] = (F)vcvt_f32_f16(vget_low_f16(h)), high[1] = (F)vcvt_high_f32_f16(h);
#else
    for (int i = 0; i < 2 * W; ++i) {
        low[i / W][i % W] = from_f8(p[2 * i]);
        high[i / W][i % W] = from_f8(p[2 * i + 1]);
    }
#endif
}

// W neighboring numbers of e4m3, as above, but 127 is NaN. 255 is not, for one operation less; nobody writes it.
RL_INLINE F from_f8(const uint8_t* p) {
#if defined(__AVX512F__)
    const __m256i x = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)p));
    const __m256i half = _mm256_and_si256(_mm256_slli_epi16(x, 7), _mm256_set1_epi16((int16_t)0xbf80));
    return _mm512_cvtph_ps(_mm256_or_si256(half, _mm256_cmpeq_epi16(x, _mm256_set1_epi16(127))));
#elif defined(__F16C__)
    const __m128i x = _mm_cvtepi8_epi16(_mm_loadl_epi64((const __m128i*)p));
    const __m128i half = _mm_and_si128(_mm_slli_epi16(x, 7), _mm_set1_epi16((int16_t)0xbf80));
    return _mm256_cvtph_ps(_mm_or_si128(half, _mm_cmpeq_epi16(x, _mm_set1_epi16(127))));
#elif defined(RL_NEON)
    uint32_t four;
    memcpy(&four, p, 4);
    const int16x4_t x = vget_low_s16(vmovl_s8(vcreate_s8(four)));
    const int16x4_t half = vand_s16(vshl_n_s16(x, 7), vdup_n_s16((int16_t)0xbf80));
    return (F)vcvt_f32_f16((float16x4_t)vorr_u16((uint16x4_t)half, vceq_s16(x, vdup_n_s16(127))));
#else
    F x;
    for (int i = 0; i < W; ++i) x[i] = p[i] == 127 ? __builtin_nanf("") : from_f8(p[i]);
    return x;
#endif
}

// Rounds to nearest, ties to even. Numbers that are too large become infinite.
RL_INLINE uint16_t to_bf16(float x) {
    uint32_t u;
    memcpy(&u, &x, 4);
    if ((u & 0x7fffffff) > 0x7f800000) return uint16_t((u >> 16) | 0x40);  // a NaN stays a NaN
    return uint16_t((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}
RL_INLINE uint16_t to_f16(float x) {
#if defined(__F16C__)
    return _cvtss_sh(x, 0);
#elif defined(RL_NEON)
    const __fp16 h = __fp16(x);
    uint16_t u;
    memcpy(&u, &h, 2);
    return u;
#else
    uint32_t u;
    memcpy(&u, &x, 4);
    uint32_t sign = (u >> 16) & 0x8000;
    u &= 0x7fffffff;
    if (u > 0x7f800000) return uint16_t(sign | 0x7e00);
    if (u >= 0x477ff000) return uint16_t(sign | 0x7c00);
    if (u < 0x38800000) {  // subnormal: in a sum with 0.5 the last bit is 2^-24, the smallest half
        float y;
        memcpy(&y, &u, 4);
        y += 0.5f;
        memcpy(&u, &y, 4);
        return uint16_t(sign | (u - 0x3f000000));
    }
    u += 0xfff + ((u >> 13) & 1);
    return uint16_t(sign | ((u - 0x38000000) >> 13));
#endif
}
RL_INLINE void store_bf16(uint16_t* p, F x) {
    I u = bits(x);
    I rounded = (u + 0x7fff + ((u >> 16) & 1)) >> 16, quiet = (u >> 16) | 0x40;
    rounded = x == x ? rounded : quiet;
#if defined(__AVX512F__)
    _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16((__m512i)rounded));
#elif defined(RL_NEON)
    const int16x4_t halves = vmovn_s32((int32x4_t)rounded);
    memcpy(p, &halves, 8);
#else
    for (int i = 0; i < W; ++i) p[i] = uint16_t(rounded[i]);
#endif
}
RL_INLINE void store_f16(uint16_t* p, F x) {
#if defined(__AVX512F__)
    _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph(x, 0));
#elif defined(__F16C__)
    _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph(x, 0));
#elif defined(RL_NEON)
    const float16x4_t halves = vcvt_f16_f32(x);
    memcpy(p, &halves, 8);
#else
    for (int i = 0; i < W; ++i) p[i] = to_f16(x[i]);
#endif
}

RL_INLINE I from_i8(const int8_t* p) {
#if defined(__AVX512F__)
    return (I)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p));
#elif defined(__AVX2__)
    return (I)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p));
#elif defined(RL_NEON)
    uint32_t four;
    memcpy(&four, p, 4);
    return (I)vmovl_s16(vget_low_s16(vmovl_s8(vcreate_s8(four))));
#else
    I x;
    for (int i = 0; i < W; ++i) x[i] = p[i];
    return x;
#endif
}
RL_INLINE I from_u8(const uint8_t* p) {
#if defined(__AVX512F__)
    return (I)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p));
#elif defined(__AVX2__)
    return (I)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p));
#elif defined(RL_NEON)
    uint32_t four;
    memcpy(&four, p, 4);
    return (I)vmovl_u16(vget_low_u16(vmovl_u8(vcreate_u8(four))));
#else
    I x;
    for (int i = 0; i < W; ++i) x[i] = p[i];
    return x;
#endif
}
RL_INLINE void store_i8(int8_t* p, I x) {  // -128 <= x <= 127
#if defined(__AVX512F__)
    _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8((__m512i)x));
#elif defined(RL_NEON)
    const int8x16_t bytes = vuzp1q_s8(vuzp1q_s8((int8x16_t)x, (int8x16_t)x), (int8x16_t)x);
    memcpy(p, &bytes, 4);
#else
    for (int i = 0; i < W; ++i) p[i] = int8_t(x[i]);
#endif
}

}  // namespace ridgeline::RL_ISA
