// Matrices with numbers that are equal on every machine, and products with them.
#pragma once
#include "checks/results.h"
#include "stages.h"

namespace ridgeline {

struct Case {
    std::string name;
    Format format;
    bool from_floats;  // the kernel rounds the numbers
};
struct Shape {
    int64_t rows, k, tokens;
};

// parts: of equal height.
Matrix random_matrix(Pool&, const Format&, int64_t k, int64_t rows, bool from_floats, Random&, int parts = 1);
// Packs rows of floats.
Matrix matrix_of(Pool&, const Format&, int64_t k, const std::vector<float>& rows);

Source source_of(const std::vector<float>& x, int64_t k);
// Multiplies a matrix with tokens, the rows of x.
Output product(Pool&, const Matrix&, const std::vector<float>& x, int64_t tokens);
// Likewise, as a result. nan: a token that is NaN, or -1.
void one_product(Pool&, Results&, const Case&, const Shape&, const std::vector<float>& x, const Matrix&,
                 int64_t nan = -1);

}  // namespace ridgeline
