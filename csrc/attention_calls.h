// Attention and the write into pages, by all threads of a pool.
#pragma once
#include <vector>

#include "attention.h"
#include "threads.h"

namespace ridgeline {

void attend(Pool::Hold&, const AttentionStep& step, const std::vector<Sequence>& sequences);

// x [tokens, heads * numbers] into pages: [heads, numbers, page_tokens] of each if `turned`, else [heads, page_tokens,
// numbers]. Throws std::out_of_range for a place that is not there.
struct PageWrite {
    const float* from;
    int64_t tokens, stride, heads, numbers;
    const int64_t *page, *slot;
    float* to;
    int64_t pages, page_stride, page_tokens;
    bool turned;
};
void write_pages(Pool::Hold&, const PageWrite& w);

}  // namespace ridgeline
