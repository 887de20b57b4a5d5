// Attention over pages in every stored type, with the writes into the pages.
#include <algorithm>

#include "attention_calls.h"
#include "checks/results.h"

namespace ridgeline {
namespace {

constexpr int64_t PAGE_TOKENS = 16, PAGES = 40;
constexpr float FP8_SCALE = 0.0123f;

// One part of a layer's state, [pages, heads], each head with its numbers and then its scales.
struct Arena {
    int64_t heads, numbers;
    StateType stored;
    bool transposed;
    Pages memory;
    Arena(int64_t heads, int64_t numbers, StateType stored, bool transposed)
        : heads(heads), numbers(numbers), stored(stored), transposed(transposed), memory(size_t(PAGES * page())) {}
    int64_t row() const { return numbers * size_of(stored); }
    int64_t scales() const { return PAGE_TOKENS * row(); }
    int64_t head() const { return scales() + PAGE_TOKENS * scale_bytes(stored); }
    int64_t page() const { return heads * head(); }

    // Writes tokens of a sequence to the slots of its pages.
    void write(Pool::Hold& hold, const std::vector<float>& x, const std::vector<int64_t>& table) {
        const int64_t tokens = int64_t(x.size()) / (heads * numbers);
        std::vector<int64_t> pages, slots;
        for (int64_t t = 0; t < tokens; ++t)
            pages.push_back(table[size_t(t / PAGE_TOKENS)]), slots.push_back(t % PAGE_TOKENS);
        write_pages(hold, {.from = x.data(),
                           .tokens = tokens,
                           .stride = heads * numbers,
                           .heads = heads,
                           .numbers = numbers,
                           .page = pages.data(),
                           .slot = slots.data(),
                           .stored = stored,
                           .to = memory.data(),
                           .pages = PAGES,
                           .page_stride = page(),
                           .page_tokens = PAGE_TOKENS,
                           .transposed = transposed,
                           .scale = FP8_SCALE});
    }
};

KeyValues key_values(const Arena& k, const Arena& v) {
    const float factor = k.stored == StateType::fp8 ? FP8_SCALE * 256.f : 1.f;
    return {.stored = k.stored,
            .keys = k.memory.data(),
            .values = v.memory.data(),
            .pages = PAGES,
            .page_tokens = PAGE_TOKENS,
            .key_page = k.page(),
            .key_head = k.head(),
            .key_row = k.row(),
            .value_page = v.page(),
            .value_head = v.head(),
            .value_row = v.row(),
            .transposed = k.transposed,
            .key_scale = k.scales(),
            .key_scale_row = 4,
            .value_scale = v.scales(),
            .value_scale_row = 4,
            .key_factor = factor,
            .value_factor = factor};
}

void attend_once(Pool& pool, Results& results, const std::string& name, AttentionCase c, StateType stored,
                 bool transposed, const std::vector<int64_t>& lengths) {
    Random random(2);
    Arena keys(c.kv_heads, c.key_dim, stored, transposed), values(c.kv_heads, c.value_dim, stored, false);
    const int64_t each = PAGES / int64_t(lengths.size());
    std::vector<std::vector<int64_t>> tables;
    std::vector<Sequence> sequences;
    int64_t rows = 0;
    Pool::Hold hold(pool);
    for (size_t i = 0; i < lengths.size(); ++i) {
        const int64_t start = 40 * int64_t(i), all = start + lengths[i];
        tables.emplace_back();
        for (int64_t p = 0; p < each; ++p) tables[i].push_back(int64_t(i + 1) * each - 1 - p);  // from the last page on
        keys.write(hold, random.floats(all * c.kv_heads * c.key_dim, 4), tables[i]);
        values.write(hold, random.floats(all * c.kv_heads * c.value_dim, 2), tables[i]);
        sequences.push_back({start, lengths[i], rows, nullptr, each, 0});
        rows += lengths[i];
    }
    for (size_t i = 0; i < lengths.size(); ++i) sequences[i].table = tables[i].data();
    const std::vector<float> q = random.floats(rows * c.heads * c.key_dim), sinks = random.floats(c.heads);
    Output out(rows, c.heads * c.value_dim);
    const KeyValues kv = key_values(keys, values);
    attend(hold, {c, kv, q.data(), c.heads * c.key_dim, sinks.data(), out.data(), out.stride}, sequences);
    results.add(name, false, out);
}

// Bytes of pages after a write, as numbers.
void written(Pool& pool, Results& results, const std::string& name, StateType stored, bool transposed) {
    Random random(3);
    Arena arena(2, 63, stored, transposed);
    Pool::Hold hold(pool);
    arena.write(hold, random.floats(20 * 2 * 63, 700), {1, 0});
    Output out(2, arena.page());
    for (int64_t r = 0; r < 2; ++r)
        std::copy_n((const uint8_t*)arena.memory.data() + r * arena.page(), arena.page(), out.data() + r * out.stride);
    results.add(name + ", bytes", true, out);
}

}  // namespace

void check_attention(Pool& pool, Results& results) {
    const char* types[] = {"float32", "bfloat16", "float16", "int8", "fp8"};
    const AttentionCase plain{6, 2, 64, 64, 0.125f, 0, 0, Pattern::none, 0};
    AttentionCase uneven{4, 4, 63, 100, 0.3f, 20, 50, Pattern::none, 0};
    AttentionCase first = plain;
    first.window = 30, first.pattern = Pattern::first_tokens, first.number = 4;
    for (int i = 0; i < 5; ++i)
        for (bool transposed : {true, false}) {
            const StateType stored = StateType(i);
            const std::string name = std::string("attention, ") + types[i] + (transposed ? ", transposed" : "");
            attend_once(pool, results, name + ", plain", plain, stored, transposed, {63, 1, 100});
            attend_once(pool, results, name + ", uneven", uneven, stored, transposed, {3, 17});
            attend_once(pool, results, name + ", long", first, stored, transposed, {257});
            written(pool, results, name, stored, transposed);
        }
}

}  // namespace ridgeline
