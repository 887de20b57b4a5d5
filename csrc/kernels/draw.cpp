#include "draw.h"

#include <algorithm>
#include <cmath>

#include "vmath.h"

namespace ridgeline::RL_ISA {
namespace {

constexpr uint32_t SPREAD = 0x9e3779b1, FACTORS[] = {0x21f0aaad, 0x735a2d97};
constexpr double LN2 = 0.693147180559945309417;
constexpr double SLACK = 1e-4;  // the bounds of tokens that can win are rounded by less than 3e-5

// 32 random bits of token ids; Word: uint32_t or U.
template <class Word> RL_INLINE Word scrambled(Word id, const uint32_t* parts) {
    Word w = id * SPREAD + parts[0];
    w = (w ^ (w >> 16)) * FACTORS[0] + parts[1];
    w = (w ^ (w >> 15)) * FACTORS[1];
    return (w ^ (w >> 15)) + parts[2];
}

double gumbel(uint32_t id, const DrawKey& key) {
    const uint32_t high = scrambled(id, key.parts), low = scrambled(id, key.parts + 3);
    const double v = (double(high) * 1048576. + double(low >> 12) + 0.5) * 0x1p-52;
    return -std::log(-std::log1p(-v));
}

// score(i, count): up to W scores from i on. exact(i): the score in double. id(i, count), id(i): the same of ids.
//
// A sum of score and noise is computed only where a cheap upper bound of it is above the best sum so far. With v from
// the two words, the noise is at most -log(v), and v * 2^32 is at least the first word. The bits of a float x > 0, read
// as an integer, over 2^23 and less 127, are at most log2(x). x is half the word: a whole one is no signed integer.
template <class Score, class Exact, class Ids, class Id>
RL_INLINE int64_t draw(int64_t n, const DrawKey& key, Score&& score, Exact&& exact, Ids&& ids, Id&& id) {
    constexpr double OFFSET = (127 + 32 - 1) * LN2 + SLACK;
    const F per_bit = set(float(-LN2 / 8388608.));
    double best = -INFINITY;
    float limit = -INFINITY;
    int64_t found = 0;
    for (int64_t i = 0; i < n; i += W) {
        const int count = int(std::min<int64_t>(W, n - i));
        const F half = to_float((I)(scrambled(ids(i, count), key.parts) >> 1));
        const I is_open = fma(to_float(bits(half)), per_bit, score(i, count)) >= set(limit);
        if (!any(is_open)) continue;
        for (int lane = 0; lane < count; ++lane) {
            if (!is_open[lane]) continue;
            const double sum = exact(i + lane) + gumbel(uint32_t(id(i + lane)), key);
            if (sum > best) best = sum, found = i + lane, limit = float(best - OFFSET);
        }
    }
    return found;
}

RL_INLINE U counted(int64_t first) {
    U id;
    RL_FOR(lane, W) id[lane] = uint32_t(lane);
    return id + uint32_t(first);
}

// The same as `draw`, for ids that may be null: token i has id i.
template <class Score, class Exact>
RL_INLINE int64_t draw_ids(const int64_t* ids, int64_t n, const DrawKey& key, Score&& score, Exact&& exact) {
    if (!ids)
        return draw(n, key, score, exact, [](int64_t i, int) { return counted(i); }, [](int64_t i) { return i; });
    const auto gathered = [=](int64_t i, int count) {
        U id = {};
        for (int lane = 0; lane < count; ++lane) id[lane] = uint32_t(ids[i + lane]);
        return id;
    };
    return draw(n, key, score, exact, gathered, [=](int64_t i) { return ids[i]; });
}

int64_t draw_logits(const float* x, const int64_t* ids, int64_t n, float top, double temperature, const DrawKey& key) {
    const F most = set(top), factor = set(float(1 / temperature));
    return draw_ids(
        ids, n, key, [=](int64_t i, int count) { return (load(x + i, count) - most) * factor; },
        [=](int64_t i) { return (double(x[i]) - double(top)) / temperature; });
}

int64_t draw_scores(const double* scores, const int64_t* ids, int64_t n, const DrawKey& key) {
    const auto narrow = [=](int64_t i, int count) {
        F x = {};
        for (int lane = 0; lane < count; ++lane) x[lane] = float(scores[i + lane]);
        return x;
    };
    return draw_ids(ids, n, key, narrow, [=](int64_t i) { return scores[i]; });
}

int64_t likely(const float* x, int64_t n, float top, double temperature, float least, int64_t* found, double& rest) {
    constexpr int64_t BLOCK = 2048;  // weights that are added in float
    const F most = set(top), factor = set(float(1 / temperature)), limit = set(least);
    int64_t count = 0;
    for (int64_t begin = 0; begin < n; begin += BLOCK) {
        const int64_t end = std::min(n, begin + BLOCK);
        Sum16 sum = Sum16::zero();
        for (int64_t i = begin; i < end; i += 16)
            RL_FOR(v, V) {
                const int64_t at = i + v * W;
                const int left = int(std::clamp<int64_t>(end - at, 0, W));
                const F score = (load(x + at, left) - most) * factor;
                I is_likely = score >= limit;
                F weight = floats(bits(exp(score)) & ~is_likely);  // a true lane is -1
                for (int lane = left; lane < W; ++lane) weight[lane] = 0, is_likely[lane] = 0;
                sum.v[v] += weight;
                if (!any(is_likely)) continue;
                for (int lane = 0; lane < left; ++lane) {
                    found[count] = at + lane;
                    count -= is_likely[lane];
                }
            }
        rest += double(total(sum));
    }
    return count;
}

}  // namespace

extern const DrawKernels draw_kernels = {draw_logits, draw_scores, likely};

}  // namespace ridgeline::RL_ISA
