#include <algorithm>
#include <cmath>
#include <numeric>

#include <nanobind/stl/optional.h>

#include "bind.h"
#include "selection.h"

namespace ridgeline {
namespace {

constexpr int64_t SCORED = 256;  // keys of a piece of work

// Whether key a comes before key b: the higher score, NaN above all, and of equal scores the earlier key.
struct Better {
    const float* scores;
    bool operator()(int64_t a, int64_t b) const {
        const bool nan_a = std::isnan(scores[a]), nan_b = std::isnan(scores[b]);
        if (nan_a != nan_b) return nan_a;
        return nan_a || scores[a] == scores[b] ? a < b : scores[a] > scores[b];
    }
};

// Writes the indices of the best `most` of the keys that a query sees, ascending, and returns how many there are.
int64_t choose(const float* scores, int64_t limit, const int64_t* seen, int64_t most, int64_t* order, int64_t* to) {
    int64_t count = 0;
    for (int64_t k = 0; k < limit; ++k)
        if (!seen || seen[k]) order[count++] = k;
    if (count > most) {
        std::nth_element(order, order + most, order + count, Better{scores});
        std::sort(order, order + most);
    }
    std::copy_n(order, std::min(count, most), to);
    return std::min(count, most);
}

// q [n, heads, numbers] and weights [n, heads] of one sequence, keys [S, numbers], limits [n]: the keys that a query
// may see come before its limit; seen [n, S]: whether it sees a key, or null for all -> ids [n, most], counts [n].
void select_keys(Pool& pool, const Input& q, const Input& weights, const Input& keys, const Ids& limits,
                 const std::optional<Ids>& seen, const Places& ids, const Places& counts) {
    const int64_t n = q.ndim() == 3 ? int64_t(q.shape(0)) : -1, heads = n < 0 ? 0 : int64_t(q.shape(1));
    if (n < 0) refuse("q must be [n, heads, numbers]");
    const Rows<const float> all = rows_of(keys, "keys");
    const SelectCase c{.heads = heads, .numbers = all.columns};
    const Heads3<const float> from = heads_of(q, "q", n, heads, c.numbers);
    const Rows<const float> shares = rows_of(weights, "weights", n, heads);
    const int64_t* limit = vector_of(limits, "limits", n);
    const Rows<int64_t> to = rows_of(ids, "ids");
    const Rows<const int64_t> mask = seen ? rows_of(*seen, "seen", n, all.rows) : Rows<const int64_t>{};
    int64_t* const many = vector_of(counts, "counts", n);
    if (to.rows != n || (all.rows > 1 && all.stride != c.numbers)) refuse("ids must be [n, k], and keys dense");
    for (int64_t t = 0; t < n; ++t)
        if (limit[t] < 0 || limit[t] > all.rows) refuse("a limit is not in 0..the number of keys");
    Work work(pool);
    Pool::Hold& hold = work.hold;
    const int64_t room = heads * (c.numbers + 1), blocks = (all.rows + SCORED - 1) / SCORED;
    const size_t scored = size_t(n * all.rows);
    float* scores = (float*)hold.scratch(0, (scored + size_t(room * hold.threads())) * sizeof(float));
    float* rooms = scores + scored;
    hold.draw(n * blocks, [&](int64_t i, int thread) {
        const int64_t t = i / blocks, begin = i % blocks * SCORED, end = std::min(begin + SCORED, limit[t]);
        if (begin >= end) return;
        float *transposed = rooms + thread * room, *sums = transposed + heads * c.numbers;
        for (int64_t h = 0; h < heads; ++h)
            for (int64_t d = 0; d < c.numbers; ++d)
                transposed[d * heads + h] = from.data[t * from.stride + h * from.head + d];
        select_kernels().score(c, transposed, shares.data + t * shares.stride, all.data + begin * all.stride,
                               end - begin, sums, scores + t * all.rows + begin);
    });
    int64_t* orders = (int64_t*)hold.scratch(1, size_t(all.rows * hold.threads()) * sizeof(int64_t));
    hold.draw(n, [&](int64_t t, int thread) {
        many[t] = choose(scores + t * all.rows, limit[t], seen ? mask.data + t * mask.stride : nullptr, to.columns,
                         orders + thread * all.rows, to.data + t * to.stride);
    });
}

}  // namespace

void bind_selection(nb::module_& m) {
    m.def("select_keys", select_keys, nb::arg("pool"), array("q"), array("weights"), array("keys"), array("limits"),
          array("seen").none(), array("ids"), array("counts"));
}

}  // namespace ridgeline
