// The functions that add bindings to the module, and helpers that all bindings share.
#pragma once
#include "activation.h"
#include "arrays.h"
#include "record.h"
#include "threads.h"

namespace ridgeline {

using Ids = Given<const int64_t>;
using Places = Given<int64_t>;

// Releases the GIL while a kernel runs. Other callers of the pool wait.
struct Held {
    nb::gil_scoped_release release;
    Pool::Hold hold;
    explicit Held(Pool& pool) : hold(pool) {}
};

// The work of a kernel that cannot be recorded.
struct Work {
    struct Unrecorded {
        explicit Unrecorded(const Pool& pool) {
            if (Program* program = Program::of(pool)) program->refuse("it contains a kernel that cannot be recorded");
        }
    } unrecorded;
    Held held;
    Pool::Hold& hold = held.hold;
    explicit Work(Pool& pool) : unrecorded(pool), held(pool) {}
};

// Runs and records a kernel: job(hold) holds by value all that it needs, except for data that `bound`, a Python object,
// and the arrays own. reads: the weights that it reads first.
template <class Bound, class Job, class... Arrays>
void perform_over(const Ahead& reads, Pool& pool, const Bound& bound, const Job& job, const Arrays&... arrays) {
    if (Program* program = Program::of(pool)) {
        (program->see(arrays), ...);
        program->keep(nb::find(bound));
        program->add(job, reads);
    }
    Held held(pool);
    job(held.hold);
}
template <class Bound, class Job, class... Arrays>
void perform(Pool& pool, const Bound& bound, const Job& job, const Arrays&... arrays) {
    perform_over({}, pool, bound, job, arrays...);
}

[[noreturn]] inline void refuse(const std::string& text) { throw nb::value_error(text.c_str()); }

inline void check_id(int64_t id, int64_t n, const char* what) {
    if (id < 0 || id >= n)
        throw std::out_of_range(std::string(what) + " " + std::to_string(id) + " of " + std::to_string(n));
}

template <class T, size_t n> T one_of(const std::string& name, const char* what, const char* const (&names)[n]) {
    for (size_t i = 0; i < n; ++i)
        if (name == names[i]) return T(int(i));
    std::string known;
    for (const char* each : names) known += std::string(known.empty() ? "" : ", ") + each;
    refuse(std::string(what) + " " + name + " is none of " + known);
}
inline Activation activation_of(const std::string& name) {
    return one_of<Activation>(name, "activation", {"silu", "gelu", "gelu_tanh", "relu", "relu2", "clamped_swiglu"});
}

// An array [tokens, heads, columns] whose last axis is dense.
template <class T> struct Heads3 {
    T* data;
    int64_t stride, head;
};
template <class T>
Heads3<T> heads_of(const Given<T>& a, const char* name, int64_t tokens, int64_t heads, int64_t columns) {
    const bool shaped = a.ndim() == 3 && int64_t(a.shape(0)) == tokens && int64_t(a.shape(1)) == heads &&
                        int64_t(a.shape(2)) == columns;
    if (!shaped || (columns > 1 && a.stride(2) != 1))
        refuse(std::string(name) + " is " + shape_text(a.shape_ptr(), a.ndim()) + ", but " + std::to_string(tokens) +
               " tokens of " + std::to_string(heads) + " heads of " + std::to_string(columns) +
               " numbers side by side are asked for");
    return {a.data(), int64_t(a.stride(0)), int64_t(a.stride(1))};
}

void bind_pool(nb::module_& m);
void bind_record(nb::module_& m);
void bind_tokens(nb::module_& m);
void bind_room(nb::class_<Pool>& pool);
void bind_attention(nb::module_& m);
void bind_matrix(nb::module_& m);
void bind_linear(nb::module_& m);
void bind_experts(nb::module_& m);
void bind_latent(nb::module_& m);
void bind_recurrent(nb::module_& m);
void bind_selection(nb::module_& m);
void bind_elementwise(nb::module_& m);
void bind_low_rank(nb::module_& m);

}  // namespace ridgeline
