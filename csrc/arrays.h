// numpy arrays as arguments, with checks that raise one clear error.
#pragma once
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <optional>
#include <stdexcept>
#include <string>

namespace ridgeline {
namespace nb = nanobind;

// A float32 matrix with dense rows: row r begins at data + r * stride.
template <class T> struct Rows {
    T* data;
    int64_t rows, columns, stride;
};

template <class T> using Given = nb::ndarray<T, nb::device::cpu>;
using Input = Given<const float>;
using Output = Given<float>;

// The declaration of an array argument. Arrays are never converted, since a copy would lose what is written to it.
inline auto array(const char* name) { return nb::arg(name).noconvert(); }

inline std::string shape_text(const int64_t* shape, size_t ndim) {
    std::string text = "[";
    for (size_t i = 0; i < ndim; ++i) text += (i ? ", " : "") + std::to_string(shape[i]);
    return text + "]";
}

template <class T> void check_alignment(const T* data, const char* name) {
    if (uintptr_t(data) % sizeof(T)) throw nb::value_error((std::string(name) + " is not aligned to its type").c_str());
}

// An array as a matrix with rows [first axis, all other axes]; the other axes must be dense.
template <class T> Rows<T> rows_of(const Given<T>& a, const char* name) {
    if (a.ndim() < 1) throw nb::value_error((std::string(name) + " has no axes").c_str());
    check_alignment(a.data(), name);
    int64_t columns = 1;
    for (size_t i = a.ndim(); i-- > 1;) {
        if (a.size() && a.shape(i) > 1 && a.stride(i) != columns) {
            std::string text =
                std::string(name) + " " + shape_text(a.shape_ptr(), a.ndim()) + " must be dense behind its first axis";
            throw nb::value_error(text.c_str());
        }
        columns *= a.shape(i);
    }
    return {a.data(), int64_t(a.shape(0)), columns, a.shape(0) > 1 ? int64_t(a.stride(0)) : columns};
}

// An array of any type with elements of `size` bytes, as rows of bytes.
inline Rows<char> bytes_of(const nb::ndarray<nb::device::cpu>& a, const char* name, int64_t size) {
    if (uintptr_t(a.data()) % size_t(size))
        throw nb::value_error((std::string(name) + " is not aligned to its type").c_str());
    int64_t columns = size;
    for (size_t i = a.ndim(); i-- > 1;) {
        if (a.size() && a.shape(i) > 1 && a.stride(i) * size != columns) {
            std::string text =
                std::string(name) + " " + shape_text(a.shape_ptr(), a.ndim()) + " must be dense behind its first axis";
            throw nb::value_error(text.c_str());
        }
        columns *= a.shape(i);
    }
    return {(char*)a.data(), int64_t(a.shape(0)), columns, a.shape(0) > 1 ? int64_t(a.stride(0)) * size : columns};
}

// An array as a matrix of a required shape.
template <class T> Rows<T> rows_of(const Given<T>& a, const char* name, int64_t rows, int64_t columns) {
    Rows<T> r = rows_of(a, name);
    if (r.rows != rows || r.columns != columns) {
        std::string text = std::string(name) + " is " + shape_text(a.shape_ptr(), a.ndim()) + ", but [" +
                           std::to_string(rows) + ", " + std::to_string(columns) + "] is required";
        throw nb::value_error(text.c_str());
    }
    return r;
}

// A dense vector of n elements, or null for None.
template <class T> T* vector_of(const Given<T>& a, const char* name, int64_t n) {
    if (a.ndim() != 1 || int64_t(a.shape(0)) != n || (n > 1 && a.stride(0) != 1)) {
        std::string text =
            std::string(name) + " " + shape_text(a.shape_ptr(), a.ndim()) + " must be dense, of " + std::to_string(n);
        throw nb::value_error(text.c_str());
    }
    check_alignment(a.data(), name);
    return a.data();
}
template <class T> T* vector_of(const std::optional<Given<T>>& a, const char* name, int64_t n) {
    return a ? vector_of(*a, name, n) : nullptr;
}

}  // namespace ridgeline
