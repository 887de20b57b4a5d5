#include "matrix.h"

namespace ridgeline {
namespace {

int64_t step_of(Format format, int group) {
    return format == Format::bf16 ? 2 : format == Format::int8 ? 8 : format == Format::int4 ? group : 1;
}

int64_t bytes_of_panel(Format format, int64_t k, int group) {
    switch (format) {
        case Format::fp32: return k * PANEL * 4;
        case Format::int8: return k * PANEL + PANEL * 4;
        case Format::int4: return k / group * (group * PANEL / 2 + PANEL * 2);
        default: return k * PANEL * 2;
    }
}

}  // namespace

Matrix::Matrix(Pool& pool, Format format, int64_t k, int group, bool interleaved, const std::vector<int64_t>& part_rows)
    : format(format), k(k), padded_k(round_up(k, step_of(format, group))), group(group), interleaved(interleaved) {
    const int64_t rows_of_panel = interleaved ? PANEL / 2 : PANEL;
    for (int64_t rows : part_rows) {
        parts.push_back({rows, interleaved ? 0 : panels});
        if (!interleaved || parts.size() == 1) panels += (rows + rows_of_panel - 1) / rows_of_panel;
    }
    panel_bytes = bytes_of_panel(format, padded_k, group);
    data = pool.take(size_t(panels * panel_bytes));
}

}  // namespace ridgeline
