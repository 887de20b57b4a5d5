// The activation functions of spec.activation, by name.
#pragma once

namespace ridgeline {

enum class Activation { silu, gelu, gelu_tanh, relu, relu2, clamped_swiglu };

struct Gate {
    Activation activation = Activation::silu;
    float alpha = 1, limit = 0;  // parameters of the clamped SwiGLU
};

}  // namespace ridgeline
