// Attention over pages: the work of one thread. attention.cpp divides it between threads.
//
// The arithmetic of a query and head, which no other query, batch or page layout changes:
//   score    a chain over the key's numbers, ascending
//   tile     TILE keys from a multiple of TILE on: their largest score, their weights exp(score - largest so far),
//            sums of every 16th weight, and a chain over the keys, ascending, for the values
//   segment  SEGMENT keys from a multiple of SEGMENT on, tile after tile; each tile rescales the results before it
//   all      segment after segment, in the same way
// Different threads may compute segments; the order of operations stays, and so do the bits.
//
// A process with a matrix unit (matrix_unit.h) has another arithmetic for keys and values of 16 bits. Tiles, segments
// and weights with their sums are the same. Queries and weights are sums of two slices of bf16: the nearest one,
// and the nearest to the rest. Halves are two such slices without an error. Products of slices are exact.
//   score    32 numbers after 32: for each pair of slices a chain over numbers 0 to 15 and one over 16 to 31, which are
//            added, and then added to the score. Pairs: first with first, the query's second with the key's first, the
//            query's first with the key's second if there is one
//   tile     likewise over its keys, 32 after 32; the sum is added to the rescaled results
//
// Rounded attention, which users choose, has one slice in place of two: queries, keys, values and weights are the
// nearest numbers of bf16, ties to even, and sums of weights are of rounded ones. In a matrix unit all else is as
// above. In vectors, products are dots of pairs of bf16 (dots.h):
//   score    a chain over the pairs of neighboring numbers, ascending
//   tile     sums of every 16th pair of weights, and for the values a chain over the pairs of neighboring keys,
//            ascending
//
// Drafts that form a tree are in neighboring slots, but a draft is at the position that it would have after its
// ancestors alone. The keys of a draft are the known tokens and then its path, so that it has the bits of a chain.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "dispatch.h"
#include "pages.h"

namespace ridgeline {

constexpr int TILE = 64;
constexpr int SEGMENT = 512;
constexpr int QUERIES = 144;    // most rows of one piece of work: queries of all heads of a group
constexpr int UNIT_ROWS = 256;  // the same in a matrix unit

enum class Pattern { none, first_tokens, dilated, strided };

struct AttentionCase {
    int heads, kv_heads, key_dim, value_dim;
    float scale;
    float softcap;   // 0: none
    int64_t window;  // number of keys, with the query's own; 0: all
    Pattern pattern;
    int64_t number;  // first tokens, step or stride of the pattern
    int64_t block = 1;  // tokens that see each other and all before them; 1: causal attention. Above 1: no window

    int group() const { return heads / kv_heads; }
    int64_t lookback() const {  // tokens before a query that it may attend to, without first tokens
        return window == 0 || pattern == Pattern::strided ? INT64_MAX
               : pattern == Pattern::dilated              ? (window - 1) * number
                                                          : window - 1;
    }
};

// Keys and values of one layer, in pages; strides are in bytes. Number d of a key of head h in slot s of page p is at
//   keys + p * key_page + h * key_head + (d * page_tokens + s) * size    if `transposed`: keys are neighbors
//   keys + p * key_page + h * key_head + s * key_row + d * size          if not
// and number d of its value is at
//   values + p * value_page + h * value_head + s * value_row + d * size
// Integers (int8) are multiples of a float32 scale for each head and token. The scale may have any alignment; it is at
//   keys + p * key_page + h * key_head + key_scale + s * key_scale_row
// and, for values, at the same expression of the value strides.
//
// All keys are what stored.h reads times `key_factor`, all values times `value_factor`.
struct KeyValues {
    StateType stored;
    const char *keys, *values;
    int64_t pages, page_tokens;
    int64_t key_page, key_head, key_row;
    int64_t value_page, value_head, value_row;
    bool transposed;
    int64_t key_scale = 0, key_scale_row = 0, value_scale = 0, value_scale_row = 0;
    float key_factor = 1.f, value_factor = 1.f;
};

// The queries of one sequence: `length` of them, the first in slot `start` and in row `row` of the step. A slot is a
// position unless drafts form a tree.
struct Sequence {
    int64_t start, length, row;
    const int64_t* table;  // page numbers; null: page i is i, and the first key is in slot `base` of page 0
    int64_t table_size, base;
    const int64_t* paths = nullptr;  // of each query: bit i is the draft in slot `limit` + i; null: it has no tree
    int64_t limit = 0;               // slot of the first draft, with `paths`

    uint64_t path(int64_t query) const { return paths ? uint64_t(paths[query]) : 0; }
    int64_t position(int64_t query) const {
        const uint64_t drafts = path(query);
        return drafts ? limit - 1 + __builtin_popcountll(drafts) : start + query;
    }
    // The end of the block of `at`, or the last query's slot if the block ends later.
    int64_t end_of_block(int64_t at, int64_t block) const {
        return block == 1 ? at : std::min(at / block * block + (block - 1), start + length - 1);
    }
    // The last slot that a query and those before it attend to.
    int64_t last_slot(int64_t query, int64_t block) const { return end_of_block(start + query, block); }
    // No query from this one on is at a lower position.
    int64_t lowest(int64_t query) const { return paths && start + query > limit ? limit : start + query; }
};

struct AttentionStep {
    const AttentionCase& c;
    const KeyValues& kv;
    const float* q;  // [rows, heads, key_dim]
    int64_t q_stride;
    const float* sinks;  // [heads] or null
    float* out;          // [rows, heads, value_dim]
    int64_t out_stride;
};

// Queries [first, last) of a sequence, key heads [head, head_end), segments [begin, end).
struct AttentionWork {
    const Sequence* sequence;
    int head, head_end;
    int64_t first, last, begin, end;
    float* partial;  // null: the piece has all segments and writes out; else [segments, rows, value_dim + 2]
    int64_t rows(const AttentionCase& c) const { return (head_end - head) * (last - first) * c.group(); }
};

struct AttentionKernels {
    void (*attend[5])(const AttentionStep&, const AttentionWork&, float* room);  // by StateType
    // Computes out from the partial results of all segments.
    void (*merge)(const AttentionStep&, const AttentionWork&, float* room);
    size_t (*room)(const AttentionCase&, StateType, int64_t rows);  // in floats
};
RL_TABLE(AttentionKernels, attention_kernels)

struct UnitAttention {  // by StateType; null for types that the unit does not serve
    void (*attend[5])(const AttentionStep&, const AttentionWork&, float* room);
    size_t (*room[5])(const AttentionCase&, int64_t rows);
};
struct UnitAttentionKernels {
    UnitAttention exact, rounded;
};
RL_TABLE(UnitAttentionKernels, unit_attention_kernels)

struct RoundedAttentionKernels {  // by StateType; null for types that they do not serve
    void (*attend[5])(const AttentionStep&, const AttentionWork&, float* room);
    size_t (*room)(const AttentionCase&, int64_t rows);
};
RL_TABLE(RoundedAttentionKernels, rounded_attention_kernels)

}  // namespace ridgeline
