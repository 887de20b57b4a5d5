#include "dispatch.h"

#include <cstdlib>
#include <stdexcept>
#include <string>

namespace ridgeline {
namespace {

bool has(Isa isa) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                      __builtin_cpu_supports("f16c") && __builtin_cpu_supports("bmi2");
    if (isa == Isa::avx2) return avx2;
    if (isa == Isa::avx512)
        return avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
               __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
               __builtin_cpu_supports("avx512vnni");
#endif
    return isa == Isa::portable;
}

Isa choose() {
    const char* wanted = getenv("RIDGELINE_ISA");
    for (Isa isa : {Isa::avx512, Isa::avx2, Isa::portable})
        if (wanted ? wanted == std::string(isa_name(isa)) : has(isa)) {
            if (!has(isa))
                throw std::runtime_error(std::string("RIDGELINE_ISA=") + wanted +
                                         ": this CPU has no such instructions");
            return isa;
        }
    throw std::runtime_error(std::string("RIDGELINE_ISA=") + wanted + ": known are avx512, avx2, portable");
}

}  // namespace

const char* isa_name(Isa isa) { return isa == Isa::avx512 ? "avx512" : isa == Isa::avx2 ? "avx2" : "portable"; }

Isa isa() {
    static const Isa chosen = choose();
    return chosen;
}

}  // namespace ridgeline
