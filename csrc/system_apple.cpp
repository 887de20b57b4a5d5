#if defined(__APPLE__)
#include <sys/sysctl.h>

#include <algorithm>
#include <limits>

#include "system.h"

namespace ridgeline::system {
namespace {

int number(const char* name) {
    int value = 0;
    size_t size = sizeof value;
    return sysctlbyname(name, &value, &size, nullptr, 0) ? 0 : value;  // not all systems know all names
}

}  // namespace

bool has(Feature f) {
    return number(f == Feature::dot ? "hw.optional.arm.FEAT_DotProd" : "hw.optional.arm.FEAT_I8MM") > 0;
}

// The fast cores where there are slow ones: threads share work in equal parts, and would wait for the slow ones.

std::vector<int> cores() {
    const int fast = number("hw.perflevel0.physicalcpu"), all = number("hw.physicalcpu");
    std::vector<int> found;
    for (int cpu = 0; cpu < std::max(1, fast ? fast : all); ++cpu) found.push_back(cpu);
    return found;
}

double quota() { return std::numeric_limits<double>::infinity(); }

// The system binds no threads to CPUs, has no calls for huge pages, and keeps freed memory by itself.
std::vector<int> allowed() { return {}; }
void bind(int) {}
void leave(const std::vector<int>&, const std::vector<int>&) {}
void prefer_huge_pages(void*, size_t) {}
void keep_freed_memory() {}

void sleep(std::atomic<uint32_t>& at, uint32_t value) { at.wait(value); }
void wake(std::atomic<uint32_t>& at) { at.notify_all(); }

}  // namespace ridgeline::system
#endif
