// Compares a processor's matrix unit with plain C++ on numbers that are hard for it.
#include <cstdio>

#include "matrix_unit.h"
#include "unit_registers.h"

namespace ridgeline::RL_ISA {
namespace {

#if defined(RL_AMX_UNIT)
// Exponents of the numbers of a case, with the bias 127: of denormal ones 0, of infinities and NaN 255. `bits` is how
// many of the 7 bits of a fraction are drawn; with few of them, many sums are ties.
struct Case {
    int low, high, bits;
    bool cancels;  // every second pair of columns is the negative of the one before, apart from a few bits
};
constexpr Case CASES[] = {
    {0, 254, 7, false},                          // sums that overflow, and sums of one large number
    {120, 134, 7, false},                        // all columns take part
    {120, 134, 7, true},  {103, 127, 1, false},  // ties
    {60, 68, 7, false},                          // products around the least number that is not denormal
    {60, 68, 7, true},                           // and sums that become denormal
    {0, 2, 7, false},                            // numbers that are denormal or nearly so
    {62, 64, 2, true},
};

struct Drawn {
    uint64_t state;
    uint32_t next() {  // splitmix64
        uint64_t z = state += 0x9e3779b97f4a7c15;
        z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
        z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
        return uint32_t(z >> 33);
    }
    uint16_t draw(const Case& c) {
        const uint32_t exponent = uint32_t(c.low) + next() % uint32_t(c.high - c.low + 1);
        return uint16_t(next() % 2 << 15 | exponent << 7 | ((next() & 127) >> (7 - c.bits) << (7 - c.bits)));
    }
};

struct Operands {
    uint16_t tokens[2][SQUARE * BF16_DEPTH], panel[SQUARE * BF16_DEPTH];

    Operands(const Case& c, uint64_t seed) {
        Drawn numbers{seed};
        for (auto& slice : tokens)
            for (uint16_t& x : slice) x = numbers.draw(c);
        for (uint16_t& x : panel) x = numbers.draw(c);
        if (!c.cancels) return;
        for (int k = 2; k < BF16_DEPTH; k += 4)
            for (int i = 0; i < SQUARE; ++i)
                for (int j = 0; j < 2; ++j) {
                    for (auto& slice : tokens) slice[i * BF16_DEPTH + k + j] = slice[i * BF16_DEPTH + k + j - 2];
                    uint16_t* w = panel + k / 2 * SQUARE * 2 + 2 * i + j;
                    *w = uint16_t(w[-2 * SQUARE] ^ 0x8000 ^ (numbers.next() % 4 ? 0 : 1));
                }
    }
};

template <class Unit> void run(const Operands& data, float* sums) {
    Unit unit;
    unit.zero();
    unit.add(data.tokens[0], (const char*)data.panel, SQUARE);
    unit.add_slice(data.tokens[1], SQUARE);
    unit.store(sums, SQUARE);
    unit.load(sums, SQUARE);
    unit.add(data.tokens[1], (const char*)data.panel, SQUARE);
    unit.store(sums, SQUARE);
}

std::string bf16_fault() {
    for (const Case& c : CASES)
        for (uint64_t seed = 0; seed < 2; ++seed) {
            const Operands data(c, seed);
            float found[SQUARE * SQUARE], wanted[SQUARE * SQUARE];
            run<AmxBf16Unit>(data, found);
            run<EmulatedBf16Unit>(data, wanted);
            for (int i = 0; i < SQUARE * SQUARE; ++i) {
                if (found[i] != found[i] && wanted[i] != wanted[i]) continue;
                if (!memcmp(&found[i], &wanted[i], 4)) continue;
                char text[100];
                snprintf(text, sizeof text, "its bf16 sum is %a where Intel's manual gives %a (case %d)", found[i],
                         wanted[i], int(&c - CASES));
                return text;
            }
        }
    return "";
}
#else
std::string bf16_fault() { return "the kernels were built without it"; }
#endif

}  // namespace

extern const UnitKernels unit_kernels = {bf16_fault};

}  // namespace ridgeline::RL_ISA
