// Packs weights into panels, and unpacks them. matrix.h describes the layouts.
#include "linear.h"
#include "pack_codes.h"

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

// Rounds a row of floats: each group's largest magnitude is `steps` times its scale. A float16 scale is rounded first,
// and each number is then within half a step of its code, plus the error of the scale's rounding. Codes behind k stay.
bool round_row(const Matrix& m, const float* x, int8_t* codes, float* scales) {
    const Traits& t = m.format.traits();
    const int32_t high = t.zero - 1, low = m.format.numbers == Numbers::int8 ? -high : -t.zero;
    for (int64_t g = 0; g * m.group < m.k; ++g) {
        const int64_t begin = g * m.group, n = m.k - begin < m.group ? m.k - begin : m.group;
        const float peak = peak_of(x + begin, n);
        float scale, inverse;
        if (m.format.has_wide_scales()) {
            const bool some = peak > 0x1p-100f;  // for a smaller peak the inverse would be infinite: the row becomes 0
            scale = some ? peak / t.steps : 0.f, inverse = some ? t.steps / peak : 0.f;
        } else {
            scale = from_f16(to_f16(peak / t.steps));
            inverse = scale > 0 ? 1.f / scale : 0.f;
        }
        if (!std::isfinite(peak) || !std::isfinite(scale)) return false;
        scales[g] = scale;
        int64_t i = 0;
        for (; i + 16 <= n; i += 16) round16(x + begin + i, inverse, low, high, codes + begin + i);
        for (; i < n; ++i) codes[begin + i] = int8_t(clamp(x[begin + i] * inverse, low, high));
    }
    return true;
}

bool put_floats(Matrix& m, char* panel, int row, const float* x) {
    switch (m.format.numbers) {
        case Numbers::fp32:
            for (int64_t i = 0; i < m.k; ++i) ((float*)panel)[i * PANEL + row] = x[i];
            return true;
        case Numbers::bf16:
            for (int64_t i = 0; i < m.k; i += 2) {
                const uint32_t both = uint32_t(to_bf16(x[i])) | uint32_t(i + 1 < m.k ? to_bf16(x[i + 1]) : 0) << 16;
                memcpy(panel + (i / 2 * PANEL + row) * 4, &both, 4);
            }
            return true;
        default:
            for (int64_t i = 0; i < m.k; ++i) {
                const uint16_t h = to_f16(x[i]);
                if ((h & 0x7fff) == 0x7c00 && std::isfinite(x[i])) return false;
                ((uint16_t*)panel)[i * PANEL + row] = h;
            }
            return true;
    }
}

// Memory for a row: floats, codes, scales, and offsets of zero.
struct Room {
    float *floats, *scales, *zeros;
    int8_t* codes;
    static size_t bytes(const Matrix& m) { return size_t(m.k + 2 * groups(m)) * 4 + size_t(m.padded_k); }
    static int64_t groups(const Matrix& m) { return m.padded_k / m.group; }
    Room(const Matrix& m, char* at)
        : floats((float*)at), scales(floats + m.k), zeros(scales + groups(m)), codes((int8_t*)(zeros + groups(m))) {
        memset(at, 0, bytes(m));
    }
};

bool pack_row(Matrix& m, char* panel, int row, const SourceRows& from, int64_t r, const Room& room) {
    if (from.kind != Kind::codes) {
        widen(from, r, m.k, room.floats);
        if (!m.format.is_coded()) return put_floats(m, panel, row, room.floats);
        if (!round_row(m, room.floats, room.codes, room.scales)) return false;
        return put_row(m, panel, row, {room.codes, room.scales});
    }
    memcpy(room.codes, (const int8_t*)from.data + r * from.stride, size_t(m.k));
    return put_row(m, panel, row,
                   {room.codes, from.scales + r * from.scale_stride,
                    from.zero_points ? from.zero_points + r * from.offset_stride : nullptr,
                    from.minimums ? from.minimums + r * from.offset_stride : nullptr,
                    from.factors ? from.factors + r * from.factor_stride : nullptr,
                    from.min_factors ? from.min_factors + r * from.factor_stride : nullptr});
}

// A row of zeros, which fills up a panel.
bool pack_nothing(Matrix& m, char* panel, int row, const Room& room) {
    memset(room.floats, 0, Room::bytes(m));
    if (!m.format.is_coded()) return put_floats(m, panel, row, room.floats);
    return put_row(m, panel, row,
                   {room.codes, room.scales, (const int8_t*)room.zeros, room.zeros, room.codes, room.codes});
}

bool pack(Matrix& m, int64_t panel, const SourceRows* parts, char* at) {
    char* to = m.panel(panel);
    const Room room(m, at);
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
        good &= r < m.parts[part].rows ? pack_row(m, to, row, parts[part], r, room) : pack_nothing(m, to, row, room);
    }
    return good;
}

void unpack(const Matrix& m, int64_t panel, int row, float* out) {
    const char* from = m.panel(panel);
    if (m.format.is_coded() && m.permutation.empty()) return coded_row(m, from, row, out);
    if (m.format.is_coded()) {
        std::vector<float> ordered(size_t(m.k));
        coded_row(m, from, row, ordered.data());
        for (int64_t i = 0; i < m.k; ++i) out[m.permutation[size_t(i)]] = ordered[size_t(i)];
        return;
    }
    for (int64_t i = 0; i < m.k; ++i) switch (m.format.numbers) {
            case Numbers::fp32: out[i] = ((const float*)from)[i * PANEL + row]; break;
            case Numbers::bf16: {
                const uint32_t u = uint32_t(((const uint16_t*)from)[i / 2 * 2 * PANEL + row * 2 + i % 2]) << 16;
                memcpy(out + i, &u, 4);
                break;
            }
            default: out[i] = from_f16(((const uint16_t*)from)[i * PANEL + row]);
        }
}

}  // namespace

extern const PanelKernels panel_kernels = {pack, Room::bytes, unpack, widen};

}  // namespace ridgeline::RL_ISA
