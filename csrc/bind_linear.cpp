#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <atomic>
#include <cstring>

#include "bind_mlp.h"

namespace ridgeline {
namespace {

using Any = nb::ndarray<nb::ro, nb::device::cpu>;

Format format_of(const std::string& name) {
    return one_of<Format>(name, "format", {"fp32", "bf16", "fp16", "int8", "int4"});
}

// ---- matrices -----------------------------------------------------------------------------------------------------

nb::dlpack::dtype dtype_of(Kind kind) {
    return kind == Kind::float32 ? nb::dtype<float>()
           : kind == Kind::codes ? nb::dtype<int8_t>()
                                 : nb::dtype<uint16_t>();
}

SourceRows stored(const Any& a, Kind kind, int64_t k) {
    if (a.dtype() != dtype_of(kind))
        refuse(kind == Kind::float32 ? "a part of kind float32 must be a float32 array"
               : kind == Kind::codes ? "a part of codes must be an int8 array"
                                     : "a part of 16-bit numbers must be given as a uint16 array");
    if (a.ndim() != 2 || (a.size() && a.shape(1) > 1 && a.stride(1) != 1))
        refuse("a part " + shape_text(a.shape_ptr(), a.ndim()) + " must have two axes, the last one dense");
    if (int64_t(a.shape(1)) != k)
        refuse("parts of a matrix must have one width, not " + std::to_string(k) + " and " +
               std::to_string(a.shape(1)));
    return {.data = a.data(), .kind = kind, .rows = int64_t(a.shape(0)), .stride = int64_t(a.stride(0))};
}

// The scales that come with codes: one array [rows, groups] for each part, none for floats.
void set_scales(std::vector<SourceRows>& parts, const std::vector<Input>& scales, Format format, int group, int64_t k) {
    const bool coded = parts[0].kind == Kind::codes;
    if (scales.size() != (coded ? parts.size() : 0)) refuse("codes need as many scales as parts, and floats need none");
    if (coded && format != Format::int8 && format != Format::int4) refuse("codes are for int8 and int4");
    for (size_t i = 0; i < scales.size(); ++i) {
        const Rows<const float> rows = rows_of(scales[i], "scales", parts[i].rows, group ? (k + group - 1) / group : 1);
        parts[i].scales = rows.data;
        parts[i].scale_stride = rows.stride;
    }
}

void set_bias(Matrix& m, const std::vector<std::optional<Input>>& biases) {
    if (biases.size() != m.parts.size()) refuse("each part needs a bias, an array or None");
    if (std::none_of(biases.begin(), biases.end(), [](const auto& b) { return bool(b); })) return;
    m.bias.assign(size_t(m.panels * PANEL), 0.f);
    for (size_t part = 0; part < biases.size(); ++part)
        if (const float* bias = vector_of(biases[part], "a bias", m.parts[part].rows))
            for (int64_t r = 0; r < m.parts[part].rows; ++r) {
                auto [panel, row] = m.locate(int(part), r);
                m.bias[size_t(panel * PANEL + row)] = bias[r];
            }
}

void build_matrix(Matrix* self, Pool& pool, const std::vector<Any>& parts, const std::string& kind_name,
                  const std::string& format_name, int group, const std::vector<std::optional<Input>>& biases,
                  bool interleave, const std::vector<Input>& scales) {
    const Kind kind = one_of<Kind>(kind_name, "kind", {"float32", "bfloat16", "float16", "codes"});
    const Format format = format_of(format_name);
    if (parts.empty() || parts.size() > Epilogue::PARTS) refuse("a matrix has 1 to 6 parts");
    if (parts[0].ndim() != 2) refuse("a part must have two axes");
    const int64_t k = int64_t(parts[0].shape(1));
    if (format == Format::int4 ? group != 32 && group != 128 : group != 0)
        refuse("group is 32 or 128 for int4, otherwise 0");
    if (format == Format::int8 && k > 65536)
        refuse("int8 sums overflow beyond 65536 columns, and there are " + std::to_string(k));
    std::vector<SourceRows> from;
    std::vector<int64_t> rows;
    for (const Any& part : parts) {
        from.push_back(stored(part, kind, k));
        rows.push_back(from.back().rows);
    }
    if (k < 1 || *std::min_element(rows.begin(), rows.end()) < 1)
        refuse("a matrix has at least one row and one column");
    if (interleave && (rows.size() != 2 || rows[0] != rows[1])) refuse("two parts of one height can be interleaved");
    set_scales(from, scales, format, group, k);
    new (self) Matrix(pool, format, k, group, interleave, rows);
    std::atomic<bool> good{true};
    {
        Work work(pool);
        float* room = (float*)work.hold.scratch(1, size_t(work.hold.threads() * k) * 4);
        work.hold.draw(self->panels, [&](int64_t panel, int thread) {
            if (!panel_kernels().pack(*self, panel, from.data(), room + thread * k)) good = false;
        });
    }
    if (!good) {
        self->~Matrix();
        refuse((kind == Kind::codes ? "a code or a scale is outside of the range of "
                                    : "a weight is not finite, or too large for ") +
               format_name);
    }
    set_bias(*self, biases);
}

int64_t rows_of_matrix(const Matrix& m) {
    int64_t rows = 0;
    for (const Part& part : m.parts) rows += part.rows;
    return rows;
}

// Writes rows of the matrix as float32. Rows are numbered through all parts.
void take_rows(const Matrix& m, Pool& pool, const Ids& ids, const Output& out) {
    const Rows<float> to = rows_of(out, "out", int64_t(ids.size()), m.k);
    const int64_t *id = vector_of(ids, "ids", int64_t(ids.size())), n = rows_of_matrix(m);
    for (size_t i = 0; i < ids.size(); ++i)
        if (id[i] < 0 || id[i] >= n)
            throw nb::index_error(("row " + std::to_string(id[i]) + " of " + std::to_string(n)).c_str());
    Work work(pool);
    work.hold.split(to.rows, [&](int64_t begin, int64_t end, int) {
        for (int64_t i = begin; i < end; ++i) {
            int64_t r = id[i];
            int part = 0;
            while (r >= m.parts[size_t(part)].rows) r -= m.parts[size_t(part++)].rows;
            auto [panel, row] = m.locate(part, r);
            panel_kernels().unpack(m, panel, row, to.data + i * to.stride);
        }
    });
}

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
    perform(self.pool, self, job, x, delta, rows, residual, out);
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
    perform(self.pool, self, job, x, delta, residual, cos, sin, outs);
}

void run_bound_mlp(BoundMlp& self, const Input& x, const std::optional<Input>& delta,
                   const std::optional<Output>& residual, const Output& out) {
    const Stream s = stream_of(self.up, x, delta, std::nullopt, residual);
    const Epilogue::Out to = out_of(out, "out", s.tokens, self.down.parts[0].rows);
    auto job = [&self, s, to](Pool::Hold& hold) { run_mlp(hold, self.up, self.down, s, to); };
    perform(self.pool, self, job, x, delta, residual, out);
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
    Work work(pool);
    work.hold.split(rows.rows, [&](int64_t begin, int64_t end, int) {
        for (int64_t t = begin; t < end; ++t)
            head_kernels().finish(heads, {}, rows.data + t * rows.stride, 0, rows.columns / head_dim,
                                  c.data + t * c.stride, s.data + t * s.stride);
    });
}

void bind_matrix(nb::module_& m) {
    nb::class_<Matrix>(m, "Matrix")
        .def("__init__", build_matrix, nb::arg("pool"), array("parts"), nb::arg("kind"), nb::arg("format"),
             nb::arg("group"), array("biases").none(), nb::arg("interleave"), nb::arg("scales") = std::vector<Input>{})
        .def_prop_ro("rows", rows_of_matrix)
        .def_ro("columns", &Matrix::k)
        .def_prop_ro("nbytes", [](const Matrix& w) { return w.panels * w.panel_bytes; })
        .def("take", take_rows, nb::arg("pool"), array("ids"), array("out"));
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
    bind_matrix(m);
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
