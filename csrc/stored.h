// Numbers of state as they are stored, and as floats.
#pragma once
#include "simd.h"

namespace ridgeline::RL_ISA {

struct BFloat16 {
    uint16_t bits;
};
struct Float16 {
    uint16_t bits;
};
struct E4m3 {  // the functions below read it times 2^-8
    uint8_t bits;
};
RL_INLINE float number(float x) { return x; }
RL_INLINE float number(BFloat16 x) {
    const uint32_t u = uint32_t(x.bits) << 16;
    float y;
    memcpy(&y, &u, 4);
    return y;
}
RL_INLINE float number(Float16 x) { return from_f16(x.bits); }
RL_INLINE float number(int8_t x) { return x; }
RL_INLINE float number(E4m3 x) { return x.bits == 127 ? __builtin_nanf("") : from_f8(x.bits); }

// Rounds to e4m3, to nearest, ties to even. Finite numbers beyond 448 become 448, all others 127, which is NaN.
RL_INLINE I to_f8(F x) {
    const I magnitude = bits(x) & 0x7fffffff, capped = bits(min(floats(magnitude), set(448.f)));
    const I normal = ((capped + 0x7ffff + ((capped >> 20) & 1)) >> 20) - (120 << 3);
    // In a sum with 2^14 the last bit is 2^-9, the smallest number of e4m3.
    const I subnormal = bits(floats(capped) + set(0x1p14f)) - bits(set(0x1p14f));
    const I code = (floats(capped) < set(0x1p-6f) ? subnormal : normal) | ((bits(x) >> 24) & 128);
    return magnitude >= 0x7f800000 ? set(int32_t(127)) : code;
}

RL_INLINE void put(float& to, float x) { to = x; }
RL_INLINE void put(BFloat16& to, float x) { to.bits = to_bf16(x); }
// A finite number beyond the largest half, 65,504, becomes that: an infinite key would turn an answer into NaN.
RL_INLINE void put(Float16& to, float x) {
    const uint16_t half = to_f16(x);
    const bool overflows = (half & 0x7fff) == 0x7c00 && __builtin_fabsf(x) <= 0x1.fffffep127f;
    to.bits = uint16_t(half - overflows);
}

RL_INLINE F load(const BFloat16* p) { return from_bf16(&p->bits); }
RL_INLINE F load(const Float16* p) { return from_f16(&p->bits); }
RL_INLINE F load(const int8_t* p) { return to_float(from_i8(p)); }
RL_INLINE F load(const E4m3* p) { return from_f8(&p->bits); }
template <class T> RL_INLINE F load(const T* p, int n) {  // the first n, as of floats
    T some[W] = {};
    for (int i = 0; i < W && i < n; ++i) some[i] = p[i];
    return load(some);
}

}  // namespace ridgeline::RL_ISA
