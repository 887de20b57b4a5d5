// Selects the instruction set of this process's kernels.
#pragma once
#include <string>
#include <vector>

namespace ridgeline {

// The instruction sets, best first: X(name, whether this CPU has it, ...). Everything else about them follows from this
// list, except for the compiler's flags, which CMakeLists.txt has for each name.
#if defined(__x86_64__)
#define RL_CPU(feature) __builtin_cpu_supports(feature)
#define RL_AVX2 (RL_CPU("avx2") && RL_CPU("fma") && RL_CPU("f16c") && RL_CPU("bmi2"))
#define RL_AVX512BW (RL_AVX2 && RL_CPU("avx512f") && RL_CPU("avx512bw") && RL_CPU("avx512dq") && RL_CPU("avx512vl"))
#define RL_AVX512 (RL_AVX512BW && RL_CPU("avx512vnni"))
#endif
#if defined(RL_TRAPPED_AMX)  // a program that checks AMX on CPUs without it (csrc/checks/unit)
#define RL_ISAS(X, ...) X(avx2, RL_AVX2 __VA_OPT__(, ) __VA_ARGS__)
#elif defined(__x86_64__)
#define RL_ISAS(X, ...)                                 \
    X(avx512, RL_AVX512 __VA_OPT__(, ) __VA_ARGS__)     \
    X(avx512bw, RL_AVX512BW __VA_OPT__(, ) __VA_ARGS__) \
    X(avx2, RL_AVX2 __VA_OPT__(, ) __VA_ARGS__)         \
    X(portable, true __VA_OPT__(, ) __VA_ARGS__)
#elif defined(__aarch64__)
#define RL_DOTPROD system::has(system::Feature::dot)
#define RL_I8MM (RL_DOTPROD && system::has(system::Feature::mixed_dot))
#define RL_ISAS(X, ...)                               \
    X(i8mm, RL_I8MM __VA_OPT__(, ) __VA_ARGS__)       \
    X(dotprod, RL_DOTPROD __VA_OPT__(, ) __VA_ARGS__) \
    X(neon, true __VA_OPT__(, ) __VA_ARGS__)          \
    X(portable, true __VA_OPT__(, ) __VA_ARGS__)
#else
#define RL_ISAS(X, ...) X(portable, true __VA_OPT__(, ) __VA_ARGS__)
#endif

#define RL_NAME(isa, has) isa,
enum class Isa { RL_ISAS(RL_NAME) };
#undef RL_NAME

// The best instruction set of this CPU, or RIDGELINE_ISA if set (for tests). It never changes within a process. Throws
// std::runtime_error for an unknown value, and for one that the CPU lacks.
Isa isa();
const char* isa_name(Isa);
std::vector<std::string> isa_names();  // of all that were compiled, best first

// Whether the kernels of this process have loops for the matrix unit of a processor.
#if defined(RL_TRAPPED_AMX)
inline bool may_have_unit() { return true; }
#elif defined(__x86_64__)
inline bool may_have_unit() { return isa() == Isa::avx512; }
#else
inline bool may_have_unit() { return false; }
#endif

// Whether the kernels of this process have loops for dot products of bf16.
#if defined(__x86_64__) && !defined(RL_TRAPPED_AMX)
inline bool may_dot_bf16() { return isa() == Isa::avx512; }
#else
inline bool may_dot_bf16() { return false; }
#endif

// A family of kernels is a struct of function pointers, `Type`, with one object `name` in the namespace of each
// instruction set. This macro declares them, and a function `name()` that returns the one to use.
#define RL_DECLARE(isa, has, Type, name) \
    namespace isa {                      \
    extern const Type name;              \
    }
#define RL_CASE(isa, has, Type, name) \
    case Isa::isa: return isa::name;
#define RL_TABLE(Type, name)                            \
    RL_ISAS(RL_DECLARE, Type, name)                     \
    inline const Type& name() {                         \
        switch (isa()) { RL_ISAS(RL_CASE, Type, name) } \
        __builtin_unreachable();                        \
    }

}  // namespace ridgeline
