// Divides attention into pieces of work for threads, and runs them.
#include "attention_calls.h"

#include "bf16_dots.h"
#include "matrix_unit.h"

#include <algorithm>
#include <cstring>
#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

namespace ridgeline {
namespace {

constexpr int PIECES = 3;  // least number of pieces for each thread, if there is enough work

struct Piece {
    AttentionWork work;
    int64_t cost;   // about keys times rows
    int64_t group;  // pieces with one number share partial results; -1: the piece is whole
};

int64_t first_segment(const AttentionCase& c, int64_t position) {
    if (c.pattern == Pattern::first_tokens) return 0;
    const int64_t back = c.lookback();
    return back > position ? 0 : (position - back) / SEGMENT;
}

// Most rows of a piece in a matrix unit: their queries and results stay in the second cache while keys pass by.
int64_t unit_rows(const AttentionCase& c) {
    constexpr int64_t BYTES = 512 << 10;
    const int64_t row = int64_t(c.key_dim) * 4 + int64_t(c.value_dim) * 8;
    return std::clamp<int64_t>(BYTES / row / 32 * 32, 32, UNIT_ROWS);
}

// Key heads of a piece of work. Few queries are memory-bound: they take many heads at once to read pages sequentially,
// as long as there are enough pieces. Many queries take one head, whose keys stay in the cache. most: rows of a piece.
int heads_of(const AttentionCase& c, int64_t most, int64_t queries, int64_t segments, int threads) {
    const int64_t rows = queries * c.group(), few = most / 2;
    if (rows * 4 > few) return 1;
    const int64_t wanted = threads == 1 ? c.kv_heads : c.kv_heads * segments / (threads * PIECES);
    return int(std::clamp<int64_t>(wanted, 1, std::min<int64_t>(few / rows, c.kv_heads)));
}

// Returns all pieces of work, each with all of its segments. most: rows of a piece.
std::vector<Piece> whole_pieces(const AttentionCase& c, int64_t most, const std::vector<Sequence>& sequences,
                                int threads) {
    const int64_t size = std::max<int64_t>(1, most / c.group());
    std::vector<Piece> pieces;
    int64_t segments = 0;
    for (const Sequence& s : sequences) segments += (s.start + s.length - 1) / SEGMENT + 1;
    for (const Sequence& s : sequences) {
        if (s.length == 0) continue;
        const int heads = heads_of(c, most, s.length, segments, threads);
        for (int64_t first = 0; first < s.length; first += size)
            for (int head = 0; head < c.kv_heads; head += heads) {
                const int64_t last = std::min(s.length, first + size);
                const int64_t end = s.last_slot(last - 1, c.block) / SEGMENT + 1;
                const int64_t begin = first_segment(c, s.lowest(first));
                const AttentionWork w{&s, head, std::min(head + heads, c.kv_heads), first, last, begin, end, nullptr};
                pieces.push_back({w, w.rows(c) * (end - begin), -1});
            }
    }
    return pieces;
}

// Pieces that would keep one thread busy after the others are done are split into segments.
struct Plan {
    std::vector<Piece> pieces;
    std::vector<AttentionWork> merged;  // the pieces that were split, with memory for their partial results
    size_t floats = 0;                  // size of that memory
};

Plan plan(const AttentionCase& c, std::vector<Piece> whole, int threads) {
    Plan p;
    int64_t total = 0;
    for (const Piece& piece : whole) total += piece.cost;
    const int64_t most = std::max<int64_t>(1, total / (int64_t(threads) * PIECES));
    const size_t width = size_t((c.value_dim + 15) / 16 * 16 + 2);
    for (Piece& piece : whole) {
        AttentionWork& w = piece.work;
        const int64_t parts = std::min(w.end - w.begin, (piece.cost + most - 1) / most), segments = w.end - w.begin;
        if (threads == 1 || parts < 2) {
            p.pieces.push_back(piece);
            continue;
        }
        for (int64_t i = 0; i < parts; ++i) {
            Piece part = piece;
            part.work.begin = w.begin + segments * i / parts, part.work.end = w.begin + segments * (i + 1) / parts;
            part.cost = piece.cost / parts, part.group = int64_t(p.merged.size());
            p.pieces.push_back(part);
        }
        p.merged.push_back(w);
        p.floats += size_t(w.rows(c) * segments) * width;
    }
    if (threads > 1)
        std::stable_sort(p.pieces.begin(), p.pieces.end(),
                         [](const Piece& a, const Piece& b) { return a.cost > b.cost; });
    return p;
}

void give_room(const AttentionCase& c, Plan& p, float* room) {
    const int64_t width = (c.value_dim + 15) / 16 * 16 + 2;
    for (AttentionWork& w : p.merged) {
        w.partial = room;
        room += w.rows(c) * (w.end - w.begin) * width;
    }
    for (Piece& piece : p.pieces)
        if (piece.group >= 0) {
            const AttentionWork& all = p.merged[size_t(piece.group)];
            piece.work.partial = all.partial + (piece.work.begin - all.begin) * all.rows(c) * width;
        }
}

// The kernels of a step.
struct Way {
    void (*attend)(const AttentionStep&, const AttentionWork&, float* room);
    std::function<size_t(const AttentionCase&, int64_t rows)> room;
    std::function<int64_t(const AttentionCase&)> most;  // rows of a piece
};

Way way_of(StateType stored, bool rounds) {
    const int i = int(stored);
    rounds = rounds && (stored == StateType::bfloat16 || stored == StateType::float16);
    if (attends_in_unit(stored)) {
        const UnitAttention& unit = rounds ? unit_attention_kernels().rounded : unit_attention_kernels().exact;
        return {unit.attend[i], unit.room[i], unit_rows};
    }
    const auto few = [](const AttentionCase&) { return int64_t(QUERIES); };
    if (rounds) return {rounded_attention_kernels().attend[i], rounded_attention_kernels().room, few};
    const auto room = [stored](const AttentionCase& c, int64_t rows) {
        return attention_kernels().room(c, stored, rows);
    };
    return {attention_kernels().attend[i], room, few};
}

void check_slot(int64_t page, int64_t slot, int64_t pages, int64_t page_tokens) {
    if (page < 0 || page >= pages || slot < 0 || slot >= page_tokens)
        throw std::out_of_range("page " + std::to_string(page) + ", slot " + std::to_string(slot) +
                                " is not in the arena");
}

}  // namespace

bool attends_in_unit(StateType stored) {
    return matrix_unit() != Unit::none && unit_attention_kernels().exact.attend[int(stored)];
}

std::string rounded_refusal() { return attends_in_unit(StateType::bfloat16) ? "" : missing_dots(); }

void attend(Pool::Hold& hold, const AttentionStep& step, const std::vector<Sequence>& sequences) {
    const Way way = way_of(step.kv.stored, hold.rounds_attention());
    Plan p = plan(step.c, whole_pieces(step.c, way.most(step.c), sequences, hold.threads()), hold.threads());
    int64_t rows = 1;
    for (const Piece& piece : p.pieces) rows = std::max(rows, piece.work.rows(step.c));
    const size_t each = way.room(step.c, rows);
    float* rooms = (float*)hold.scratch(0, (each * size_t(hold.threads()) + p.floats) * sizeof(float));
    give_room(step.c, p, rooms + each * size_t(hold.threads()));
    hold.draw(int64_t(p.pieces.size()), [&](int64_t i, int thread) {
        way.attend(step, p.pieces[size_t(i)].work, rooms + each * size_t(thread));
    });
    if (!p.merged.empty())
        hold.draw(int64_t(p.merged.size()), [&](int64_t i, int thread) {
            attention_kernels().merge(step, p.merged[size_t(i)], rooms + each * size_t(thread));
        });
}

void write_pages(Pool::Hold& hold, const PageWrite& w) {
    struct Run {
        int64_t token, n;
    };
    std::vector<Run> runs;  // tokens in neighboring slots
    for (int64_t t = 0; t < w.tokens; ++t) {
        check_slot(w.page[t], w.slot[t], w.pages, w.page_tokens);
        if (!runs.empty() && w.page[t] == w.page[t - 1] && w.slot[t] == w.slot[t - 1] + 1)
            ++runs.back().n;
        else
            runs.push_back({t, 1});
    }
    const int64_t head = w.page_tokens * (w.numbers * size_of(w.stored) + scale_bytes(w.stored));
    hold.draw(int64_t(runs.size()), [&](int64_t i, int) {
        const Run& r = runs[size_t(i)];
        page_kernels().write[int(w.stored)]({w.from + r.token * w.stride, w.stride, r.n, w.heads, w.numbers,
                                             w.to + w.page[r.token] * w.page_stride, head, w.page_tokens,
                                             w.slot[r.token], w.transposed, w.scale});
    });
}

void move_rows(const RowMoves& m) {
    for (int64_t r = 0; r < m.rows; ++r) {
        check_slot(m.from_page[r], m.from_slot[r], m.count, m.page_tokens);
        check_slot(m.to_page[r], m.to_slot[r], m.count, m.page_tokens);
    }
    const int64_t size = size_of(m.stored), row = m.numbers * size, scale = scale_bytes(m.stored);
    // Bytes of a row that are neighbors, and the distance of the next ones of the same row.
    const int64_t together = m.transposed ? size : row, step = m.page_tokens * together;
    for (int64_t r = 0; r < m.rows; ++r)
        for (int64_t h = 0; h < m.heads; ++h) {
            const int64_t head = h * m.page_tokens * (row + scale);
            const char* from = m.pages + m.from_page[r] * m.page_stride + head;
            char* to = m.pages + m.to_page[r] * m.page_stride + head;
            for (int64_t i = 0; i < row / together; ++i)
                memmove(to + i * step + m.to_slot[r] * together, from + i * step + m.from_slot[r] * together,
                        size_t(together));
            const int64_t scales = m.page_tokens * row;
            memmove(to + scales + m.to_slot[r] * scale, from + scales + m.from_slot[r] * scale, size_t(scale));
        }
}

}  // namespace ridgeline
