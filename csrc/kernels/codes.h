// Codes as they are stored in a panel, for the inner loops: bytes of four neighbors in each lane.
#pragma once
#include "matrix.h"
#include "simd.h"

namespace ridgeline::RL_ISA {

constexpr int VECTORS = PANEL / W;  // vectors of a panel
constexpr int PIECE = 32;           // columns that are read at once, in 8 steps of 4

// each<N>(w, f) calls f(step, codes of N vectors) for the 8 steps of a piece. w: the first vector of the piece.
// STEPS: steps of 4 columns whose products with activations add up to 16 bits in each half of a lane; 0: no number of
// them. 16 columns of a half lane with codes of 4 bits: 16 * 15 * 127 < 2^15.

struct Bytes {
    static constexpr int BYTES = 1024, STEPS = 0;
    template <int N, class Each> RL_INLINE void each(const char* w, Each&& f) {
        RL_FOR(s, 8) {
            I x[N];
            RL_FOR(v, N) x[v] = load((const int32_t*)(w + s * 128) + v * W);
            f(s, x);
        }
    }
};
template <int MOST> struct SmallBytes : Bytes {
    static constexpr int STEPS = MOST;
};
struct Int4 {
    static constexpr int BYTES = 512, STEPS = 8;
    template <int N, class Each> RL_INLINE void each(const char* w, Each&& f) {
        RL_FOR(d, 4) {
            I both[N], x[N];
            RL_FOR(v, N) {
                both[v] = load((const int32_t*)(w + d * 128) + v * W);
                x[v] = both[v] & 0x0f0f0f0f;
            }
            f(2 * d, x);
            RL_FOR(v, N) x[v] = (both[v] >> 4) & 0x0f0f0f0f;
            f(2 * d + 1, x);
        }
    }
};
struct Int3 {
    static constexpr int BYTES = 384, STEPS = 8;
    template <int N, class Each> RL_INLINE void each(const char* w, Each&& f) {
        RL_FOR(d, 3) {
            I both[N], x[N];
            RL_FOR(v, N) {
                both[v] = load((const int32_t*)(w + d * 128) + v * W);
                x[v] = both[v] & 0x07070707;
            }
            f(2 * d, x);
            RL_FOR(v, N) x[v] = (both[v] >> 3) & 0x07070707;
            f(2 * d + 1, x);
        }
        w = again(w);
        RL_FOR(d, 2) {
            I x[N];
            RL_FOR(v, N) {
                const I low = load((const int32_t*)(w + d * 128) + v * W);
                const I high = load((const int32_t*)(w + 256) + v * W);
                x[v] = ((low >> 6) & 0x03030303) | ((high >> (4 + d)) & 0x04040404);
            }
            f(6 + d, x);
        }
    }
};
struct Int2 {
    static constexpr int BYTES = 256, STEPS = 8;
    template <int N, class Each> RL_INLINE void each(const char* w, Each&& f) {
        RL_FOR(d, 2) {
            I four[N], x[N];
            RL_FOR(v, N) {
                four[v] = load((const int32_t*)(w + d * 128) + v * W);
                x[v] = four[v] & 0x03030303;
            }
            f(4 * d, x);
            RL_FOR(j, 3) {
                RL_FOR(v, N) x[v] = (four[v] >> (2 * j + 2)) & 0x03030303;
                f(4 * d + j + 1, x);
            }
        }
    }
};

// The lowest four bits of the codes of steps 2 d and 2 d + 1, as Int4 has them.
template <int N> RL_INLINE void low_bits(const char* w, int d, I (&first)[N], I (&second)[N]) {
    RL_FOR(v, N) {
        const I both = load((const int32_t*)(w + d * 128) + v * W);
        first[v] = both & 0x0f0f0f0f;
        second[v] = (both >> 4) & 0x0f0f0f0f;
    }
}
struct Int5 {
    static constexpr int BYTES = 640, STEPS = 4;
    template <int N, class Each> RL_INLINE void each(const char* w, Each&& f) {
        I high[N];
        RL_FOR(v, N) high[v] = load((const int32_t*)(w + 512) + v * W);
        RL_FOR(d, 4) {
            I x[N], y[N];
            low_bits(w, d, x, y);
            RL_FOR(v, N) {
                x[v] |= (d < 2 ? high[v] << (4 - 2 * d) : high[v] >> (2 * d - 4)) & 0x10101010;
                y[v] |= (d < 2 ? high[v] << (3 - 2 * d) : high[v] >> (2 * d - 3)) & 0x10101010;
            }
            f(2 * d, x);
            f(2 * d + 1, y);
        }
    }
};
struct Int6 {
    static constexpr int BYTES = 768, STEPS = 2;
    template <int N, class Each> RL_INLINE void each(const char* w, Each&& f) {
        RL_FOR(h, 2) {
            const char* at = w + h * 384;
            I high[N], x[N], y[N];
            RL_FOR(v, N) high[v] = load((const int32_t*)(at + 256) + v * W);
            low_bits(at, 0, x, y);
            RL_FOR(v, N) {
                x[v] |= (high[v] << 4) & 0x30303030;
                y[v] |= (high[v] << 2) & 0x30303030;
            }
            f(4 * h, x);
            f(4 * h + 1, y);
            low_bits(at, 1, x, y);
            RL_FOR(v, N) {
                x[v] |= high[v] & 0x30303030;
                y[v] |= (high[v] >> 2) & 0x30303030;
            }
            f(4 * h + 2, x);
            f(4 * h + 3, y);
        }
    }
};

// ---- what follows the codes of a group --------------------------------------------------------------------------

// Vector v of the scales.
RL_INLINE F scale_at(const char* tail, bool wide, int v) {
    return wide ? load((const float*)tail + v * W) : from_f16((const uint16_t*)tail + v * W);
}
// Vector v of the zero points, as unsigned as the codes. at: behind the scales.
RL_INLINE I zeros_at(const char* at, bool halves, int v) {
    const uint8_t* p = (const uint8_t*)at;
    if (!halves) return from_u8(p + v * W);
    const I both = from_u8(p + v * W % 16);
    return v * W < 16 ? both & 15 : both >> 4;
}
RL_INLINE F minimum_at(const char* at, int v) { return from_f16((const uint16_t*)at + v * W); }

}  // namespace ridgeline::RL_ISA
