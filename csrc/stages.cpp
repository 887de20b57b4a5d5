#include "stages.h"

#include <algorithm>
#include <cstring>

namespace ridgeline {
namespace {

constexpr int64_t BLOCK = 504;  // tokens that are packed at once: bounds the memory that this takes, changes no result

enum Slot { ACTIVATIONS, ROWS, TILES, HIDDEN, CHOSEN };

// What the activations of `tokens` take, and where they lie in `room`.
size_t activation_bytes(const Matrix& w, int64_t tokens) {
    const int64_t groups = w.format == Format::int4 ? w.padded_k / w.group : 1;
    const size_t data = size_t(tokens * w.padded_k) * (w.quantised() ? 1 : 4);
    return size_t(round_up(int64_t(data), 64)) + size_t(round_up(tokens * 4, 64)) +
           size_t(round_up(tokens * groups * 4, 64));
}

Activations activations(const Matrix& w, int64_t tokens, void* room) {
    Activations a;
    const int64_t tile = product_kernels().tile;
    a.tokens = tokens;
    a.padded_k = w.padded_k;
    a.groups = w.format == Format::int4 ? w.padded_k / w.group : 1;
    a.tiles = (tokens + tile - 1) / tile;
    a.data = room;
    const size_t data = size_t(tokens * w.padded_k) * (w.quantised() ? 1 : 4);
    a.scale = (float*)((char*)room + round_up(int64_t(data), 64));
    a.offset = (int32_t*)((char*)a.scale + round_up(tokens * 4, 64));
    return a;
}

struct Job {
    Pool::Hold& hold;
    const Matrix& w;
    const Source& source;
    const Epilogue& epilogue;
    int64_t grain;  // panels that one thread must have together
};

void load_unit(const Job& job, const Activations& a, int64_t unit, float* rows, bool keep) {
    const float* tokens[Activations::UNIT];
    const int64_t first = unit * Activations::UNIT;
    const int n = int(std::min<int64_t>(Activations::UNIT, a.tokens - first));
    for (int i = 0; i < n; ++i) tokens[i] = source_kernels().prepare(job.source, first + i, rows + i * job.w.k, keep);
    source_kernels().load(a, job.w.format, job.w.group, job.w.k, tokens, first, n);
}

// One block of tokens. after(begin, end): called on the thread that has finished these panels.
template <class After> void product(const Job& job, int64_t tokens, After&& after) {
    const Matrix& w = job.w;
    const int threads = job.hold.threads();
    const int64_t each = tokens == 1 ? threads : 1;  // alone, a token is prepared by every thread for itself: that is
                                                     // cheaper than to wait for one that does
    const int64_t size = round_up(int64_t(activation_bytes(w, tokens)), 4096);
    char* room = (char*)job.hold.scratch(ACTIVATIONS, size_t(size * each));
    float* rows = (float*)job.hold.scratch(ROWS, size_t(threads * Activations::UNIT * w.k) * 4);
    const Activations shared = activations(w, tokens, room);
    const int64_t tile_room = round_up(int64_t(product_kernels().room_bytes(w, shared)), 4096);
    char* tiles = (char*)job.hold.scratch(TILES, size_t(tile_room * threads));
    auto rows_of = [&](int thread) { return rows + thread * Activations::UNIT * w.k; };
    if (tokens > 1)
        job.hold.split(shared.units(), [&](int64_t begin, int64_t end, int thread) {
            for (int64_t u = begin; u < end; ++u) load_unit(job, shared, u, rows_of(thread), true);
        });
    const int64_t grains = (w.panels + job.grain - 1) / job.grain;
    job.hold.run([&](int thread) {
        const Activations a = tokens > 1 ? shared : activations(w, 1, room + size * thread);
        const int64_t begin = grains * thread / threads * job.grain;
        const int64_t end = std::min(grains * (thread + 1) / threads * job.grain, w.panels);
        if (tokens == 1 && (begin < end || thread == 0)) load_unit(job, a, 0, rows_of(thread), thread == 0);
        if (begin >= end) return;
        product_kernels().multiply(w, a, begin, end, job.epilogue, tiles + tile_room * thread);
        after(begin, end);
    });
}

// Block by block: `each(job, first token, tokens)`.
template <class Each> void blocks(Pool::Hold& hold, const Matrix& w, const Stream& stream, const Epilogue& whole,
                                  int64_t grain, Each&& each) {
    for (int64_t first = 0; first < stream.tokens; first += BLOCK) {
        Source s = stream.source;
        if (s.rows)
            s.rows += first;
        else {
            s.x += first * s.stride;
            if (s.delta) s.delta += first * s.delta_stride;
        }
        if (s.residual) s.residual += first * s.residual_stride;
        Epilogue e = whole;
        for (auto& out : e.out)
            if (out.data) out.data += first * out.stride;
        each(Job{hold, w, s, e, grain}, first, std::min(BLOCK, stream.tokens - first));
    }
}

Epilogue with_outputs(Epilogue e, const Epilogue::Out* out, size_t parts) {
    for (size_t i = 0; i < Epilogue::PARTS; ++i) e.out[i] = i < parts ? out[i] : Epilogue::Out{nullptr, 0};
    return e;
}

}  // namespace

Source Projection::source(Source s) const {
    s.k = matrix.k;
    s.scale = scale;
    s.norm = norm.view();
    return s;
}

void Projection::run(Pool::Hold& hold, const Stream& stream, const Epilogue::Out* out) const {
    const Epilogue e = with_outputs(epilogue, out, epilogue.kind == Epilogue::gated ? 1 : matrix.parts.size());
    const Stream own{source(stream.source), stream.tokens};
    blocks(hold, matrix, own, e, 1,
           [](const Job& job, int64_t, int64_t tokens) { product(job, tokens, [](int64_t, int64_t) {}); });
}

void HeadsProjection::run(Pool::Hold& hold, const Stream& stream, const Epilogue::Out* out, const float* cos,
                          const float* sin, int64_t rope_stride) const {
    const Matrix& w = projection.matrix;
    const int64_t panels = heads.head_dim / PANEL;
    // Where heads are whole panels and have norms of their own, the thread that has computed them finishes them.
    const bool together = heads.head_dim % PANEL == 0 && !heads.over_all;
    const Epilogue e = with_outputs(projection.epilogue, out, w.parts.size());
    const Stream own{projection.source(stream.source), stream.tokens};
    blocks(hold, w, own, e, together ? panels : 1, [&](const Job& job, int64_t first, int64_t tokens) {
        auto finish = [&](size_t part, int64_t token, int64_t begin, int64_t end) {
            const Epilogue::Out& o = job.epilogue.out[part];
            const int64_t at = (first + token) * rope_stride;
            head_kernels().finish(heads, norms[part].view(), o.data + token * o.stride, begin, end,
                                  cos ? cos + at : nullptr, sin ? sin + at : nullptr);
        };
        product(job, tokens, [&](int64_t begin, int64_t end) {
            for (size_t part = 0; together && part < norms.size(); ++part) {
                const int64_t low = w.parts[part].first_panel, high = low + w.parts[part].rows / PANEL;
                const int64_t from = std::max(begin, low), to = std::min(end, high);
                for (int64_t t = 0; from < to && t < tokens; ++t)
                    finish(part, t, (from - low) / panels, (to - low) / panels);
            }
        });
        if (!together)
            hold.split(tokens, [&](int64_t begin, int64_t end, int) {
                for (int64_t t = begin; t < end; ++t)
                    for (size_t part = 0; part < norms.size(); ++part)
                        finish(part, t, 0, w.parts[part].rows / heads.head_dim);
            });
    });
}

void run_mlp(Pool::Hold& hold, const Projection& up, const Matrix& down, const Stream& stream, Epilogue::Out out) {
    const int64_t inner = down.k;
    const Stream own{up.source(stream.source), stream.tokens};
    const Projection after{down, {}, 1, {}};
    Epilogue e = with_outputs(up.epilogue, nullptr, 0);
    float* hidden = (float*)hold.scratch(HIDDEN, size_t(std::min(BLOCK, stream.tokens) * inner) * 4);
    blocks(hold, up.matrix, own, e, 1, [&](const Job& job, int64_t first, int64_t tokens) {
        Epilogue to = job.epilogue;
        to.out[0] = {hidden, inner};
        product(Job{hold, up.matrix, job.source, to, 1}, tokens, [](int64_t, int64_t) {});
        Source s{};
        s.x = hidden;
        s.stride = inner;
        const Epilogue::Out part{out.data + first * out.stride, out.stride};
        after.run(hold, {s, tokens}, &part);
    });
}

void Experts::run(Pool::Hold& hold, const float* x, int64_t stride, int64_t tokens, int64_t choices, const int64_t* ids,
                  const float* weights, Epilogue::Out out) const {
    // Each pair of a token and a choice has a row of its own, so that a token's sum runs over its choices whatever the
    // others have chosen.
    const int64_t pairs = tokens * choices, width = down[0]->parts[0].rows;
    std::vector<std::vector<int64_t>> of(up.size());
    for (int64_t i = 0; i < pairs; ++i) of[size_t(ids[i])].push_back(i);
    float* results = (float*)hold.scratch(CHOSEN, size_t(pairs * width) * 4);
    std::vector<int64_t> place(static_cast<size_t>(pairs));
    int64_t done = 0;
    for (size_t expert = 0; expert < up.size(); ++expert) {
        std::vector<int64_t>& rows = of[expert];
        for (size_t i = 0; i < rows.size(); ++i) {
            place[size_t(rows[i])] = done + int64_t(i);
            rows[i] /= choices;
        }
        Source s{};
        s.x = x;
        s.stride = stride;
        s.rows = rows.data();
        Projection first{*up[expert], {}, 1, {}};
        first.epilogue.kind = up[expert]->interleaved ? Epilogue::gated : Epilogue::unary;
        first.epilogue.gate = gate;
        run_mlp(hold, first, *down[expert], {s, int64_t(rows.size())}, {results + done * width, width});
        done += int64_t(rows.size());
    }
    hold.split(tokens, [&](int64_t begin, int64_t end, int) {
        for (int64_t t = begin; t < end; ++t) {
            float* to = out.data + t * out.stride;
            for (int64_t c = 0; c < choices; ++c) {
                const float* from = results + place[size_t(t * choices + c)] * width;
                const float weight = weights[t * choices + c];
                for (int64_t i = 0; i < width; ++i) to[i] = c ? to[i] + weight * from[i] : weight * from[i];
            }
        }
    });
}

}  // namespace ridgeline
