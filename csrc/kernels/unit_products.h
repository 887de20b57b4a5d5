// Products of rounded tokens in a matrix unit: the work of one thread.
#pragma once
#include "linear.h"

namespace ridgeline::RL_ISA {

// Panels [begin, end) times all tokens, which are packed for the unit. room: `unit_room_bytes`.
void unit_multiply(const Matrix&, const Activations&, int64_t begin, int64_t end, const Epilogue&, char* room);
size_t unit_room_bytes(const Matrix&);

}  // namespace ridgeline::RL_ISA
