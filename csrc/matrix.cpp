#include "matrix.h"

namespace ridgeline {
namespace {

// Columns of a panel come in whole groups; in whole pieces of 32 columns where a row has one scale.
int64_t unit_of(const Format& f) {
    if (!f.is_coded() || f.is_plain_bytes()) return f.traits().step;
    return f.block ? f.block : f.group ? f.group : 32;
}

int64_t bytes_of_tail(const Format& f) {
    if (!f.is_coded()) return 0;
    if (f.block) return PANEL * (f.block / f.group + 2) * (f.offsets == Offsets::minimums ? 2 : 1);
    const int64_t zeros = f.offsets == Offsets::zero_points ? f.traits().bits <= 4 ? 4 : 8 : 0;
    const int64_t bits = (f.has_wide_scales() ? 32 : 16) + (f.offsets == Offsets::minimums ? 16 : zeros);
    return PANEL * bits / 8;
}

}  // namespace

Matrix::Matrix(Pool& pool, Format format, int64_t k, bool interleaved, const std::vector<int64_t>& part_rows)
    : format(format),
      k(k),
      padded_k(round_up(k, unit_of(format))),
      group(format.block   ? format.block
            : format.group ? format.group
                           : padded_k),
      code_bytes(group * format.traits().bits * (PANEL / 8)),
      group_bytes(code_bytes + bytes_of_tail(format)),
      interleaved(interleaved) {
    const int64_t rows_of_panel = interleaved ? PANEL / 2 : PANEL;
    for (int64_t rows : part_rows) {
        parts.push_back({rows, interleaved ? 0 : panels});
        if (!interleaved || parts.size() == 1) panels += (rows + rows_of_panel - 1) / rows_of_panel;
    }
    panel_bytes = padded_k / group * group_bytes;
    data = pool.take(size_t(panels * panel_bytes));
}

}  // namespace ridgeline
