// All experts that a step has chosen are computed together, so that many small products are one piece of work for all
// threads: five parallel regions for a decode step, however many experts it visits.
#include "experts.h"

#include <cmath>

#include "packing.h"

namespace ridgeline {
namespace {

// Visits [first, first + tokens) belong to one expert.
struct Group {
    size_t expert;
    int64_t first, tokens;
};

// The pairs of a token and a choice, ordered by expert. Each token's sum runs over its own choices, whatever the other
// tokens have chosen. Identities are not visited.
struct Visitors {
    std::vector<int64_t> token;  // token of each visit
    std::vector<int64_t> of;     // index of each pair's visit; -1 for an identity
    std::vector<Group> groups;   // each of at most BLOCK tokens

    Visitors(const Visits& v, size_t experts) : token(size_t(v.tokens * v.choices)), of(token.size()) {
        std::vector<int64_t> next(experts + 1);
        for (size_t i = 0; i < of.size(); ++i)
            if (size_t(v.ids[i]) < experts) ++next[size_t(v.ids[i]) + 1];
        for (size_t e = 0; e < experts; ++e) {
            for (int64_t at = 0; at < next[e + 1]; at += BLOCK)
                groups.push_back({e, next[e] + at, std::min(BLOCK, next[e + 1] - at)});
            next[e + 1] += next[e];
        }
        for (size_t i = 0; i < of.size(); ++i) {
            of[i] = size_t(v.ids[i]) < experts ? next[size_t(v.ids[i])]++ : -1;
            if (of[i] >= 0) token[size_t(of[i])] = int64_t(i) / v.choices;
        }
    }
};

// Multiplies some groups by their experts' matrices. source: the source of visit 0.
struct Products {
    const std::vector<const Matrix*>& matrices;
    const Group* groups;
    int64_t count;
    Source source;
    Epilogue epilogue;

    Source source_of(const Group& g) const {
        Source s = source;
        if (s.rows)
            s.rows += g.first;
        else
            s.x += g.first * s.stride;
        return s;
    }
    Epilogue epilogue_of(const Group& g) const {
        Epilogue e = epilogue;
        e.out[0].data += g.first * e.out[0].stride;
        return e;
    }
};

void multiply(Pool::Hold& hold, const Products& p) {
    const Matrix& like = *p.matrices[0];
    std::vector<Activations> packed;
    std::vector<int64_t> unit{0};  // index of the first unit of each group
    std::vector<size_t> room{0};
    size_t tile_room = 0;
    for (int64_t g = 0; g < p.count; ++g) {
        const int64_t tokens = p.groups[g].tokens;
        room.push_back(room.back() + size_t(round_up(int64_t(activation_bytes(like, tokens)), 64)));
        packed.push_back(activations(like, tokens, nullptr));
        unit.push_back(unit.back() + packed.back().units());
        tile_room = std::max(tile_room, product_kernels().room_bytes(like, packed.back()));
    }
    tile_room = size_t(round_up(int64_t(tile_room), 4096));
    char* data = (char*)hold.scratch(ACTIVATIONS, room.back());
    for (size_t g = 0; g < packed.size(); ++g) packed[g] = activations(like, packed[g].tokens, data + room[g]);
    int64_t each_row = 0;
    for (int64_t g = 0; g < p.count; ++g) each_row = std::max(each_row, unit_floats(*p.matrices[p.groups[g].expert]));
    float* rows = (float*)hold.scratch(ROWS, size_t(hold.threads() * each_row) * 4);
    char* tiles = (char*)hold.scratch(TILES, tile_room * size_t(hold.threads()));
    hold.draw(unit.back(), [&](int64_t i, int thread) {
        const size_t g = size_t(std::upper_bound(unit.begin(), unit.end(), i) - unit.begin()) - 1;
        load_unit(*p.matrices[p.groups[g].expert], p.source_of(p.groups[g]), packed[g], i - unit[g],
                  rows + thread * each_row, false);
    });
    // Several panels at once, few enough that every thread draws several times.
    const int64_t wanted = p.count * like.panels / (4 * hold.threads());
    const int64_t each = std::clamp<int64_t>(wanted, 1, like.panels), pieces = (like.panels + each - 1) / each;
    hold.draw(p.count * pieces, [&](int64_t i, int thread) {
        const Group& g = p.groups[i / pieces];
        const int64_t begin = i % pieces * each;
        product_kernels().multiply(*p.matrices[g.expert], packed[size_t(i / pieces)], begin,
                                   std::min(begin + each, like.panels), p.epilogue_of(g),
                                   tiles + size_t(thread) * tile_room);
    });
}

void add_up(Pool::Hold& hold, const Visits& v, const Visitors& visitors, const float* results, int64_t width,
            float share) {
    hold.split(v.tokens, [&](int64_t begin, int64_t end, int) {
        for (int64_t t = begin; t < end; ++t) {
            float* to = v.out.data + t * v.out.stride;
            for (int64_t c = 0; c < v.choices; ++c) {
                const int64_t visit = visitors.of[size_t(t * v.choices + c)];
                const float* from = visit < 0 ? v.x + t * v.stride : results + visit * width;
                const float weight = v.weights[t * v.choices + c] * (visit < 0 ? share : 1.f);
                for (int64_t i = 0; i < width; ++i) to[i] = c ? to[i] + weight * from[i] : weight * from[i];
            }
            if (!v.plus) continue;
            const float* plus = v.plus + t * v.plus_stride;
            const float factor = v.gate ? 1.f / (1.f + std::exp(-v.gate[t * v.gate_stride])) : 1.f;
            for (int64_t i = 0; i < width; ++i) to[i] += factor * plus[i];
        }
    });
}

}  // namespace

void Experts::run(Pool::Hold& hold, const Visits& v) const {
    const Visitors visitors(v, up.size());
    const int64_t width = down[0]->parts[0].rows, inner = down[0]->k;
    float* results = (float*)hold.scratch(CHOSEN, visitors.of.size() * size_t(width) * 4);
    float* hidden = (float*)hold.scratch(HIDDEN, visitors.of.size() * size_t(inner) * 4);
    Source from{};
    from.x = v.x, from.stride = v.stride, from.k = up[0]->k, from.rows = visitors.token.data(), from.norm = norm.view();
    Source between{};
    between.x = hidden, between.stride = between.k = inner;
    Epilogue first = epilogue, second;
    first.out[0] = {hidden, inner}, second.out[0] = {results, width};
    for (size_t begin = 0, end; begin < visitors.groups.size(); begin = end) {
        int64_t tokens = 0;
        for (end = begin; end < visitors.groups.size() && (end == begin || tokens < BLOCK); ++end)
            tokens += visitors.groups[end].tokens;
        const Group* groups = &visitors.groups[begin];
        multiply(hold, {up, groups, int64_t(end - begin), from, first});
        multiply(hold, {down, groups, int64_t(end - begin), between, second});
    }
    add_up(hold, v, visitors, results, width, share);
}

}  // namespace ridgeline
