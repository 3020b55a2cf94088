// Registers with one writer, each two lines written in turn: a write that is cut short leaves the value before it.
#pragma once

#include <array>
#include <optional>

#include "format.h"

namespace pool {

class Registers {
 public:
  Registers(Memory& memory, const Geometry& geometry) : memory_(memory), geometry_(geometry) {}

  // Forget copies of a register; loads after the next fence are fresh.
  void drop(int slot, Register which, Site site) {
    memory_.flush(geometry_.register_offset(slot, which), 2 * kLine, site);
  }
  // Those of all others; the own one is written here alone.
  void drop_all(int self, Register which, Site site) {
    for (int slot = 0; slot < geometry_.slots; ++slot)
      if (slot != self) drop(slot, which, site);
  }

  // The value, or nothing if it was never written whole. `torn`, where given, says that something is there.
  template <class T>
  std::optional<T> load(int slot, Register which, bool* torn = nullptr) {
    const auto line = newest(slot, which, torn);
    if (!line) return std::nullopt;
    if constexpr (std::is_same_v<T, Line>) return *line;
    else return payload_as<T>(*line);
  }

  template <class T>
  void store(int slot, Register which, const T& value, Site site) {
    uint64_t& seq = seq_[static_cast<size_t>(which)];
    if (seq == 0) {
      const auto line = newest(slot, which, nullptr);
      seq = line ? line->seq : 1;
    }
    ++seq;
    Line line;
    line.seq = seq;
    std::memcpy(line.payload, &value, sizeof value);
    const uint64_t offset = geometry_.register_offset(slot, which) + seq % 2 * kLine;
    line.check = line_check(line, geometry_.salt, offset);
    memory_.store(offset, &line, kLine);
    memory_.flush(offset, kLine, site);
  }

 private:
  Memory& memory_;
  const Geometry& geometry_;
  std::array<uint64_t, static_cast<size_t>(Register::kCount)> seq_{};  // of the own slot's

  std::optional<Line> newest(int slot, Register which, bool* torn) {
    std::optional<Line> best;
    for (uint64_t i = 0; i < 2; ++i) {
      const uint64_t offset = geometry_.register_offset(slot, which) + i * kLine;
      Line line;
      memory_.load(offset, &line, kLine);
      if (is_zero(line)) continue;
      const bool whole = memory_.check(line.check == line_check(line, geometry_.salt, offset), Site::kCheckLine);
      if (torn && !whole) *torn = true;
      if (whole && (!best || line.seq > best->seq)) best = line;
    }
    return best;
  }
};

}  // namespace pool
