// Writes the codes, scales and offsets of a row into its panel, and reads them.
#pragma once
#include <cmath>

#include "codes.h"

namespace ridgeline::RL_ISA {

// A row of codes, padded with zeros to whole groups, with one scale and offset for each group.
struct CodedRow {
    const int8_t* codes;
    const float* scales;
    const int8_t* zero_points = nullptr;
    const float* minimums = nullptr;
    const int8_t* factors = nullptr;
    const int8_t* min_factors = nullptr;
};

// 32 unsigned codes, four to a word, as the words of a row: each is 128 bytes behind the one before.
RL_INLINE void put_word(char* to, int i, uint32_t word) { memcpy(to + i * 128, &word, 4); }
RL_INLINE uint32_t word_at(const char* from, int i) {
    uint32_t word;
    memcpy(&word, from + i * 128, 4);
    return word;
}

inline void put_words(Numbers numbers, char* to, const uint32_t (&u)[8], int count) {
    switch (numbers) {
        case Numbers::int8:
            for (int i = 0; i < count; ++i) put_word(to, i, u[i]);
            break;
        case Numbers::int4:
            RL_FOR(i, 4) put_word(to, i, u[2 * i] | u[2 * i + 1] << 4);
            break;
        case Numbers::int3: {
            const uint32_t a = u[6], b = u[7];
            put_word(to, 0, u[0] | u[1] << 3 | (a & 0x03030303) << 6);
            put_word(to, 1, u[2] | u[3] << 3 | (b & 0x03030303) << 6);
            put_word(to, 2, u[4] | u[5] << 3 | (a & 0x04040404) << 4 | (b & 0x04040404) << 5);
            break;
        }
        case Numbers::int5: {
            uint32_t high = 0;
            RL_FOR(s, 8) high |= (u[s] >> 4 & 0x01010101) << s;
            RL_FOR(i, 4) put_word(to, i, (u[2 * i] & 0x0f0f0f0f) | (u[2 * i + 1] & 0x0f0f0f0f) << 4);
            put_word(to, 4, high);
            break;
        }
        case Numbers::int6:
            RL_FOR(h, 2) {
                uint32_t high = 0;
                RL_FOR(j, 4) high |= (u[4 * h + j] >> 4 & 0x03030303) << (2 * j);
                RL_FOR(i, 2) {
                    const uint32_t x = u[4 * h + 2 * i], y = u[4 * h + 2 * i + 1];
                    put_word(to, 3 * h + i, (x & 0x0f0f0f0f) | (y & 0x0f0f0f0f) << 4);
                }
                put_word(to, 3 * h + 2, high);
            }
            break;
        default: RL_FOR(i, 2) put_word(to, i, u[4 * i] | u[4 * i + 1] << 2 | u[4 * i + 2] << 4 | u[4 * i + 3] << 6);
    }
}

inline void words_at(Numbers numbers, const char* from, uint32_t (&u)[8], int count) {
    switch (numbers) {
        case Numbers::int8:
            for (int i = 0; i < count; ++i) u[i] = word_at(from, i);
            break;
        case Numbers::int4:
            RL_FOR(i, 8) u[i] = word_at(from, i / 2) >> (i % 2 * 4) & 0x0f0f0f0f;
            break;
        case Numbers::int3: {
            RL_FOR(i, 6) u[i] = word_at(from, i / 2) >> (i % 2 * 3) & 0x07070707;
            const uint32_t high = word_at(from, 2);
            RL_FOR(i, 2) u[6 + i] = (word_at(from, i) >> 6 & 0x03030303) | (high >> (4 + i) & 0x04040404);
            break;
        }
        case Numbers::int5:
            RL_FOR(i, 8) {
                u[i] = (word_at(from, i / 2) >> (i % 2 * 4) & 0x0f0f0f0f) | (word_at(from, 4) >> i & 0x01010101) << 4;
            }
            break;
        case Numbers::int6:
            RL_FOR(i, 8) {
                const int h = i / 4, j = i % 4;
                u[i] = (word_at(from, 3 * h + j / 2) >> (j % 2 * 4) & 0x0f0f0f0f) |
                       (word_at(from, 3 * h + 2) >> (2 * j) & 0x03030303) << 4;
            }
            break;
        default: RL_FOR(i, 8) u[i] = word_at(from, i / 4) >> (i % 4 * 2) & 0x03030303;
    }
}

// Writes `count` codes, 32 or the rest of plain bytes. Returns whether each is one of the format's.
inline bool put_piece(const Format& f, char* piece, int row, const int8_t* codes, int count) {
    uint8_t u[PIECE] = {};
    int worst = 0;
    if (f.numbers == Numbers::fp8) {
        RL_FOR(i, PIECE) worst |= (codes[i] & 127) == 127;  // NaN
        for (int i = 0; i < count; i += 2) memcpy(piece + i * PANEL + row * 2, codes + i, 2);
        return !worst;
    }
    const int zero = f.zero(), most = (1 << f.traits().bits) - 1;
    const bool is_unsigned = f.offsets == Offsets::minimums;
    for (int i = 0; i < count; ++i) {
        const int code = is_unsigned ? uint8_t(codes[i]) : codes[i] + zero;
        worst |= code & ~most;
        u[i] = uint8_t(code & most);
    }
    uint32_t words[8];
    memcpy(words, u, PIECE);
    put_words(f.numbers, piece + row * 4, words, count / 4);
    return !worst;
}

// Writes a float16, unless the number is none.
inline bool put_half(char* to, int row, float x) {
    const uint16_t half = to_f16(x);
    memcpy(to + row * 2, &half, 2);
    return from_f16(half) == x && std::isfinite(x);
}

// Writes what follows the codes of block b: factors of its groups, a scale, a minimum.
inline bool put_block_tail(const Matrix& m, char* tail, int row, const CodedRow& from, int64_t b) {
    const Format& f = m.format;
    const int groups = f.block / f.group;
    const bool lower = f.offsets == Offsets::minimums;
    bool good = true;
    for (int g = 0; g < groups; ++g) {
        const int8_t factor = from.factors[b * groups + g];
        tail[g * PANEL + row] = char(factor);
        if (!lower) continue;
        const int8_t low = from.min_factors[b * groups + g];
        tail[(groups + g) * PANEL + row] = char(low);
        good &= factor >= 0 && low >= 0;
    }
    char* scales = tail + groups * PANEL * (lower ? 2 : 1);
    good &= put_half(scales, row, from.scales[b] / m.factor);
    if (lower) good &= put_half(scales + PANEL * 2, row, from.minimums[b] / m.factor);
    return good;
}

// Writes what follows the codes of group g.
inline bool put_tail(const Matrix& m, char* tail, int row, const CodedRow& from, int64_t g) {
    const Format& f = m.format;
    const float scale = from.scales[g] / m.factor;
    bool good = scale >= -0x1p100f && scale <= 0x1p100f;
    if (f.has_wide_scales())
        memcpy(tail + row * 4, &scale, 4);
    else
        good &= put_half(tail, row, scale);
    uint8_t* behind = (uint8_t*)tail + (f.has_wide_scales() ? 128 : 64);
    if (f.offsets == Offsets::minimums) good &= put_half((char*)behind, row, from.minimums[g] / m.factor);
    if (f.offsets == Offsets::zero_points) {
        const int zero = from.zero_points[g] + f.traits().zero, most = (1 << f.traits().bits) - 1;
        good &= zero >= 0 && zero <= most;
        if (f.traits().bits > 4)
            behind[row] = uint8_t(zero);
        else
            behind[row % 16] = uint8_t(row < 16 ? (behind[row] & 0xf0) | zero : (behind[row - 16] & 15) | zero << 4);
    }
    return good;
}

// Writes a row of a panel. Returns whether the format can hold its codes, scales and offsets.
inline bool put_row(Matrix& m, char* panel, int row, const CodedRow& from) {
    bool good = true;
    const int64_t piece = m.format.traits().bits * PIECE * (PANEL / 8);
    for (int64_t g = 0; g * m.group < m.padded_k; ++g) {
        char* to = panel + g * m.group_bytes;
        const int8_t* codes = from.codes + g * m.group;
        for (int64_t k = 0; k < m.group; k += PIECE)
            good &= put_piece(m.format, to + k / PIECE * piece, row, codes + k,
                              int(m.group - k < PIECE ? m.group - k : PIECE));
        char* tail = to + m.code_bytes;
        good &= m.format.block ? put_block_tail(m, tail, row, from, g) : put_tail(m, tail, row, from, g);
    }
    return good;
}

// Reads the unsigned codes of a piece, or bytes of e4m3.
inline void piece_at(const Format& f, const char* piece, int row, uint8_t (&u)[PIECE], int count) {
    if (f.numbers == Numbers::fp8) {
        for (int i = 0; i < count; i += 2) memcpy(u + i, piece + i * PANEL + row * 2, 2);
        return;
    }
    uint32_t words[8] = {};
    words_at(f.numbers, piece + row * 4, words, count / 4);
    memcpy(u, words, PIECE);
}

// The scale and the minimum of a column of a row. column: in its group or block, whose tail is given.
struct Step {
    float scale, minimum;
};
inline Step step_at(const Matrix& m, const char* tail, int row, int64_t column) {
    const Format& f = m.format;
    const bool wide = f.has_wide_scales(), lower = f.offsets == Offsets::minimums;
    const int groups = f.block ? f.block / f.group : 0;
    const char* scales = tail + groups * PANEL * (lower ? 2 : 1);
    Step step;
    step.scale = (wide ? ((const float*)scales)[row] : from_f16(((const uint16_t*)scales)[row])) * m.factor;
    const uint16_t* minimums = (const uint16_t*)(scales + (wide ? 128 : 64));
    step.minimum = lower ? from_f16(minimums[row]) * m.factor : 0.f;
    if (!f.block) return step;
    const int64_t g = column / f.group;
    step.scale *= float(int8_t(tail[g * PANEL + row]));
    if (lower) step.minimum *= float(int8_t(tail[(groups + g) * PANEL + row]));
    return step;
}

// Reads one row of a matrix of codes as float32, in the order of its codes.
inline void coded_row(const Matrix& m, const char* panel, int row, float* out) {
    const Format& f = m.format;
    const int64_t piece = f.traits().bits * PIECE * (PANEL / 8);
    for (int64_t k = 0; k < m.k; k += PIECE) {
        const char* group = panel + k / m.group * m.group_bytes;
        const int64_t in = k % m.group, rest = m.padded_k - k, n = m.k - k < PIECE ? m.k - k : PIECE;
        uint8_t u[PIECE];
        piece_at(f, group + in / PIECE * piece, row, u, int(rest < PIECE ? rest : PIECE));
        const char *tail = group + m.code_bytes, *behind = tail + (f.has_wide_scales() ? 128 : 64);
        int zero = f.zero();
        if (f.offsets == Offsets::zero_points)
            zero = f.traits().bits > 4 ? uint8_t(behind[row]) : uint8_t(behind[row % 16]) >> (row / 16 * 4) & 15;
        for (int64_t i = 0; i < n; ++i) {
            const Step step = step_at(m, tail, row, in + i);
            const float number = f.numbers == Numbers::fp8 ? from_f8(u[i]) * 256.f : float(u[i] - zero);
            const float scaled = number * step.scale;
            out[k + i] = f.offsets == Offsets::minimums ? scaled - step.minimum : scaled;
        }
    }
}

}  // namespace ridgeline::RL_ISA
