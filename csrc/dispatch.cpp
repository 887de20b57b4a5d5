#include "dispatch.h"

#include <cstdlib>
#include <stdexcept>

#if defined(__aarch64__)
#include "system.h"
#endif

namespace ridgeline {
namespace {

struct Entry {
    Isa isa;
    const char* name;
    bool (*has)();
};

#define RL_ENTRY(isa, has) {Isa::isa, #isa, [] { return bool(has); }},
constexpr Entry ISAS[] = {RL_ISAS(RL_ENTRY)};
#undef RL_ENTRY

Isa choose() {
#if defined(__x86_64__)
    __builtin_cpu_init();
#endif
    const char* wanted = getenv("RIDGELINE_ISA");
    for (const Entry& one : ISAS)
        if (wanted ? wanted == std::string(one.name) : one.has()) {
            if (!one.has())
                throw std::runtime_error(std::string("RIDGELINE_ISA=") + wanted +
                                         ": this CPU has no such instructions");
            return one.isa;
        }
    std::string known;
    for (const Entry& one : ISAS) known += (known.empty() ? "" : ", ") + std::string(one.name);
    throw std::runtime_error(std::string("RIDGELINE_ISA=") + wanted + ": known are " + known);
}

}  // namespace

const char* isa_name(Isa isa) { return ISAS[int(isa)].name; }

std::vector<std::string> isa_names() {
    std::vector<std::string> names;
    for (const Entry& one : ISAS) names.emplace_back(one.name);
    return names;
}

Isa isa() {
    static const Isa chosen = choose();
    return chosen;
}

}  // namespace ridgeline
