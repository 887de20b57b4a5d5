// A square of 32 tokens times the 32 rows of a panel in the registers of a matrix unit. Besides simd.h and dots.h, only
// this file names instructions.
//
// Bytes: tokens come in blocks of 64 columns, [32][64] bytes with signs; rows as a panel of int8 has them, unsigned
// bytes in the order [columns / 4][32][4]. `DEPTH` columns (64 or 32) are multiplied at once. Sums are int32.
//
// bf16: tokens come in blocks of 32 columns, [32][32]; rows as a panel of bf16 has them, [columns / 2][32][2]. 32
// columns are multiplied at once. Sums are float32.
//
// Sums are [32 tokens][32 rows]. `rows` is 16 or 32: the tokens that count.
#pragma once
#include "matrix.h"
#include "simd.h"

namespace ridgeline::RL_ISA {

// ---- in plain C++ -------------------------------------------------------------------------------------------------

template <int DEPTH> struct EmulatedUnit {
    int32_t sum[SQUARE][SQUARE];

    void zero() { memset(sum, 0, sizeof sum); }
    void add(const int8_t* tokens, const char* panel, int rows) {
        for (int i = 0; i < rows; ++i)
            for (int k = 0; k < DEPTH; ++k)
                for (int j = 0; j < SQUARE; ++j)
                    sum[i][j] += int32_t(tokens[i * 64 + k]) * int32_t(uint8_t(panel[k / 4 * 128 + j * 4 + k % 4]));
    }
    void load(const int32_t* from, int rows) { memcpy(sum, from, size_t(rows) * sizeof sum[0]); }
    void store(int32_t* to, int rows) const { memcpy(to, sum, size_t(rows) * sizeof sum[0]); }
};

// The operation of TDPBF16PS (Intel 64 and IA-32 Architectures Software Developer's Manual, volume 2): for each sum two
// chains of fused multiply-adds from 0 over the pairs of columns, one over the first and one over the second of each
// pair; then the sum of the two is added to the sum so far. Every operation rounds to nearest even, takes denormal
// numbers as zeros and gives zeros for them (DAZ, FTZ), and no control register is read or written.
struct EmulatedBf16Unit {
    float sum[SQUARE][SQUARE];
    const char* last;  // the panel of the last `add`

    void zero() { memset(sum, 0, sizeof sum); }
    void add(const uint16_t* tokens, const char* panel, int rows) {
        last = panel;
        for (int i = 0; i < rows; ++i)
            for (int j = 0; j < SQUARE; j += W) {
                F even = {}, odd = {};
                for (int k = 0; k < BF16_DEPTH; k += 2) {
                    const I both = RL_ISA::load((const int32_t*)(panel + k * 64) + j);
                    const uint16_t* x = tokens + i * BF16_DEPTH + k;
                    even = fused(flushed(widened(x[0])), flushed(floats(both << 16)), even);
                    odd = fused(flushed(widened(x[1])), flushed(floats(both & (int32_t)0xffff0000)), odd);
                }
                RL_ISA::store(sum[i] + j, flushed(RL_ISA::load(sum[i] + j) + flushed(even + odd)));
            }
    }
    void add_slice(const uint16_t* tokens, int rows) { add(tokens, last, rows); }
    void load(const float* from, int rows) {
        for (int i = 0; i < rows * SQUARE; i += W) RL_ISA::store(&sum[0][0] + i, flushed(RL_ISA::load(from + i)));
    }
    void store(float* to, int rows) const { memcpy(to, sum, size_t(rows) * sizeof sum[0]); }

private:
    static F widened(uint16_t x) { return floats(set(int32_t(uint32_t(x) << 16))); }
    // x, or a zero of its sign for a denormal number. Sums of floats need no rounding where they are denormal.
    static F flushed(F x) { return abs(x) < set(0x1p-126f) ? floats(bits(x) & (int32_t)0x80000000) : x; }
    // a * b + c. As everywhere on x86, a result is denormal if it is after rounding to 24 bits: below 2^-126 - 2^-151,
    // from where on it is rounded up to 2^-126. Only near that must the sum be known exactly.
    static F fused(F a, F b, F c) {
        F r = fma_exact(a, b, c);
        if (!any((abs(r) <= set(0x1p-126f)) & (r != F{}))) return r;
        for (int i = 0; i < W; ++i) {
            const double exact = sum_to_odd(double(a[i]) * double(b[i]), c[i]);
            r[i] = __builtin_fabs(exact) < 0x1.ffffffp-127 ? __builtin_copysignf(0, r[i]) : float(exact);
        }
        return r;
    }
};

// Makes this thread's vectors take and give zeros for denormal numbers while it lives, as a matrix unit does. The
// arithmetic in between is in a function that the compiler does not know: it would move it out of here.
struct Flushing {
#if defined(__x86_64__)
    uint32_t before;
    Flushing() {
        const uint32_t flushed = 0x9fc0;  // FTZ, DAZ, no exceptions, to nearest even
        asm volatile("stmxcsr %0" : "=m"(before)::"memory");
        asm volatile("ldmxcsr %0" ::"m"(flushed) : "memory");
    }
    ~Flushing() { asm volatile("ldmxcsr %0" ::"m"(before) : "memory"); }
#endif  // ARM finds out before rounding that a number is denormal, which has other bits
};

// ---- AMX ------------------------------------------------------------------------------------------------------------

#if defined(RL_HAS_AMX) && (defined(__AVX512VNNI__) || defined(RL_TRAPPED_AMX))
#define RL_AMX_UNIT
// Tiles 0 to 3 hold the sums, 4 and 5 the two halves of the panel's rows, 6 and 7 those of the tokens. The instructions
// are written as asm: g++ 12 drops most stores of a configuration before its `_tile_loadconfig`. A configuration lasts
// as long as the object, of which a thread has one at a time.
struct AmxTiles {
    // token_bytes: of a token in a tile. steps: lines of a panel in a tile.
    AmxTiles(int token_bytes, int steps) {
        alignas(64) uint8_t config[64] = {1};  // palette
        for (int tile = 0; tile < 8; ++tile) {
            const bool is_panel = tile == 4 || tile == 5, is_tokens = tile > 5;
            config[16 + 2 * tile] = uint8_t(is_tokens ? token_bytes : 64);  // bytes of a row
            config[48 + tile] = uint8_t(is_panel ? steps : 16);             // rows
        }
        asm volatile("ldtilecfg %0" ::"m"(config));
    }
    ~AmxTiles() { asm volatile("tilerelease"); }
    AmxTiles(const AmxTiles&) = delete;

