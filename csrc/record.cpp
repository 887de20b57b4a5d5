#include "record.h"

#include <algorithm>
#include <bit>
#include <limits>

namespace ridgeline {

Made Rooms::lend(const std::vector<size_t>& shape) {
    size_t floats = 1;
    for (size_t n : shape) floats *= n;
    Room* best = nullptr;
    for (Room& room : rooms_)
        if (!*room.lent && room.floats >= floats && (!best || room.floats < best->floats)) best = &room;
    if (!best) {
        // Sizes are powers of two, since programs for 1, 2, 3 ... sequences need slightly larger rooms each.
        const size_t size = std::bit_ceil(std::max<size_t>(floats, 16));
        rooms_.push_back({std::unique_ptr<float[]>(new float[size]), size, std::make_shared<bool>(false)});
        best = &rooms_.back();
    }
    *best->lent = true;
    using Lent = std::shared_ptr<bool>;
    nb::capsule holder(new Lent(best->lent), [](void* p) noexcept {
        **(Lent*)p = false;
        delete (Lent*)p;
    });
    return Made(best->data.get(), shape.size(), shape.data(), holder);
}

bool Rooms::holds(const char* begin, const char* end) const {
    return std::any_of(rooms_.begin(), rooms_.end(), [&](const Room& room) {
        return begin >= (const char*)room.data.get() && end <= (const char*)(room.data.get() + room.floats);
    });
}

void Rooms::poison() {
    for (Room& room : rooms_) std::fill_n(room.data.get(), room.floats, std::numeric_limits<float>::quiet_NaN());
}

Made Rooms::borrow(std::shared_ptr<Rooms> rooms, const Output& array) {
    std::vector<size_t> shape(array.shape_ptr(), array.shape_ptr() + array.ndim());
    using Owner = std::shared_ptr<Rooms>;
    nb::capsule holder(new Owner(std::move(rooms)), [](void* p) noexcept { delete (Owner*)p; });
    return Made(array.data(), shape.size(), shape.data(), holder, array.stride_ptr());
}

nb::object Program::record(const nb::callable& work) {
    if (pool_.program) throw std::runtime_error("another program of this pool is being recorded");
    struct Mark {
        Pool& pool;
        ~Mark() { pool.program = nullptr; }
    } mark{pool_};
    thread_ = std::this_thread::get_id();
    pool_.program = this;
    nb::object result = work();
    look_ahead();
    return result;
}

// Threads that wait in a job fetch weights of the next one. Behind the last job is the first one of the next run.
void Program::look_ahead() {
    Ahead next;
    for (size_t i = 2 * jobs_.size(); i-- > 0;) {
        Job& job = jobs_[i % jobs_.size()];
        job.later = next;
        if (job.reads.data) next = job.reads;
    }
}

void Program::run() {
    Pool::Hold hold(pool_);
    for (const Job& job : jobs_) {
        hold.fetch(job.later);
        job.run(hold);
    }
}

bool Program::knows(const char* begin, const char* end) const {
    return rooms_->holds(begin, end) || std::any_of(known_.begin(), known_.end(), [&](const auto& range) {
               return begin >= range.first && end <= range.second;
           });
}

}  // namespace ridgeline
