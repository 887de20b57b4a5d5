// Writes numbers into pages, rounded to the stored type.
#include "pages.h"

#include "stored.h"

namespace ridgeline::RL_ISA {
namespace {

template <class T> void write(const Tokens& t) {
    for (int64_t h = 0; h < t.heads; ++h) {
        T* to = (T*)(t.to + h * t.head);
        for (int64_t i = 0; i < t.n; ++i) {
            const float* x = t.from + i * t.stride + h * t.numbers;
            const int64_t slot = t.slot + i;
            if (t.transposed)
                for (int64_t d = 0; d < t.numbers; ++d) put(to[d * t.page_tokens + slot], x[d]);
            else
                for (int64_t d = 0; d < t.numbers; ++d) put(to[slot * t.numbers + d], x[d]);
        }
    }
}

// Writes n <= W codes, the first at `to` and the next `step` bytes on.
RL_INLINE void put_codes(I codes, int n, char* to, int64_t step) {
    RL_FOR(k, W)
        if (k < n) to[k * step] = char(codes[k]);
}

// Returns the largest magnitude; NaN if there is one.
float magnitude(const float* x, int64_t n) {
    I best = set(0);  // magnitudes are ordered like their bits, and NaN is the largest
    int64_t i = 0;
    for (; i + W <= n; i += W) best = max(best, bits(abs(load(x + i))));
    if (i < n) best = max(best, bits(abs(load(x + i, int(n - i)))));
    return floats(set(largest(best)))[0];
}

void write_int8(const Tokens& t) {
    for (int64_t h = 0; h < t.heads; ++h) {
        char* to = t.to + h * t.head;
        for (int64_t i = 0; i < t.n; ++i) {
            const float* x = t.from + i * t.stride + h * t.numbers;
            const int64_t slot = t.slot + i;
            float scale = magnitude(x, t.numbers) / 127.f, inverse = 1.f / scale;
            if (!(inverse > 0.f))
                scale = floats(set(0x7fc00000))[0], inverse = 0.f;  // the head holds an infinity or NaN
            if (inverse > 0x1.fffffep127f) scale = inverse = 0.f;
            memcpy(to + t.numbers * t.page_tokens + slot * 4, &scale, 4);
            char* first = to + (t.transposed ? slot : slot * t.numbers);
            const int64_t step = t.transposed ? t.page_tokens : 1;
            for (int64_t d = 0; d < t.numbers; d += W) {
                const int n = int(t.numbers - d < W ? t.numbers - d : W);
                const F product = (n == W ? load(x + d) : load(x + d, n)) * set(inverse);
                put_codes(round(inverse > 0.f ? product : set(0.f)), n, first + d * step, step);
            }
        }
    }
}

void write_fp8(const Tokens& t) {
    for (int64_t h = 0; h < t.heads; ++h)
        for (int64_t i = 0; i < t.n; ++i) {
            const float* x = t.from + i * t.stride + h * t.numbers;
            const int64_t slot = t.slot + i, step = t.transposed ? t.page_tokens : 1;
            char* first = t.to + h * t.head + (t.transposed ? slot : slot * t.numbers);
            for (int64_t d = 0; d < t.numbers; d += W) {
                const int n = int(t.numbers - d < W ? t.numbers - d : W);
                put_codes(to_f8((n == W ? load(x + d) : load(x + d, n)) / set(t.scale)), n, first + d * step, step);
            }
        }
}

}  // namespace

extern const PageKernels page_kernels = {{write<float>, write<BFloat16>, write<Float16>, write_int8, write_fp8}};

}  // namespace ridgeline::RL_ISA
