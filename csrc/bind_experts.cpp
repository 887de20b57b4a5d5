#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bind_mlp.h"
#include "experts.h"
#include "route.h"

namespace ridgeline {
namespace {

struct BoundExperts {
    Pool& pool;
    Experts stage;
};

void build_experts(BoundExperts* self, Pool& pool, const std::vector<Matrix*>& up, const std::vector<Matrix*>& down,
                   const Norm* norm, const std::string& activation, float alpha, float limit, int64_t identities,
                   float share) {
    if (up.empty() || up.size() != down.size())
        refuse("experts need as many first as second matrices, and at least one");
    Experts e;
    for (size_t i = 0; i < up.size(); ++i) {
        check_mlp(*up[i], *down[i]);
        const bool alike = up[i]->interleaved == up[0]->interleaved && up[i]->k == up[0]->k &&
                           up[i]->parts[0].rows == up[0]->parts[0].rows && up[i]->format == up[0]->format &&
                           down[i]->parts[0].rows == down[0]->parts[0].rows && down[i]->format == down[0]->format;
        if (!alike) refuse("experts must have one shape and format");
        e.up.push_back(up[i]);
        e.down.push_back(down[i]);
    }
    check_norm(*up[0], norm);
    if (norm) e.norm = *norm;
    e.epilogue = gated_by(*up[0], activation, alpha, limit);
    if (identities < 0 || (identities && (norm || down[0]->parts[0].rows != up[0]->k)))
        refuse("identities need an input without a norm, as wide as the result");
    e.identities = identities, e.share = share;
    new (self) BoundExperts{pool, std::move(e)};
}

void run_experts(BoundExperts& self, const Input& x, const Ids& ids, const Input& weights,
                 const std::optional<Input>& plus, const std::optional<Input>& gate, const Output& out) {
    const Experts& e = self.stage;
    const int64_t tokens = x.ndim() ? int64_t(x.shape(0)) : 0, width = e.down[0]->parts[0].rows;
    const Rows<const float> from = rows_of(x, "x", tokens, e.up[0]->k);
    const Rows<const int64_t> chosen = rows_of(ids, "ids");
    const Rows<const float> scores = rows_of(weights, "weights", tokens, chosen.columns);
    const bool dense =
        chosen.rows == tokens && (tokens < 2 || (chosen.stride == chosen.columns && scores.stride == chosen.columns));
    if (!dense) refuse("ids and weights must be dense, a row for each token");
    if (gate && !plus) refuse("a gate needs `plus`, which it multiplies");
    const Rows<const float> more = plus ? rows_of(*plus, "plus", tokens, width) : Rows<const float>{};
    const Rows<const float> factor = gate ? rows_of(*gate, "gate", tokens, 1) : Rows<const float>{};
    const Rows<float> to = rows_of(out, "out", tokens, width);
    const Visits v{.x = from.data,
                   .stride = from.stride,
                   .tokens = tokens,
                   .choices = chosen.columns,
                   .ids = chosen.data,
                   .weights = scores.data,
                   .plus = more.data,
                   .plus_stride = more.stride,
                   .gate = factor.data,
                   .gate_stride = factor.stride,
                   .out = {to.data, to.stride}};
    auto job = [&e, v](Pool::Hold& hold) {
        for (int64_t i = 0; i < v.tokens * v.choices; ++i)
            check_id(v.ids[i], int64_t(e.up.size()) + e.identities, "expert");
        e.run(hold, v);
    };
    perform(self.pool, self, job, x, ids, weights, plus, gate, out);
}

void route(Pool& pool, int64_t groups, int64_t open, bool best_two, bool sigmoid, bool normalize, float scale,
           const Input& logits, const std::optional<Input>& bias, const Places& ids, const Output& weights) {
    const Rows<const float> from = rows_of(logits, "logits");
    const Rows<int64_t> chosen = rows_of(ids, "ids");
    const RouteCase c{.experts = from.columns,
                      .choices = chosen.columns,
                      .groups = groups,
                      .open = open,
                      .best_two = best_two,
                      .sigmoid = sigmoid,
                      .normalize = normalize,
                      .scale = scale};
    if (chosen.rows != from.rows || c.choices < 1 || c.choices > c.experts)
        refuse("ids must be [tokens, k], with k from 1 to the number of experts");
    if (groups < 0 || (groups && (c.experts % groups || open < 1 || open > groups)))
        refuse("the number of experts must be a multiple of the number of groups");
    const Rows<float> to = rows_of(weights, "weights", from.rows, c.choices);
    const float* added = vector_of(bias, "bias", c.experts);
    auto job = [c, from, added, chosen, to](Pool::Hold& hold) {
        float* room = (float*)hold.scratch(0, size_t(route_room(c) * hold.threads()) * 4);
        hold.split(from.rows, [&](int64_t begin, int64_t end, int thread) {
            for (int64_t t = begin; t < end; ++t)
                route_kernels().route(c, from.data + t * from.stride, added, chosen.data + t * chosen.stride,
                                      to.data + t * to.stride, room + thread * route_room(c));
        });
    };
    perform(pool, pool, job, logits, bias, ids, weights);
}

}  // namespace

void bind_experts(nb::module_& m) {
    nb::class_<BoundExperts>(m, "Experts")
        .def("__init__", build_experts, nb::arg("pool"), nb::arg("up"), nb::arg("down"), nb::arg("norm").none(),
             nb::arg("activation"), nb::arg("alpha"), nb::arg("limit"), nb::arg("identities") = 0,
             nb::arg("share") = 1.f, nb::keep_alive<1, 2>(), nb::keep_alive<1, 3>(), nb::keep_alive<1, 4>())
        .def("__call__", run_experts, array("x"), array("ids"), array("weights"), array("plus").none(),
             array("gate").none(), array("out"));
    m.def("route", route, nb::arg("pool"), nb::arg("groups"), nb::arg("open"), nb::arg("best_two"), nb::arg("sigmoid"),
          nb::arg("normalize"), nb::arg("scale"), array("logits"), array("bias").none(), array("ids"),
          array("weights"));
}

}  // namespace ridgeline
