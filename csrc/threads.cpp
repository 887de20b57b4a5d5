#include "threads.h"

#include <pthread.h>
#include <sched.h>
#include <sys/mman.h>

#include <algorithm>
#include <cmath>
#include <new>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "system.h"

namespace ridgeline {
namespace {

constexpr double SPIN_US = 200;  // longer than the longest serial gap in a decode step
constexpr int MAX_THREADS = 1024;
constexpr int64_t FETCHED = 128 << 10;  // bytes for a waiting thread: they must fit into its second cache (docs/log)

void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("isb" ::: "memory");  // a pause; `yield` does nothing on most CPUs
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

// What a thread does while it waits: it fetches memory that it reads next, or nothing.
class Waiting {
public:
    Waiting() = default;
    Waiting(const Ahead& ahead, int thread, int threads) {
        const int64_t begin = ahead.pieces * thread / threads, end = ahead.pieces * (thread + 1) / threads;
        at_ = ahead.data + begin * ahead.bytes;
        end_ = at_ + std::min((end - begin) * ahead.bytes, FETCHED);
    }
    void step() {
        if (at_ >= end_) return relax();
        for (int line = 0; line < 4; ++line) __builtin_prefetch(at_ + line * 64, 0, 2);
        at_ += 4 * 64;
    }

private:
    const char *at_ = nullptr, *end_ = nullptr;
};

std::atomic<unsigned> forks{0};  // number of forks since the kernels were loaded

void count_forks() {
    static const int registered = pthread_atfork(nullptr, nullptr, [] { ++forks; });
    (void)registered;
}

// Every step allocates and frees its arrays. If the allocator returned their memory to the system, the next step would
// have a page fault for every 4 KiB, which took two thirds of the time of top-p sampling.
void keep_freed_memory() {
    static const bool done = (system::keep_freed_memory(), true);
    (void)done;
}

}  // namespace

int usable_cores() { return std::max(1, int(std::min(double(system::cores().size()), std::ceil(system::quota())))); }

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
    system::prefer_huge_pages(data_, room);
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
    struct alignas(64) Range {
        std::atomic<int64_t> next{0};
        int64_t end = 0;
    };
    Line epoch, parked;
    std::vector<Line> done;
    std::vector<Range> ranges;  // of `share`, for each thread
    Ahead ahead;
    std::vector<std::thread> workers;
    std::vector<int> worker_cpus;  // empty if workers are not pinned
    std::vector<int> allowed;
    void (*work)(void*, int) = nullptr;
    void* context = nullptr;
    bool stop = false;
    int spin;
    std::mutex mutex;
    Pages scratch[SLOTS];
    unsigned generation = forks;

    explicit Team(int size) : done(size), ranges(size), allowed(system::allowed()) {
        std::vector<int> cpus = system::cores();
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
        system::wake(epoch.v);
        for (auto& worker : workers) worker.join();
        workers.clear();
    }

    void serve(int thread, int cpu) {
        if (cpu >= 0) system::bind(cpu);
        Waiting waiting;
        for (uint32_t seen = 0;;) {
            seen = wait_beyond(seen, waiting);
            if (stop) return;
            work(context, thread);
            waiting = waiting_of(thread);  // before the caller may change `ahead`
            done[thread].v.store(seen, std::memory_order_release);
        }
    }

    Waiting waiting_of(int thread) const { return {ahead, thread, int(done.size())}; }

    uint32_t wait_beyond(uint32_t seen, Waiting& waiting) {
        for (int i = 0; i < spin; ++i) {
            if (uint32_t now = epoch.v.load(std::memory_order_acquire); now != seen) return now;
            waiting.step();
        }
        parked.v.fetch_add(1);
        uint32_t now;
        while ((now = epoch.v.load()) == seen) system::sleep(epoch.v, seen);
        parked.v.fetch_sub(1);
        return now;
    }

    // The caller must not share a CPU with a worker: two spinning threads would wait for the scheduler's next tick. The
    // caller is moved to another CPU, and gets its affinity mask back, because new threads inherit it.
    void step_aside() {
        if (!worker_cpus.empty()) system::leave(worker_cpus, allowed);
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
    pool_.team_->ahead = {};  // its owner may free it
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
    if (team.parked.v.load()) system::wake(team.epoch.v);
    work(context, 0);
    Waiting waiting = team.waiting_of(0);
    for (int t = 1; t < size_; ++t)
        for (int i = 0; team.done[t].v.load(std::memory_order_acquire) != epoch; ++i)
            if (i < team.spin)
                waiting.step();
            else
                sched_yield();
}

void Pool::Hold::share(int64_t n) {
    const int64_t threads = pool_.size_;
    for (int64_t t = 0; t < threads; ++t) {
        Team::Range& range = pool_.team_->ranges[size_t(t)];
        range.next.store(n * t / threads, std::memory_order_relaxed);  // `run` publishes it
        range.end = n * (t + 1) / threads;
    }
}

std::pair<int64_t, int64_t> Pool::Hold::next(int thread) const {
    std::vector<Team::Range>& ranges = pool_.team_->ranges;
    for (size_t i = 0, t = size_t(thread); i < ranges.size(); ++i, t = t + 1 == ranges.size() ? 0 : t + 1) {
        const int64_t end = ranges[t].end;
        for (int64_t begin = ranges[t].next.load(std::memory_order_relaxed); begin < end;) {
            const int64_t middle = end - (end - begin) / 2;
            if (ranges[t].next.compare_exchange_weak(begin, middle, std::memory_order_relaxed)) return {begin, middle};
        }
    }
    return {0, 0};
}

Ahead Pool::Hold::fetch(const Ahead& ahead) { return std::exchange(pool_.team_->ahead, ahead); }

void* Pool::Hold::scratch(int slot, size_t bytes) {
    Pages& room = pool_.team_->scratch[slot];
    if (room.size() < bytes) room = Pages();  // freed before the larger one is allocated
    if (room.size() < bytes) room = Pages(bytes + bytes / 4);
    return room.data();
}

}  // namespace ridgeline
