// Records the calls of kernels while they run, so that one call repeats a whole step.
//
// A program is valid as long as all arrays that its calls use stay at their addresses. So it accepts only registered
// arrays, which the recording code promises to keep, and arrays in its own memory (`Rooms`). Rooms are allocated like
// other memory: a room that has been freed at some point of the recording is used again later in the program, and in
// other programs over the same Rooms.
#pragma once
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "arrays.h"
#include "threads.h"

namespace ridgeline {

using Made = nb::ndarray<nb::numpy, float, nb::device::cpu>;

class Rooms {
public:
    Rooms() = default;
    Rooms(const Rooms&) = delete;
    // Returns memory for an array of that shape; its contents are undefined. It is freed with the array's last owner.
    Made lend(const std::vector<size_t>& shape);
    bool holds(const char* begin, const char* end) const;
    void poison();  // fills all memory with NaN
    // Returns the same array with its memory marked as free: the caller reads it before another program runs.
    static Made borrow(std::shared_ptr<Rooms> rooms, const Output& array);

private:
    struct Room {
        std::unique_ptr<float[]> data;  // only lent memory is touched
        size_t floats;
        std::shared_ptr<bool> lent;
    };
    std::vector<Room> rooms_;
};

class Program {
public:
    Program(Pool& pool, std::shared_ptr<Rooms> rooms) : pool_(pool), rooms_(std::move(rooms)) {}

    // Runs `work`, and records this thread's calls to kernels of the pool.
    nb::object record(const nb::callable& work);
    void run();
    size_t size() const { return jobs_.size(); }
    const std::string& refusal() const { return refusal_; }  // why the program must not run; empty if it may
    const std::shared_ptr<Rooms>& rooms() const { return rooms_; }

    // ---- used by each call
    // reads: the weights that the job reads first.
    void add(std::function<void(Pool::Hold&)> run, const Ahead& reads) { jobs_.push_back({std::move(run), reads, {}}); }
    void refuse(const std::string& reason) {
        if (refusal_.empty()) refusal_ = reason;
    }
    void keep(nb::object object) { kept_.push_back(std::move(object)); }
    template <class Array> void know(const Array& a) {
        auto [begin, end] = extent(a);
        known_.push_back({begin, end});
    }
    template <class... T> void see(const nb::ndarray<T...>& a) {
        auto [begin, end] = extent(a);
        if (begin != end && !knows(begin, end))
            refuse("a kernel uses an array that is neither registered nor a kernel's result");
    }
    template <class T> void see(const std::optional<T>& a) {
        if (a) see(*a);
    }
    template <class T> void see(const std::vector<T>& all) {
        for (const T& a : all) see(a);
    }

    // Returns the program that records this thread's calls, or null.
    static Program* of(const Pool& pool) {
        Program* p = pool.program;
        return p && p->thread_ == std::this_thread::get_id() ? p : nullptr;
    }

private:
    template <class Array> static std::pair<const char*, const char*> extent(const Array& a) {
        const char* begin = (const char*)a.data();
        if (!a.size()) return {begin, begin};
        int64_t last = 0;
        for (size_t i = 0; i < a.ndim(); ++i) last += int64_t(a.shape(i) - 1) * a.stride(i);
        return {begin, begin + (last + 1) * int64_t(a.itemsize())};
    }
    bool knows(const char* begin, const char* end) const;

    Pool& pool_;
    std::shared_ptr<Rooms> rooms_;
    std::thread::id thread_;
    struct Job {
        std::function<void(Pool::Hold&)> run;
        Ahead reads, later;  // what this job reads first, and what the next one that reads weights does
    };
    void look_ahead();
    std::vector<Job> jobs_;
    std::vector<std::pair<const char*, const char*>> known_;
    std::vector<nb::object> kept_;
    std::string refusal_;
};

}  // namespace ridgeline
