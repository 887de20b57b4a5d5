#include <algorithm>

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include "bind.h"
#include "elementwise.h"

namespace ridgeline {
namespace {

constexpr int64_t BLOCK = 4096;  // elements that one thread computes at once

// A single row, if the whole matrix is dense.
template <class T> Rows<T> joined(Rows<T> r, bool all) {
    return all ? Rows<T>{r.data, 1, r.rows * r.columns, r.rows * r.columns} : r;
}

void run_map(Pool& pool, const MapCase& c, const Input& a, const std::optional<Input>& b, const Output& out) {
    Rows<const float> x = rows_of(a, "a");
    Rows<const float> y = b ? rows_of(*b, "b", x.rows, x.columns) : x;
    Rows<float> to = rows_of(out, "out", x.rows, x.columns);
    const bool dense = x.stride == x.columns && y.stride == x.columns && to.stride == x.columns;
    x = joined(x, dense), y = joined(y, dense), to = joined(to, dense);
    const int64_t blocks = (x.columns + BLOCK - 1) / BLOCK;
    auto job = [c, x, y, to, blocks, two = bool(b)](Pool::Hold& hold) {
        hold.split(x.rows * blocks, [&](int64_t begin, int64_t end, int) {
            for (int64_t i = begin; i < end; ++i) {
                const int64_t row = i / blocks, at = i % blocks * BLOCK, n = std::min(BLOCK, x.columns - at);
                elementwise_kernels().map(c, x.data + row * x.stride + at, two ? y.data + row * y.stride + at : nullptr,
                                          n, to.data + row * to.stride + at);
            }
        });
    };
    perform(pool, pool, job, a, b, out);
}

void activate(Pool& pool, const std::string& name, float alpha, float limit, const Input& a,
              const std::optional<Input>& b, const Output& out) {
    const Gate gate{activation_of(name), alpha, limit};
    if (!b && gate.activation == Activation::clamped_swiglu) refuse("a clamped SwiGLU needs a gate");
    run_map(pool, {b ? Map::gated : Map::activate, gate, 0.f}, a, b, out);
}

void gated_norm(Pool& pool, int64_t groups, float eps, const Input& y, const Input& z, const Input& weight,
                const Output& out) {
    const int64_t n = int64_t(weight.size());
    const Rows<const float> a = rows_of(y, "y"), b = rows_of(z, "z", a.rows, n);
    const Rows<float> to = rows_of(out, "out", a.rows, n);
    const float* w = vector_of(weight, "weight", n);
    if (a.columns != n || groups < 1 || n % groups) refuse("y must have a column for each weight, in equal groups");
    auto job = [=](Pool::Hold& hold) {
        hold.split(a.rows, [&](int64_t begin, int64_t end, int) {
            for (int64_t r = begin; r < end; ++r)
                elementwise_kernels().gated_norm(a.data + r * a.stride, b.data + r * b.stride, w, groups, n / groups,
                                                 eps, to.data + r * to.stride);
        });
    };
    perform(pool, pool, job, y, z, out);
}

}  // namespace

void bind_elementwise(nb::module_& m) {
    auto one = [&m](const char* name, Map kind) {
        m.def(
            name,
            [kind](Pool& pool, const Input& x, float number, const Output& out) {
                run_map(pool, {kind, {}, number}, x, std::nullopt, out);
            },
            nb::arg("pool"), array("x"), nb::arg("number"), array("out"));
    };
    auto two = [&m](const char* name, Map kind) {
        m.def(
            name,
            [kind](Pool& pool, const Input& a, const Input& b, const Output& out) {
                run_map(pool, {kind, {}, 1.f}, a, b, out);
            },
            nb::arg("pool"), array("a"), array("b"), array("out"));
    };
    one("scale", Map::scale), one("softcap", Map::softcap), two("multiply", Map::multiply);
    two("gate", Map::gate), two("sigmoid_gate", Map::sigmoid_gate);
    m.def(
        "add",
        [](Pool& pool, const Input& a, const Input& b, float factor, const Output& out) {
            run_map(pool, {Map::add, {}, factor}, a, b, out);
        },
        nb::arg("pool"), array("a"), array("b"), nb::arg("factor"), array("out"));
    m.def("activate", activate, nb::arg("pool"), nb::arg("activation"), nb::arg("alpha"), nb::arg("limit"), array("a"),
          array("b").none(), array("out"));
    m.def("gated_norm", gated_norm, nb::arg("pool"), nb::arg("groups"), nb::arg("eps"), array("y"), array("z"),
          array("weight"), array("out"));
}

}  // namespace ridgeline
