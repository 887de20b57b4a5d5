// Draws tokens with noise of their own for every token id: src/ridgeline/sample/noise.py says how and why.
#pragma once
#include <cstdint>

#include "dispatch.h"

namespace ridgeline {

// Two words of 32 random bits for a token id come from the same rounds with these parts, 3 for each.
struct DrawKey {
    uint32_t parts[6];
};

struct DrawKernels {
    // Returns the index of the largest (x[i] - top) / temperature + noise of ids[i]; of equals the first one. ids: null
    // where id i is i. top: the largest x. temperature: above 1e-30.
    int64_t (*logits)(const float* x, const int64_t* ids, int64_t n, float top, double temperature,
                      const DrawKey& key);
    // Returns the index of the largest scores[i] + noise of ids[i], where ids may be null: i. scores: at most 0.
    int64_t (*scores)(const double* scores, const int64_t* ids, int64_t n, const DrawKey& key);
    // Writes the indices of the scores (x[i] - top) / temperature that are at least `least`, up to rounding in float,
    // to `found` [n + 1]; returns their number. Adds e^score of all others to `rest`. least: above -80.
    int64_t (*likely)(const float* x, int64_t n, float top, double temperature, float least, int64_t* found,
                      double& rest);
};
RL_TABLE(DrawKernels, draw_kernels)

// How the token of a row is drawn; src/ridgeline/ops/draws.py says what the numbers mean.
struct Draw {
    uint64_t key[4];
    double temperature;
    int64_t top_k;
    double top_p, min_p;

    bool is_greedy() const { return !(temperature > 1e-30); }
    bool is_filtered() const { return top_k > 0 || top_p < 1 || min_p > 0; }
};

// A token that a filter may keep.
struct Candidate {
    double score;
    float logit;
    uint32_t index;
};

// Memory for one draw from n logits.
struct DrawRoom {
    int64_t* found;         // n + 1
    Candidate* candidates;  // n
    double* scores;         // n
    static size_t bytes(int64_t n) { return size_t(n + 1) * (sizeof(int64_t) + sizeof(Candidate) + sizeof(double)); }
    static DrawRoom at(char* memory, int64_t n);
};

DrawKey draw_key(const uint64_t* words);

// Returns the index of the token that is drawn from n logits. ids: the tokens that have the noise; null: the indices.
// top: the largest logit, which is finite. room: used if there are filters.
int64_t draw_row(const float* x, const int64_t* ids, int64_t n, float top, const Draw& how, const DrawRoom& room);

}  // namespace ridgeline
