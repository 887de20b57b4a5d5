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
RL_INLINE float number(float x) { return x; }
RL_INLINE float number(BFloat16 x) {
    const uint32_t u = uint32_t(x.bits) << 16;
    float y;
    memcpy(&y, &u, 4);
    return y;
}
RL_INLINE float number(Float16 x) { return from_f16(x.bits); }
RL_INLINE float number(int8_t x) { return x; }
RL_INLINE void put(float& to, float x) { to = x; }
RL_INLINE void put(BFloat16& to, float x) { to.bits = to_bf16(x); }
RL_INLINE void put(Float16& to, float x) { to.bits = to_f16(x); }

RL_INLINE F load(const BFloat16* p) { return from_bf16(&p->bits); }
RL_INLINE F load(const Float16* p) { return from_f16(&p->bits); }
RL_INLINE F load(const int8_t* p) { return to_float(from_i8(p)); }
template <class T> RL_INLINE F load(const T* p, int n) {  // the first n, as of floats
    T some[W] = {};
    for (int i = 0; i < W && i < n; ++i) some[i] = p[i];
    return load(some);
}

}  // namespace ridgeline::RL_ISA
