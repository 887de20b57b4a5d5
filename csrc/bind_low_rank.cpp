#include <algorithm>
#include <cstring>

#include "bind.h"
#include "low_rank.h"

namespace ridgeline {
namespace {

constexpr int64_t BLOCK = 1024;  // outputs that one thread computes at once

struct Terms {
    Rows<const float> down, up, gain, add;
    const int64_t* ranks;
    int64_t slots, rows, columns;

    LowRankTerm of(int64_t slot) const {
        return {down.data + slot * down.stride, up.data + slot * up.stride, gain.data + slot * gain.stride,
                add.data + slot * add.stride,   ranks[slot],                rows,
                columns};
    }
};

void add_low_rank(Pool& pool, const Input& y, const Input& x, const Ids& slots, const Input& down, const Input& up,
                  const Input& gain, const Input& add, const Ids& ranks, const Output& out) {
    const Rows<const float> from = rows_of(y, "y"), in = rows_of(x, "x");
    const int64_t count = int64_t(ranks.size()), n = from.rows;
    if (in.rows != n || down.ndim() != 3 || up.ndim() != 3 || down.shape(1) != up.shape(1))
        refuse("x must have the rows of y; down and up must be [slots, rank, numbers]");
    const int64_t most = int64_t(down.shape(1));
    const Terms terms{rows_of(down, "down", count, most * in.columns),
                      rows_of(up, "up", count, most * from.columns),
                      rows_of(gain, "gain", count, from.columns),
                      rows_of(add, "add", count, from.columns),
                      vector_of(ranks, "ranks", count),
                      count,
                      from.columns,
                      in.columns};
    const Rows<float> to = rows_of(out, "out", n, from.columns);
    const int64_t* of = vector_of(slots, "slots", n);
    const int64_t blocks = (from.columns + BLOCK - 1) / BLOCK;
    auto job = [=](Pool::Hold& hold) {
        float* inner = (float*)hold.scratch(0, size_t(n * most) * sizeof(float));
        // An unknown slot and a rank beyond the arrays are read as no term: recorded slots are checked by the host.
        auto has = [&](int64_t row) {
            return of[row] >= 0 && of[row] < terms.slots && terms.ranks[of[row]] <= most;
        };
        hold.split(n, [&](int64_t begin, int64_t end, int) {
            for (int64_t i = begin; i < end; ++i)
                if (has(i)) low_rank_kernels().inner(terms.of(of[i]), in.data + i * in.stride, inner + i * most);
        });
        hold.split(n * blocks, [&](int64_t begin, int64_t end, int) {
            for (int64_t k = begin; k < end; ++k) {  // neighboring rows of a slot share a block of its matrix
                const int64_t i = k % n, first = k / n * BLOCK, last = std::min(first + BLOCK, from.columns);
                const float* row = from.data + i * from.stride;
                float* target = to.data + i * to.stride;
                if (has(i))
                    low_rank_kernels().outer(terms.of(of[i]), row, inner + i * most, first, last, target);
                else
                    std::memcpy(target + first, row + first, size_t(last - first) * sizeof(float));
            }
        });
    };
    perform(pool, pool, job, y, x, slots, down, up, gain, add, ranks, out);
}

}  // namespace

void bind_low_rank(nb::module_& m) {
    m.def("add_low_rank", add_low_rank, nb::arg("pool"), array("y"), array("x"), array("slots"), array("down"),
          array("up"), array("gain"), array("add"), array("ranks"), array("out"));
}

}  // namespace ridgeline
