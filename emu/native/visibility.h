// Making stores visible to other hosts, and other hosts' stores visible here, on memory without hardware coherence.
#pragma once

#include <cstddef>
#include <cstdint>

constexpr size_t kLineBytes = 64;

// Write dirty lines of [begin, begin + nbytes) back to memory (clwb, else clflushopt, else clflush); no fence.
// Returns the lines.
int64_t writeback_lines(const uint8_t* begin, size_t nbytes);

// Drop the lines from this CPU's caches (clflushopt, else clflush); no fence. A dirty line is written back, not
// lost: x86 has no other user-level invalidate. Returns the lines.
int64_t invalidate_lines(const uint8_t* begin, size_t nbytes);

// Order earlier non-temporal stores and write-backs before later stores.
void store_fence();

// Order everything, flushes included, before later loads and stores.
void full_fence();

// Copy past the caches; part lines at both ends are stored and written back. The caller fences. Returns the part
// lines written back.
int64_t nontemporal_copy(uint8_t* to, const uint8_t* from, size_t nbytes);
