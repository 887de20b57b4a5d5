#include "rates.h"

#include "dots.h"
#include "unit_registers.h"

namespace ridgeline::RL_ISA {
namespace {

constexpr int CHAINS = 12;  // enough for two units with a latency of 4 to 5

// FETCHES: whether lines are prefetched. Some processors read one stream faster without it, others with it.
template <bool FETCHES> uint32_t read(const char* data, size_t bytes) {
    constexpr int step = 256 / (W * 4);
    I sum[step] = {};
    for (const char* end = data + bytes; data < end; data += 256) {
        if (FETCHES)
            RL_FOR(i, 4) prefetch(data + 4096 + i * 64);
        RL_FOR(i, step) sum[i] |= load((const int32_t*)data + i * W);
    }
    for (int i = 1; i < step; ++i) sum[0] |= sum[i];
    return uint32_t(total(sum[0]));
}

double fma_rate(long rounds) {
    F c[CHAINS], a = set(0.5f), b = set(0.25f);
    RL_FOR(i, CHAINS) c[i] = set(float(i));
    for (long r = 0; r < rounds; ++r) {
        RL_FOR(i, CHAINS) c[i] = fma(a, c[i], b);
        RL_FOR(i, CHAINS) keep(c[i]);
    }
    return 2.0 * W * CHAINS * double(rounds);
}

double dot_rate(long rounds) {
    I c[CHAINS] = {};
    Unsigned4 a = unsigned4(set(int32_t(0x01020304)));
    Signed4 b = signed4(set(int32_t(0x01ff01ff)));
    for (long r = 0; r < rounds; ++r) {
        RL_FOR(i, CHAINS) {
            keep(a), keep(b);  // otherwise the chains would share products, and constant ones would leave the loop
            dot(c[i], a, b);
        }
        RL_FOR(i, CHAINS) keep(c[i]);
    }
    return 8.0 * W * CHAINS * double(rounds);
}

double bf16_rate(long rounds) {
    F c[CHAINS] = {};
    I a = set(int32_t(0x3f803f00)), b = set(int32_t(0x3f003f80));
    for (long r = 0; r < rounds; ++r) {
        RL_FOR(i, CHAINS) dot_bf16(c[i], a, b);
        RL_FOR(i, CHAINS) keep(c[i]);
    }
    return 4.0 * W * CHAINS * double(rounds);
}

#if defined(RL_AMX_UNIT)
template <class Unit, class Number> double rate_of(int depth, long rounds) {
    alignas(64) const char zeros[UNIT_DEPTH * PANEL] = {};
    Unit unit;
    unit.zero();
    unit.add((const Number*)zeros, zeros, SQUARE);
    for (long r = 0; r < rounds; ++r) unit.add_again();
    return 2.0 * SQUARE * PANEL * depth * double(rounds);
}
double unit_rate(long rounds) { return rate_of<AmxUnit<UNIT_DEPTH>, int8_t>(UNIT_DEPTH, rounds); }
double unit_bf16_rate(long rounds) { return rate_of<AmxBf16Unit, uint16_t>(BF16_DEPTH, rounds); }
#else
double unit_rate(long) { return 0; }
double unit_bf16_rate(long) { return 0; }
#endif

}  // namespace

extern const RateKernels rate_kernels = {
    {read<true>, read<false>}, fma_rate, dot_rate, bf16_rate, unit_rate, unit_bf16_rate,
};

}  // namespace ridgeline::RL_ISA
