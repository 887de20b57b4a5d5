#include "checks/matrices.h"

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

void pack(Matrix& m, const std::vector<SourceRows>& from) {
    std::vector<float> room(panel_kernels().pack_room(m) / 4 + 1);
    for (int64_t panel = 0; panel < m.panels; ++panel)
        if (!panel_kernels().pack(m, panel, from.data(), (char*)room.data()))
            throw std::runtime_error("a panel does not hold its numbers");
}

}  // namespace

Matrix random_matrix(Pool& pool, const Format& f, int64_t k, int64_t rows, bool from_floats, Random& random,
                     int parts) {
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
    pack(m, from);
    return m;
}

Matrix matrix_of(Pool& pool, const Format& f, int64_t k, const std::vector<float>& rows) {
    Matrix m(pool, f, k, false, {int64_t(rows.size()) / k});
    pack(m, {{.data = rows.data(), .kind = Kind::float32, .rows = m.parts[0].rows, .stride = k}});
    return m;
}

Source source_of(const std::vector<float>& x, int64_t k) {
    Source s{};
    s.x = x.data(), s.stride = k, s.k = k;
    return s;
}

Output product(Pool& pool, const Matrix& m, const std::vector<float>& x, int64_t tokens) {
    Output out(tokens, m.parts[0].rows);
    const Epilogue::Out to{out.data(), out.stride};
    Pool::Hold hold(pool);
    Projection{m, {}, 1, {}}.run(hold, {source_of(x, m.k), tokens}, &to);
    return out;
}

void one_product(Pool& pool, Results& results, const Case& c, const Shape& s, const std::vector<float>& x,
                 const Matrix& m, int64_t nan) {
    const std::string name = c.name + " " + std::to_string(s.rows) + "x" + std::to_string(s.k) + " of " +
                             std::to_string(s.tokens) + (nan < 0 ? "" : " with NaN");
    results.add(name, c.format.rounds_tokens(), product(pool, m, x, s.tokens), nan);
}

}  // namespace ridgeline
