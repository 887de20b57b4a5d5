#include "threads.h"

#include <linux/futex.h>
#include <malloc.h>
#include <pthread.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>
#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <new>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace ridgeline {
namespace {

constexpr double SPIN_US = 200;  // longer than the longest serial gap in a decode step
constexpr int MAX_THREADS = 1024;

void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#else
    asm volatile("" ::: "memory");
#endif
}

// Returns how many relax() take SPIN_US: one takes 10 cycles on some cores and 140 on others.
int spins() {
    static const int count = [] {
        auto start = std::chrono::steady_clock::now();
        for (int i = 0; i < 2000; ++i) relax();
        std::chrono::duration<double, std::micro> taken = std::chrono::steady_clock::now() - start;
        return int(SPIN_US * 2000 / std::max(taken.count(), 1.0)) + 1;
    }();
    return count;
}

cpu_set_t affinity() {
    cpu_set_t set;
    CPU_ZERO(&set);
    if (sched_getaffinity(0, sizeof set, &set)) CPU_SET(0, &set);
    return set;
}

// Returns one CPU of each physical core that this process may use.
std::vector<int> cores() {
    cpu_set_t set = affinity();
    std::vector<int> found;
    std::set<std::string> seen;
    for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
        if (!CPU_ISSET(cpu, &set)) continue;
        std::ifstream file("/sys/devices/system/cpu/cpu" + std::to_string(cpu) + "/topology/thread_siblings_list");
        std::string siblings;
        if (!std::getline(file, siblings)) siblings = "only " + std::to_string(cpu);
        if (seen.insert(siblings).second) found.push_back(cpu);
    }
    return found;
}

// Returns the CPU quota of the control group, in cores; a large number if there is none.
double quota() {
    std::ifstream file("/sys/fs/cgroup/cpu.max");
    std::string limit;
    double period = 0;
    if (!(file >> limit >> period) || limit == "max" || period <= 0) return MAX_THREADS;
    return atof(limit.c_str()) / period;
}

std::atomic<unsigned> forks{0};  // number of forks since the kernels were loaded

void count_forks() {
    static const int registered = pthread_atfork(nullptr, nullptr, [] { ++forks; });
    (void)registered;
}

// Every step allocates and frees its arrays. If the allocator returned their memory to the system, the next step would
// have a page fault for every 4 KiB, which took two thirds of the time of top-p sampling.
void keep_freed_memory() {
#if defined(__GLIBC__)
    static const int set = mallopt(M_MMAP_THRESHOLD, 4 << 20) + mallopt(M_TRIM_THRESHOLD, 64 << 20);
    (void)set;
#endif
}

long futex(std::atomic<uint32_t>& at, int op, uint32_t value) {
    return syscall(SYS_futex, reinterpret_cast<uint32_t*>(&at), op | FUTEX_PRIVATE_FLAG, value, nullptr, nullptr, 0);
}

}  // namespace

std::string allow_tiles() {
#if defined(__x86_64__) && defined(__linux__)
    constexpr int ARCH_REQ_XCOMP_PERM = 0x1023, XTILEDATA = 18;
    constexpr unsigned TILE = 1u << 24, INT8 = 1u << 25;
    unsigned a = 0, b = 0, c = 0, d = 0;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & (TILE | INT8)) != (TILE | INT8)) return "this CPU has no AMX";
    if (syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XTILEDATA)) return "the system does not allow its tile registers";
    return "";
#else
    return "AMX is used on Linux only";
#endif
}

int usable_cores() { return std::max(1, int(std::min(double(cores().size()), std::ceil(quota())))); }

// ---- pages ------------------------------------------------------------------------------------------------------

Pages::Pages(size_t bytes) : bytes_(bytes) {
    constexpr size_t huge = size_t(2) << 20;
    size_t room = (bytes + 8192 + huge - 1) / huge * huge;
    void* p = room < bytes ? MAP_FAILED
                           : mmap(nullptr, room + huge, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED) throw std::bad_alloc();
    char *begin = (char*)p, *end = begin + room + huge;
    data_ = (char*)((uintptr_t(begin) + huge - 1) / huge * huge);
    if (data_ > begin) munmap(begin, data_ - begin);
    munmap(data_ + room, end - data_ - room);
    madvise(data_, room, MADV_HUGEPAGE);  // if it fails, reading only has more TLB misses
}

Pages::~Pages() {
    constexpr size_t huge = size_t(2) << 20;
    if (data_) munmap(data_, (bytes_ + 8192 + huge - 1) / huge * huge);
}

Share Room::take(size_t bytes) {
    constexpr size_t mapping = size_t(32) << 20, page = 4096;
    if (bytes > mapping / 4) {
        auto own = std::make_shared<Pages>(bytes);
        return {own, own->data()};
    }
    std::lock_guard lock(mutex_);
    if (!open_ || used_ + bytes > mapping) {
        open_ = std::make_shared<Pages>(mapping);
        used_ = 0;
    }
    char* data = open_->data() + used_;
    used_ += (bytes + page - 1) / page * page;
    return {open_, data};
}

// ---- the team ---------------------------------------------------------------------------------------------------

