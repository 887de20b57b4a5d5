// State in pages: the stored types of numbers, and writing them.
//
// bfloat16, float16: the nearest number, ties to even. In float16 finite numbers beyond 65,504 become 65,504.
//
// int8: each head of a token has a float32 scale, the largest magnitude over 127, and its numbers are stored as the
// nearest multiples of it, ties to even. Magnitudes below about 2^-121, whose scale has no reciprocal, become 0. A head
// with an infinity or a NaN gets the scale NaN.
//
// fp8: e4m3 of the number over a scale, which all keys of a layer share, or all of its values. Finite quotients beyond
// 448 become 448, infinities NaN.
#pragma once
#include <cstdint>

#include "dispatch.h"

namespace ridgeline {

enum class StateType { float32, bfloat16, float16, int8, fp8 };
constexpr int64_t size_of(StateType s) { return s == StateType::float32 ? 4 : s >= StateType::int8 ? 1 : 2; }
constexpr int64_t scale_bytes(StateType s) { return s == StateType::int8 ? 4 : 0; }

// Writes n tokens, [heads, numbers] each and `stride` numbers apart, into neighboring slots of a page at `to`. Head h
// begins at to + h * head: [numbers, page_tokens] if `transposed`, else [page_tokens, numbers]; then the scales,
// [page_tokens]. slot: the slot of the first token. scale: that of fp8.
struct Tokens {
    const float* from;
    int64_t stride, n, heads, numbers;
    char* to;
    int64_t head, page_tokens, slot;
    bool transposed;
    float scale;
};

struct PageKernels {
    void (*write[5])(const Tokens&);  // by StateType
};
RL_TABLE(PageKernels, page_kernels)

}  // namespace ridgeline
