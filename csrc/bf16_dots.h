// Dot products of two numbers of bf16 in each lane (AVX-512 BF16), for matrices of bf16 with tokens that are rounded to
// bf16. They are twice as fast as float32, and their bits differ from those of widened floats (dots.h).
//
// A process uses them for all such matrices, or for none: the bits of a token never depend on its batch. Where a matrix
// unit serves bf16 (matrix_unit.h), its arithmetic comes first.
#pragma once
#include <string>

#include "matrix.h"

namespace ridgeline {

// Why this process has none; empty if it has.
std::string missing_dots();
// Why this process does not use them for products; empty if it does. Neither changes within a process.
std::string dots_refusal();
// Whether products with matrices of this format are such dot products.
bool in_dots(const Format&);

}  // namespace ridgeline