struct Pool::Team {
    struct alignas(64) Line {
        std::atomic<uint32_t> v{0};
    };
    Line epoch, parked;
    std::vector<Line> done;
    std::vector<std::thread> workers;
    std::vector<int> worker_cpus;  // empty if workers are not pinned
    cpu_set_t allowed;
    void (*work)(void*, int) = nullptr;
    void* context = nullptr;
    bool stop = false;
    int spin;
    std::mutex mutex;
    Pages scratch[SLOTS];
    unsigned generation = forks;

    explicit Team(int size) : done(size), allowed(affinity()) {
        std::vector<int> cpus = cores();
        const bool pinned = size <= int(cpus.size());
        spin = pinned ? spins() : 0;
        try {
            for (int t = 1; t < size; ++t) {
                if (pinned) worker_cpus.push_back(cpus[t]);
                workers.emplace_back([this, t, cpu = pinned ? cpus[t] : -1] { serve(t, cpu); });
            }
        } catch (...) {
            end();
            throw std::runtime_error("the system cannot create more threads; use fewer than " + std::to_string(size));
        }
    }
    ~Team() { end(); }

    void end() {
        stop = true;
        epoch.v.fetch_add(1);
        futex(epoch.v, FUTEX_WAKE, 1 << 30);
        for (auto& worker : workers) worker.join();
        workers.clear();
    }

    void serve(int thread, int cpu) {
        if (cpu >= 0) {
            cpu_set_t one;
            CPU_ZERO(&one);
            CPU_SET(cpu, &one);
            pthread_setaffinity_np(pthread_self(), sizeof one, &one);
        }
        for (uint32_t seen = 0;;) {
            seen = wait_beyond(seen);
            if (stop) return;
            work(context, thread);
            done[thread].v.store(seen, std::memory_order_release);
        }
    }

    uint32_t wait_beyond(uint32_t seen) {
        for (int i = 0; i < spin; ++i) {
            if (uint32_t now = epoch.v.load(std::memory_order_acquire); now != seen) return now;
            relax();
        }
        parked.v.fetch_add(1);
        uint32_t now;
        while ((now = epoch.v.load()) == seen) futex(epoch.v, FUTEX_WAIT, seen);
        parked.v.fetch_sub(1);
        return now;
    }

    // The caller must not share a CPU with a worker: two spinning threads would wait for the scheduler's next tick. The
    // caller is moved to another CPU, and gets its affinity mask back, because new threads inherit it.
    void step_aside() {
        if (worker_cpus.empty()) return;
        const int here = sched_getcpu();
        bool taken = false;
        cpu_set_t free = allowed;
        for (int cpu : worker_cpus) {
            CPU_CLR(cpu, &free);
            taken |= cpu == here;
        }
        if (!taken || !CPU_COUNT(&free)) return;
        cpu_set_t before = affinity();
        pthread_setaffinity_np(pthread_self(), sizeof free, &free);
        pthread_setaffinity_np(pthread_self(), sizeof before, &before);
    }
};

// ---- the pool ---------------------------------------------------------------------------------------------------

Pool::Pool(int threads) : size_(threads) {
    if (threads < 1 || threads > MAX_THREADS)
        throw std::invalid_argument("threads must be 1.." + std::to_string(MAX_THREADS) + ", not " +
                                    std::to_string(threads));
    count_forks();
    keep_freed_memory();
    team_ = std::make_unique<Team>(threads);
}

Pool::~Pool() {
    // After a fork, the workers exist in the parent only: there are no threads to wait for.
    if (team_ && team_->generation != forks) (void)team_.release();
}

Pool::Hold::Hold(Pool& pool) : pool_(pool) {
    if (pool.team_->generation != forks) {
        (void)pool.team_.release();  // a thread of the parent may hold its mutex
        pool.team_ = std::make_unique<Team>(pool.size_);
    }
    lock_ = std::unique_lock(pool.team_->mutex);
    pool.team_->step_aside();
    since_ = std::chrono::steady_clock::now();
}

Pool::Hold::~Hold() {
    const auto held = std::chrono::steady_clock::now() - since_;
    pool_.busy_ns_ += std::chrono::duration_cast<std::chrono::nanoseconds>(held).count();
}

double Pool::busy_seconds() const { return double(busy_ns_) * 1e-9; }

void Pool::run(void (*work)(void*, int), void* context) {
    Team& team = *team_;
    if (size_ == 1) return work(context, 0);
    team.work = work;
    team.context = context;
    const uint32_t epoch = team.epoch.v.fetch_add(1) + 1;
    if (team.parked.v.load()) futex(team.epoch.v, FUTEX_WAKE, 1 << 30);
    work(context, 0);
    for (int t = 1; t < size_; ++t)
        for (int i = 0; team.done[t].v.load(std::memory_order_acquire) != epoch; ++i)
            if (i < team.spin)
                relax();
            else
                sched_yield();
}

void* Pool::Hold::scratch(int slot, size_t bytes) {
    Pages& room = pool_.team_->scratch[slot];
    if (room.size() < bytes) room = Pages();  // freed before the larger one is allocated
    if (room.size() < bytes) room = Pages(bytes + bytes / 4);
    return room.data();
}

}  // namespace ridgeline
