// What happens to the sums of a finished tile: scales, bias, activation, and the write to the output.
#pragma once
#include <algorithm>

#include "linear.h"
#include "tiles.h"
#include "vmath.h"
#include "widen.h"

namespace ridgeline::RL_ISA {

// Converts the raw sums of a tile to floats, in place.
static inline void finish(const Matrix& w, const Activations& a, int64_t panel, int64_t begin, int64_t m, float* c) {
    const bool is_plain = w.format.is_plain_bytes(), by_row = is_plain || widening_of(w.format) == BY_ROW;
    if (!w.format.rounds_tokens() && !by_row) return;
    const float* scales = (const float*)(w.panel(panel) + w.code_bytes);
    const bool has_zero = BYTE_ZERO && !a.for_unit;  // sums already lack what the offset would remove
    for (int64_t i = 0; i < m; ++i) {
        if (SHORT && is_plain && a.surplus)
            add_surplus(w.panel(panel), a.surplus + (begin + i) * (a.padded_k / 4), a.num_surplus[begin + i],
                        (int32_t*)c + i * PANEL);
        const F token = set(w.format.rounds_tokens() ? a.scale[begin + i] * w.factor : 256.f);
        RL_FOR(v, VECTORS) {
            float* at = c + i * PANEL + v * W;
            F sum = load(at);
            if (is_plain) sum = to_float(has_zero ? bits(sum) : bits(sum) + set(a.offset[begin + i]));
            if (by_row) sum = sum * load(scales + v * W);
            store(at, sum * token);
        }
    }
}

static inline void store_gated(const Matrix& w, const Epilogue& e, int64_t panel, int64_t begin, int64_t m,
                               const float* c) {
    const int64_t column = panel * 16;
    const int count = int(std::min<int64_t>(16, w.parts[0].rows - column));
    for (int64_t i = 0; i < m; ++i)
        RL_FOR(v, V) {
            F gate = load(c + i * PANEL + v * W), up = load(c + i * PANEL + 16 + v * W);
            store(e.out[0].data + (begin + i) * e.out[0].stride + column + v * W, activate(e.gate, gate, up),
                  count - v * W);
        }
}

static inline F plain(const Epilogue& e, F x) {
    if (e.kind == Epilogue::unary) return activate(e.gate.activation, x);
    if (e.scale != 1.f) x = x * set(e.scale);
    return e.softcap > 0 ? set(e.softcap) * tanh(x / set(e.softcap)) : x;
}

static inline void store_rows(const Matrix& w, const Epilogue& e, int64_t panel, int64_t begin, int64_t m,
                              const float* c) {
    size_t part = 0;
    while (part + 1 < w.parts.size() && w.parts[part + 1].first_panel <= panel) ++part;
    const int64_t column = (panel - w.parts[part].first_panel) * PANEL;
    const int count = int(std::min<int64_t>(PANEL, w.parts[part].rows - column));
    const bool bare = e.kind == Epilogue::plain && e.scale == 1.f && e.softcap <= 0;
    for (int64_t i = 0; i < m; ++i) {
        float* out = e.out[part].data + (begin + i) * e.out[part].stride + column;
        RL_FOR(v, VECTORS) {
            F x = load(c + i * PANEL + v * W);
            store(out + v * W, bare ? x : plain(e, x), count - v * W);
        }
    }
}

static inline void deliver(const Matrix& w, const Activations& a, const Epilogue& e, int64_t panel, int64_t tile,
                           float* c) {
    const int64_t begin = a.first(tile), m = a.first(tile + 1) - begin;
    finish(w, a, panel, begin, m, c);
    if (!w.bias.empty())
        for (int64_t i = 0; i < m; ++i)
            RL_FOR(v, VECTORS) {
                float* at = c + i * PANEL + v * W;
                store(at, load(at) + load(w.bias.data() + panel * PANEL + v * W));
            }
    if (e.kind == Epilogue::gated)
        store_gated(w, e, panel, begin, m, c);
    else
        store_rows(w, e, panel, begin, m, c);
}

}  // namespace ridgeline::RL_ISA
