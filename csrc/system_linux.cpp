#if defined(__linux__)
#include <linux/futex.h>
#include <malloc.h>
#include <pthread.h>
#include <sched.h>
#include <sys/auxv.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <limits>
#include <set>
#include <string>

#include "system.h"

namespace ridgeline::system {
namespace {

cpu_set_t affinity() {
    cpu_set_t set;
    CPU_ZERO(&set);
    if (sched_getaffinity(0, sizeof set, &set)) CPU_SET(0, &set);
    return set;
}

long futex(std::atomic<uint32_t>& at, int op, uint32_t value) {
    return syscall(SYS_futex, reinterpret_cast<uint32_t*>(&at), op | FUTEX_PRIVATE_FLAG, value, nullptr, nullptr, 0);
}

}  // namespace

bool has(Feature f) {
    // Bits of aarch64 that the kernel's interface fixes; older headers of the C library lack the second.
    constexpr unsigned long DOT = 1ul << 20, MIXED_DOT = 1ul << 13;
    return f == Feature::dot ? getauxval(AT_HWCAP) & DOT : getauxval(AT_HWCAP2) & MIXED_DOT;
}

std::vector<int> cores() {
    std::vector<int> found;
    std::set<std::string> seen;
    for (int cpu : allowed()) {
        std::ifstream file("/sys/devices/system/cpu/cpu" + std::to_string(cpu) + "/topology/thread_siblings_list");
        std::string siblings;
        if (!std::getline(file, siblings)) siblings = "only " + std::to_string(cpu);
        if (seen.insert(siblings).second) found.push_back(cpu);
    }
    return found;
}

// The quota of the control group.
double quota() {
    std::ifstream file("/sys/fs/cgroup/cpu.max");
    std::string limit;
    double period = 0;
    if (!(file >> limit >> period) || limit == "max" || period <= 0) return std::numeric_limits<double>::infinity();
    return atof(limit.c_str()) / period;
}

std::vector<int> allowed() {
    const cpu_set_t set = affinity();
    std::vector<int> found;
    for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu)
        if (CPU_ISSET(cpu, &set)) found.push_back(cpu);
    return found;
}

void bind(int cpu) {
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(cpu, &one);
    pthread_setaffinity_np(pthread_self(), sizeof one, &one);
}

void leave(const std::vector<int>& taken, const std::vector<int>& allowed) {
    const int here = sched_getcpu();
    bool is_taken = false;
    cpu_set_t free;
    CPU_ZERO(&free);
    for (int cpu : allowed) CPU_SET(cpu, &free);
    for (int cpu : taken) {
        CPU_CLR(cpu, &free);
        is_taken |= cpu == here;
    }
    if (!is_taken || !CPU_COUNT(&free)) return;
    cpu_set_t before = affinity();
    pthread_setaffinity_np(pthread_self(), sizeof free, &free);
    pthread_setaffinity_np(pthread_self(), sizeof before, &before);
}

void sleep(std::atomic<uint32_t>& at, uint32_t value) { futex(at, FUTEX_WAIT, value); }
void wake(std::atomic<uint32_t>& at) { futex(at, FUTEX_WAKE, 1 << 30); }

void prefer_huge_pages(void* begin, size_t bytes) { madvise(begin, bytes, MADV_HUGEPAGE); }

void keep_freed_memory() {
#if defined(__GLIBC__)
    mallopt(M_MMAP_THRESHOLD, 32 << 20);  // the largest value that glibc accepts
    mallopt(M_TRIM_THRESHOLD, 64 << 20);
#endif
}

}  // namespace ridgeline::system
#endif
