// Selects the instruction set of this process's kernels.
#pragma once

namespace ridgeline {

enum class Isa { portable, avx2, avx512 };

// The best instruction set of this CPU, or RIDGELINE_ISA if set (for tests). It never changes within a process. Throws
// std::runtime_error for an unknown value, and for one that the CPU lacks.
Isa isa();
const char* isa_name(Isa);

// A family of kernels is a struct of function pointers, `Type`, with one object `name` in the namespace of each
// instruction set. This macro declares them, and a function `name()` that returns the one to use.
#if defined(__x86_64__)
#define RL_TABLE(Type, name)                                                                           \
    namespace portable {                                                                               \
    extern const Type name;                                                                            \
    }                                                                                                  \
    namespace avx2 {                                                                                   \
    extern const Type name;                                                                            \
    }                                                                                                  \
    namespace avx512 {                                                                                 \
    extern const Type name;                                                                            \
    }                                                                                                  \
    inline const Type& name() {                                                                        \
        return isa() == Isa::avx512 ? avx512::name : isa() == Isa::avx2 ? avx2::name : portable::name; \
    }
#else
#define RL_TABLE(Type, name) \
    namespace portable {     \
    extern const Type name;  \
    }                        \
    inline const Type& name() { return portable::name; }
#endif

}  // namespace ridgeline
