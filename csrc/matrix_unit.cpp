#include "matrix_unit.h"

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <map>
#include <mutex>
#include <stdexcept>
#include <vector>

#include "packing.h"
#include "system.h"

namespace ridgeline {
namespace {

constexpr int64_t EMULATED_FROM = 4;  // for bf16: tests then mix the unit and vectors, whose bits are equal

struct Choice {
    Unit unit;
    bool is_forced;
    std::string refusal;
};

// Why this process cannot use AMX; empty if it can.
std::string amx_refusal() {
#if defined(RL_HAS_AMX)
    if (!may_have_unit()) return std::string("the kernels of ") + isa_name(isa()) + " do not use it";
    return system::allow_tiles();
#else
    return "the kernels were built without it";
#endif
}

Choice choose() {
    const char* wanted = getenv("RIDGELINE_MATRIX_UNIT");
    const std::string name = wanted ? wanted : "";
    if (wanted && name != "off" && name != "auto" && name != "emulated" && name != "amx")
        throw std::runtime_error("RIDGELINE_MATRIX_UNIT=" + name + ": known are off, auto, emulated, amx");
    if (name == "off") return {Unit::none, true, "RIDGELINE_MATRIX_UNIT is off"};
    if (name == "emulated") return {Unit::emulated, true, ""};
    const std::string refusal = amx_refusal();
    if (name == "amx" && !refusal.empty()) throw std::runtime_error("RIDGELINE_MATRIX_UNIT=amx: " + refusal);
    if (!refusal.empty()) return {Unit::none, false, refusal};
    // Until the instructions have run on a real machine, users must ask for them.
    if (!wanted)
        return {Unit::none, false, "no AMX has been tried yet; RIDGELINE_MATRIX_UNIT=auto uses it where it is faster"};
    return {Unit::amx, name == "amx", ""};
}

const Choice& choice() {
    static const Choice chosen = choose();
    return chosen;
}

// Why matrices of bf16 are not multiplied with the arithmetic of a unit.
std::string refuse_bf16() {
    if (choice().unit == Unit::none) return unit_refusal();
    if (choice().unit == Unit::emulated) return "";
    if (!system::has_bf16_tiles()) return "the matrix unit of this CPU has no bf16";
    return unit_kernels().bf16_fault();
}

// Formats whose products take the same time in the unit, and as long as each other in vectors.
enum class Class { none, rows, deep_groups, shallow_groups, bf16, bf16_slices };
Class class_of(const Format& f) {
    if (in_tiles(f)) return f.inputs == Inputs::bf16 ? Class::bf16 : Class::bf16_slices;
    if (!f.rounds_tokens() || f.block) return Class::none;
    if (f.is_plain_bytes()) return Class::rows;
    return f.group % UNIT_DEPTH ? Class::shallow_groups : Class::deep_groups;
}

// Seconds of the fastest of some products with `tokens`, on this thread.
double seconds(const Matrix& w, int64_t tokens) {
    std::vector<char> room(activation_bytes(w, tokens) + 64);
    const Activations a = activations(w, tokens, room.data());
    std::vector<char> tiles(product_kernels().room_bytes(w, a) + 64);
    std::vector<float> out(size_t(tokens * w.panels * PANEL));
    Epilogue e;
    e.out[0] = {out.data(), w.panels * PANEL};
    double best = 1e9;
    for (int i = 0; i < 5; ++i) {
        const auto start = std::chrono::steady_clock::now();
        product_kernels().multiply(w, a, 0, w.panels, e, tiles.data());
        best = std::min(best, std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
    }
    return best;
}

// Tries descending numbers of tokens until vectors are faster.
int64_t measured_from(Pool& pool, const Format& format) {
    constexpr int64_t COLUMNS = 1024, ROWS = 256;
    Matrix vectors(pool, format, COLUMNS, false, {ROWS}), unit(pool, format, COLUMNS, false, {ROWS});
    vectors.in_tiles = unit.in_tiles = in_tiles(format);
    unit.unit_from = 1;
    int64_t from = NEVER;
    for (int64_t tokens : {128, 64, 32, 16, 8, 4}) {
        if (seconds(unit, tokens) > 0.95 * seconds(vectors, tokens)) break;
        from = tokens;
    }
    return from;
}

}  // namespace

Unit matrix_unit() { return choice().unit; }
const char* unit_name(Unit unit) { return unit == Unit::amx ? "amx" : unit == Unit::emulated ? "emulated" : "none"; }
std::string unit_refusal() { return choice().refusal; }
std::string bf16_refusal() {
    static const std::string refusal = refuse_bf16();
    return refusal;
}
bool serves(const Format& f) { return matrix_unit() != Unit::none && class_of(f) != Class::none; }
bool in_tiles(const Format& f) { return f.numbers == Numbers::bf16 && bf16_refusal().empty(); }

int64_t unit_from(Pool& pool, const Format& format) {
    if (!serves(format)) return NEVER;
    const Class kind = class_of(format);
    if (in_tiles(format) && !VECTORS_FOLLOW) return 1;
    if (in_tiles(format) && matrix_unit() == Unit::emulated) return EMULATED_FROM;
    if (choice().is_forced) return 1;
    static std::mutex mutex;
    static std::map<Class, int64_t> known;
    std::lock_guard lock(mutex);
    if (!known.count(kind)) known[kind] = measured_from(pool, format);
    return known[kind];
}

}  // namespace ridgeline
