// Measures the peak rates of this machine.
#pragma once
#include <cstddef>
#include <cstdint>

#include "dispatch.h"

namespace ridgeline {

struct RateKernels {
    // bytes: a multiple of 256. Returns a sum, so that loads are not optimized away. In two ways, of which each is the
    // faster one on some processors.
    uint32_t (*read[2])(const char* data, size_t bytes);
    double (*fma)(long rounds);        // returns the number of float operations; a multiply-add counts as two
    double (*dot)(long rounds);        // returns the number of byte operations, likewise
    double (*bf16)(long rounds);       // of float operations of dot products of bf16, which the processor must have
    double (*unit)(long rounds);       // of byte operations in the processor's matrix unit, which must exist
    double (*unit_bf16)(long rounds);  // of float operations there, with numbers of bf16
};
RL_TABLE(RateKernels, rate_kernels)

}  // namespace ridgeline