    void zero() {
        asm volatile(
            "tilezero %tmm0\n\t"
            "tilezero %tmm1\n\t"
            "tilezero %tmm2\n\t"
            "tilezero %tmm3");
    }
    void load(const void* from, int rows) {
        const int64_t line = SQUARE * 4;
        asm volatile(
            "tileloadd (%0,%1,1), %%tmm0\n\t"
            "tileloadd 64(%0,%1,1), %%tmm1" ::"r"(from),
            "r"(line)
            : "memory");
        if (rows == 16) return;
        asm volatile(
            "tileloadd 2048(%0,%1,1), %%tmm2\n\t"
            "tileloadd 2112(%0,%1,1), %%tmm3" ::"r"(from),
            "r"(line)
            : "memory");
    }
    void store(void* to, int rows) const {
        const int64_t line = SQUARE * 4;
        asm volatile(
            "tilestored %%tmm0, (%0,%1,1)\n\t"
            "tilestored %%tmm1, 64(%0,%1,1)" ::"r"(to),
            "r"(line)
            : "memory");
        if (rows == 16) return;
        asm volatile(
            "tilestored %%tmm2, 2048(%0,%1,1)\n\t"
            "tilestored %%tmm3, 2112(%0,%1,1)" ::"r"(to),
            "r"(line)
            : "memory");
    }
};

template <int DEPTH> struct AmxUnit : AmxTiles {
    AmxUnit() : AmxTiles(DEPTH, DEPTH / 4) {}
    void add(const int8_t* tokens, const char* panel, int rows) {
        const int64_t line = 128, token = 64;
        asm volatile(
            "tileloadd (%0,%1,1), %%tmm4\n\t"
            "tileloadd (%2,%3,1), %%tmm6\n\t"
            "tdpbsud %%tmm4, %%tmm6, %%tmm0\n\t"
            "tileloadd 64(%0,%1,1), %%tmm5\n\t"
            "tdpbsud %%tmm5, %%tmm6, %%tmm1" ::"r"(panel),
            "r"(line), "r"(tokens), "r"(token)
            : "memory");
        if (rows == 16) return;
        asm volatile(
            "tileloadd 1024(%0,%1,1), %%tmm7\n\t"
            "tdpbsud %%tmm4, %%tmm7, %%tmm2\n\t"
            "tdpbsud %%tmm5, %%tmm7, %%tmm3" ::"r"(tokens),
            "r"(token)
            : "memory");
    }
    // Adds the products of the last 32 tokens once more, for a loop that measures speed.
    void add_again() {
        asm volatile(
            "tdpbsud %tmm4, %tmm6, %tmm0\n\t"
            "tdpbsud %tmm5, %tmm6, %tmm1\n\t"
            "tdpbsud %tmm4, %tmm7, %tmm2\n\t"
            "tdpbsud %tmm5, %tmm7, %tmm3");
    }
};

struct AmxBf16Unit : AmxTiles {
    AmxBf16Unit() : AmxTiles(64, 16) {}
    void add(const uint16_t* tokens, const char* panel, int rows) {
        const int64_t line = 128;
        asm volatile(
            "tileloadd (%0,%1,1), %%tmm4\n\t"
            "tileloadd 64(%0,%1,1), %%tmm5" ::"r"(panel),
            "r"(line)
            : "memory");
        add_slice(tokens, rows);
    }
    // Adds other tokens times the columns of the panel that the last `add` loaded.
    void add_slice(const uint16_t* tokens, int rows) {
        const int64_t token = 64;
        asm volatile(
            "tileloadd (%0,%1,1), %%tmm6\n\t"
            "tdpbf16ps %%tmm4, %%tmm6, %%tmm0\n\t"
            "tdpbf16ps %%tmm5, %%tmm6, %%tmm1" ::"r"(tokens),
            "r"(token)
            : "memory");
        if (rows == 16) return;
        asm volatile(
            "tileloadd 1024(%0,%1,1), %%tmm7\n\t"
            "tdpbf16ps %%tmm4, %%tmm7, %%tmm2\n\t"
            "tdpbf16ps %%tmm5, %%tmm7, %%tmm3" ::"r"(tokens),
            "r"(token)
            : "memory");
    }
    // Likewise, for a loop that measures speed.
    void add_again() {
        asm volatile(
            "tdpbf16ps %tmm4, %tmm6, %tmm0\n\t"
            "tdpbf16ps %tmm5, %tmm6, %tmm1\n\t"
            "tdpbf16ps %tmm4, %tmm7, %tmm2\n\t"
            "tdpbf16ps %tmm5, %tmm7, %tmm3");
    }
};
#endif

}  // namespace ridgeline::RL_ISA
