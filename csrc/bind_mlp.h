// Helpers for the bindings of MLPs and experts.
#pragma once
#include "bind.h"
#include "stages.h"

namespace ridgeline {

inline Epilogue gated_by(const Matrix& up, const std::string& name, float alpha, float limit) {
    Epilogue e;
    e.kind = up.interleaved ? Epilogue::gated : Epilogue::unary;
    e.gate = {activation_of(name), alpha, limit};
    if (!up.interleaved && e.gate.activation == Activation::clamped_swiglu) refuse("a clamped SwiGLU needs a gate");
    return e;
}

inline void check_mlp(const Matrix& up, const Matrix& down) {
    if (up.parts[0].rows != down.k) refuse("an MLP's second matrix must have as many columns as its first has rows");
    if (down.parts.size() != 1 || (up.parts.size() != 1 && !up.interleaved))
        refuse("an MLP's matrices have one part, or two interleaved");
}

inline void check_norm(const Matrix& m, const Norm* norm) {
    if (norm && int64_t(norm->weight.size()) != m.k)
        refuse("a norm of " + std::to_string(norm->weight.size()) + " elements before a matrix of " +
               std::to_string(m.k) + " columns");
}

}  // namespace ridgeline
