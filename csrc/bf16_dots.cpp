#include "bf16_dots.h"

#include "dispatch.h"
#include "matrix_unit.h"

namespace ridgeline {
namespace {

std::string refuse() {
#if defined(__x86_64__) && defined(RL_HAS_BF16_DOTS)
    if (!may_dot_bf16()) return std::string("the kernels of ") + isa_name(isa()) + " do not use them";
    if (!RL_CPU("avx512bf16")) return "this CPU has no avx512_bf16";
    return bf16_refusal().empty() ? "the matrix unit multiplies bf16" : "";
#else
    return "the kernels were built without them";
#endif
}

}  // namespace

std::string dots_refusal() {
    static const std::string refusal = refuse();
    return refusal;
}

bool in_dots(const Format& f) {
    return f.numbers == Numbers::bf16 && f.inputs == Inputs::bf16 && dots_refusal().empty();
}

}  // namespace ridgeline
