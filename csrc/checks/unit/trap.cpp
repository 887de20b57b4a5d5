// Emulates the instructions of AMX that csrc/kernels/unit_registers.h uses: a CPU without AMX sends SIGILL for each,
// and the handler decodes it from its bytes, computes it with tiles of its own, and goes on behind it. Encodings,
// checks and operations are those of Intel's Software Developer's Manual, volume 2. What the manual forbids ends the
// program. On a CPU with AMX no signal arrives, and the instructions run as they are.
#include "checks/unit/trap.h"

#include <signal.h>
#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "system.h"

namespace ridgeline::trap {
namespace {

constexpr int TILES = 8, ROWS = 16, BYTES = 64;  // of palette 1
std::atomic<int64_t> emulated{0}, configured{0}, released{0};

// ---- an instruction -------------------------------------------------------------------------------------------------

struct Instruction {
    int prefix, opcode;      // the prefix that VEX stands for: 0: none, 1: 66, 2: F3, 3: F2
    int mode, reg, rm, vex;  // fields of ModRM with their fourth bits, and VEX.vvvv
    bool has_sib;
    const char* address;  // base and displacement
    int64_t stride;       // index x scale
    int length;
};

// Ends the program, which has used an instruction in a way that the manual forbids.
[[noreturn]] void stop(const uint8_t* at, const char* why) {
    char text[200];
    int size = snprintf(text, sizeof text, "%s:", why);
    for (int i = 0; i < 11; ++i) size += snprintf(text + size, sizeof text - size_t(size), " %02x", at[i]);
    text[size++] = '\n';
    [[maybe_unused]] const ssize_t written = write(2, text, size_t(size));
    _exit(3);
}

int64_t reg_of(const greg_t* regs, int number) {
    static constexpr int NAMES[] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP, REG_RSI, REG_RDI,
                                    REG_R8,  REG_R9,  REG_R10, REG_R11, REG_R12, REG_R13, REG_R14, REG_R15};
    return regs[NAMES[number]];
}

template <class T> int64_t read(const uint8_t*& at) {
    T x;
    memcpy(&x, at, sizeof x);
    at += sizeof x;
    return x;
}

// at: behind ModRM. x, b: the bits of VEX that extend an index and a base.
void decode_address(Instruction& i, const uint8_t*& at, const greg_t* regs, int low, int x, int b) {
    int64_t address = 0;
    bool is_relative = false, has_base = true;
    int base = low | b << 3;
    i.has_sib = low == 4;
    if (i.has_sib) {
        const uint8_t sib = *at++;
        const int index = (sib >> 3 & 7) | x << 3;
        base = (sib & 7) | b << 3;
        i.stride = index == 4 ? 0 : reg_of(regs, index) << (sib >> 6);
        has_base = i.mode != 0 || (sib & 7) != 5;
    } else if (i.mode == 0 && low == 5) {
        is_relative = true, has_base = false;
    }
    if (has_base) address = reg_of(regs, base);
    if (i.mode == 1) address += read<int8_t>(at);
    if (i.mode == 2 || !has_base) address += read<int32_t>(at);
    if (is_relative) address += int64_t(at);  // no instruction here has an immediate behind it
    i.address = (const char*)address;
}

Instruction decode(const uint8_t* begin, const greg_t* regs) {
    const uint8_t* at = begin;
    if (*at++ != 0xc4) stop(begin, "an illegal instruction without a VEX prefix of three bytes");
    const uint8_t first = *at++, second = *at++;
    if ((first & 31) != 2) stop(begin, "an illegal instruction outside of the map 0F38");
    if (second & 0x84) stop(begin, "VEX.W and VEX.L must be 0");
    Instruction i{};
    i.prefix = second & 3;
    i.vex = ~(second >> 3) & 15;
    i.opcode = *at++;
    const uint8_t modrm = *at++;
    i.mode = modrm >> 6;
    i.reg = (modrm >> 3 & 7) | (~first >> 7 & 1) << 3;
    if (i.mode == 3)
        i.rm = (modrm & 7) | (~first >> 5 & 1) << 3;
    else
        decode_address(i, at, regs, modrm & 7, ~first >> 6 & 1, ~first >> 5 & 1);
    i.length = int(at - begin);
    return i;
}

// ---- tiles ----------------------------------------------------------------------------------------------------------

struct Tile {
    int rows = 0, bytes = 0;  // as configured; 0 for a tile that must not be used
    alignas(64) uint8_t data[ROWS][BYTES] = {};
};

struct File {
    bool is_configured = false;
    Tile tiles[TILES];

