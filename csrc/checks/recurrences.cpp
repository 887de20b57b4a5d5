// Recurrent mixers over sequences of several lengths.
#include "checks/results.h"
#include "recurrent_calls.h"

namespace ridgeline {
namespace {

constexpr int64_t LENGTHS[] = {100, 1, 63}, NUM = 3, MOST = 100;
constexpr Sequences SEQUENCES{NUM, MOST, LENGTHS};

// Rows of all sequences, and their states.
struct Rows {
    std::vector<float> numbers;
    int64_t columns;
    Rows(Random& random, int64_t columns, float scale = 1)
        : numbers(random.floats(NUM * MOST * columns, scale)), columns(columns) {}
    Matrix2<const float> view() const { return {numbers.data(), columns}; }
};
struct State {
    std::vector<float> numbers;
    Output after;
    State(Random& random, int64_t size) : numbers(random.floats(NUM * size)), after(NUM, size) {}
    States<const float> before() const { return {numbers.data(), after.columns, nullptr}; }
    States<float> h() { return {after.data(), after.stride, nullptr}; }
};

// The rows that belong to a sequence, one after the other; none of the others may have been written.
void add_rows(Results& results, const std::string& name, Output& y) {
    Output used(0, y.columns);
    for (int64_t i = 0; i < NUM; ++i)
        for (int64_t t = 0; t < LENGTHS[i]; ++t) {
            const float* row = y.data() + (i * MOST + t) * y.stride;
            used.numbers.insert(used.numbers.end(), row, row + y.stride);
            ++used.rows;
        }
    results.add(name, false, used);
}

template <class Scan>
void run_scan(Pool& pool, Results& results, const std::string& name, Scan scan, State& state, int64_t columns) {
    Output y(NUM * MOST, columns);
    scan.y = {y.data(), y.stride};
    scan.h = state.h();
    Pool::Hold hold(pool);
    run(hold, scan);
    add_rows(results, name, y);
    results.add(name + ", state", false, state.after);
}

void convolution(Pool& pool, Results& results, Random& random) {
    const int64_t channels = 63, before = 3;
    const Rows x(random, channels);
    State state(random, before * channels);
    const std::vector<float> weight = random.floats((before + 1) * channels), bias = random.floats(channels);
    Output y(NUM * MOST, channels);
    Pool::Hold hold(pool);
    run(hold, ShortConv{SEQUENCES,
                        channels,
                        before,
                        x.view(),
                        state.before(),
                        weight.data(),
                        bias.data(),
                        {y.data(), y.stride},
                        state.h()});
    for (int64_t i = 0; i < NUM; ++i)  // this kernel also computes the rows behind a sequence
        for (int64_t t = 0; t < MOST; ++t)
            if (t >= LENGTHS[i]) std::fill_n(y.data() + (i * MOST + t) * y.stride, channels, 0.f);
    results.add("convolution", false, y);
    results.add("convolution, state", true, state.after);
}

std::vector<float> negative(std::vector<float> x) {
    for (float& one : x) one = -std::abs(one) - 0.01f;
    return x;
}

void selective(Pool& pool, Results& results, Random& random) {
    const int64_t channels = 100, states = 7;
    const Rows x(random, channels), dt(random, channels), b(random, states), c(random, states);
    const std::vector<float> a = negative(random.floats(states * channels, 4)), d = random.floats(channels);
    State state(random, states * channels);
    SelectiveScan s{.s = SEQUENCES,
                    .channels = channels,
                    .states = states,
                    .x = x.view(),
                    .dt = dt.view(),
                    .b = b.view(),
                    .c = c.view(),
                    .a = a.data(),
                    .d = d.data(),
                    .before = state.before(),
                    .h = {},
                    .y = {}};
    run_scan(pool, results, "selective scan", s, state, channels);
}

void linear(Pool& pool, Results& results, Random& random) {
    const int64_t heads = 4, width = 33, states = 21;
    const Rows x(random, heads * width), b(random, 2 * states), c(random, 2 * states), dt(random, heads, 2);
    const std::vector<float> bias = random.floats(heads), a = negative(random.floats(heads)), d = random.floats(heads);
    State state(random, heads * states * width);
    LinearScan s{.s = SEQUENCES,
                 .heads = heads,
                 .width = width,
                 .states = states,
                 .group = 2,
                 .x = x.view(),
                 .b = b.view(),
                 .c = c.view(),
                 .x_head = width,
                 .b_head = states,
                 .c_head = states,
                 .before = state.before(),
                 .h = {},
                 .y = {},
                 .decay = nullptr,
                 .dt = dt.view(),
                 .dt_bias = bias.data(),
                 .a = a.data(),
                 .d = d.data(),
                 .dt_least = 0.001f,
                 .dt_most = 5};
    run_scan(pool, results, "linear scan", s, state, heads * width);
    const std::vector<float> decay = {0.9f, 0.5f, 1.f, 0.99f};
    State other(random, heads * states * width);
    LinearScan lightning = s;
    lightning.decay = decay.data(), lightning.before = other.before();
    run_scan(pool, results, "lightning scan", lightning, other, heads * width);
}

void taylor(Pool& pool, Results& results, Random& random, bool is_hedgehog) {
    const int64_t heads = 2, dim = 5, width = 20;
    const Rows q(random, heads * dim), k(random, heads * dim), v(random, heads * width);
    TaylorScan s{SEQUENCES, heads, dim, width, is_hedgehog, q.view(), k.view(), v.view(), {}, {}, {}};
    State state(random, heads * s.features() * (width + 1));
    for (float& one : state.numbers) one = std::abs(one) + 1;
    s.before = state.before();
    run_scan(pool, results, is_hedgehog ? "hedgehog scan" : "taylor scan", s, state, heads * width);
}

void delta(Pool& pool, Results& results, Random& random, bool by_channel) {
    const int64_t heads = 4, key_heads = 2, dim = 33, width = 40, decays = by_channel ? heads * dim : heads;
    const Rows q(random, key_heads * dim), k(random, key_heads * dim), v(random, heads * width), decay(random, decays),
        beta(random, heads, 3);
    const std::vector<float> rate = negative(random.floats(heads)), bias = random.floats(decays);
    State state(random, heads * dim * width);
    DeltaScan s{SEQUENCES,      heads,    key_heads, dim,          width,       by_channel,  1.5f,
                q.view(),       k.view(), v.view(),  decay.view(), beta.view(), rate.data(), bias.data(),
                state.before(), {},       {}};
    run_scan(pool, results, by_channel ? "delta scan by channel" : "delta scan", s, state, heads * width);
}

void state_space(Pool& pool, Results& results, Random& random, bool low_rank) {
    const int64_t channels = 37, modes = 5;
    const Rows u(random, channels);
    const std::vector<float> d = random.floats(channels);
    State state(random, modes * 2 * channels);
    StateSpace s{SEQUENCES, channels, modes, low_rank, u.view(), nullptr, d.data(), state.before(), {}, {}};
    const std::vector<float> terms = random.floats(s.blocks() * modes * s.num_terms() * StateSpace::BLOCK, 0.4f);
    s.terms = terms.data();
    run_scan(pool, results, low_rank ? "state space of low rank" : "state space", s, state, channels);
}

void gated_lru(Pool& pool, Results& results, Random& random) {
    const int64_t channels = 70;
    const Rows x(random, channels), into(random, channels, 3), gate(random, channels, 3);
    const std::vector<float> decay = negative(random.floats(channels, 2));
    State state(random, channels), begun(random, 2);
    begun.numbers[2] = begun.numbers[3] = 0;
    GatedLru s{SEQUENCES,      channels,       2,         x.view(), into.view(), gate.view(), decay.data(),
               begun.before(), state.before(), begun.h(), {},       {}};
    run_scan(pool, results, "gated linear recurrent unit", s, state, channels);
    results.add("gated linear recurrent unit, begun", true, begun.after);
}

}  // namespace

void check_recurrences(Pool& pool, Results& results) {
    Random random(4);
    convolution(pool, results, random);
    selective(pool, results, random);
    linear(pool, results, random);
    gated_lru(pool, results, random);
    for (bool variant : {false, true}) {
        taylor(pool, results, random, variant);
        delta(pool, results, random, variant);
        state_space(pool, results, random, variant);
    }
}

}  // namespace ridgeline
