// Packs weights into panels, and unpacks them. matrix.h describes the layouts.
#include <cmath>

#include "linear.h"
#include "simd.h"

namespace ridgeline::RL_ISA {
namespace {

void widen(const SourceRows& from, int64_t row, int64_t k, float* out) {
    if (from.kind == Kind::float32) {
        memcpy(out, (const float*)from.data + row * from.stride, size_t(k) * 4);
        return;
    }
    const uint16_t* p = (const uint16_t*)from.data + row * from.stride;
    const bool brain = from.kind == Kind::bfloat16;
    int64_t i = 0;
    for (; i + W <= k; i += W) store(out + i, brain ? from_bf16(p + i) : from_f16(p + i));
    for (; i < k; ++i) {
        uint16_t half;  // files have no alignment
        memcpy(&half, (const char*)from.data + (row * from.stride + i) * 2, 2);
        const uint32_t u = uint32_t(half) << 16;
        memcpy(out + i, &u, 4);
        if (!brain) out[i] = from_f16(half);
    }
}

float peak_of(const float* x, int64_t n) {  // infinity or NaN if there is one: their bits are the largest
    I best = {};
    int64_t i = 0;
    for (; i + W <= n; i += W) best = max(best, bits(abs(load(x + i))));
    if (i < n) best = max(best, bits(abs(load(x + i, int(n - i)))));
    const int32_t top = largest(best);
    float peak;
    memcpy(&peak, &top, 4);
    return peak;
}

int32_t clamp(float x, int32_t low, int32_t high) {
    const int32_t q = int32_t(std::nearbyint(x));
    return q < low ? low : q > high ? high : q;
}

// Rounds 16 numbers to multiples of 1 / inverse.
RL_INLINE void round16(const float* x, float inverse, int32_t low, int32_t high, int8_t* q) {
    RL_FOR(v, V) {
        I r = round(load(x + v * W) * set(inverse));
        r = r > high ? set(high) : r < low ? set(low) : r;
        store_i8(q + v * W, r);
    }
}

bool pack_int8(char* panel, int64_t k, int64_t padded, int row, const float* x) {
    const float peak = peak_of(x, k);
    if (!std::isfinite(peak)) return false;
    const bool some = peak > 0x1p-100f;  // for a smaller peak the inverse would be infinite: the row becomes 0
    const float scale = some ? peak / 127.f : 0.f, inverse = some ? 127.f / peak : 0.f;
    int64_t at = 0;
    for (; at + 16 <= k; at += 16) {
        int8_t q[16];
        round16(x + at, inverse, -127, 127, q);
        RL_FOR(j, 4) {
            uint32_t four;
            memcpy(&four, q + j * 4, 4);
            four ^= 0x80808080u;
            memcpy(panel + (at / 4 + j) * 128 + row * 4, &four, 4);
        }
    }
    for (; at < padded; ++at)
        panel[at / 4 * 128 + row * 4 + at % 4] = char(128 + (at < k ? clamp(x[at] * inverse, -127, 127) : 0));
    memcpy(panel + padded / 4 * 128 + row * 4, &scale, 4);
    return true;
}

// The scale is the largest magnitude / 7.5, rounded to float16. Each number is within half a step of its code, plus the
// error of the scale's rounding.
bool pack_int4(char* panel, int64_t k, int group, int row, const float* x) {
    const int64_t block = group / 8 * 128 + 64;
    for (int64_t g = 0; g * group < k; ++g) {
        uint8_t* out = (uint8_t*)panel + g * block;
        const int64_t begin = g * group, n = k - begin < group ? k - begin : group;
        const uint16_t half = to_f16(peak_of(x + begin, n) / 7.5f);
        const float scale = from_f16(half), inverse = scale > 0 ? 1.f / scale : 0.f;
        if (!(scale <= 65504.f)) return false;
        for (int c = 0; c < group; c += 16) {
            int8_t q[16] = {};
            if (c + 16 <= n)
                round16(x + begin + c, inverse, -8, 7, q);
            else
                for (int i = 0; c + i < n; ++i) q[i] = int8_t(clamp(x[begin + c + i] * inverse, -8, 7));
            RL_FOR(j, 2) {
                uint32_t four[2];
                memcpy(four, q + j * 8, 8);  // q + 8 in four bits is q with its highest bit flipped
                const uint32_t both = ((four[0] ^ 0x08080808u) & 0x0f0f0f0fu) | ((four[1] ^ 0x08080808u) & 0x0f0f0f0fu)
                                                                                    << 4;
                memcpy(out + (c / 8 + j) * 128 + row * 4, &both, 4);
            }
        }
        memcpy(out + group / 8 * 128 + row * 2, &half, 2);
    }
    return true;
}

bool pack_row(Matrix& m, char* panel, int row, const float* x) {
    switch (m.format) {
        case Format::fp32:
            for (int64_t i = 0; i < m.k; ++i) ((float*)panel)[i * PANEL + row] = x[i];
            return true;
        case Format::bf16:
            for (int64_t i = 0; i < m.k; i += 2) {
                const uint32_t both = uint32_t(to_bf16(x[i])) | uint32_t(i + 1 < m.k ? to_bf16(x[i + 1]) : 0) << 16;
                memcpy(panel + (i / 2 * PANEL + row) * 4, &both, 4);
            }
            return true;
        case Format::fp16:
            for (int64_t i = 0; i < m.k; ++i) {
                const uint16_t h = to_f16(x[i]);
                if ((h & 0x7fff) == 0x7c00 && std::isfinite(x[i])) return false;
                ((uint16_t*)panel)[i * PANEL + row] = h;
            }
            return true;
        case Format::int8: return pack_int8(panel, m.k, m.padded_k, row, x);
        default: return pack_int4(panel, m.k, m.group, row, x);
    }
}

bool pack_codes_int8(char* panel, int64_t k, int64_t padded, int row, const int8_t* q, const float* scales) {
    if (!(scales[0] >= 0.f && std::isfinite(scales[0]))) return false;
    bool good = true;
    for (int64_t i = 0; i < padded; ++i) {
        const int code = i < k ? q[i] : 0;
        good &= code >= -127;
        panel[i / 4 * 128 + row * 4 + i % 4] = char(128 + code);
    }
    memcpy(panel + padded / 4 * 128 + row * 4, scales, 4);
    return good;
}

bool pack_codes_int4(char* panel, int64_t k, int group, int row, const int8_t* q, const float* scales) {
    const int64_t block = group / 8 * 128 + 64;
    bool good = true;
    for (int64_t g = 0; g * group < k; ++g) {
        uint8_t* out = (uint8_t*)panel + g * block;
        const uint16_t half = to_f16(scales[g]);
        if (!(scales[g] >= 0.f && scales[g] <= 65504.f) || from_f16(half) != scales[g]) return false;
        for (int i = 0; i < group; i += 8)
            for (int j = 0; j < 4; ++j) {
                const int64_t at = g * group + i + j;
                const int low = at < k ? q[at] : 0, high = at + 4 < k ? q[at + 4] : 0;
                good &= low >= -8 && low <= 7 && high >= -8 && high <= 7;
                out[i / 8 * 128 + row * 4 + j] = uint8_t((low + 8) & 15) | uint8_t(((high + 8) & 15) << 4);
            }
        memcpy(out + group / 8 * 128 + row * 2, &half, 2);
    }
    return good;
}

// A row of codes. Returns whether the format can hold its codes and scales.
bool pack_codes(Matrix& m, char* panel, int row, const SourceRows& from, int64_t r) {
    const int8_t* q = (const int8_t*)from.data + r * from.stride;
    const float* scales = from.scales + r * from.scale_stride;
    return m.format == Format::int8 ? pack_codes_int8(panel, m.k, m.padded_k, row, q, scales)
                                    : pack_codes_int4(panel, m.k, m.group, row, q, scales);
}

bool pack(Matrix& m, int64_t panel, const SourceRows* parts, float* room) {
    char* to = m.panel(panel);
    bool good = true;
    for (int row = 0; row < PANEL; ++row) {
        int part = 0;
        int64_t r;
        if (m.interleaved) {
            part = row / 16;
            r = panel * 16 + row % 16;
        } else {
            while (part + 1 < int(m.parts.size()) && m.parts[part + 1].first_panel <= panel) ++part;
            r = (panel - m.parts[part].first_panel) * PANEL + row;
        }
        if (r < m.parts[part].rows && parts[part].kind == Kind::codes) {
            good &= pack_codes(m, to, row, parts[part], r);
            continue;
        }
        if (r < m.parts[part].rows)
            widen(parts[part], r, m.k, room);
        else
            memset(room, 0, size_t(m.k) * 4);
        good &= pack_row(m, to, row, room);
    }
    return good;
}

void unpack(const Matrix& m, int64_t panel, int row, float* out) {
    const char* from = m.panel(panel);
    const int64_t block = m.group / 8 * 128 + 64;
    for (int64_t i = 0; i < m.k; ++i) switch (m.format) {
            case Format::fp32: out[i] = ((const float*)from)[i * PANEL + row]; break;
            case Format::bf16: {
                const uint32_t u = uint32_t(((const uint16_t*)from)[i / 2 * 2 * PANEL + row * 2 + i % 2]) << 16;
                memcpy(out + i, &u, 4);
                break;
            }
            case Format::fp16: out[i] = from_f16(((const uint16_t*)from)[i * PANEL + row]); break;
            case Format::int8: {
                const int q = int(((const uint8_t*)from)[i / 4 * 128 + row * 4 + i % 4]) - 128;
                out[i] = float(q) * ((const float*)(from + m.padded_k / 4 * 128))[row];
                break;
            }
            case Format::int4: {
                const char* g = from + i / m.group * block;
                const int64_t c = i % m.group;
                const uint8_t byte = ((const uint8_t*)g)[c / 8 * 128 + row * 4 + c % 4];
                const int q = (c % 8 < 4 ? byte & 15 : byte >> 4) - 8;
                out[i] = float(q) * from_f16(((const uint16_t*)(g + m.group / 8 * 128))[row]);
                break;
            }
        }
}

}  // namespace

extern const PanelKernels panel_kernels = {pack, unpack, widen};

}  // namespace ridgeline::RL_ISA
