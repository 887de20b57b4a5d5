// Products in a matrix unit, or with its arithmetic.
#pragma once
#include "linear.h"

namespace ridgeline::RL_ISA {

// Panels [begin, end) times all tokens, which are packed for a unit. room: `unit_room_bytes`.
void unit_multiply(const Matrix&, const Activations&, int64_t begin, int64_t end, const Epilogue&, char* room);
size_t unit_room_bytes(const Matrix&, const Activations&);

// Likewise by vectors, for tokens in slices that are not packed for a unit.
void sliced_multiply(const Matrix&, const Activations&, int64_t begin, int64_t end, const Epilogue&, char* room);
size_t sliced_room_bytes(const Activations&);

}  // namespace ridgeline::RL_ISA
