#include <chrono>
#include <vector>

#include "attention_calls.h"
#include "bf16_dots.h"
#include "bind.h"
#include "matrix_unit.h"
#include "rates.h"
#include "threads.h"

namespace ridgeline {
namespace {

double seconds_since(std::chrono::steady_clock::time_point start) {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// Returns the bytes per second at which all threads read newly allocated memory once.
double read_rate(Pool& pool, const Pages& pages, int way) {
    Pool::Hold hold(pool);
    std::vector<uint32_t> sums(size_t(hold.threads()) *
                               64);  // 64 apart, so that no two threads write to one cache line
    auto start = std::chrono::steady_clock::now();
    hold.split(int64_t(pages.size() / 256), [&](int64_t begin, int64_t end, int t) {
        sums[size_t(t) * 64] = rate_kernels().read[way](pages.data() + begin * 256, size_t(end - begin) * 256);
    });
    return double(pages.size() / 256 * 256) / seconds_since(start);
}

// Returns operations per second: the best of many short runs, since other programs interrupt long ones.
double operation_rate(Pool& pool, double (*kernel)(long)) {
    constexpr long rounds = 20000;
    Pool::Hold hold(pool);
    std::vector<double> done(size_t(hold.threads()) * 8);
    double best = 0;
    for (int tries = 0; tries < 100; ++tries) {
        auto start = std::chrono::steady_clock::now();
        hold.run([&](int t) { done[size_t(t) * 8] = kernel(rounds); });
        const double taken = seconds_since(start);
        double sum = 0;
        for (double d : done) sum += d;
        best = std::max(best, sum / taken);
    }
    return best;
}

}  // namespace

void bind_pool(nb::module_& m) {
    using Free = nb::call_guard<nb::gil_scoped_release>;
    m.def("usable_cores", usable_cores);
    nb::class_<Pool> pool(m, "Pool");
    bind_room(pool);
    pool.def(nb::init<int>(), nb::arg("threads"))
        .def_prop_ro("size", &Pool::size)
        .def_prop_ro("busy_seconds", &Pool::busy_seconds)
        .def_prop_rw(
            "rounds_attention", [](Pool& pool) { return pool.rounds_attention; },
            [](Pool& pool, bool rounds) {
                if (rounds && !rounded_refusal().empty()) refuse("attention cannot be rounded: " + rounded_refusal());
                pool.rounds_attention = rounds;
            })
        .def(
            "read_rate",
            [](Pool& pool, size_t bytes) {
                Pages pages(bytes);
                for (size_t i = 0; i < bytes; i += 4096) pages.data()[i] = 1;
                double best = 0;
                for (int i = 0; i < 4; ++i) best = std::max(best, read_rate(pool, pages, i % 2));
                return best;
            },
            nb::arg("bytes"), Free())
        .def(
            "fma_rate", [](Pool& pool) { return operation_rate(pool, rate_kernels().fma); }, Free())
        .def(
            "dot_rate", [](Pool& pool) { return operation_rate(pool, rate_kernels().dot); }, Free())
        .def(
            "bf16_rate",
            [](Pool& pool) { return dots_refusal().empty() ? operation_rate(pool, rate_kernels().bf16) : 0.; }, Free())
        .def(
            "unit_rate",
            [](Pool& pool) { return matrix_unit() == Unit::amx ? operation_rate(pool, rate_kernels().unit) : 0.; },
            Free())
        .def(
            "unit_bf16_rate",
            [](Pool& pool) {
                const bool has_tiles = matrix_unit() == Unit::amx && bf16_refusal().empty();
                return has_tiles ? operation_rate(pool, rate_kernels().unit_bf16) : 0.;
            },
            Free());
}

}  // namespace ridgeline
