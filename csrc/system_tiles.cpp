// The tile registers of AMX: whether this CPU has them, and the right to use them.
#include "system.h"
#if defined(__linux__) && defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace ridgeline::system {
namespace {

constexpr unsigned BF16 = 1u << 22, TILE = 1u << 24, INT8 = 1u << 25;

bool has_features(unsigned bits) {
    unsigned a = 0, b = 0, c = 0, d = 0;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d & bits) == bits;
}

}  // namespace

std::string allow_tiles() {
    constexpr int ARCH_REQ_XCOMP_PERM = 0x1023, XTILEDATA = 18;
    if (!has_features(TILE | INT8)) return "this CPU has no AMX";
    if (syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XTILEDATA)) return "the system does not allow its tile registers";
    return "";
}
bool has_bf16_tiles() { return has_features(BF16); }

}  // namespace ridgeline::system
#else
namespace ridgeline::system {

std::string allow_tiles() { return "AMX is used on x86 with Linux only"; }
bool has_bf16_tiles() { return false; }

}  // namespace ridgeline::system
#endif
