// A fork-join pool of threads. Only threads.cpp and system_*.cpp call the operating system.
//
//   fork   the caller writes the work, then increments `epoch`. Workers spin on that one cache line.
//   join   each worker stores the epoch that it has finished in its own cache line; the caller spins on those.
//   park   a worker without work for SPIN_US sleeps on a futex. It increments the count of parked workers, then
//          sleeps unless the epoch has changed. The caller increments the epoch, then looks for parked workers. All
//          threads observe both in one order, so that no wake-up is lost.
//
// Workers spin because two stages of a decode step are microseconds apart, and a futex costs 5 to 50 of them. They park
// because an idle process must not use its cores.
#pragma once
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <type_traits>
#include <utility>

namespace ridgeline {

// Returns the physical cores that this process may use, by its affinity mask and its control group's CPU quota.
int usable_cores();

// Zeroed pages aligned to 2 MiB, huge pages if the system has them. 8 KiB past the end are readable.
class Pages {
public:
    Pages() = default;
    explicit Pages(size_t bytes);
    ~Pages();
    Pages(Pages&& other) noexcept : data_(other.data_), bytes_(other.bytes_) { other.data_ = nullptr; }
    Pages& operator=(Pages&& other) noexcept {
        std::swap(data_, other.data_);
        std::swap(bytes_, other.bytes_);
        return *this;
    }
    char* data() const { return data_; }
    size_t size() const { return bytes_; }

private:
    char* data_ = nullptr;
    size_t bytes_ = 0;
};

// A long-lived piece of a mapping that several pieces share, so that small ones share huge pages. A mapping is freed
// with its last piece.
struct Share {
    std::shared_ptr<Pages> mapping;
    char* data = nullptr;
};

class Room {
public:
    Share take(size_t bytes);  // zeroed, aligned to 4 KiB, readable 8 KiB past the end

private:
    std::mutex mutex_;
    std::shared_ptr<Pages> open_;
    size_t used_ = 0;
};

class Program;

// Memory that all threads read from a later call on. Thread t of n begins with piece `pieces * t / n`.
struct Ahead {
    const char* data = nullptr;
    int64_t pieces = 0, bytes = 0;  // bytes of a piece
};

class Pool {
public:
    // threads: number of threads with the caller's, at least 1. Each worker is pinned to its own core and spins, unless
    // there are more threads than cores. Throws std::runtime_error if a thread cannot be created.
    explicit Pool(int threads);
    ~Pool();
    Pool(const Pool&) = delete;

    int size() const { return size_; }
    Share take(size_t bytes) { return room_.take(bytes); }
    double busy_seconds() const;  // seconds for which calls have held the pool
    Program* program = nullptr;   // that records the calls of a thread (record.h); changed under the GIL

    // The pool, locked for one op: others wait. Work is given through a Hold only. In a forked process, the first Hold
    // creates new workers.
    class Hold {
    public:
        explicit Hold(Pool& pool);
        ~Hold();
        Hold(const Hold&) = delete;
        int threads() const { return pool_.size_; }
        bool rounds_attention() const { return pool_.rounds_attention; }

        // Calls f(thread) once on every thread, and returns when all are done. f must not throw.
        template <class Work> void run(Work&& f) {
            using Bare = std::remove_reference_t<Work>;
            pool_.run([](void* context, int thread) { (*static_cast<Bare*>(context))(thread); }, (void*)&f);
        }
        // Calls f(begin, end, thread) on one range of [0, n) for each thread. The ranges are fixed.
        template <class Work> void split(int64_t n, Work&& f) {
            if (n == 1) return f(0, 1, 0);  // waking other threads costs more than most single elements
            run([&](int thread) {
                int64_t begin = n * thread / pool_.size_, end = n * (thread + 1) / pool_.size_;
                if (begin < end) f(begin, end, thread);
            });
        }
        // Calls f(i, thread) for every i in [0, n). Threads draw the next i when they are done, so that any thread may
        // compute an element; its result does not depend on the thread.
        template <class Work> void draw(int64_t n, Work&& f) {
            if (n == 1) return f(0, 0);
            std::atomic<int64_t> next{0};
            run([&](int thread) {
                for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < n;) f(i, thread);
            });
        }
        // Divides [0, n) between all threads, for `next`.
        void share(int64_t n);
        // Returns a range of elements that no thread has begun; empty if there is none. A thread gets half of what is
        // left of its own range each time, and then of the ranges of others: a call for each element would cost more
        // than waiting.
        std::pair<int64_t, int64_t> next(int thread) const;
        // Threads that wait for others fetch the first bytes of this memory. Returns what they fetched before.
        Ahead fetch(const Ahead& ahead);
        // Returns memory that is valid until the next call with the same slot < SLOTS. Its contents are undefined.
        void* scratch(int slot, size_t bytes);

    private:
        Pool& pool_;
        std::unique_lock<std::mutex> lock_;
        std::chrono::steady_clock::time_point since_;
    };
    static constexpr int SLOTS = 8;

private:
    struct Team;  // the workers of one process
    void run(void (*work)(void*, int), void* context);

    const int size_;
    std::atomic<int64_t> busy_ns_{0};
    std::unique_ptr<Team> team_;
    Room room_;

public:
    bool rounds_attention = false;  // whether attention over state of 16 bits is rounded; see attention_calls.h
};

}  // namespace ridgeline
