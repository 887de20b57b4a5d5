// Recurrent mixers: the work of one thread. recurrent.cpp divides it between threads.
//
// Every number of a state and of a result is one chain over the tokens, and over the states, ascending: chunks, batches
// and threads change no bit. Neighboring channels of a state are neighbors in memory, as the loops need.
#pragma once
#include <cstddef>
#include <cstdint>

#include "dispatch.h"

namespace ridgeline {

// n sequences of up to m tokens: token t of sequence i is row i * m + t of every matrix of rows.
template <class T> struct Matrix2 {
    T* data;
    int64_t stride;
    T* row(int64_t i) const { return data + i * stride; }
};

struct Sequences {
    int64_t n, m;
    const int64_t* lengths;  // [n], 1 .. m
};

// A dense state for each sequence: one after the other, or in pages. A kernel may read and write the same state, since
// each thread reads a part of the state before it writes that part.
template <class T> struct States {
    T* data;
    int64_t stride;
    const int64_t* pages;  // [n], or null
    T* of(int64_t i) const { return data + (pages ? pages[i] : i) * stride; }
};

// A filter for each channel over a token and the `before` tokens before it.
struct ShortConv {
    Sequences s;
    int64_t channels, before;
    Matrix2<const float> x;
    States<const float> kept;  // [before, channels]
    const float* weight;       // [before + 1, channels]
    const float* bias;         // [channels] or null
    Matrix2<float> y;
    States<float> left;  // [before, channels]
};

// h = exp(dt A) h + dt x B; y = C h + D x, with a decay for each channel and state. dt is given before softplus.
struct SelectiveScan {
    Sequences s;
    int64_t channels, states;
    Matrix2<const float> x, dt, b, c;
    const float* a;              // [states, channels], negative
    const float* d;              // [channels]
    States<const float> before;  // [states, channels]
    States<float> h;             // the state after
    Matrix2<float> y;
};

// h = decay h + x B; y = C h, with a decay for each head and token. Heads of a group share B and C.
struct LinearScan {
    Sequences s;
    int64_t heads, width, states, group;
    Matrix2<const float> x, b, c;    // rows of heads, [width], [states] and [states]
    int64_t x_head, b_head, c_head;  // from a head to the next; b_head and c_head: from a group to the next
    States<const float> before;      // [heads, states, width]
    States<float> h;
    Matrix2<float> y;    // rows [heads * width]
    const float* decay;  // [heads], for all tokens: lightning attention, which does not use the members below
    // Mamba-2: dt = softplus(dt + bias), limited to [least, most]; x is multiplied by dt; the decay is exp(dt a); D x
    // is added.
    Matrix2<const float> dt = {};                                // rows [heads]
    const float *dt_bias = nullptr, *a = nullptr, *d = nullptr;  // [heads]
    float dt_least = 0, dt_most = 0;
};

// Linear attention: B and C are features of keys and queries, without a decay: 1 + dim + dim^2 of BASED, or 2 dim of
// Hedgehog. Each head's values end with a 1. y: sums of values divided by sums of weights.
struct TaylorScan {
    Sequences s;
    int64_t heads, dim, width;  // width: size of a value without the 1
    bool is_hedgehog;
    Matrix2<const float> q, k, v;
    States<const float> before;  // [heads, features, width + 1]
    States<float> h;
    Matrix2<float> y;

    int64_t features() const { return is_hedgehog ? 2 * dim : 1 + dim + dim * dim; }
};

struct RecurrentKernels {
    void (*conv)(const ShortConv&, int64_t sequence, int64_t first, int64_t last);  // tokens
    void (*left)(const ShortConv&, int64_t sequence);  // the inputs that the next step needs
    void (*selective)(const SelectiveScan&, int64_t sequence, int64_t first, int64_t last, float* room);  // channels
    void (*linear)(const LinearScan&, int64_t sequence, int64_t head, int64_t first, int64_t last,
                   float* room);  // of width
    void (*taylor)(const TaylorScan&, int64_t sequence, int64_t head, float* room);
    int64_t channels;  // pieces of work for `selective` and `linear` are multiples of this, except for the last
    size_t (*room)(int64_t states);  // in floats, for any of them
};
RL_TABLE(RecurrentKernels, recurrent_kernels)

}  // namespace ridgeline
