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

    // Whether heads are whole panels with their own norms: the thread that has computed them also finishes them.
    bool together() const { return heads.head_dim % PANEL == 0 && !heads.over_all; }
    int64_t grain() const { return together() ? heads.head_dim / PANEL : 1; }
    Ahead reads() const { return projection.matrix.ahead(grain()); }

    // cos, sin: row t begins at + t * rope_stride; or null.
    void run(Pool::Hold&, const Stream&, const Epilogue::Out* out, const float* cos, const float* sin,
             int64_t rope_stride) const;
};

// down(act(up(norm(...)))): `up` is gated (interleaved) or not.
void run_mlp(Pool::Hold&, const Projection& up, const Matrix& down, const Stream&, Epilogue::Out out);

}  // namespace ridgeline
