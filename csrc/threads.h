// A fork-join pool of threads: the only file, with threads.cpp, that knows the operating system.
//
//   fork   the work is written, then `epoch` is raised. Workers spin on that one cache line.
//   join   each worker stores the epoch that it finished in a line of its own; the caller spins on those.
//   park   a worker that saw no work for SPIN_US sleeps on a futex. It counts itself as parked and then asks the
//          kernel to sleep unless the epoch has changed; the caller raises the epoch and then looks for parked
//          workers. All threads see both in one order, so no wake-up is lost.
//
// Spinning matters: between two stages of a decode step are microseconds, and a futex costs 5 to 50 of them. Parking
// matters too: an idle process must not burn its cores.
#pragma once
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <type_traits>

namespace ridgeline {

// Physical cores that this process may use: by its affinity mask, and by its control group's quota of processor time.
int usable_cores();

// Zeroed pages aligned to 2 MiB, huge ones where the system gives them, with room to read 8 KiB past the end.
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

// Memory that lives long, cut from mappings which others are cut from too: so small pieces share huge pages. A mapping
// goes with its last piece.
struct Share {
    std::shared_ptr<Pages> mapping;
    char* data = nullptr;
};

class Room {
public:
    Share take(size_t bytes);  // zeroed, aligned to 4 KiB, with room to read 8 KiB past the end

private:
    std::mutex mutex_;
    std::shared_ptr<Pages> open_;
    size_t used_ = 0;
};

class Program;

class Pool {
public:
    // threads: the caller's own included, at least 1. Workers are pinned to cores of their own, unless there are more
    // threads than cores: then none is, and none spins. Throws std::runtime_error where no thread can be made.
    explicit Pool(int threads);
    ~Pool();
    Pool(const Pool&) = delete;

    int size() const { return size_; }
    Share take(size_t bytes) { return room_.take(bytes); }
    double busy_seconds() const;  // that calls have held the pool, so far
    Program* program = nullptr;   // that writes down the calls of a thread (record.h); changed under Python's lock

    // One op's hold on the pool: others wait for it. Work is given within a hold only. In a process that was forked,
    // the first hold makes new workers.
    class Hold {
    public:
        explicit Hold(Pool& pool);
        ~Hold();
        Hold(const Hold&) = delete;
        int threads() const { return pool_.size_; }

        // f(thread) once on every thread; back when all are done. f must not throw.
        template <class Work> void run(Work&& f) {
            using Bare = std::remove_reference_t<Work>;
            pool_.run([](void* context, int thread) { (*static_cast<Bare*>(context))(thread); }, (void*)&f);
        }
        // f(begin, end, thread) on one stretch of [0, n) for each thread; which thread has which element is fixed.
        template <class Work> void split(int64_t n, Work&& f) {
            if (n == 1) return f(0, 1, 0);  // to wake the others costs more than most single elements do
            run([&](int thread) {
                int64_t begin = n * thread / pool_.size_, end = n * (thread + 1) / pool_.size_;
                if (begin < end) f(begin, end, thread);
            });
        }
        // f(i, thread) for every i of [0, n): threads draw the next one when they are done. Who computes an element
        // changes, how it is computed does not.
        template <class Work> void draw(int64_t n, Work&& f) {
            if (n == 1) return f(0, 0);
            std::atomic<int64_t> next{0};
            run([&](int thread) {
                for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < n;) f(i, thread);
            });
        }
        // Room that is valid until the next call with the same slot; contents undefined. slot < SLOTS.
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
};

}  // namespace ridgeline
