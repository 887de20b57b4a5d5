// Runs instructions of AMX on a CPU that lacks them.
#pragma once
#include <cstdint>

namespace ridgeline::trap {

// Instructions that were emulated so far, in all threads; 0 on a CPU that has them.
struct Counts {
    int64_t all, configured, released;
};
Counts counts();

}  // namespace ridgeline::trap
