// Matrices: their arguments from Python, and rows of them.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <atomic>

#include "bf16_dots.h"
#include "bind.h"
#include "linear.h"
#include "matrix_unit.h"

namespace ridgeline {
namespace {

using Any = nb::ndarray<nb::ro, nb::device::cpu>;

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

// An array of a part's scales or offsets, a row of `columns` numbers for each row. Returns the distance of rows.
template <class T> int64_t set_rows(const T*& to, const Any& a, const char* name, int64_t rows, int64_t columns) {
    if (a.dtype() != nb::dtype<T>()) refuse(std::string(name) + (sizeof(T) == 1 ? " are int8" : " are float32"));
    const bool fits = a.ndim() == 2 && int64_t(a.shape(0)) == rows && int64_t(a.shape(1)) == columns;
    if (!fits)
        refuse(std::string(name) + " are " + shape_text(a.shape_ptr(), a.ndim()) + ", but [" + std::to_string(rows) +
               ", " + std::to_string(columns) + "] is needed");
    if (columns > 1 && a.size() && a.stride(1) != 1) refuse(std::string(name) + " need dense rows");
    to = (const T*)a.data();
    return int64_t(a.stride(0));
}

// What comes with codes: an array of scales for each part, and one of zero points or minimums if there are any.
void set_scales(std::vector<SourceRows>& parts, const Format& f, int64_t k, const std::vector<Any>& scales,
                const std::vector<Any>& offsets) {
    const bool coded = parts[0].kind == Kind::codes;
    if (scales.size() != (coded ? parts.size() : 0)) refuse("codes need as many scales as parts, and floats need none");
    if (coded && !f.is_coded()) refuse("codes are for whole numbers and fp8");
    if (offsets.size() != (f.offsets == Offsets::none ? 0 : parts.size()))
        refuse("zero points or minimums come with each part of codes, or with none");
    const int shared = f.block ? f.block : f.group;
    const int64_t groups = shared ? (k + shared - 1) / shared : 1;
    for (size_t i = 0; i < scales.size(); ++i) {
        SourceRows& p = parts[i];
        p.scale_stride = set_rows(p.scales, scales[i], "scales", p.rows, groups);
        if (f.offsets == Offsets::zero_points)
            p.offset_stride = set_rows(p.zero_points, offsets[i], "zero points", p.rows, groups);
        if (f.offsets == Offsets::minimums)
            p.offset_stride = set_rows(p.minimums, offsets[i], "minimums", p.rows, groups);
    }
}

void check_sums(const Format& f, int64_t k) {
    if (f.rounds_tokens() && k > 65536)
        refuse("int8 sums overflow beyond 65536 columns, and there are " + std::to_string(k));
}

// The factors of groups, for codes in blocks.
void set_factors(std::vector<SourceRows>& parts, const Format& f, int64_t k, const std::vector<Any>& factors,
                 const std::vector<Any>& min_factors) {
    const bool lower = f.block && f.offsets == Offsets::minimums;
    if (factors.size() != (f.block ? parts.size() : 0) || min_factors.size() != (lower ? parts.size() : 0))
        refuse("factors come with each part of codes in blocks, and with nothing else");
    for (size_t i = 0; i < factors.size(); ++i) {
        SourceRows& p = parts[i];
        p.factor_stride = set_rows(p.factors, factors[i], "factors", p.rows, k / f.group);
        if (lower && set_rows(p.min_factors, min_factors[i], "factors", p.rows, k / f.group) != p.factor_stride)
            refuse("factors of scales and of minimums need rows of one size");
    }
}

// Blocks are those of Q4_K, Q5_K and Q6_K.
bool has_blocks(const Format& f, int64_t k) {
    const bool lower = f.offsets == Offsets::minimums;
    const bool known = f.numbers == Numbers::int6
                           ? f.group == 16 && f.offsets == Offsets::none
                           : f.group == 32 && lower && (f.numbers == Numbers::int4 || f.numbers == Numbers::int5);
    return known && f.block == 256 && k % f.block == 0 && !f.wide;
}

void check_format(const Format& f, bool floats, int64_t k) {
    if (f.block && (floats || !has_blocks(f, k)))
        refuse(
            "blocks are of 256 columns, in rows of whole blocks: codes of int4 and int5 with minimums in groups of 32, "
            "or of int6 in groups of 16");
    if (f.block) return check_sums(f, k);
    const bool grouped = f.group > 0 && f.group % 32 == 0 && f.group <= 256;
    if (f.group && (!f.is_coded() || !grouped)) refuse("group is a multiple of 32 up to 256 for codes, or 0");
    if (!f.is_coded() && (f.offsets != Offsets::none || f.wide)) refuse("floats have neither scales nor offsets");
    if (f.numbers == Numbers::fp8 && f.offsets != Offsets::none) refuse("fp8 has no zero points and no minimums");
    if (floats && f.is_coded() && (f.offsets != Offsets::none || f.numbers == Numbers::fp8))
        refuse("floats are rounded to whole numbers without offsets only");
    check_sums(f, k);
}

void set_permutation(Matrix& m, const Ids& given, const std::string& numbers) {
    const int64_t* from = vector_of(given, "permutation", m.k);
    std::vector<bool> found(size_t(m.k), false);
    for (int64_t j = 0; j < m.k; ++j) {
        if (from[j] < 0 || from[j] >= m.k || found[size_t(from[j])])
            refuse("the permutation of a matrix in " + numbers + " does not contain each column once");
        found[size_t(from[j])] = true;
        m.permutation.push_back(int32_t(from[j]));
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

Format format_of(const std::string& numbers, int group, const std::string& offsets,
                 const std::optional<std::string>& tokens, bool wide, int block) {
    Format f{one_of<Numbers>(numbers, "format",
                             {"fp32", "bf16", "fp16", "int8", "int4", "int3", "int2", "fp8", "int5", "int6"}),
             group};
    f.block = block;
    f.offsets = one_of<Offsets>(offsets, "offsets", {"none", "zero_points", "minimums"});
    const bool is_whole = f.is_coded() && f.numbers != Numbers::fp8;
    f.inputs = one_of<Inputs>(tokens.value_or(is_whole ? "int8" : "exact"), "tokens", {"exact", "bf16", "int8"});
    if (f.inputs == Inputs::int8 && !is_whole) refuse("tokens in int8 need a matrix of whole numbers, not " + numbers);
    f.wide = wide;
    return f;
}

// Packs all panels. Returns whether the format can hold every number.
bool pack_all(Matrix& m, Pool& pool, const std::vector<SourceRows>& from) {
    std::atomic<bool> good{true};
    Work work(pool);
    const size_t each = size_t(round_up(int64_t(panel_kernels().pack_room(m)), 64));
    char* room = (char*)work.hold.scratch(1, size_t(work.hold.threads()) * each);
    work.hold.draw(m.panels, [&](int64_t panel, int thread) {
        if (!panel_kernels().pack(m, panel, from.data(), room + size_t(thread) * each)) good = false;
    });
    return good;
}

void build_matrix(Matrix* self, Pool& pool, const std::vector<Any>& parts, const std::string& kind_name,
                  const std::string& numbers, int group, const std::vector<std::optional<Input>>& biases,
                  bool interleave, const std::vector<Any>& scales, const std::string& offset_kind,
                  const std::vector<Any>& offsets, const std::optional<std::string>& tokens, bool wide,
                  const std::optional<Ids>& permutation, float factor, float input_scale, int block,
                  const std::vector<Any>& factors, const std::vector<Any>& min_factors) {
    const Kind kind = one_of<Kind>(kind_name, "kind", {"float32", "bfloat16", "float16", "codes"});
    const Format format = format_of(numbers, group, offset_kind, tokens, wide, block);
    if (parts.empty() || parts.size() > Epilogue::PARTS) refuse("a matrix has 1 to 6 parts");
    if (parts[0].ndim() != 2) refuse("a part must have two axes");
    const int64_t k = int64_t(parts[0].shape(1));
    check_format(format, kind != Kind::codes, k);
    std::vector<SourceRows> from;
    std::vector<int64_t> rows;
    for (const Any& part : parts) {
        from.push_back(stored(part, kind, k));
        rows.push_back(from.back().rows);
    }
    if (k < 1 || *std::min_element(rows.begin(), rows.end()) < 1)
        refuse("a matrix has at least one row and one column");
    if (interleave && (rows.size() != 2 || rows[0] != rows[1])) refuse("two parts of one height can be interleaved");
    set_scales(from, format, k, scales, offsets);
    set_factors(from, format, k, factors, min_factors);
    auto m = std::make_unique<Matrix>(pool, format, k, interleave, rows);
    m->factor = factor, m->input_scale = input_scale;
    m->in_tiles = in_tiles(format);
    m->unit_from = unit_from(pool, format);
    m->in_dots = in_dots(format);
    if (permutation) set_permutation(*m, *permutation, numbers);
    if (!pack_all(*m, pool, from))
        refuse((kind == Kind::codes ? "a code or a scale is outside of the range of "
                                    : "a weight is not finite, or too large for ") +
               numbers);
    set_bias(*m, biases);
    new (self) Matrix(std::move(*m));
}

int64_t rows_of_matrix(const Matrix& m) {
    int64_t rows = 0;
    for (const Part& part : m.parts) rows += part.rows;
    return rows;
}

// Writes rows of the matrix as float32. Rows are numbered through all parts.
void take_rows(const Matrix& m, Pool& pool, const Ids& ids, const Output& out) {
    const int64_t n = int64_t(ids.size()), *id = vector_of(ids, "ids", n);
    const Rows<float> to = rows_of(out, "out", n, m.k);
    auto job = [from = &m, to, id, n](Pool::Hold& hold) {
        for (int64_t i = 0; i < n; ++i) check_id(id[i], rows_of_matrix(*from), "row");
        hold.split(n, [&](int64_t begin, int64_t end, int) {
            for (int64_t i = begin; i < end; ++i) {
                int64_t r = id[i];
                int part = 0;
                while (r >= from->parts[size_t(part)].rows) r -= from->parts[size_t(part++)].rows;
                auto [panel, row] = from->locate(part, r);
                panel_kernels().unpack(*from, panel, row, to.data + i * to.stride);
            }
        });
    };
    perform(pool, m, job, ids, out);
}

// Only for formats that a unit serves in this process.
void set_unit_from(Matrix& m, std::optional<int64_t> tokens) {
    if (tokens && (*tokens < 1 || !serves(m.format)))
        refuse("no matrix unit serves this format from " + std::to_string(*tokens) + " tokens on");
    if (!tokens && m.in_tiles && !VECTORS_FOLLOW) refuse("vectors do not have the bits of a matrix unit here");
    m.unit_from = tokens.value_or(NEVER);
}

}  // namespace

void bind_matrix(nb::module_& m) {
    using Arrays = std::vector<Any>;
    nb::class_<Matrix>(m, "Matrix")
        .def("__init__", build_matrix, nb::arg("pool"), array("parts"), nb::arg("kind"), nb::arg("format"),
             nb::arg("group"), array("biases").none(), nb::arg("interleave"), nb::arg("scales") = Arrays{},
             nb::arg("offset_kind") = "none", nb::arg("offsets") = Arrays{}, nb::arg("tokens") = nb::none(),
             nb::arg("wide") = false, array("permutation").none() = nb::none(), nb::arg("factor") = 1.f,
             nb::arg("input_scale") = 0.f, nb::arg("block") = 0, nb::arg("factors") = Arrays{},
             nb::arg("min_factors") = Arrays{})
        .def_prop_ro("rows", rows_of_matrix)
        .def_ro("columns", &Matrix::k)
        .def_ro("in_tiles", &Matrix::in_tiles)
        .def_ro("in_dots", &Matrix::in_dots)
        .def_prop_rw(
            "unit_from",
            [](const Matrix& w) { return w.unit_from == NEVER ? std::nullopt : std::optional(w.unit_from); },
            set_unit_from, nb::arg("tokens").none())
        .def_prop_ro("nbytes", [](const Matrix& w) { return w.panels * w.panel_bytes; })
        .def("take", take_rows, nb::arg("pool"), array("ids"), array("out"));
}

}  // namespace ridgeline
