#include "stages.h"

#include <algorithm>

#include "packing.h"

namespace ridgeline {
namespace {

// Tokens that every thread prepares for itself, which is cheaper than waiting for another thread and fetching what it
// has written.
constexpr int64_t ALONE = 6;

// Bytes of its panels that a thread fetches before it prepares such tokens: memory would be idle meanwhile.
constexpr int64_t FIRST_BYTES = 16 << 10;

void fetch_first(const Matrix& w, int64_t begin, int64_t end) {
    const int64_t bytes = std::min(FIRST_BYTES, (end - begin) * w.panel_bytes);
    for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(w.panel(begin) + i, 0, 2);
}

struct Job {
    Pool::Hold& hold;
    const Matrix& w;
    const Source& source;
    const Epilogue& epilogue;
    int64_t grain;  // consecutive panels that one thread must compute
};

// Computes one block of tokens. after(begin, end) runs on the thread that has finished these panels.
template <class After> void product(const Job& job, int64_t tokens, After&& after) {
    const Matrix& w = job.w;
    const int threads = job.hold.threads();
    const bool alone = tokens <= ALONE;
    const int64_t each = alone ? threads : 1;
    const int64_t size = round_up(int64_t(activation_bytes(w, tokens)), 4096);
    char* room = (char*)job.hold.scratch(ACTIVATIONS, size_t(size * each));
    float* rows = (float*)job.hold.scratch(ROWS, size_t(threads * unit_floats(w)) * 4);
    const Activations shared = activations(w, tokens, room);
    const int64_t tile_room = round_up(int64_t(product_kernels().room_bytes(w, shared)), 4096);
    char* tiles = (char*)job.hold.scratch(TILES, size_t(tile_room * threads));
    auto load = [&](const Activations& a, int64_t begin, int64_t end, int thread, bool keep) {
        for (int64_t u = begin; u < end; ++u) load_unit(w, job.source, a, u, rows + thread * unit_floats(w), keep);
    };
    if (!alone)
        job.hold.split(shared.units(),
                       [&](int64_t begin, int64_t end, int thread) { load(shared, begin, end, thread, true); });
    // Few tiles: the time of a grain is that of reading it, and threads do not read equally fast. So each takes what
    // others have not begun. Many tiles: a thread's own range in one call, whose weights stay in its cache.
    const int64_t grains = (w.panels + job.grain - 1) / job.grain;
    const bool is_shared = shared.tiles <= FEW_TILES && !shared.for_unit && !shared.slices;
    if (is_shared) job.hold.share(grains);
    job.hold.run([&](int thread) {
        const Activations a = alone ? activations(w, tokens, room + size * thread) : shared;
        const int64_t first = grains * thread / threads, last = grains * (thread + 1) / threads;
        auto compute = [&](int64_t from, int64_t to) {
            const int64_t begin = from * job.grain, end = std::min(to * job.grain, w.panels);
            product_kernels().multiply(w, a, begin, end, job.epilogue, tiles + tile_room * thread);
            after(begin, end);
        };
        if (alone) fetch_first(w, first * job.grain, std::min(last * job.grain, w.panels));
        if (alone && (first < last || thread == 0)) load(a, 0, a.units(), thread, thread == 0);
        if (first == last) return;
        if (!is_shared) return compute(first, last);
        for (;;) {
            const auto [from, to] = job.hold.next(thread);
            if (from == to) return;
            compute(from, to);
        }
    });
}

// Calls each(job, first token, tokens) for every block.
template <class Each> void blocks(Pool::Hold& hold, const Matrix& w, const Stream& stream, const Epilogue& whole,
                                  int64_t grain, Each&& each) {
    const int64_t tile = tile_size(w, stream.tokens), most = BLOCK / tile * tile;
    const int64_t count = (stream.tokens + most - 1) / most;
    const int64_t size = count ? round_up((stream.tokens + count - 1) / count, tile) : 1;  // blocks of equal size
    for (int64_t first = 0; first < stream.tokens; first += size) {
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
        each(Job{hold, w, s, e, grain}, first, std::min(size, stream.tokens - first));
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
    const Epilogue e = with_outputs(projection.epilogue, out, w.parts.size());
    const Stream own{projection.source(stream.source), stream.tokens};
    blocks(hold, w, own, e, grain(), [&](const Job& job, int64_t first, int64_t tokens) {
        auto finish = [&](size_t part, int64_t token, int64_t begin, int64_t end) {
            const Epilogue::Out& o = job.epilogue.out[part];
            const int64_t at = (first + token) * rope_stride;
            head_kernels().finish(heads, norms[part].view(), o.data + token * o.stride, begin, end,
                                  cos ? cos + at : nullptr, sin ? sin + at : nullptr);
        };
        product(job, tokens, [&](int64_t begin, int64_t end) {
            for (size_t part = 0; together() && part < norms.size(); ++part) {
                const int64_t low = w.parts[part].first_panel, high = low + w.parts[part].rows / PANEL;
                const int64_t from = std::max(begin, low), to = std::min(end, high);
                for (int64_t t = 0; from < to && t < tokens; ++t)
                    finish(part, t, (from - low) / panels, (to - low) / panels);
            }
        });
        if (!together())
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
        const Ahead later = hold.fetch(down.ahead(1));
        product(Job{hold, up.matrix, job.source, to, 1}, tokens, [](int64_t, int64_t) {});
        hold.fetch(later);
        Source s{};
        s.x = hidden;
        s.stride = inner;
        const Epilogue::Out part{out.data + first * out.stride, out.stride};
        after.run(hold, {s, tokens}, &part);
    });
}

}  // namespace ridgeline