    const char* configure(const uint8_t* from) {
        if (from[0] != 1) return "LDTILECFG: the palette is not 1";
        File next;
        for (int i = 1; i < 16; ++i)
            if (from[i]) return "LDTILECFG: a start row or a reserved byte is not 0";
        for (int i = 0; i < 16; ++i) {
            const int bytes = from[16 + 2 * i] | from[17 + 2 * i] << 8, rows = from[48 + i];
            if (i >= TILES && (bytes || rows)) return "LDTILECFG: a tile beyond the eighth is configured";
            if (bytes > BYTES || rows > ROWS) return "LDTILECFG: a tile is too large";
            if (!bytes != !rows) return "LDTILECFG: a tile has rows or columns, but not both";
            if (i < TILES) next.tiles[i].rows = rows, next.tiles[i].bytes = bytes;
        }
        *this = next;
        is_configured = true;
        return nullptr;
    }
    // Why tile i cannot be used.
    const char* refuses(int i) const {
        if (!is_configured) return "#UD: no configuration is loaded";
        if (i >= TILES) return "#UD: there are eight tiles";
        if (!tiles[i].rows) return "#UD: the tile is not configured";
        return nullptr;
    }
    void load(int i, const char* from, int64_t stride) {
        Tile& t = tiles[i];
        memset(t.data, 0, sizeof t.data);
        for (int r = 0; r < t.rows; ++r) memcpy(t.data[r], from + r * stride, size_t(t.bytes));
    }
    void store(int i, char* to, int64_t stride) const {
        for (int r = 0; r < tiles[i].rows; ++r) memcpy(to + r * stride, tiles[i].data[r], size_t(tiles[i].bytes));
    }
};

const char* refuses_product(const File& f, const Instruction& i) {
    for (int tile : {i.reg, i.rm, i.vex})
        if (const char* why = f.refuses(tile)) return why;
    if (i.reg == i.rm || i.rm == i.vex || i.reg == i.vex) return "#UD: two operands are one tile";
    const Tile &c = f.tiles[i.reg], &a = f.tiles[i.rm], &b = f.tiles[i.vex];
    if (c.bytes % 4 || a.bytes % 4 || b.bytes % 4) return "#UD: a row has no whole number of four bytes";
    if (c.rows != a.rows) return "#UD: the first operand and the sums have different rows";
    if (a.bytes / 4 != b.rows) return "#UD: columns of the first operand are not the rows of the second";
    if (c.bytes != b.bytes) return "#UD: the second operand and the sums have different columns";
    return nullptr;
}

void multiply_bytes(Tile& c, const Tile& a, const Tile& b) {
    for (int m = 0; m < c.rows; ++m)
        for (int n = 0; n < c.bytes; n += 4) {
            uint32_t sum;
            memcpy(&sum, &c.data[m][n], 4);
            for (int k = 0; k < a.bytes; ++k)
                sum += uint32_t(int32_t(int8_t(a.data[m][k])) * int32_t(b.data[k / 4][n + k % 4]));
            memcpy(&c.data[m][n], &sum, 4);
        }
}

float number(const uint8_t* at) {  // of bf16
    uint16_t half;
    memcpy(&half, at, 2);
    const uint32_t bits = uint32_t(half) << 16;
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

// This CPU's own arithmetic, with denormal numbers as zeros. RIDGELINE_TRAP_FAULT makes it one that a unit could have,
// but that the manual does not describe: `denormals` keeps these, `one_chain` adds all products to the sum in turn.
void multiply_bf16(Tile& c, const Tile& a, const Tile& b) {
    static const char* fault = getenv("RIDGELINE_TRAP_FAULT");
    const bool keeps_denormals = fault && !strcmp(fault, "denormals"), is_chain = fault && !strcmp(fault, "one_chain");
    const unsigned before = __builtin_ia32_stmxcsr();
    __builtin_ia32_ldmxcsr(keeps_denormals ? 0x1f80 : 0x9fc0);
    for (int m = 0; m < c.rows; ++m)
        for (int n = 0; n < c.bytes; n += 4) {
            float* sum = (float*)&c.data[m][n];
            float even = is_chain ? *sum : 0, odd = 0;
            for (int k = 0; k < a.bytes / 4; ++k) {
                float& second = is_chain ? even : odd;
                even = __builtin_fmaf(number(&a.data[m][4 * k]), number(&b.data[k][n]), even);
                second = __builtin_fmaf(number(&a.data[m][4 * k + 2]), number(&b.data[k][n + 2]), second);
            }
            *sum = is_chain ? even : *sum + (even + odd);
        }
    __builtin_ia32_ldmxcsr(before);
}

// ---- the handler ----------------------------------------------------------------------------------------------------

thread_local File file;

// Returns why the manual forbids the instruction; null if it was done.
const char* execute(const Instruction& i) {
    const int kind = i.opcode << 4 | i.prefix;
    const bool is_product = i.opcode == 0x5c || i.opcode == 0x5e;
    if (!is_product && i.vex) return "#UD: VEX.vvvv must be 1111b";
    switch (kind) {
        case 0x490:
            if (i.mode == 3) {
                if (i.reg || i.rm) return "an unknown instruction";
                file = File{};
                ++released;
                return nullptr;
            }
            if (i.reg) return "an unknown instruction";
            ++configured;
            return file.configure((const uint8_t*)i.address);
        case 0x493:  // TILEZERO
            if (i.mode != 3 || i.rm) return "an unknown instruction";
            if (const char* why = file.refuses(i.reg)) return why;
            memset(file.tiles[i.reg].data, 0, sizeof file.tiles[i.reg].data);
            return nullptr;
        case 0x4b2:  // TILESTORED
        case 0x4b3:  // TILELOADD
            if (i.mode == 3 || !i.has_sib) return "#UD: a tile in memory needs SIB";
            if (const char* why = file.refuses(i.reg)) return why;
            if (i.prefix == 3)
                file.load(i.reg, i.address, i.stride);
            else
                file.store(i.reg, (char*)i.address, i.stride);
            return nullptr;
        case 0x5c2:  // TDPBF16PS
        case 0x5e2:  // TDPBSUD
            if (i.mode != 3) return "#UD: the operands of a product are tiles";
            if (const char* why = refuses_product(file, i)) return why;
            (i.opcode == 0x5c ? multiply_bf16 : multiply_bytes)(file.tiles[i.reg], file.tiles[i.rm], file.tiles[i.vex]);
            return nullptr;
        default: return "an unknown instruction";
    }
}

void on_illegal(int, siginfo_t*, void* context) {
    greg_t* regs = ((ucontext_t*)context)->uc_mcontext.gregs;
    const uint8_t* at = (const uint8_t*)regs[REG_RIP];
    const Instruction i = decode(at, regs);
    if (const char* why = execute(i)) stop(at, why);
    regs[REG_RIP] += i.length;
    ++emulated;
}

}  // namespace

Counts counts() { return {emulated, configured, released}; }

}  // namespace ridgeline::trap

// In place of csrc/system_tiles.cpp.
namespace ridgeline::system {

std::string allow_tiles() {
    constexpr int ARCH_REQ_XCOMP_PERM = 0x1023, XTILEDATA = 18;
    syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XTILEDATA);  // it fails where the CPU has no tiles
    struct sigaction action{};
    action.sa_sigaction = trap::on_illegal;
    action.sa_flags = SA_SIGINFO;
    sigaction(SIGILL, &action, nullptr);
    return "";
}
bool has_bf16_tiles() { return true; }

}  // namespace ridgeline::system
