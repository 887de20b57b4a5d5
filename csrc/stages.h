// Stages: a residual sum, a norm, a product and the operation after it, in one call.
#pragma once
#include <vector>

#include "heads.h"
#include "linear.h"

namespace ridgeline {

// A norm that owns its weights.
struct Norm {
    NormKind kind = NormKind::none;
    float eps = 0;
    std::vector<float> weight, bias;
    NormWeights view() const { return {kind, eps, weight.data(), bias.empty() ? nullptr : bias.data()}; }
};

// x [T, k], delta [T, k] or null, residual [T, k] or null: see Source.
struct Stream {
    Source source;
    int64_t tokens;
};

// A residual sum and a norm before a matrix.
struct Projection {
    const Matrix& matrix;
    Norm norm;
    float scale = 1;
    Epilogue epilogue;

    Source source(Source s) const;
    void run(Pool::Hold&, const Stream&, const Epilogue::Out* out) const;
};

// Queries, keys and values.
struct HeadsProjection {
    Projection projection;
    HeadsCase heads;
    std::vector<Norm> norms;  // norms of the first parts of the matrix; other parts (values) have none

    // cos, sin: row t begins at + t * rope_stride; or null.
    void run(Pool::Hold&, const Stream&, const Epilogue::Out* out, const float* cos, const float* sin,
             int64_t rope_stride) const;
};

// down(act(up(norm(...)))): `up` is gated (interleaved) or not.
void run_mlp(Pool::Hold&, const Projection& up, const Matrix& down, const Stream&, Epilogue::Out out);

}  // namespace ridgeline
