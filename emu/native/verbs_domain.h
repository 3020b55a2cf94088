// What a memory node lets one client touch: keys, bounds and access rights, as an adapter keeps them.
#pragma once

#include <mutex>
#include <random>
#include <unordered_map>
#include <utility>

#include "verbs_shared.h"

namespace verbs {

// The bytes that the node serves: a sealed memfd, or the beginning of a device, which is mapped whole (devdax maps
// whole huge pages only).
struct NodeMemory {
  NodeMemory(int fd, size_t nbytes) : mapping(map_foreign(fd, nbytes)), size(nbytes) {}
  NodeMemory(int device_fd, size_t nbytes, size_t device_bytes) : mapping(device_fd, device_bytes), size(nbytes) {
    if (nbytes == 0 || nbytes > device_bytes) throw std::invalid_argument("the device is shorter than what is served");
  }
  Mapping mapping;
  size_t size;
};

// A client's registered memory as mapped here; addresses in work requests are the client's own.
struct LocalRegion {
  uint64_t address;
  Mapping mapping;
};

struct RemoteRegion {
  uint64_t offset, length;
  uint32_t access;
};

inline bool inside(uint64_t offset, uint64_t nbytes, uint64_t size) {
  return offset <= size && nbytes <= size - offset;
}

// What one client may touch: its own registered memory, and the parts of the node's that were exposed to it.
class ProtectionDomain {
 public:
  explicit ProtectionDomain(const NodeMemory& memory) : memory_(memory) {}

  uint32_t add_local(int fd, size_t nbytes, uint64_t address) {
    Mapping mapping = map_foreign(fd, nbytes);
    const std::lock_guard guard(mutex_);
    const uint32_t key = fresh_key();
    local_.emplace(key, LocalRegion{address, std::move(mapping)});
    return key;
  }
  void remove_local(uint32_t lkey) {
    const std::lock_guard guard(mutex_);
    if (!local_.erase(lkey)) throw std::invalid_argument("no registered memory has this lkey");
  }
  uint32_t expose(uint64_t offset, uint64_t length, uint32_t access) {
    if (!inside(offset, length, memory_.size))
      throw std::invalid_argument("the region passes the end of the node's memory");
    const std::lock_guard guard(mutex_);
    const uint32_t key = fresh_key();
    remote_.emplace(key, RemoteRegion{offset, length, access});
    return key;
  }

  // The calls below need the lock; what they return is valid while it is held.
  std::mutex& mutex() { return mutex_; }
  uint8_t* local(uint32_t lkey, uint64_t address, uint64_t nbytes) const {
    const auto found = local_.find(lkey);
    if (found == local_.end() || address < found->second.address) return nullptr;
    const uint64_t offset = address - found->second.address;
    return inside(offset, nbytes, found->second.mapping.size()) ? found->second.mapping.data() + offset : nullptr;
  }
  uint8_t* remote(uint32_t rkey, uint64_t offset, uint64_t nbytes, uint32_t access) const {
    const auto found = remote_.find(rkey);
    if (found == remote_.end() || !(found->second.access & access) || !inside(offset, nbytes, found->second.length))
      return nullptr;
    return memory_.mapping.data() + found->second.offset + offset;
  }

 private:
  // Unguessable, as an adapter's keys are: a stale or mistaken key must not hit another region by luck.
  uint32_t fresh_key() {
    for (;;)
      if (const uint32_t key = random_(); key != 0 && !local_.contains(key) && !remote_.contains(key)) return key;
  }

  const NodeMemory& memory_;  // outlives every queue pair (keep_alive below)
  std::mutex mutex_;
  std::random_device random_;
  std::unordered_map<uint32_t, LocalRegion> local_;
  std::unordered_map<uint32_t, RemoteRegion> remote_;
};

}  // namespace verbs
