// Where metadata lies on a device, and what a line of it looks like (docs/pool-format.md).
#pragma once

#include <cstdint>
#include <cstring>
#include <optional>
#include <string>

#include "memory.h"

namespace pool {

constexpr int kSlots = 16;  // at most
constexpr uint64_t kLine = 64;
constexpr uint64_t kPayload = 48;
constexpr uint64_t kSuperblock = 4096;

struct Line {
  uint64_t check = 0, seq = 0;
  uint8_t payload[kPayload] = {};
};
static_assert(sizeof(Line) == kLine);

// The registers of a slot, each written by its participant alone.
enum class Register : int { kIdentity, kHeartbeat, kTicket, kVerdicts, kCheckpoint, kCount };

struct Geometry {
  uint64_t num_blocks = 0;
  uint64_t meta_offset = 0;
  uint64_t ring_lines = 0;      // of each slot's log
  uint64_t snapshot_lines = 0;  // of each of its two snapshots
  uint64_t salt = 0;            // of the pool's uuid: lines of another pool are invalid
  int block_tokens = 64;
  int slots = kSlots;

  static constexpr uint64_t kRegisterLines = 16;
  uint64_t slot_bytes() const { return (kRegisterLines + ring_lines + 2 * snapshot_lines) * kLine; }
  uint64_t end() const { return meta_offset + static_cast<uint64_t>(slots) * slot_bytes(); }
  uint64_t slot_offset(int slot) const { return meta_offset + static_cast<uint64_t>(slot) * slot_bytes(); }
  uint64_t register_offset(int slot, Register which) const {
    return slot_offset(slot) + static_cast<uint64_t>(which) * 2 * kLine;
  }
  uint64_t ring_offset(int slot, uint64_t number) const {
    return slot_offset(slot) + (kRegisterLines + number % ring_lines) * kLine;
  }
  uint64_t snapshot_offset(int slot, int buffer) const {
    return slot_offset(slot) + (kRegisterLines + ring_lines + static_cast<uint64_t>(buffer) * snapshot_lines) * kLine;
  }
};

inline uint64_t mix(uint64_t h, uint64_t word) {
  h = (h ^ word) * 0x9E3779B97F4A7C15u;
  return h ^ (h >> 29);
}

inline uint64_t line_check(const Line& line, uint64_t salt, uint64_t offset) {
  uint64_t words[7];
  std::memcpy(words, &line.seq, sizeof words);
  uint64_t h = mix(salt, offset);
  for (const uint64_t word : words) h = mix(h, word);
  return h | 1;  // never the 0 of a line that was not written
}

// The salt of a pool: a hash of its superblock's first line, which holds the uuid.
inline uint64_t superblock_salt(const Line& line) {
  uint64_t words[8], h = 0x656D75706F6F6C;
  std::memcpy(words, &line, sizeof words);
  for (const uint64_t word : words) h = mix(h, word);
  return h;
}

inline bool is_zero(const Line& line) {
  uint64_t words[8], any = 0;
  std::memcpy(words, &line, sizeof words);
  for (const uint64_t word : words) any |= word;
  return any == 0;
}

// What a pool's metadata cannot be: the pool is refused, or the participant stops.
struct Fault {
  enum Kind : int { kDamaged, kReplaced, kTruncated, kExpired, kBusy, kFull } kind;
  std::string text;
};

// Payloads. All fields little-endian, as x86 is.
struct Identity {
  uint32_t epoch = 0;
  uint32_t state = 0;  // 1 open, 2 closed, 3 stopped by itself
  int32_t pid = 0;
  uint32_t expiry_ms = 0;
  uint64_t start_time = 0, boot = 0, pid_namespace = 0;
};
constexpr uint32_t kOpen = 1, kClosed = 2, kStopped = 3;

struct Heartbeat {
  uint64_t epoch = 0, counter = 0;
};

struct Ticket {
  uint64_t epoch = 0, choosing = 0, number = 0;
};

struct Verdicts {
  uint16_t epoch[kSlots] = {};
};

struct Checkpoint {
  uint64_t number = 0, bytes = 0, buffer = 0;
};

template <class T>
T payload_as(const Line& line) {
  static_assert(sizeof(T) <= kPayload);
  T value;
  std::memcpy(&value, line.payload, sizeof value);
  return value;
}

}  // namespace pool
