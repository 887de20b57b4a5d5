#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstring>

#include "bind_mlp.h"

namespace ridgeline {
namespace {

// ---- stages -------------------------------------------------------------------------------------------------------

void build_norm(Norm* self, const std::string& kind, float eps, const Input& weight, const std::optional<Input>& bias) {
    new (self) Norm();
    self->kind = one_of<NormKind>(kind, "norm", {"none", "rms", "layer"});
    self->eps = eps;
    const int64_t n = int64_t(weight.size());
    const float* w = vector_of(weight, "a norm's weight", n);
    self->weight.assign(w, w + n);
    if (const float* b = vector_of(bias, "a norm's bias", n)) self->bias.assign(b, b + n);
}

// A stage with its pool.
struct BoundProjection {
    Pool& pool;
    Projection stage;
};
struct BoundHeads {
    Pool& pool;
    HeadsProjection stage;
};
struct BoundMlp {
    Pool& pool;
    Projection up;
    const Matrix& down;
};

Projection projection(const Matrix& m, const Norm* norm, float scale) {
    check_norm(m, norm);
    return {m, norm ? *norm : Norm{}, scale, {}};
}

Stream stream_of(const Projection& p, const Input& x, const std::optional<Input>& delta, const std::optional<Ids>& rows,
                 const std::optional<Output>& residual) {
    const int64_t all = x.ndim() ? int64_t(x.shape(0)) : 0;
    const Rows<const float> from = rows_of(x, "x", all, p.matrix.k);
    Stream s{};
    s.tokens = rows ? int64_t(rows->size()) : all;
    s.source.x = from.data;
    s.source.stride = from.stride;
    if (rows) {
        s.source.rows = vector_of(*rows, "rows", s.tokens);
        for (int64_t i = 0; i < s.tokens; ++i)
            if (s.source.rows[i] < 0 || s.source.rows[i] >= all)
                throw nb::index_error(
                    ("row " + std::to_string(s.source.rows[i]) + " of " + std::to_string(all)).c_str());
    }
    if (delta) {
        const Rows<const float> d = rows_of(*delta, "delta", all, p.matrix.k);
        s.source.delta = d.data;
        s.source.delta_stride = d.stride;
    }
    if (residual) {
        if (!delta) refuse("a residual sum needs a delta");
        const Rows<float> r = rows_of(*residual, "residual", s.tokens, p.matrix.k);
        s.source.residual = r.data;
        s.source.residual_stride = r.stride;
    }
    return s;
}

Epilogue::Out out_of(const Output& a, const char* name, int64_t tokens, int64_t columns) {
    const Rows<float> r = rows_of(a, name, tokens, columns);
    return {r.data, r.stride};
}

std::vector<Epilogue::Out> outs_of(const Matrix& m, int64_t tokens, const std::vector<Output>& outs) {
    if (outs.size() != m.parts.size()) refuse("each part of the matrix needs an output");
    std::vector<Epilogue::Out> result;
    for (size_t i = 0; i < outs.size(); ++i) result.push_back(out_of(outs[i], "out", tokens, m.parts[i].rows));
    return result;
}

void run_projection(BoundProjection& self, const Input& x, const std::optional<Input>& delta,
                    const std::optional<Ids>& rows, const std::optional<Output>& residual, const Output& out) {
    const Stream s = stream_of(self.stage, x, delta, rows, residual);
    const Epilogue::Out to = out_of(out, "out", s.tokens, self.stage.matrix.parts[0].rows);
    auto job = [&self, s, to](Pool::Hold& hold) { self.stage.run(hold, s, &to); };
    perform_over(self.stage.matrix.ahead(1), self.pool, self, job, x, delta, rows, residual, out);
}

void run_heads(BoundHeads& self, const Input& x, const std::optional<Input>& delta,
               const std::optional<Output>& residual, const std::optional<Input>& cos, const std::optional<Input>& sin,
               const std::vector<Output>& outs) {
    const Stream s = stream_of(self.stage.projection, x, delta, std::nullopt, residual);
    const auto to = outs_of(self.stage.projection.matrix, s.tokens, outs);
    const float *c = nullptr, *n = nullptr;
    int64_t stride = 0;
    if (bool(cos) != bool(sin)) refuse("cosines and sines must be given together");
    if (cos && self.stage.heads.rope_dim) {
        const Rows<const float> a = rows_of(*cos, "cos", s.tokens, self.stage.heads.rope_dim / 2);
        const Rows<const float> b = rows_of(*sin, "sin", s.tokens, self.stage.heads.rope_dim / 2);
        if (a.stride != b.stride) refuse("cosines and sines must have one stride");
        c = a.data;
        n = b.data;
        stride = a.stride;
    }
    auto job = [&self, s, to, c, n, stride](Pool::Hold& hold) { self.stage.run(hold, s, to.data(), c, n, stride); };
    perform_over(self.stage.reads(), self.pool, self, job, x, delta, residual, cos, sin, outs);
}

void run_bound_mlp(BoundMlp& self, const Input& x, const std::optional<Input>& delta,
                   const std::optional<Output>& residual, const Output& out) {
    const Stream s = stream_of(self.up, x, delta, std::nullopt, residual);
    const Epilogue::Out to = out_of(out, "out", s.tokens, self.down.parts[0].rows);
    auto job = [&self, s, to](Pool::Hold& hold) { run_mlp(hold, self.up, self.down, s, to); };
    perform_over(self.up.matrix.ahead(1), self.pool, self, job, x, delta, residual, out);
}

void build_heads(BoundHeads* self, Pool& pool, const Matrix& m, const Norm* norm, float scale, int64_t head_dim,
                 int64_t rope_dim, bool interleaved, bool over_all, const std::vector<Norm*>& norms, int num_rotated) {
    if (m.interleaved) refuse("heads need a matrix whose parts are not interleaved");
    if (num_rotated < 0 || size_t(num_rotated) > m.parts.size() || norms.size() > size_t(num_rotated))
        refuse("num_rotated is more than the number of parts");
    HeadsProjection h{projection(m, norm, scale),
                      {.head_dim = head_dim, .rope_dim = rope_dim, .interleaved = interleaved, .over_all = over_all},
                      {}};
    for (int i = 0; i < num_rotated; ++i) {
        if (m.parts[size_t(i)].rows % head_dim) refuse("a part's rows are not whole heads");
        h.norms.push_back(size_t(i) < norms.size() ? *norms[size_t(i)] : Norm{});
        const int64_t wanted = over_all ? m.parts[size_t(i)].rows : head_dim;
        if (h.norms.back().kind != NormKind::none && int64_t(h.norms.back().weight.size()) != wanted)
            refuse("a norm of heads has " + std::to_string(h.norms.back().weight.size()) + " elements instead of " +
                   std::to_string(wanted));
    }
    if (rope_dim < 0 || rope_dim % 2 || rope_dim > head_dim) refuse("rope_dim must be even, and at most head_dim");
    new (self) BoundHeads{pool, std::move(h)};
}

void run_norm(const Norm& norm, Pool& pool, const Input& x, const Output& out) {
    const int64_t n = int64_t(norm.weight.size()), tokens = x.ndim() ? int64_t(x.shape(0)) : 0;
    const Rows<const float> from = rows_of(x, "x", tokens, n);
    const Rows<float> to = rows_of(out, "out", tokens, n);
    const NormWeights weights = norm.view();
    auto job = [weights, tokens, from, to, n](Pool::Hold& hold) {
        hold.split(tokens, [&](int64_t begin, int64_t end, int) {
            for (int64_t t = begin; t < end; ++t)
                source_kernels().norm(weights, from.data + t * from.stride, n, to.data + t * to.stride);
        });
    };
    perform(pool, norm, job, x, out);
}

void rotate(Pool& pool, const Output& x, int64_t head_dim, int64_t first, int64_t rope_dim, bool interleaved,
            const Input& cos, const Input& sin) {
    const Rows<float> rows = rows_of(x, "x");
    if (head_dim < 1 || rows.columns % head_dim || rope_dim < 2 || rope_dim % 2 || first < 0 ||
        rope_dim > head_dim - first)
        refuse("x must consist of whole heads, and rope_dim must be even and fit into a head");
    const Rows<const float> c = rows_of(cos, "cos", rows.rows, rope_dim / 2),
                            s = rows_of(sin, "sin", rows.rows, rope_dim / 2);
    const HeadsCase heads{.head_dim = head_dim, .rope_dim = rope_dim, .interleaved = interleaved, .first = first};
    auto job = [rows, head_dim, c, s, heads](Pool::Hold& hold) {
        hold.split(rows.rows, [&](int64_t begin, int64_t end, int) {
            for (int64_t t = begin; t < end; ++t)
                head_kernels().finish(heads, {}, rows.data + t * rows.stride, 0, rows.columns / head_dim,
                                      c.data + t * c.stride, s.data + t * s.stride);
        });
    };
    perform(pool, pool, job, x, cos, sin);
}

void bind_norm(nb::module_& m) {
    nb::class_<Norm>(m, "Norm")
        .def("__init__", build_norm, nb::arg("kind"), nb::arg("eps"), array("weight"), array("bias").none())
        .def("__call__", run_norm, nb::arg("pool"), array("x"), array("out"));
    m.def("rotate", rotate, nb::arg("pool"), array("x"), nb::arg("head_dim"), nb::arg("first"), nb::arg("rope_dim"),
          nb::arg("interleaved"), array("cos"), array("sin"));
}

}  // namespace

void bind_linear(nb::module_& m) {
    using Keep2 = nb::keep_alive<1, 2>;
    using Keep3 = nb::keep_alive<1, 3>;
    bind_norm(m);
    nb::class_<BoundProjection>(m, "Projection")
        .def(
            "__init__",
            [](BoundProjection* self, Pool& pool, const Matrix& w, const Norm* norm, float scale, float factor,
               float softcap) {
                if (w.parts.size() != 1) refuse("a projection's matrix has one part");
                Projection p = projection(w, norm, scale);
                p.epilogue.scale = factor;
                p.epilogue.softcap = softcap;
                new (self) BoundProjection{pool, std::move(p)};
            },
            nb::arg("pool"), nb::arg("matrix"), nb::arg("norm").none(), nb::arg("residual_scale"), nb::arg("scale"),
            nb::arg("softcap"), Keep2(), Keep3())
        .def("__call__", run_projection, array("x"), array("delta").none(), array("rows").none(),
             array("residual").none(), array("out"));
    nb::class_<BoundHeads>(m, "Heads")
        .def("__init__", build_heads, nb::arg("pool"), nb::arg("matrix"), nb::arg("norm").none(),
             nb::arg("residual_scale"), nb::arg("head_dim"), nb::arg("rope_dim"), nb::arg("interleaved"),
             nb::arg("over_all"), nb::arg("norms"), nb::arg("num_rotated"), Keep2(), Keep3())
        .def("__call__", run_heads, array("x"), array("delta").none(), array("residual").none(), array("cos").none(),
             array("sin").none(), array("outs"));
    nb::class_<BoundMlp>(m, "Mlp")
        .def(
            "__init__",
            [](BoundMlp* self, Pool& pool, const Matrix& up, const Matrix& down, const Norm* norm, float scale,
               const std::string& activation, float alpha, float limit) {
                check_mlp(up, down);
                Projection p = projection(up, norm, scale);
                p.epilogue = gated_by(up, activation, alpha, limit);
                new (self) BoundMlp{pool, std::move(p), down};
            },
            nb::arg("pool"), nb::arg("up"), nb::arg("down"), nb::arg("norm").none(), nb::arg("residual_scale"),
            nb::arg("activation"), nb::arg("alpha"), nb::arg("limit"), Keep2(), Keep3(), nb::keep_alive<1, 4>())
        .def("__call__", run_bound_mlp, array("x"), array("delta").none(), array("residual").none(), array("out"));
}

}  // namespace ridgeline
