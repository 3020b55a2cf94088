#include "mapped_memory.h"

#include <sys/stat.h>

#include <string>

#include "../visibility.h"

namespace pool {

// Word by word: a line that is written meanwhile may be torn, a word may not.
void MappedMemory::load(uint64_t offset, void* to, size_t nbytes) {
  auto* words = static_cast<uint64_t*>(to);
  const auto* from = reinterpret_cast<const uint64_t*>(base_ + offset);
  for (size_t i = 0; i < nbytes / 8; ++i) words[i] = __atomic_load_n(from + i, __ATOMIC_RELAXED);
}

void MappedMemory::store(uint64_t offset, const void* from, size_t nbytes) {
  const auto* words = static_cast<const uint64_t*>(from);
  auto* to = reinterpret_cast<uint64_t*>(base_ + offset);
  for (size_t i = 0; i < nbytes / 8; ++i) __atomic_store_n(to + i, words[i], __ATOMIC_RELAXED);
}

void MappedMemory::stream(uint64_t offset, const void* from, size_t nbytes) {
  if (coherent_) return store(offset, from, nbytes);
  nontemporal_copy(base_ + offset, static_cast<const uint8_t*>(from), nbytes);
}

void MappedMemory::flush(uint64_t offset, size_t nbytes, Site) {
  if (!coherent_) lines_flushed_ += invalidate_lines(base_ + offset, nbytes);
}

// Loads come after a fence: the device's size is looked at here, not once per load.
void MappedMemory::fence(Site) {
  full_fence();
  usable();
}

void MappedMemory::usable() {
  struct stat status {};
  if (fd_ < 0 || (fstat(fd_, &status) == 0 && static_cast<size_t>(status.st_size) >= size_)) return;
  throw Fault{Fault::kTruncated, "the device shrank from " + std::to_string(size_) + " to " + std::to_string(status.st_size) + " bytes"};
}

}  // namespace pool
