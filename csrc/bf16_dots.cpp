#include "bf16_dots.h"

#include "dispatch.h"
#include "matrix_unit.h"

namespace ridgeline {
namespace {

std::string find_missing() {
#if defined(__x86_64__) && defined(RL_HAS_BF16_DOTS)
    if (!may_dot_bf16()) return std::string("the kernels of ") + isa_name(isa()) + " do not use them";
    if (!RL_CPU("avx512bf16")) return "this CPU has no avx512_bf16";
    return "";
#else
    return "the kernels were built without them";
#endif
}

}  // namespace

std::string missing_dots() {
    static const std::string missing = find_missing();
    return missing;
}

std::string dots_refusal() {
    if (!missing_dots().empty()) return missing_dots();
    return bf16_refusal().empty() ? "the matrix unit multiplies bf16" : "";
}

bool in_dots(const Format& f) {
    return f.numbers == Numbers::bf16 && f.inputs == Inputs::bf16 && dots_refusal().empty();
}

}  // namespace ridgeline
