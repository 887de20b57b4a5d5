#include "recurrent_calls.h"

#include <algorithm>

namespace ridgeline {
namespace {

struct Rooms {
    size_t each;
    float* data;
    Rooms(Pool::Hold& hold, size_t floats)
        : each((floats + 15) / 16 * 16), data((float*)hold.scratch(0, each * size_t(hold.threads()) * sizeof(float))) {}
    float* of(int thread) const { return data + each * size_t(thread); }
};

// Calls f(sequence, begin, end, thread) on pieces of [0, all) for each of n sequences.
template <class Work> void draw_pieces(Pool::Hold& hold, int64_t n, int64_t all, int64_t piece, Work&& f) {
    const int64_t pieces = (all + piece - 1) / piece;
    hold.draw(n * pieces, [&](int64_t i, int thread) {
        const int64_t begin = i % pieces * piece;
        f(i / pieces, begin, std::min(all, begin + piece), thread);
    });
}

// Returns the size of a piece in whole units, such that every thread gets several.
int64_t piece_of(int64_t n, int64_t all, int64_t unit, int threads) {
    const int64_t wanted = n * all / (int64_t(threads) * 4);
    return std::max(unit, wanted / unit * unit);
}

}  // namespace

void run(Pool::Hold& hold, const ShortConv& c) {
    draw_pieces(hold, c.s.n, c.s.m, piece_of(c.s.n, c.s.m, 16, hold.threads()),
                [&](int64_t i, int64_t first, int64_t last, int) { recurrent_kernels().conv(c, i, first, last); });
    for (int64_t i = 0; i < c.s.n; ++i) recurrent_kernels().left(c, i);
}

void run(Pool::Hold& hold, const SelectiveScan& s) {
    const RecurrentKernels& kernels = recurrent_kernels();
    const Rooms rooms(hold, kernels.room(s.states));
    const int64_t piece = piece_of(s.s.n, s.channels, kernels.channels, hold.threads());
    draw_pieces(hold, s.s.n, s.channels, piece, [&](int64_t i, int64_t first, int64_t last, int thread) {
        kernels.selective(s, i, first, last, rooms.of(thread));
    });
}

void run(Pool::Hold& hold, const LinearScan& s) {
    const RecurrentKernels& kernels = recurrent_kernels();
    const Rooms rooms(hold, kernels.room(s.states));
    draw_pieces(hold, s.s.n * s.heads, s.width, kernels.channels,
                [&](int64_t i, int64_t first, int64_t last, int thread) {
                    kernels.linear(s, i / s.heads, i % s.heads, first, last, rooms.of(thread));
                });
}

void run(Pool::Hold& hold, const DeltaScan& s) {
    const Rooms rooms(hold, delta_kernels().room(s.dim));
    hold.draw(s.s.n * s.heads,
              [&](int64_t i, int thread) { delta_kernels().scan(s, i / s.heads, i % s.heads, rooms.of(thread)); });
}

void run(Pool::Hold& hold, const GatedLru& s) {
    const int64_t piece = piece_of(s.s.n, s.channels, gated_lru_kernels().channels, hold.threads());
    draw_pieces(hold, s.s.n, s.channels, piece,
                [&](int64_t i, int64_t first, int64_t last, int) { gated_lru_kernels().scan(s, i, first, last); });
    // At last, as each piece reads whether a sequence has begun.
    for (int64_t i = 0; i < s.s.n; ++i) std::fill_n(s.begins.of(i), s.flags, 1.f);
}

void run(Pool::Hold& hold, const StateSpace& s) {
    const Rooms rooms(hold, size_t(2 * s.modes * StateSpace::BLOCK));
    hold.draw(s.s.n * s.blocks(), [&](int64_t i, int thread) {
        state_space_kernels().scan(s, i / s.blocks(), i % s.blocks(), rooms.of(thread));
    });
}

void run(Pool::Hold& hold, const TaylorScan& s) {
    const Rooms rooms(hold, recurrent_kernels().room(s.features()));
    hold.draw(s.s.n * s.heads, [&](int64_t i, int thread) {
        recurrent_kernels().taylor(s, i / s.heads, i % s.heads, rooms.of(thread));
    });
}

}  // namespace ridgeline
