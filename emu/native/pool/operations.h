// What a store asks of a pool, always in batches: each is one transaction, or only reads.
#pragma once

#include <stdexcept>
#include <string>
#include <vector>

#include "participant.h"

namespace pool {

// Why an operation was refused; nothing was changed.
struct Refusal : std::runtime_error {
  enum Kind : int { kKeyExists, kNoRoom, kGone, kLeaseLost, kAppender, kGrown, kTooLarge };
  Refusal(Kind kind_, std::string key_, uint64_t first_ = 0, uint64_t second_ = 0)
      : std::runtime_error("refused: " + key_), kind(kind_), key(std::move(key_)), first(first_), second(second_) {}
  Kind kind;
  std::string key;
  uint64_t first, second;  // kNoRoom: blocks needed and free; kGrown: tokens; kTooLarge: bytes
};

struct Wanted {
  std::string key;
  uint32_t prompt_tokens = 0;
  uint32_t blocks = 0;  // of the prompt and of what may be appended
  std::vector<Hash> hashes;
  uint32_t append_tokens = 0;  // that may follow the prompt
};

struct Held {
  uint64_t lease = 0;  // 0: there is none
  uint64_t generation = 0;
};

class Operations {
 public:
  explicit Operations(Participant& self) : self_(self) {}

  // All of them or none. The leading blocks whose names are here are shared.
  std::vector<Held> reserve(const std::vector<Wanted>& wanted);
  void publish(const std::vector<std::pair<uint64_t, uint32_t>>& lengths);
  void take_append_right(uint64_t lease, uint32_t num_tokens);
  std::vector<Held> lease(const std::vector<std::string>& keys);
  // kGone unless that generation is published under that key on those blocks.
  Held attach(uint64_t generation, const std::string& key, const std::vector<int32_t>& blocks);
  void release(const std::vector<uint64_t>& leases);
  // Published requests and own reserved ones; returns their generations.
  std::vector<uint64_t> remove(const std::vector<std::string>& keys);
  // Blocks in use, after the dead are buried.
  uint64_t used_blocks();

  // Without a transaction.
  const Request* visible(const std::string& key) const;
  // The block of each name, -1 where it is not here; what is found may go before it is leased.
  void lookup(const Hash* hashes, size_t count, int32_t* blocks);
  size_t longest_prefix(const Hash* hashes, size_t count);

 private:
  struct Plan {
    std::vector<std::vector<int32_t>> shared;  // per request
    std::vector<uint64_t> evicted;             // generations
  };

  Participant& self_;

  template <class Visit>
  void each_block(const Hash* hashes, size_t count, Visit visit) const;
  const State& state() const { return self_.state(); }
  bool held_here(const Request& one) const;
  const Request& leased(uint64_t lease) const;
  bool check_keys(const std::vector<Wanted>& wanted, bool buried) const;
  Plan plan_room(const std::vector<Wanted>& wanted, bool& enough) const;
  void emit_reservation(const Wanted& want, const std::vector<int32_t>& shared);
};

}  // namespace pool
