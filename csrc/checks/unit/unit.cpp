// Products in a matrix unit, compared with vectors: for unit_checks, whose kernels use AMX on every x86 CPU with avx2.
#include <cstring>

#include "checks/matrices.h"
#include "checks/unit/trap.h"
#include "matrix_unit.h"

namespace ridgeline {
namespace {

std::vector<Case> cases() {
    std::vector<Case> all = {{"bf16", {Numbers::bf16}, true},
                             {"bf16 of bf16", {.numbers = Numbers::bf16, .inputs = Inputs::bf16}, true}};
    const std::pair<std::string, Numbers> codes[] = {{"int8", Numbers::int8}, {"int6", Numbers::int6},
                                                     {"int5", Numbers::int5}, {"int4", Numbers::int4},
                                                     {"int3", Numbers::int3}, {"int2", Numbers::int2}};
    for (const auto& [name, numbers] : codes)
        for (int group : {0, 32, 128}) {
            const std::string with = name + (group ? "-" + std::to_string(group) : "");
            all.push_back({with, {numbers, group, Offsets::none, Inputs::int8}, group != 32});
            if (!group) continue;
            all.push_back({with + "-zero", {numbers, group, Offsets::zero_points, Inputs::int8}, false});
            all.push_back({with + "-min", {numbers, group, Offsets::minimums, Inputs::int8}, false});
        }
    return all;
}

// Multiplies in the unit and in vectors.
void both(Pool& pool, Results& results, const Case& c, const Shape& s, Random& random) {
    Matrix m = random_matrix(pool, c.format, s.k, s.rows, c.from_floats, random);
    const std::vector<float> x = random.floats(s.tokens * s.k, 3);
    if (!c.format.is_coded() && !bf16_refusal().empty()) throw std::runtime_error(bf16_refusal());
    m.in_tiles = in_tiles(c.format);
    if (!serves(c.format)) throw std::runtime_error(c.name + " does not use the unit");
    m.unit_from = 1;
    one_product(pool, results, c, s, x, m);
    m.unit_from = NEVER;
    const Output vectors = product(pool, m, x, s.tokens);
    if (memcmp(vectors.numbers.data(), results.all.back().numbers.data(), vectors.numbers.size() * 4))
        throw std::runtime_error(results.all.back().name + ": vectors have other bits than the unit");
}

}  // namespace

Results compute() {
    Results results;
    Pool pool(2);  // each thread has tiles of its own
    Random random(7);
    for (const Case& c : cases()) {
        for (Shape s : {Shape{100, 257, 1}, Shape{257, 63, 100}, Shape{1, 100, 63}, Shape{63, 1, 257}})
            both(pool, results, c, s, random);
        // Columns and rows of several ranges, where these differ from those of other formats.
        if (!c.format.is_coded() || c.format.is_plain_bytes())
            both(pool, results, c, {290, c.format.is_coded() ? 2100 : 1100, 33}, random);
        if (c.name == "int4-32" || c.name == "int4-128-min") both(pool, results, c, {63, 1400, 40}, random);
    }
    const trap::Counts counts = trap::counts();
    printf("%lld instructions of AMX were emulated\n", (long long)counts.all);
    if (counts.configured != counts.released) throw std::runtime_error("a thread has kept its tiles");
    return results;
}

}  // namespace ridgeline
