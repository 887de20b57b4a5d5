// Computes results with the instruction set of this process, and writes them to a file or compares them with one:
//   kernel_checks write FILE      under one instruction set (RIDGELINE_ISA)
//   kernel_checks compare FILE    under another: every bit is equal, except for those of a NaN
//   kernel_checks whole FILE      compares results of whole numbers alone, for a side without a fused multiply-add
// unit_checks has the same words, and compares matrix units (RIDGELINE_MATRIX_UNIT, emulated and amx).
#include <cstdio>
#include <cstring>
#include <exception>
#include <fstream>

#include "checks/results.h"
#include "dispatch.h"

namespace ridgeline {
namespace {

void write(const Results& results, const char* path) {
    std::ofstream file(path, std::ios::binary);
    for (const Result& r : results.all) {
        file << r.name << '\n' << r.numbers.size() << '\n';
        file.write((const char*)r.numbers.data(), std::streamsize(r.numbers.size() * 4));
    }
    if (!file.flush()) throw std::runtime_error(std::string(path) + " cannot be written");
}

bool is_equal(float a, float b) { return std::isnan(a) ? std::isnan(b) : !memcmp(&a, &b, 4); }

// Throws std::runtime_error for the first difference. Returns the number of results that were compared.
size_t compare(const Results& results, const char* path, bool whole_only) {
    std::ifstream file(path, std::ios::binary);
    size_t compared = 0;
    for (const Result& r : results.all) {
        std::string name, size;
        if (!std::getline(file, name) || !std::getline(file, size) || name != r.name ||
            size != std::to_string(r.numbers.size()))
            throw std::runtime_error(std::string(path) + " has no result " + r.name + " of this size; write it anew");
        std::vector<float> wanted(r.numbers.size());
        if (!file.read((char*)wanted.data(), std::streamsize(wanted.size() * 4)))
            throw std::runtime_error(std::string(path) + " ends within " + r.name);
        if (whole_only && !r.is_whole) continue;
        ++compared;
        for (size_t i = 0; i < wanted.size(); ++i)
            if (!is_equal(wanted[i], r.numbers[i])) {
                char text[80];
                snprintf(text, sizeof text, ": number %zu is %.9g, and not %.9g", i, r.numbers[i], wanted[i]);
                throw std::runtime_error(r.name + text);
            }
    }
    return compared;
}

}  // namespace
}  // namespace ridgeline

int main(int count, char** words) {
    using namespace ridgeline;
    const std::string job = count == 3 ? words[1] : "";
    if (job != "write" && job != "compare" && job != "whole") {
        fprintf(stderr, "usage: %s write|compare|whole FILE\n", words[0]);
        return 2;
    }
    try {
        const Results results = compute();
        size_t done = results.all.size();
        if (job == "write")
            write(results, words[2]);
        else
            done = compare(results, words[2], job == "whole");
        printf("%s: %zu results\n", isa_name(isa()), done);
    } catch (const std::exception& e) {
        fprintf(stderr, "%s\n", e.what());
        return 1;
    }
}
