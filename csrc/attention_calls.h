// Attention and writes into pages, on all threads of a pool.
#pragma once
#include <string>
#include <vector>

#include "attention.h"
#include "threads.h"

namespace ridgeline {

// Whether this process computes attention over keys and values of this type in its matrix unit.
bool attends_in_unit(StateType);
// Why this process cannot round attention over keys and values of 16 bits; empty if it can. A pool does so if its
// `rounds_attention` is set, which must not be set otherwise.
std::string rounded_refusal();

void attend(Pool::Hold&, const AttentionStep& step, const std::vector<Sequence>& sequences);

// Writes x [tokens, heads * numbers] into pages with the layout of Tokens. Strides of pages are in bytes. Throws
// std::out_of_range for a page or slot that does not exist.
struct PageWrite {
    const float* from;
    int64_t tokens, stride, heads, numbers;
    const int64_t *page, *slot;
    StateType stored;
    char* to;
    int64_t pages, page_stride, page_tokens;
    bool transposed;
    float scale;  // of fp8
};
void write_pages(Pool::Hold&, const PageWrite& w);

// Moves rows of one part of a layer's state between slots of pages, one after the other; the layout is that of Tokens.
// Strides are in bytes. Throws std::out_of_range for a page or slot that does not exist, before it moves any row.
struct RowMoves {
    char* pages;
    int64_t count, page_stride, page_tokens, heads, numbers;
    StateType stored;
    bool transposed;
    int64_t rows;
    const int64_t *from_page, *from_slot, *to_page, *to_slot;
};
void move_rows(const RowMoves& m);

}  // namespace ridgeline
