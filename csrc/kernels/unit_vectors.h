// The arithmetic of a matrix unit with bf16, in vectors: for few tokens, which leave tiles empty. Denormal numbers are
// zeros as long as `Flushing` lives.
#pragma once
#include "tiles.h"

namespace ridgeline::RL_ISA {

constexpr int64_t BF16_BLOCK = BF16_DEPTH * PANEL * 2;  // bytes of a block of columns of a panel

// Vectors of a panel in one pass: both chains of each sum, the weights and a token fit into the registers.
constexpr int chain_vectors(int m) {
    int n = VECTORS;
    while (n > 1 && 2 * n * m + (m > 1 ? 2 * n : 2) + 1 > REGISTERS) n /= 2;
    return n;
}

// Adds a slice of a block of 32 columns to the sums. a: [32][m].
template <int m, int N>
RL_INLINE void add_chains(const char* w, const float* a, int pass, float* c, bool first, Fetch& ahead, bool fetches) {
    F chain[2][m][N] = {};
    for (int k = 0; k < BF16_DEPTH; k += 2, w += 128, a += 2 * m) {
        if (fetches) fetch<2>(ahead, 128 / ahead.tiles);
        F x[2][N];
        RL_FOR(v, N) {
            const I both = load((const int32_t*)w + (pass + v) * W);
            x[0][v] = floats(both << 16);
            x[1][v] = floats(both & (int32_t)0xffff0000);
        }
        RL_FOR(j, 2)
            RL_FOR(i, m) {
                const F y = set(a[j * m + i]);
                RL_FOR(v, N) chain[j][i][v] = fma_exact(x[j][v], y, chain[j][i][v]);
            }
    }
    RL_FOR(i, m)
        RL_FOR(v, N) {
            float* at = c + i * PANEL + (pass + v) * W;
            store(at, (first ? F{} : load(at)) + (chain[0][i][v] + chain[1][i][v]));
        }
}

// A tile of m tokens times some blocks of a panel. a: [blocks][slices][32][m].
template <int m>
void sliced_tile(const char* panel, const float* a, int64_t blocks, int slices, float* c, bool first, Fetch ahead) {
    constexpr int N = chain_vectors(m);
    for (int64_t b = 0; b < blocks; ++b, panel += BF16_BLOCK)
        for (int s = 0; s < slices; ++s, a += BF16_DEPTH * m)
            for (int pass = 0; pass < VECTORS; pass += N)
                add_chains<m, N>(panel, a, pass, c, first && b == 0 && s == 0, ahead, s == 0 && pass == 0);
}

}  // namespace ridgeline::RL_ISA
