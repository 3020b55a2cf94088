// What the records of a pool add up to: requests, leases, blocks and their names. Pure: no memory of the device.
//
// Every participant that has applied the same records has the same State.
#pragma once

#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "bytes.h"
#include "name_table.h"

namespace pool {

enum class Op : uint8_t { kReserve = 1, kPublish, kLease, kRelease, kDelete, kDrop, kAppender, kJoin, kLeave, kDead,
                          kClear, kPin, kUnpin };

enum class Stage : uint8_t { kReserved, kPublished, kDeleted };

struct Request {
  uint64_t generation = 0;  // never used twice
  std::string key;
  Stage stage = Stage::kReserved;
  uint32_t prompt_tokens = 0, append_tokens = 0, num_tokens = 0, shared_tokens = 0;
  std::vector<int32_t> blocks;
  uint32_t first_hash = 0;   // block that hashes[0] will name
  std::vector<Hash> hashes;  // of the full prompt blocks that publish() has yet to name
  uint64_t appender = 0;     // the lease that may append, 0: nobody
  uint64_t last_used = 0;
  uint32_t leases = 0;

  uint64_t bytes() const { return 68 + key.size() + 4 * blocks.size() + 16 * hashes.size(); }
};

struct Lease {
  uint64_t generation = 0;
  int slot = 0;
};

enum class Seat : uint8_t { kFree, kTaken, kQuarantined };

struct Member {
  uint32_t epoch = 0;  // the last that joined
  Seat seat = Seat::kFree;
  uint64_t log_end = 0;  // lines of its log that count
};

// The end of a member: its log counts up to `end`. These records come first in a transaction.
struct Dead {
  uint8_t slot = 0, proven = 0;
  uint32_t epoch = 0;
  uint64_t end = 0;

  static constexpr size_t kBytes = 15;
  Writer write() const { return Writer().put(Op::kDead).put(slot).put(proven).put(epoch).put(end); }
  static Dead read(Reader& in) {
    Dead one;
    one.slot = in.get<uint8_t>();
    one.proven = in.get<uint8_t>();
    one.epoch = in.get<uint32_t>();
    one.end = in.get<uint64_t>();
    if (one.slot >= kSlots) throw Fault{Fault::kDamaged, "the death of a slot that is not there"};
    return one;
  }
};

class State {
 public:
  explicit State(const Geometry& geometry);

  // -- history
  uint64_t number = 0;  // transactions applied
  uint64_t tip = 0;     // Transaction::place() of the last one
  Member members[kSlots];

  // -- content, read by everyone, changed by apply() only
  std::map<uint64_t, Request> requests;
  std::map<uint64_t, Lease> leases;
  std::unordered_map<std::string, uint64_t> keys;    // of reserved and published requests
  std::set<std::pair<uint64_t, uint64_t>> evictable;  // (last used, generation): published, held by nobody
  uint64_t next_generation = 1, next_lease = 1, clock = 1;
  uint64_t used_blocks = 0, bytes = 0;  // bytes: what a snapshot takes, at most

  // Apply the records of one transaction. Throws Fault::kDamaged if they cannot be right.
  void apply(int author, const std::vector<uint8_t>& records);

  std::vector<uint8_t> snapshot() const;
  static State restore(const Geometry& geometry, const std::vector<uint8_t>& bytes);

  const Request* find(const std::string& key) const;
  int32_t block_of(const Hash& hash) const { return names_.find(hash); }
  void prefetch(const Hash& hash) const { names_.prefetch(hash); }
  void prefetch_name(const Hash& hash) const { names_.prefetch_name(hash); }
  uint32_t holders(int32_t block) const { return refcount_[static_cast<size_t>(block)]; }
  bool named(int32_t block) const { return names_.named(block); }
  uint64_t free_count() const { return num_blocks_ - used_blocks; }
  // The lowest free blocks, at most that many.
  std::vector<int32_t> free_blocks(size_t count) const;
  // What does not add up; empty in a sound state.
  std::vector<std::string> contradictions() const;

 private:
  uint64_t num_blocks_;
  uint32_t block_tokens_;
  std::vector<uint32_t> refcount_;
  size_t first_free_ = 0;  // no block below it is free
  NameTable names_;

  void apply_one(int author, Op op, Reader& in);
  void reserve(int author, Reader& in);
  void publish(uint64_t lease, uint32_t num_tokens);
  void name_blocks(Request& request);
  void add_lease(int author, uint64_t generation);
  void drop_lease(uint64_t lease);
  void remove(uint64_t generation);
  void bury(int slot, bool proven);
  void settle(Request& request);
  void hold(int32_t block);
  void let_go(int32_t block);
  void check_block(int32_t block) const;
  void touch(Request& request);
  Request& request(uint64_t generation);
};

}  // namespace pool
