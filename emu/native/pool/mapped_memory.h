// The pool in memory that this process maps: with hardware coherence, or with real flushes and streaming stores.
#pragma once

#include <atomic>

#include "format.h"
#include "memory.h"

namespace pool {

class MappedMemory : public Memory {
 public:
  // fd: of the device's file, whose size is checked; -1 for memory that cannot shrink.
  MappedMemory(uint8_t* base, size_t nbytes, bool coherent, int fd) : base_(base), size_(nbytes), coherent_(coherent), fd_(fd) {}

  void load(uint64_t offset, void* to, size_t nbytes) override;
  void store(uint64_t offset, const void* from, size_t nbytes) override;
  void stream(uint64_t offset, const void* from, size_t nbytes) override;
  void flush(uint64_t offset, size_t nbytes, Site site) override;
  void fence(Site site) override;
  void usable() override;

  int64_t lines_flushed() const { return lines_flushed_; }

 private:
  uint8_t* base_;
  size_t size_;
  bool coherent_;
  int fd_;
  std::atomic<int64_t> lines_flushed_{0};
};

}  // namespace pool
