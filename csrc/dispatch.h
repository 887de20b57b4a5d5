// Which instruction set the kernels of this process use.
#pragma once

namespace ridgeline {

enum class Isa { portable, avx2, avx512 };

// The best that this CPU has, or RIDGELINE_ISA if that is set (for tests); the same for the whole life of the process.
// Throws std::runtime_error for a value that is unknown or that the CPU lacks.
Isa isa();
const char* isa_name(Isa);

// A family of kernels is a struct of function pointers, `Type`, and one object of it, `name`, in the namespace of each
// instruction set. This declares them, and a function `name()` that returns the one to use.
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
