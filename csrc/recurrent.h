// Recurrent mixers: what one thread does. Who does what is in recurrent.cpp.
//
// Every number of a state and of a result is one chain over the tokens, and over the states, ascending: chunks, batches
// and threads change no bit. States lie as the loops want them, with neighboring channels as neighbors in memory.
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

// A state of each sequence, in one piece: one after the other, or where it lies in pages. It may stand in the same
// place before and after: who works on a part of it has read that when he writes it.
template <class T> struct States {
    T* data;
    int64_t stride;
    const int64_t* pages;  // [n], or null
    T* of(int64_t i) const { return data + (pages ? pages[i] : i) * stride; }
};

// Each channel's own filter over a token and the `before` ones before it.
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

// h = exp(dt A) h + dt x B; y = C h + D x: a decay for each channel and state; dt = softplus of what is given.
struct SelectiveScan {
    Sequences s;
    int64_t channels, states;
    Matrix2<const float> x, dt, b, c;
    const float* a;              // [states, channels], negative
    const float* d;              // [channels]
    States<const float> before;  // [states, channels]
    States<float> h;             // the same, after
    Matrix2<float> y;
};

// h = decay h + x B; y = C h: a decay for each head and token. Heads of a group have B and C in common.
struct LinearScan {
    Sequences s;
    int64_t heads, width, states, group;
    Matrix2<const float> x, b, c;    // rows of heads, [width], [states] and [states]
    int64_t x_head, b_head, c_head;  // from one to the next; of B and C, of a group
    States<const float> before;      // [heads, states, width]
    States<float> h;
    Matrix2<float> y;    // rows [heads * width]
    const float* decay;  // [heads], the same for every token: lightning attention, which has nothing of what follows
    // Mamba-2: x is multiplied by dt = softplus(dt + bias), between least and most; the decay is exp(dt a); D x is
    // added.
    Matrix2<const float> dt = {};                                // rows [heads]
    const float *dt_bias = nullptr, *a = nullptr, *d = nullptr;  // [heads]
    float dt_least = 0, dt_most = 0;
};

// Linear attention: B and C are features of keys and queries, 1 + dim + dim^2 of them, there is no decay, and a last
// number of each head's values is 1. y: sums of values over sums of weights.
struct TaylorScan {
    Sequences s;
    int64_t heads, dim, width;  // of values, without the 1
    Matrix2<const float> q, k, v;
    States<const float> before;  // [heads, features, width + 1]
    States<float> h;
    Matrix2<float> y;
};

struct RecurrentKernels {
    void (*conv)(const ShortConv&, int64_t sequence, int64_t first, int64_t last);  // tokens
    void (*left)(const ShortConv&, int64_t sequence);                               // what the next step needs
    void (*selective)(const SelectiveScan&, int64_t sequence, int64_t first, int64_t last, float* room);  // channels
    void (*linear)(const LinearScan&, int64_t sequence, int64_t head, int64_t first, int64_t last,
                   float* room);  // of width
    void (*taylor)(const TaylorScan&, int64_t sequence, int64_t head, float* room);
    int64_t channels;  // of a piece of work for `selective` and `linear`: a multiple of this many, but for the last
    size_t (*room)(int64_t states);  // in floats, for any of them
};
RL_TABLE(RecurrentKernels, recurrent_kernels)

}  // namespace ridgeline
