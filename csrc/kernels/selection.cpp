#include "selection.h"

#include <algorithm>
#include <cstring>

namespace ridgeline::RL_ISA {
namespace {

// One query against some keys. q: [numbers, heads]. sums: room for `heads` floats. The order of operations of a key
// does not depend on the other keys: a chain over numbers for each head, then a chain over heads.
void score(const SelectCase& c, const float* q, const float* weights, const float* keys, int64_t count, float* sums,
           float* scores) {
    for (int64_t k = 0; k < count; ++k) {
        std::memset(sums, 0, size_t(c.heads) * sizeof(float));
        for (int64_t d = 0; d < c.numbers; ++d) {
            const float key = keys[k * c.numbers + d];
            const float* row = q + d * c.heads;
            for (int64_t h = 0; h < c.heads; ++h) sums[h] += key * row[h];
        }
        float total = 0;
        for (int64_t h = 0; h < c.heads; ++h) total += weights[h] * (sums[h] < 0 ? 0.f : sums[h]);
        scores[k] = total;
    }
}

}  // namespace

extern const SelectKernels select_kernels = {score};

}  // namespace ridgeline::RL_ISA
