// Experts: MLPs, of which each token uses some.
#pragma once
#include <vector>

#include "stages.h"

namespace ridgeline {

// out[t] = the sum over t's choices c, in order, of weights[t, c] * expert[ids[t, c]](norm(x[t])). Then plus[t] is
// added if `plus` is not null, multiplied by sigmoid(gate[t]) if `gate` is not null. An id behind those of the
// experts is an identity: its result is share * x[t].
struct Visits {
    const float* x;
    int64_t stride, tokens, choices;
    const int64_t* ids;    // [tokens, choices]
    const float* weights;  // the same
    const float* plus;     // or null
    int64_t plus_stride;
    const float* gate;  // or null
    int64_t gate_stride;
    Epilogue::Out out;
};

struct Experts {
    std::vector<const Matrix*> up, down;  // of one shape
    Norm norm;
    Epilogue epilogue;  // of `up`
    int64_t identities = 0;  // ids behind those of the experts; there is no norm then
    float share = 1.f;
    void run(Pool::Hold&, const Visits&) const;
};

}  // namespace ridgeline
