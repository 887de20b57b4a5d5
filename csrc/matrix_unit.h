// The matrix unit: a part of some processors that multiplies whole tiles of bytes or of bf16 (AMX).
//
// Its sums of bytes are whole numbers, so that a product has the same bits with and without it: it is a question of
// speed only. Its sums of bf16 have an arithmetic of their own, which vectors repeat for few tokens. A process uses
// that arithmetic for all matrices of bf16, or for none: the bits of a token never depend on its batch. So it is with
// attention over state of 16 bits (attention.h).
#pragma once
#include <string>

#include "dispatch.h"
#include "matrix.h"

namespace ridgeline {

// `emulated` does in plain C++ what the unit does, for tests on machines without one.
enum class Unit { none, emulated, amx };

// The unit of this process, by RIDGELINE_MATRIX_UNIT: none by default and with `off`; with `auto` that of the machine,
// where it is faster; `amx` and `emulated` for all products that they serve, the latter for bf16 from 4 tokens on. It
// never changes within a process. Throws std::runtime_error for an unknown value, and for a unit that cannot be used.
Unit matrix_unit();
const char* unit_name(Unit);
// Why the unit of the machine is not used; empty if it is.
std::string unit_refusal();
// Why matrices of bf16 are not multiplied with its arithmetic; empty if they are. A processor's unit is compared with
// plain C++ once, and refused if a bit differs.
std::string bf16_refusal();

// Whether the unit of this process multiplies matrices of this format.
bool serves(const Format&);
// Whether products with matrices of this format have the arithmetic of a unit for bf16.
bool in_tiles(const Format&);
// Returns the least number of tokens from which the unit multiplies matrices of this format faster than vectors do. It
// is measured once in a process for each kind of format.
int64_t unit_from(Pool&, const Format&);

// Whether vectors can repeat the arithmetic of a unit for bf16.
#if defined(__x86_64__)
constexpr bool VECTORS_FOLLOW = true;
#else
constexpr bool VECTORS_FOLLOW = false;
#endif

struct UnitKernels {
    // Returns how a sum of the processor's unit differs from the operation that it has by its manual, or nothing.
    std::string (*bf16_fault)();
};
RL_TABLE(UnitKernels, unit_kernels)

}  // namespace ridgeline
