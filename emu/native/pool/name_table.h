// Chain hash -> block: a flat table with linear probing, sized once for all blocks of a device.
#pragma once

#include <sys/mman.h>

#include <bit>
#include <cstdint>
#include <new>
#include <vector>

namespace pool {

// Tables that are read at random: on large pages where the kernel has them, or most reads miss the TLB as well.
template <class T>
struct LargePages {
  using value_type = T;
  static constexpr size_t kPage = size_t{2} << 20;
  LargePages() = default;
  template <class U>
  LargePages(const LargePages<U>&) {}
  T* allocate(size_t count) {
    const size_t nbytes = count * sizeof(T);
    const bool large = nbytes >= kPage;
    void* at = ::operator new(nbytes, std::align_val_t{large ? kPage : 64});
    if (large) madvise(at, nbytes, MADV_HUGEPAGE);
    return static_cast<T*>(at);
  }
  void deallocate(T* at, size_t count) {
    ::operator delete(at, std::align_val_t{count * sizeof(T) >= kPage ? kPage : 64});
  }
  bool operator==(const LargePages&) const { return true; }
};

struct Hash {
  uint64_t low = 0, high = 0;
  bool operator==(const Hash&) const = default;
};

class NameTable {
 public:
  explicit NameTable(uint64_t num_blocks)
      : mask_(std::bit_ceil(2 * num_blocks + 2) - 1), places_(mask_ + 1), names_(num_blocks), named_(num_blocks) {}

  void prefetch(const Hash& hash) const { __builtin_prefetch(&places_[home(hash)]); }
  // The second step: the name of the block that is likely to be it.
  void prefetch_name(const Hash& hash) const {
    const int32_t block = first_alike(hash);
    if (block >= 0) __builtin_prefetch(&names_[static_cast<size_t>(block)]);
  }

  // The block of that name, -1 if there is none.
  int32_t find(const Hash& hash) const {
    for (uint64_t at = home(hash);; at = (at + 1) & mask_) {
      const Place& place = places_[at];
      if (place.block < 0 || (place.tag == tag(hash) && names_[static_cast<size_t>(place.block)] == hash)) return place.block;
    }
  }
  bool named(int32_t block) const { return named_[static_cast<size_t>(block)]; }
  const Hash& name(int32_t block) const { return names_[static_cast<size_t>(block)]; }

  // Name a block, unless it has a name or the name is taken.
  void add(const Hash& hash, int32_t block) {
    if (named(block) || find(hash) >= 0) return;
    uint64_t at = home(hash);
    while (places_[at].block >= 0) at = (at + 1) & mask_;
    places_[at] = Place{block, tag(hash)};
    names_[static_cast<size_t>(block)] = hash;
    named_[static_cast<size_t>(block)] = true;
  }

  void remove(int32_t block) {
    if (!named(block)) return;
    uint64_t hole = home(name(block));
    while (places_[hole].block != block) hole = (hole + 1) & mask_;
    named_[static_cast<size_t>(block)] = false;
    // Move back what would no longer be found across the hole.
    for (uint64_t at = (hole + 1) & mask_; places_[at].block >= 0; at = (at + 1) & mask_) {
      const uint64_t wanted = home(name(places_[at].block));
      if (((at - wanted) & mask_) >= ((at - hole) & mask_)) {
        places_[hole] = places_[at];
        hole = at;
      }
    }
    places_[hole] = Place{};
  }

 private:
  struct Place {
    int32_t block = -1;
    uint32_t tag = 0;  // of the name: others that probe past it need not look at the name
  };
  uint64_t mask_;
  std::vector<Place, LargePages<Place>> places_;
  std::vector<Hash, LargePages<Hash>> names_;
  std::vector<bool> named_;

  static uint64_t mixed(const Hash& hash) { return (hash.low ^ hash.high) * 0x9E3779B97F4A7C15u; }
  static uint32_t tag(const Hash& hash) { return static_cast<uint32_t>(hash.low * 0xD6E8FEB86659FD93u >> 32); }
  uint64_t home(const Hash& hash) const { return mixed(hash) >> 20 & mask_; }

  int32_t first_alike(const Hash& hash) const {
    for (uint64_t at = home(hash);; at = (at + 1) & mask_)
      if (places_[at].block < 0 || places_[at].tag == tag(hash)) return places_[at].block;
  }
};

}  // namespace pool
