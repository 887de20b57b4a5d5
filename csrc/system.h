// The calls of the operating system that differ between Linux (system_linux.cpp) and macOS (system_apple.cpp), and the
// right to use tile registers (system_tiles.cpp).
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace ridgeline::system {

// Instructions of ARM CPUs beyond the base: products of four bytes, both signed or both unsigned; and of unsigned with
// signed ones.
enum class Feature { dot, mixed_dot };
bool has(Feature);

// Asks for the right to use the tile registers of AMX. Returns why there is none, or an empty string.
std::string allow_tiles();
// Whether the tile registers multiply bf16.
bool has_bf16_tiles();

// Returns one CPU of each physical core that this process may use.
std::vector<int> cores();
// Returns the limit on this process's CPU time, in cores; infinity if there is none.
double quota();

// Returns all CPUs that this thread may use, or nothing where threads cannot be bound to CPUs.
std::vector<int> allowed();
// Binds this thread to one CPU.
void bind(int cpu);
// Moves this thread from the CPUs in `taken` to another one of `allowed`, if it is on one of them and there is another.
// It may then use all that it could before.
void leave(const std::vector<int>& taken, const std::vector<int>& allowed);

// Sleeps until another thread calls `wake`, unless `at` differs from `value`. It may also return early.
void sleep(std::atomic<uint32_t>& at, uint32_t value);
void wake(std::atomic<uint32_t>& at);  // all threads that sleep there

// Asks for huge pages. If it fails, reading only has more TLB misses.
void prefer_huge_pages(void* begin, size_t bytes);
// Keeps freed memory in this process.
void keep_freed_memory();

}  // namespace ridgeline::system
