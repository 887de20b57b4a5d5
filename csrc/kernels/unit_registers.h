// A square of 32 tokens times the 32 rows of a panel in the registers of a matrix unit. Besides simd.h and dots.h, only
// this file names instructions.
//
// Tokens come in blocks of 64 columns, [32][64] bytes with signs; rows as a panel of int8 has them, unsigned bytes in
// the order [columns / 4][32][4]. `DEPTH` columns (64 or 32) are multiplied at once. Sums are [32 tokens][32 rows].
#pragma once
#include "matrix.h"
#include "simd.h"

namespace ridgeline::RL_ISA {

template <int DEPTH> struct EmulatedUnit {
    int32_t sum[SQUARE][SQUARE];

    void zero() { memset(sum, 0, sizeof sum); }
    // rows: 16 or 32, tokens that count.
    void add(const int8_t* tokens, const char* panel, int rows) {
        for (int i = 0; i < rows; ++i)
            for (int k = 0; k < DEPTH; ++k)
                for (int j = 0; j < SQUARE; ++j)
                    sum[i][j] += int32_t(tokens[i * 64 + k]) * int32_t(uint8_t(panel[k / 4 * 128 + j * 4 + k % 4]));
    }
    void store(int32_t* to, int rows) const { memcpy(to, sum, size_t(rows) * sizeof sum[0]); }
};

#if defined(RL_HAS_AMX) && defined(__AVX512VNNI__)
#define RL_AMX_UNIT
// Tiles 0 to 3 hold the sums, 4 and 5 the two halves of the panel's rows, 6 and 7 those of the tokens. The instructions
// are written as asm: g++ 12 drops most stores of a configuration before its `_tile_loadconfig`.
template <int DEPTH> struct AmxUnit {
    AmxUnit() {
        alignas(64) uint8_t config[64] = {1};  // palette
        for (int tile = 0; tile < 8; ++tile) {
            const bool is_panel = tile == 4 || tile == 5, is_tokens = tile > 5;
            config[16 + 2 * tile] = is_tokens ? DEPTH : 64;          // bytes of a row
            config[48 + tile] = uint8_t(is_panel ? DEPTH / 4 : 16);  // rows
        }
        asm volatile("ldtilecfg %0" ::"m"(config));
    }
    ~AmxUnit() { asm volatile("tilerelease"); }
    AmxUnit(const AmxUnit&) = delete;

    void zero() {
        asm volatile(
            "tilezero %tmm0\n\t"
            "tilezero %tmm1\n\t"
            "tilezero %tmm2\n\t"
            "tilezero %tmm3");
    }
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
    void store(int32_t* to, int rows) const {
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
#endif

}  // namespace ridgeline::RL_ISA
