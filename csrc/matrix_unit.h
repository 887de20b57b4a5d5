// The matrix unit: a part of some processors that multiplies whole tiles of bytes (AMX). Its sums are whole numbers, so
// a product has the same bits with and without it: it is a question of speed only.
#pragma once
#include <string>

#include "matrix.h"

namespace ridgeline {

// `emulated` does in plain C++ what the unit does, for tests on machines without one.
enum class Unit { none, emulated, amx };

// The unit of this process, by RIDGELINE_MATRIX_UNIT: none by default and with `off`; with `auto` that of the machine,
// where it is faster; `amx` and `emulated` for all products that they serve. It never changes within a process. Throws
// std::runtime_error for an unknown value, and for a unit that cannot be used.
Unit matrix_unit();
const char* unit_name(Unit);
// Why the unit of the machine is not used; empty if it is.
std::string unit_refusal();

// Returns the least number of tokens from which the unit multiplies matrices of this format faster than vectors do. It
// is measured once in a process for each kind of format.
int64_t unit_from(Pool&, const Format&);

}  // namespace ridgeline
