// Chain hash -> block: a flat table with linear probing, sized once for all blocks of a device.
#pragma once

#include <bit>
#include <cstdint>
#include <vector>

namespace pool {

struct Hash {
  uint64_t low = 0, high = 0;
  bool operator==(const Hash&) const = default;
};

class NameTable {
 public:
  explicit NameTable(uint64_t num_blocks)
      : mask_(std::bit_ceil(2 * num_blocks + 2) - 1), places_(mask_ + 1, -1), names_(num_blocks), named_(num_blocks) {}

  void prefetch(const Hash& hash) const { __builtin_prefetch(&places_[home(hash)]); }

  // The second step: the name of the block that is likely to be it.
  void prefetch_name(const Hash& hash) const {
    const int32_t block = places_[home(hash)];
    if (block >= 0) __builtin_prefetch(&names_[static_cast<size_t>(block)]);
  }

  // The block of that name, -1 if there is none.
  int32_t find(const Hash& hash) const {
    for (uint64_t at = home(hash);; at = (at + 1) & mask_) {
      const int32_t block = places_[at];
      if (block < 0 || names_[static_cast<size_t>(block)] == hash) return block;
    }
  }
  bool named(int32_t block) const { return named_[static_cast<size_t>(block)]; }
  const Hash& name(int32_t block) const { return names_[static_cast<size_t>(block)]; }

  // Name a block, unless it has a name or the name is taken.
  void add(const Hash& hash, int32_t block) {
    if (named(block) || find(hash) >= 0) return;
    uint64_t at = home(hash);
    while (places_[at] >= 0) at = (at + 1) & mask_;
    places_[at] = block;
    names_[static_cast<size_t>(block)] = hash;
    named_[static_cast<size_t>(block)] = true;
  }

  void remove(int32_t block) {
    if (!named(block)) return;
    uint64_t hole = home(name(block));
    while (places_[hole] != block) hole = (hole + 1) & mask_;
    named_[static_cast<size_t>(block)] = false;
    // Move back what would no longer be found across the hole.
    for (uint64_t at = (hole + 1) & mask_; places_[at] >= 0; at = (at + 1) & mask_) {
      const uint64_t wanted = home(name(places_[at]));
      if (((at - wanted) & mask_) >= ((at - hole) & mask_)) {
        places_[hole] = places_[at];
        hole = at;
      }
    }
    places_[hole] = -1;
  }

 private:
  uint64_t mask_;
  std::vector<int32_t> places_;
  std::vector<Hash> names_;
  std::vector<bool> named_;

  uint64_t home(const Hash& hash) const { return ((hash.low ^ hash.high) * 0x9E3779B97F4A7C15u >> 20) & mask_; }
};

}  // namespace pool
