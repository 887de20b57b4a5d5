// Attention and the write into pages, by all threads of a pool.
#pragma once
#include <vector>

#include "attention.h"
#include "threads.h"

namespace ridgeline {

void attend(Pool::Hold&, const AttentionStep& step, const std::vector<Sequence>& sequences);

// x [tokens, heads * numbers] into pages, of which a part lies as Tokens says. Strides of pages are in bytes. Throws
// std::out_of_range for a place that is not there.
struct PageWrite {
    const float* from;
    int64_t tokens, stride, heads, numbers;
    const int64_t *page, *slot;
    StateType stored;
    char* to;
    int64_t pages, page_stride, page_tokens;
    bool transposed;
};
void write_pages(Pool::Hold&, const PageWrite& w);

}  // namespace ridgeline
