// Functions of elements, norms of heads, the choice of experts and of tokens.
#include <algorithm>

#include "checks/results.h"
#include "delta.h"
#include "draw.h"
#include "elementwise.h"
#include "heads.h"
#include "route.h"

namespace ridgeline {
namespace {

constexpr int64_t SIZES[] = {1, 63, 100, 257};

std::string sized(const std::string& name, int64_t n) { return name + " of " + std::to_string(n); }

void maps(Results& results, Random& random) {
    std::vector<MapCase> cases;
    for (Activation a :
         {Activation::silu, Activation::gelu, Activation::gelu_tanh, Activation::relu, Activation::relu2})
        for (Map kind : {Map::activate, Map::gated}) cases.push_back({kind, {a, 1, 0}, 0});
    cases.push_back({Map::gated, {Activation::clamped_swiglu, 1.7f, 7}, 0});
    for (Map kind : {Map::gate, Map::sigmoid_gate, Map::softcap, Map::scale, Map::add, Map::multiply})
        cases.push_back({kind, {}, 3});
    for (size_t i = 0; i < cases.size(); ++i)
        for (int64_t n : SIZES) {
            const std::vector<float> a = random.floats(n, 100), b = random.floats(n, 9);
            const bool one = cases[i].kind == Map::activate;
            Output out(1, n);
            elementwise_kernels().map(cases[i], a.data(), one ? nullptr : b.data(), n, out.data());
            results.add(sized("map " + std::to_string(i), n), false, out);
        }
}

void norms(Results& results, Random& random) {
    for (int64_t n : SIZES) {
        const std::vector<float> y = random.floats(2 * n), z = random.floats(2 * n, 8), weight = random.floats(2 * n);
        Output out(1, 2 * n), gated(1, n), top(1, 1);
        elementwise_kernels().gated_norm(y.data(), z.data(), weight.data(), 2, n, 1e-5f, out.data());
        results.add(sized("gated norm", n), false, out);
        delta_kernels().norm_gate(y.data(), z.data(), weight.data(), n, 1e-5f, n % 2, gated.data());
        results.add(sized("norm and gate", n), false, gated);
        top.numbers[0] = elementwise_kernels().largest(y.data(), n);
        results.add(sized("largest", n), true, top);
    }
    const int64_t dim = 100, heads = 3;
    const std::vector<float> weight = random.floats(heads * dim), cos = random.floats(31), sin = random.floats(31);
    for (int i = 0; i < 4; ++i) {
        const HeadsCase c{dim, 62, i % 2 > 0, i / 2 > 0, 7};
        const std::vector<float> x = random.floats(heads * dim, 5);
        Output out(1, heads * dim);
        std::copy(x.begin(), x.end(), out.data());
        head_kernels().finish(c, {NormKind::rms, 1e-6f, weight.data(), nullptr}, out.data(), 0, heads, cos.data(),
                              sin.data());
        results.add(sized("heads", i), false, out);
    }
}

void routes(Results& results, Random& random) {
    for (int i = 0; i < 8; ++i) {
        const RouteCase c{60, 6, i % 2 ? 4 : 0, 2, i % 4 > 2, i / 4 > 0, true, 2.5f};
        const std::vector<float> logits = random.floats(c.experts, 6), bias = random.floats(c.experts);
        std::vector<float> room(size_t(route_room(c)));
        std::vector<int64_t> ids(size_t(c.choices));
        Output out(2, c.choices);
        route_kernels().route(c, logits.data(), bias.data(), ids.data(), out.data(), room.data());
        std::copy(ids.begin(), ids.end(), out.data() + out.stride);
        results.add(sized("route", i), false, out);
    }
}

void draws(Results& results, Random& random) {
    for (int64_t n : SIZES) {
        const std::vector<float> x = random.floats(n, 20);
        std::vector<char> memory(DrawRoom::bytes(n) + sizeof(Candidate));
        Output out(1, 24);
        for (int64_t i = 0; i < out.columns; ++i) {
            const Draw how{{random.bits(), random.bits(), random.bits(), random.bits()},
                           0.5 + 0.2 * double(i % 6),
                           i % 3 == 1 ? 5 : 0,
                           i % 3 == 2 ? 0.8 : 1,
                           i % 4 == 3 ? 0.05 : 0};
            const float top = *std::max_element(x.begin(), x.end());
            out.numbers[size_t(i)] = float(draw_row(x.data(), nullptr, n, top, how, DrawRoom::at(memory.data(), n)));
        }
        results.add(sized("draws", n), false, out);
    }
}

}  // namespace

void check_elements(Pool&, Results& results) {
    Random random(5);
    maps(results, random);
    norms(results, random);
    routes(results, random);
    draws(results, random);
}

}  // namespace ridgeline
