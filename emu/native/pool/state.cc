#include "state.h"

#include <algorithm>

namespace pool {

namespace {

[[noreturn]] void refuse(const std::string& text) { throw Fault{Fault::kDamaged, text}; }

}  // namespace

State::State(const Geometry& geometry)
    : num_blocks_(geometry.num_blocks),
      block_tokens_(static_cast<uint32_t>(geometry.block_tokens)),
      refcount_(geometry.num_blocks),
      names_(geometry.num_blocks) {}

void State::apply(int author, const std::vector<uint8_t>& records) {
  Reader in(records);
  while (!in.done()) apply_one(author, in.get<Op>(), in);
}

void State::apply_one(int author, Op op, Reader& in) {
  switch (op) {
    case Op::kReserve: return reserve(author, in);
    case Op::kPublish: {
      const auto lease = in.get<uint64_t>();
      return publish(lease, in.get<uint32_t>());
    }
    case Op::kLease: return add_lease(author, in.get<uint64_t>());
    case Op::kRelease: return drop_lease(in.get<uint64_t>());
    case Op::kDelete: {
      Request& gone = request(in.get<uint64_t>());
      if (gone.stage == Stage::kPublished && gone.leases == 0) evictable.erase({gone.last_used, gone.generation});
      keys.erase(gone.key);
      gone.stage = Stage::kDeleted;
      std::vector<uint64_t> own;
      for (const auto& [id, lease] : leases)
        if (lease.generation == gone.generation && lease.slot == author) own.push_back(id);
      if (own.empty()) return settle(gone);
      for (const uint64_t id : own) drop_lease(id);
      return;
    }
    case Op::kDrop: return remove(in.get<uint64_t>());
    case Op::kAppender: {
      const auto id = in.get<uint64_t>();
      const auto found = leases.find(id);
      if (found == leases.end()) refuse("an appender without a lease");
      request(found->second.generation).appender = id;
      return;
    }
    case Op::kJoin: {
      bury(author, true);
      members[author].epoch = in.get<uint32_t>();
      members[author].seat = Seat::kTaken;
      return;
    }
    case Op::kLeave: return bury(author, true);
    case Op::kDead: {
      const Dead one = Dead::read(in);
      members[one.slot].log_end = one.end;
      members[one.slot].epoch = one.epoch;
      return bury(one.slot, one.proven != 0);
    }
    case Op::kClear: {
      const auto slot = in.get<uint8_t>();
      if (slot >= kSlots) refuse("a slot that is not there");
      return bury(slot, true);
    }
    case Op::kPin:
      for (const int32_t block : in.list<int32_t>()) hold(block);
      return;
    case Op::kUnpin:
      for (const int32_t block : in.list<int32_t>()) let_go(block);
      return;
  }
  refuse("a record of unknown kind");
}

void State::reserve(int author, Reader& in) {
  Request made;
  made.generation = next_generation++;
  made.key = in.text();
  made.prompt_tokens = in.get<uint32_t>();
  made.append_tokens = in.get<uint32_t>();
  made.first_hash = in.get<uint32_t>();
  made.blocks = in.list<int32_t>();
  made.hashes = in.list<Hash>();
  if (keys.contains(made.key)) refuse("two requests of one name");
  if (made.first_hash > made.blocks.size()) refuse("more shared blocks than blocks");
  made.shared_tokens = made.num_tokens = made.first_hash * block_tokens_;
  for (size_t i = 0; i < made.blocks.size(); ++i) {
    check_block(made.blocks[i]);
    if ((i < made.first_hash) != (holders(made.blocks[i]) > 0)) refuse("a block is given out twice");
    hold(made.blocks[i]);
  }
  bytes += made.bytes();
  keys[made.key] = made.generation;
  made.appender = next_lease;
  const uint64_t generation = made.generation;
  requests.emplace(generation, std::move(made));
  add_lease(author, generation);
}

void State::publish(uint64_t lease, uint32_t num_tokens) {
  const auto found = leases.find(lease);
  if (found == leases.end()) refuse("a publication without a lease");
  Request& one = request(found->second.generation);
  one.num_tokens = num_tokens;
  if (one.stage == Stage::kReserved) {
    one.stage = Stage::kPublished;
    one.appender = 0;
  }
  touch(one);
  name_blocks(one);
}

// Name the full, written prompt blocks by their hashes; a name that is taken stays where it is.
void State::name_blocks(Request& one) {
  const size_t full = std::min(one.num_tokens, one.prompt_tokens) / block_tokens_;
  if (full <= one.first_hash) return;
  const size_t count = std::min(full - one.first_hash, one.hashes.size());
  for (size_t i = 0; i < count; ++i) names_.add(one.hashes[i], one.blocks[one.first_hash + i]);
  bytes -= 16 * count;
  one.hashes.erase(one.hashes.begin(), one.hashes.begin() + static_cast<ptrdiff_t>(count));
  one.first_hash += static_cast<uint32_t>(count);
}

void State::add_lease(int author, uint64_t generation) {
  Request& one = request(generation);
  if (one.leases++ == 0 && one.stage == Stage::kPublished) evictable.erase({one.last_used, generation});
  leases[next_lease++] = Lease{generation, author};
  bytes += 24;
  touch(one);
}

void State::drop_lease(uint64_t lease) {
  const auto found = leases.find(lease);
  if (found == leases.end()) return;  // it went with its participant
  Request& one = request(found->second.generation);
  leases.erase(found);
  bytes -= 24;
  if (one.appender == lease) one.appender = 0;
  if (--one.leases == 0 && one.stage == Stage::kPublished) evictable.insert({one.last_used, one.generation});
  settle(one);
}

// Drop what was deleted, or reserved and never published, and nobody holds now.
void State::settle(Request& one) {
  if (one.leases == 0 && one.stage != Stage::kPublished) remove(one.generation);
}

void State::remove(uint64_t generation) {
  Request& gone = request(generation);
  if (gone.leases) refuse("a request that is held is dropped");
  evictable.erase({gone.last_used, generation});
  if (gone.stage != Stage::kDeleted) keys.erase(gone.key);
  for (const int32_t block : gone.blocks) let_go(block);
  bytes -= gone.bytes();
  requests.erase(generation);
}

// The leases of a slot end. Unless its participant is proven dead, what it may still be writing stays held.
void State::bury(int slot, bool proven) {
  std::vector<uint64_t> ending;
  for (const auto& [id, lease] : leases) {
    if (lease.slot != slot) continue;
    Request& one = request(lease.generation);
    if (proven || one.appender != id) {
      ending.push_back(id);
    } else if (one.stage == Stage::kReserved) {
      keys.erase(one.key);
      one.stage = Stage::kDeleted;
    }
  }
  for (const uint64_t id : ending) drop_lease(id);
  members[slot].seat = proven ? Seat::kFree : Seat::kQuarantined;
}

void State::check_block(int32_t block) const {
  if (block < 0 || static_cast<uint64_t>(block) >= num_blocks_) refuse("a block that the device does not have");
}

void State::hold(int32_t block) {
  check_block(block);
  if (refcount_[static_cast<size_t>(block)]++ == 0) ++used_blocks, bytes += 24;
  if (static_cast<size_t>(block) == first_free_) ++first_free_;
}

void State::let_go(int32_t block) {
  check_block(block);
  uint32_t& count = refcount_[static_cast<size_t>(block)];
  if (count == 0) refuse("a free block is freed");
  if (--count == 0) {
    names_.remove(block);
    --used_blocks, bytes -= 24;
    first_free_ = std::min(first_free_, static_cast<size_t>(block));
  }
}

void State::touch(Request& one) {
  const bool listed = one.stage == Stage::kPublished && one.leases == 0;
  if (listed) evictable.erase({one.last_used, one.generation});
  one.last_used = clock++;
  if (listed) evictable.insert({one.last_used, one.generation});
}

Request& State::request(uint64_t generation) {
  const auto found = requests.find(generation);
  if (found == requests.end()) refuse("a record about a request that is not there");
  return found->second;
}

const Request* State::find(const std::string& key) const {
  const auto found = keys.find(key);
  return found == keys.end() ? nullptr : &requests.at(found->second);
}

std::vector<int32_t> State::free_blocks(size_t count) const {
  std::vector<int32_t> found;
  if (used_blocks == num_blocks_) return found;
  for (size_t block = first_free_; block < num_blocks_ && found.size() < count; ++block)
    if (refcount_[block] == 0) found.push_back(static_cast<int32_t>(block));
  return found;
}

std::vector<uint8_t> State::snapshot() const {
  Writer out;
  out.put(number).put(tip).put(next_generation).put(next_lease).put(clock);
  for (const Member& one : members) out.put(one.epoch).put(one.seat).put(one.log_end);
  out.put(static_cast<uint32_t>(requests.size()));
  for (const auto& [generation, one] : requests) {
    out.put(generation).text(one.key).put(one.stage).put(one.prompt_tokens).put(one.append_tokens).put(one.num_tokens);
    out.put(one.shared_tokens).list(one.blocks).put(one.first_hash).list(one.hashes);
    out.put(one.appender).put(one.last_used);
  }
  out.put(static_cast<uint32_t>(leases.size()));
  for (const auto& [id, lease] : leases) out.put(id).put(lease.generation).put(static_cast<uint8_t>(lease.slot));
  for (size_t block = 0; block < num_blocks_; ++block) {
    const auto number_of = static_cast<int32_t>(block);
    if (names_.named(number_of)) out.put(number_of).put(names_.name(number_of));
  }
  return out.bytes;
}

State State::restore(const Geometry& geometry, const std::vector<uint8_t>& bytes) {
  State made(geometry);
  Reader in(bytes);
  made.number = in.get<uint64_t>();
  made.tip = in.get<uint64_t>();
  made.next_generation = in.get<uint64_t>();
  made.next_lease = in.get<uint64_t>();
  made.clock = in.get<uint64_t>();
  for (Member& one : made.members) {
    one.epoch = in.get<uint32_t>();
    one.seat = in.get<Seat>();
    one.log_end = in.get<uint64_t>();
  }
  for (uint32_t left = in.get<uint32_t>(); left > 0; --left) {
    Request one;
    one.generation = in.get<uint64_t>();
    one.key = in.text();
    one.stage = in.get<Stage>();
    one.prompt_tokens = in.get<uint32_t>();
    one.append_tokens = in.get<uint32_t>();
    one.num_tokens = in.get<uint32_t>();
    one.shared_tokens = in.get<uint32_t>();
    one.blocks = in.list<int32_t>();
    one.first_hash = in.get<uint32_t>();
    one.hashes = in.list<Hash>();
    one.appender = in.get<uint64_t>();
    one.last_used = in.get<uint64_t>();
    for (const int32_t block : one.blocks) made.hold(block);
    made.bytes += one.bytes();
    if (one.stage != Stage::kDeleted) made.keys[one.key] = one.generation;
    if (one.stage == Stage::kPublished) made.evictable.insert({one.last_used, one.generation});
    made.requests.emplace(one.generation, std::move(one));
  }
  for (uint32_t left = in.get<uint32_t>(); left > 0; --left) {
    const auto id = in.get<uint64_t>();
    const auto generation = in.get<uint64_t>();
    const auto slot = in.get<uint8_t>();
    if (slot >= kSlots) refuse("a lease of a slot that is not there");
    Request& one = made.request(generation);
    if (one.leases++ == 0) made.evictable.erase({one.last_used, generation});
    made.leases[id] = Lease{generation, slot};
    made.bytes += 24;
  }
  while (!in.done()) {
    const auto block = in.get<int32_t>();
    const auto name = in.get<Hash>();
    made.check_block(block);
    if (made.holders(block) == 0) refuse("a free block has a name");
    made.names_.add(name, block);
  }
  return made;
}

std::vector<std::string> State::contradictions() const {
  std::vector<std::string> found;
  std::vector<uint32_t> count(num_blocks_);
  std::map<uint64_t, uint32_t> held;
  for (const auto& [id, lease] : leases) {
    ++held[lease.generation];
    if (members[lease.slot].seat == Seat::kFree) found.push_back("a free slot holds lease " + std::to_string(id));
  }
  for (const auto& [generation, one] : requests) {
    for (const int32_t block : one.blocks) ++count[static_cast<size_t>(block)];
    const std::string name = "request " + std::to_string(generation);
    if (held[generation] != one.leases) found.push_back(name + " counts its leases wrong");
    if (one.leases == 0 && one.stage != Stage::kPublished) found.push_back(name + " is held by nobody");
    if ((one.leases == 0) != evictable.contains({one.last_used, generation})) found.push_back(name + " is lost to eviction");
    if (one.appender && !leases.contains(one.appender)) found.push_back(name + " has an appender without a lease");
  }
  for (size_t block = 0; block < num_blocks_; ++block)
    if (count[block] != refcount_[block]) found.push_back("block " + std::to_string(block) + " is counted wrong");
  return found;
}

}  // namespace pool
