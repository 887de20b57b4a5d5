// What kernels were called with, written down while they run, so that a step can be run again by one call.
//
// A program is right as long as everything that its calls touch stays where it is. So it accepts only arrays that it
// knows: those that its maker promises to keep, and rooms of its own. Rooms are lent like memory from an allocator: one
// that nobody holds any more, at that point of the recording, serves again later in the program, and in other programs
// over the same rooms.
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
    // Room for an array of that shape, contents undefined; it is free again when the array's last holder lets it go.
    Made lend(const std::vector<size_t>& shape);
    bool holds(const char* begin, const char* end) const;
    void poison();  // NaN everywhere
    // The same array for one who promises to read it before another program runs: its room counts as free.
    static Made borrow(std::shared_ptr<Rooms> rooms, const Output& array);

private:
    struct Room {
        std::unique_ptr<float[]> data;  // never touched beyond what was lent of it
        size_t floats;
        std::shared_ptr<bool> lent;
    };
    std::vector<Room> rooms_;
};

class Program {
public:
    Program(Pool& pool, std::shared_ptr<Rooms> rooms) : pool_(pool), rooms_(std::move(rooms)) {}

    // Calls of this thread to kernels of the pool are written down while `work` runs.
    nb::object record(const nb::callable& work);
    void run();
    size_t size() const { return jobs_.size(); }
    const std::string& refusal() const { return refusal_; }  // why it must not be run; empty if it may
    const std::shared_ptr<Rooms>& rooms() const { return rooms_; }

    // ---- of one call
    void add(std::function<void(Pool::Hold&)> job) { jobs_.push_back(std::move(job)); }
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
        if (begin != end && !knows(begin, end)) refuse("a kernel was given an array that no other one has made");
    }
    template <class T> void see(const std::optional<T>& a) {
        if (a) see(*a);
    }
    template <class T> void see(const std::vector<T>& all) {
        for (const T& a : all) see(a);
    }

    // The program that writes down what this thread calls, or null.
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
    std::vector<std::function<void(Pool::Hold&)>> jobs_;
    std::vector<std::pair<const char*, const char*>> known_;
    std::vector<nb::object> kept_;
    std::string refusal_;
};

}  // namespace ridgeline
