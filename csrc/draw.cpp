#include "draw.h"

#include <algorithm>
#include <cmath>

namespace ridgeline {
namespace {

// Filters look at likely tokens first, and at all tokens only where those do not decide. The constants are those of
// src/ridgeline/sample/sampler.py.
constexpr float LIKELY = -10;         // score of a likely token
constexpr double MARGIN = 1e-3;       // every token with a score above LIKELY + MARGIN is found
constexpr double REST_ERROR = 1e-5;   // relative; the sum of the other weights is off by less than 1e-6
constexpr double SUM_ERROR = 1e-9;    // relative; of sums in double in another order
constexpr int64_t UNDECIDED = -1;

// Keeps the candidates that the filters keep, and returns their number. is_part: the candidates are only the likely
// tokens; UNDECIDED is returned if others could count. rest: then the sum of the weights of the others.
int64_t keep(Candidate* list, int64_t count, bool is_part, double rest, const Draw& how) {
    if (how.top_k > 0) {
        if (how.top_k <= count)
            std::nth_element(list, list + how.top_k - 1, list + count, [](const Candidate& a, const Candidate& b) {
                return a.logit != b.logit ? a.logit > b.logit : a.index < b.index;
            });
        if (is_part && (count < how.top_k || list[how.top_k - 1].score < LIKELY + MARGIN)) return UNDECIDED;
        count = std::min(count, how.top_k);
        is_part = false, rest = 0;
    }
    if (how.top_p < 1) {
        double total = rest;
        for (int64_t i = 0; i < count; ++i) total += std::exp(list[i].score);
        std::sort(list, list + count, [](const Candidate& a, const Candidate& b) {
            return a.score != b.score ? a.score > b.score : a.index < b.index;
        });
        double sum = 0, last = 0;
        int64_t kept = 0;
        while (kept < count && !(sum / total >= how.top_p)) sum += last = std::exp(list[kept++].score);
        if (is_part) {
            const double mass = how.top_p * total, error = REST_ERROR * rest + SUM_ERROR * total;
            if (!(sum > mass + error) || std::abs(sum - last - mass) < error) return UNDECIDED;
        }
        count = std::max<int64_t>(kept, 1);
        is_part = false;
    }
    if (how.min_p > 0) {
        const double least = std::log(how.min_p);
        if (is_part && !(least > LIKELY + MARGIN)) return UNDECIDED;
        count = std::remove_if(list, list + count, [=](const Candidate& a) { return !(a.score >= least); }) - list;
    }
    return count;
}

}  // namespace

DrawRoom DrawRoom::at(char* memory, int64_t n) {
    Candidate* const candidates = (Candidate*)memory;
    int64_t* const found = (int64_t*)(candidates + n + 1);
    return {found, candidates, (double*)(found + n + 1)};
}

// Each half of the key, 128 bits, gives three parts; its last 32 bits are not used.
DrawKey draw_key(const uint64_t* words) {
    DrawKey key;
    for (int half = 0; half < 2; ++half) {
        const uint64_t one = words[2 * half], two = words[2 * half + 1];
        key.parts[3 * half] = uint32_t(one);
        key.parts[3 * half + 1] = uint32_t(one >> 32);
        key.parts[3 * half + 2] = uint32_t(two);
    }
    return key;
}

int64_t draw_row(const float* x, const int64_t* ids, int64_t n, float top, const Draw& how, const DrawRoom& room) {
    const DrawKey key = draw_key(how.key);
    if (!how.is_filtered()) return draw_kernels().logits(x, ids, n, top, how.temperature, key);
    Candidate* const list = room.candidates;
    const auto candidate = [&](int64_t i) {
        return Candidate{(double(x[i]) - double(top)) / how.temperature, x[i], uint32_t(i)};
    };
    double rest = 0;
    int64_t count = draw_kernels().likely(x, n, top, how.temperature, LIKELY, room.found, rest);
    for (int64_t i = 0; i < count; ++i) list[i] = candidate(room.found[i]);
    if ((count = keep(list, count, true, rest, how)) == UNDECIDED) {
        for (int64_t i = 0; i < n; ++i) list[i] = candidate(i);
        count = keep(list, n, false, 0, how);
    }
    for (int64_t i = 0; i < count; ++i) {
        room.scores[i] = list[i].score;
        room.found[i] = ids ? ids[list[i].index] : list[i].index;
    }
    return list[draw_kernels().scores(room.scores, room.found, count, key)].index;
}

}  // namespace ridgeline
