// Products of all formats, with norms and epilogues.
#include <cstring>

#include "checks/matrices.h"
#include "matrix_unit.h"

namespace ridgeline {
namespace {

std::vector<Case> cases() {
    std::vector<Case> all = {{"fp32", {Numbers::fp32}, true},
                             {"bf16", {Numbers::bf16}, true},
                             {"fp16", {Numbers::fp16}, true},
                             {"fp32 of bf16", {.numbers = Numbers::fp32, .inputs = Inputs::bf16}, true},
                             {"bf16 of bf16", {.numbers = Numbers::bf16, .inputs = Inputs::bf16}, true},
                             {"int4 of bf16", {.numbers = Numbers::int4, .group = 32, .inputs = Inputs::bf16}, true},
                             {"fp8", {Numbers::fp8}, false},
                             {"fp8-128", {Numbers::fp8, 128}, false}};
    const std::pair<std::string, Numbers> codes[] = {{"int8", Numbers::int8}, {"int6", Numbers::int6},
                                                     {"int5", Numbers::int5}, {"int4", Numbers::int4},
                                                     {"int3", Numbers::int3}, {"int2", Numbers::int2}};
    const std::pair<std::string, Inputs> ways[] = {{"", Inputs::int8}, {"-exact", Inputs::exact}};
    for (const auto& [how, taken] : ways) {
        for (const auto& [name, numbers] : codes) {
            for (int group : {0, 32, 128}) {
                const std::string with = name + (group ? "-" + std::to_string(group) : "") + how;
                all.push_back({with, {numbers, group, Offsets::none, taken}, group != 32});
                all.push_back({with + "-zero", {numbers, group, Offsets::zero_points, taken}, false});
            }
            all.push_back({name + "-32-min" + how, {numbers, 32, Offsets::minimums, taken}, false});
        }
        all.push_back({"q4_k" + how, {Numbers::int4, 32, Offsets::minimums, taken, false, 256}, false});
        all.push_back({"q5_k" + how, {Numbers::int5, 32, Offsets::minimums, taken, false, 256}, false});
        all.push_back({"q6_k" + how, {Numbers::int6, 16, Offsets::none, taken, false, 256}, false});
    }
    for (Case& one : all)
        if (one.format.numbers == Numbers::fp8) one.format.inputs = Inputs::exact;
    return all;
}

void all_shapes(Pool& pool, Results& results, const Case& c, Random& random) {
    for (Shape s : {Shape{100, 257, 1}, Shape{33, 63, 7}, Shape{1, 100, 4}, Shape{63, 1, 2}, Shape{40, 63, 34}}) {
        if (c.format.block) s.k = s.k == 257 ? 512 : 256;
        const Matrix m = random_matrix(pool, c.format, s.k, s.rows, c.from_floats, random);
        std::vector<float> x = random.floats(s.tokens * s.k, 3);
        one_product(pool, results, c, s, x, m);
        if (s.tokens != 7) continue;
        for (float bad : {std::nanf(""), INFINITY}) {
            if (!c.format.rounds_tokens()) continue;  // one infinity times 0 is NaN, and others are not
            x[size_t(2 * s.k + s.k / 2)] = bad;
            one_product(pool, results, c, s, x, m, 2);
        }
        // Pairs of neighbors with the largest magnitude, whose products are the largest sums.
        for (size_t i = 0; i < x.size(); ++i) x[i] = i / 2 % 3 ? 1.f : -1.f;
        one_product(pool, results, {c.name + " of largest", c.format, c.from_floats}, s, x, m);
        // Halves, which are ties: the scale of each token is 1.
        for (size_t i = 0; i < x.size(); ++i) x[i] = i % size_t(s.k) ? float(random.whole(-253, 253)) / 2 : 127;
        one_product(pool, results, {c.name + " of ties", c.format, c.from_floats}, s, x, m);
    }
}

// Numbers of all sizes: products and sums that are denormal, ties, and sums that cancel.
std::vector<float> of_all_sizes(Random& random, int64_t n) {
    std::vector<float> x;
    for (int64_t i = 0; i < n; ++i) {
        const int64_t exponent = i % 3 ? random.whole(-68, -60) : random.whole(-140, 20);
        x.push_back(std::ldexp(float(random.whole(-(1 << 24), 1 << 24)), int(exponent) - 24));
        if (i % 7 == 6) x.back() = -x[x.size() - 3];
    }
    return x;
}

// Matrices of bf16 with the arithmetic of a matrix unit. Vectors have its bits where they can.
void tiles_of_bf16(Pool& pool, Results& results, Random& random) {
    for (Inputs taken : {Inputs::exact, Inputs::bf16})
        for (Shape s : {Shape{100, 257, 1}, Shape{33, 63, 7}, Shape{1, 100, 4}, Shape{63, 1, 2}, Shape{40, 96, 34}}) {
            const Case c{taken == Inputs::exact ? "tiles" : "tiles of bf16", {Numbers::bf16}, true};
            Matrix m =
                matrix_of(pool, {.numbers = Numbers::bf16, .inputs = taken}, s.k, of_all_sizes(random, s.rows * s.k));
            const std::vector<float> x = of_all_sizes(random, s.tokens * s.k);
            m.in_tiles = true, m.unit_from = 1;
            one_product(pool, results, c, s, x, m);
            results.all.back().is_whole = true;  // this arithmetic rounds once on every machine
            if (!VECTORS_FOLLOW) continue;
            m.unit_from = NEVER;
            const Output vectors = product(pool, m, x, s.tokens);
            if (memcmp(vectors.numbers.data(), results.all.back().numbers.data(), vectors.numbers.size() * 4))
                throw std::runtime_error(results.all.back().name + ": vectors have other bits than the unit");
        }
}

// A residual sum, a norm, and every operation behind a product.
void stages(Pool& pool, Results& results, const Case& c, Random& random) {
    const int64_t k = 100, rows = 63, tokens = 7;
    const Matrix m = random_matrix(pool, c.format, k, rows, true, random);
    const Matrix both = random_matrix(pool, c.format, k, rows, true, random, 2);
    const std::vector<float> x = random.floats(tokens * k, 2), delta = random.floats(tokens * k);
    Epilogue capped, gated;
    capped.scale = 0.5f, capped.softcap = 3;
    gated.kind = Epilogue::gated;
    std::vector<std::pair<const Matrix*, Epilogue>> ends = {{&m, capped}, {&both, gated}};
    for (Activation a : {Activation::silu, Activation::gelu, Activation::gelu_tanh, Activation::relu2}) {
        Epilogue unary;
        unary.kind = Epilogue::unary, unary.gate.activation = a;
        ends.push_back({&m, unary});
    }
    for (size_t i = 0; i < ends.size(); ++i) {
        Output out(tokens, rows), sum(tokens, k);
        Source s = source_of(x, k);
        s.delta = delta.data(), s.delta_stride = k, s.residual = sum.data(), s.residual_stride = sum.stride;
        const Norm norm{i % 2 ? NormKind::layer : NormKind::rms, 1e-5f, random.floats(k),
                        i % 2 ? random.floats(k) : std::vector<float>{}};
        const Epilogue::Out to{out.data(), out.stride};
        Pool::Hold hold(pool);
        Projection{*ends[i].first, norm, 0.7f, ends[i].second}.run(hold, {s, tokens}, &to);
        results.add(c.name + ", stage " + std::to_string(i), false, out);
        results.add(c.name + ", residual of stage " + std::to_string(i), true, sum);
    }
}

}  // namespace

void check_products(Pool& pool, Results& results) {
    Random random(1);
    for (const Case& c : cases()) all_shapes(pool, results, c, random);
    for (const Case& c :
         {Case{"fp32", {Numbers::fp32}, true}, Case{"int8", {.numbers = Numbers::int8, .inputs = Inputs::int8}, true}})
        stages(pool, results, c, random);
    tiles_of_bf16(pool, results, random);
}

}  // namespace ridgeline
