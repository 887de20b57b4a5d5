// Random bits for a key and a counter: Philox4x64-10 (Salmon et al., Parallel random numbers, 2011).
#pragma once
#include <array>
#include <cstdint>

namespace ridgeline {

inline std::array<uint64_t, 4> philox(std::array<uint64_t, 2> key, std::array<uint64_t, 4> x) {
    for (int round = 0; round < 10; ++round) {
        const unsigned __int128 a = (unsigned __int128)0xd2e7470ee14c6c93 * x[0],
                                b = (unsigned __int128)0xca5a826395121157 * x[2];
        x = {uint64_t(b >> 64) ^ x[1] ^ key[0], uint64_t(b), uint64_t(a >> 64) ^ x[3] ^ key[1], uint64_t(a)};
        key[0] += 0x9e3779b97f4a7c15;
        key[1] += 0xbb67ae8584caa73b;
    }
    return x;
}

}  // namespace ridgeline
