// Products of all formats, with norms and epilogues.
#include "checks/results.h"
#include "stages.h"

namespace ridgeline {
namespace {

// The numbers of a part, as a checkpoint stores them.
struct Stored {
    std::vector<float> floats, scales, minimums;
    std::vector<int8_t> codes, zero_points, factors, min_factors;
    SourceRows rows{};
};

int8_t random_code(const Format& f, Random& random) {
    if (f.numbers == Numbers::fp8) {
        const int64_t sign = random.whole(0, 1) * 128;
        return int8_t(uint8_t(sign + random.whole(0, 126)));
    }
    const int64_t codes = int64_t(1) << f.traits().bits;
    return int8_t(
        uint8_t(f.offsets == Offsets::minimums ? random.whole(0, codes - 1) : random.whole(-codes / 2, codes / 2 - 1)));
}

void set_codes(Stored& s, const Format& f, int64_t k, Random& random) {
    const int64_t rows = s.rows.rows, shared = f.block ? f.block : f.group;
    const int64_t groups = shared ? (k + shared - 1) / shared : 1, factors = f.block ? k / f.group : 0;
    const int64_t half = f.traits().zero;
    for (int64_t i = 0; i < rows * k; ++i) s.codes.push_back(random_code(f, random));
    for (int64_t i = 0; i < rows * groups; ++i) {
        s.scales.push_back(float(random.whole(1024, 2047)) * 0x1p-18f);  // a float16
        s.minimums.push_back(float(random.whole(0, 2047)) * 0x1p-14f);
        s.zero_points.push_back(int8_t(random.whole(-half, half ? half - 1 : 0)));
    }
    for (int64_t i = 0; i < rows * factors; ++i) {
        s.factors.push_back(int8_t(f.offsets == Offsets::minimums ? random.whole(0, 63) : random.whole(-128, 127)));
        s.min_factors.push_back(int8_t(random.whole(0, 63)));
    }
    s.rows.data = s.codes.data(), s.rows.kind = Kind::codes;
    s.rows.scales = s.scales.data(), s.rows.scale_stride = groups;
    if (f.offsets == Offsets::zero_points) s.rows.zero_points = s.zero_points.data();
    if (f.offsets == Offsets::minimums) s.rows.minimums = s.minimums.data();
    s.rows.offset_stride = groups;
    if (f.block) s.rows.factors = s.factors.data(), s.rows.min_factors = s.min_factors.data();
    s.rows.factor_stride = factors;
}

// from_floats: the kernel rounds the numbers. parts: of equal height.
Matrix random_matrix(Pool& pool, const Format& f, int64_t k, int64_t rows, bool from_floats, Random& random,
                     int parts = 1) {
    Matrix m(pool, f, k, parts == 2, std::vector<int64_t>(size_t(parts), rows));
    std::vector<Stored> stored(static_cast<size_t>(parts));
    std::vector<SourceRows> from;
    for (Stored& s : stored) {
        s.rows.rows = rows, s.rows.stride = k;
        s.floats = random.floats(rows * k);
        s.rows.data = s.floats.data(), s.rows.kind = Kind::float32;
        if (!from_floats) set_codes(s, f, k, random);
        from.push_back(s.rows);
    }
    std::vector<float> room(panel_kernels().pack_room(m) / 4 + 1);
    for (int64_t panel = 0; panel < m.panels; ++panel)
        if (!panel_kernels().pack(m, panel, from.data(), (char*)room.data()))
            throw std::runtime_error("a panel does not hold its numbers");
    return m;
}

struct Case {
    std::string name;
    Format format;
    bool from_floats;
};

std::vector<Case> cases() {
    std::vector<Case> all = {{"fp32", {Numbers::fp32}, true},
                             {"bf16", {Numbers::bf16}, true},
                             {"fp16", {Numbers::fp16}, true},
                             {"fp8", {Numbers::fp8}, false},
                             {"fp8-128", {Numbers::fp8, 128}, false}};
    const std::pair<std::string, Numbers> codes[] = {{"int8", Numbers::int8}, {"int6", Numbers::int6},
                                                     {"int5", Numbers::int5}, {"int4", Numbers::int4},
                                                     {"int3", Numbers::int3}, {"int2", Numbers::int2}};
    for (bool is_exact : {false, true}) {
        const std::string how = is_exact ? "-exact" : "";
        for (const auto& [name, numbers] : codes) {
            for (int group : {0, 32, 128}) {
                const std::string with = name + (group ? "-" + std::to_string(group) : "") + how;
                all.push_back({with, {numbers, group, Offsets::none, is_exact}, group != 32});
                all.push_back({with + "-zero", {numbers, group, Offsets::zero_points, is_exact}, false});
            }
            all.push_back({name + "-32-min" + how, {numbers, 32, Offsets::minimums, is_exact}, false});
        }
        all.push_back({"q4_k" + how, {Numbers::int4, 32, Offsets::minimums, is_exact, false, 256}, false});
        all.push_back({"q5_k" + how, {Numbers::int5, 32, Offsets::minimums, is_exact, false, 256}, false});
        all.push_back({"q6_k" + how, {Numbers::int6, 16, Offsets::none, is_exact, false, 256}, false});
    }
    for (Case& one : all)
        if (one.format.numbers == Numbers::fp8 || !one.format.is_coded()) one.format.is_exact = true;
    return all;
}

Source source_of(const std::vector<float>& x, int64_t k) {
    Source s{};
    s.x = x.data(), s.stride = k, s.k = k;
    return s;
}

struct Shape {
    int64_t rows, k, tokens;
};

void one_product(Pool& pool, Results& results, const Case& c, const Shape& s, const std::vector<float>& x,
                 const Matrix& m, int64_t nan = -1) {
    Output out(s.tokens, s.rows);
    const Epilogue::Out to{out.data(), out.stride};
    Pool::Hold hold(pool);
    Projection{m, {}, 1, {}}.run(hold, {source_of(x, s.k), s.tokens}, &to);
    const std::string name = c.name + " " + std::to_string(s.rows) + "x" + std::to_string(s.k) + " of " +
                             std::to_string(s.tokens) + (nan < 0 ? "" : " with NaN");
    results.add(name, c.format.rounds_tokens(), out, nan);
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
         {Case{"fp32", {Numbers::fp32}, true}, Case{"int8", {.numbers = Numbers::int8, .is_exact = false}, true}})
        stages(pool, results, c, random);
}

}  // namespace ridgeline
