// What this machine can do at best, for shares of it.
#pragma once
#include <cstddef>
#include <cstdint>

#include "dispatch.h"

namespace ridgeline {

struct RateKernels {
    uint32_t (*read)(const char* data, size_t bytes);  // bytes: a multiple of 256; a sum that keeps the loads alive
    double (*fma)(long rounds);                        // float operations done: a product and its sum are two
    double (*dot)(long rounds);                        // the same of bytes
};
RL_TABLE(RateKernels, rate_kernels)

}  // namespace ridgeline
