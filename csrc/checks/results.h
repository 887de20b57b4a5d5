// Results of kernels for fixed inputs, which all instruction sets must compute with the same bits.
#pragma once
#include <cmath>
#include <cstdint>
#include <limits>
#include <stdexcept>
#include <string>
#include <vector>

#include "threads.h"

namespace ridgeline {

// Numbers that are equal on every machine (splitmix64).
class Random {
public:
    explicit Random(uint64_t seed) : state_(seed) {}
    uint64_t bits() {
        uint64_t z = state_ += 0x9e3779b97f4a7c15;
        z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
        z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
        return z ^ (z >> 31);
    }
    int64_t whole(int64_t low, int64_t high) { return low + int64_t(bits() >> 1) % (high - low + 1); }
    // Returns n multiples of scale / 2^20 from -scale to scale.
    std::vector<float> floats(int64_t n, float scale = 1) {
        std::vector<float> x;
        for (int64_t i = 0; i < n; ++i) x.push_back(float(whole(-(1 << 20), 1 << 20)) * 0x1p-20f * scale);
        return x;
    }

private:
    uint64_t state_;
};

// An output [rows, columns] that is filled with NaN, with three numbers between its rows which nobody may write.
struct Output {
    int64_t rows, columns, stride;
    std::vector<float> numbers;
    Output(int64_t rows, int64_t columns)
        : rows(rows), columns(columns), stride(columns + 3), numbers(size_t(rows * stride), std::nanf("")) {}
    float* data() { return numbers.data(); }
};

struct Result {
    std::string name;
    bool is_whole;  // equal without a fused multiply-add too, as sums of whole numbers are
    std::vector<float> numbers;
};

class Results {
public:
    // Throws std::runtime_error if a number was not written, or one was that does not belong to the output. nan: a row
    // that is NaN, or -1.
    void add(const std::string& name, bool is_whole, const Output& out, int64_t nan = -1) {
        for (int64_t r = 0; r < out.rows; ++r)
            for (int64_t i = 0; i < out.stride; ++i)
                if (std::isnan(out.numbers[size_t(r * out.stride + i)]) != (i >= out.columns || r == nan))
                    throw std::runtime_error(
                        name + ": row " + std::to_string(r) + ", column " + std::to_string(i) +
                        (i < out.columns ? " is wrong: only poison is NaN" : " is behind the row, and was written"));
        all.push_back({name, is_whole, out.numbers});
    }
    std::vector<Result> all;
};

// Returns the results of a program.
Results compute();

// Each adds the results of a part of the kernels.
void check_products(Pool&, Results&);
void check_attention(Pool&, Results&);
void check_recurrences(Pool&, Results&);
void check_elements(Pool&, Results&);

}  // namespace ridgeline
