#include "operations.h"

#include <algorithm>
#include <unordered_map>
#include <unordered_set>

namespace pool {

bool Operations::held_here(const Request& one) const {
  return std::any_of(state().leases.begin(), state().leases.end(), [&](const auto& entry) {
    return entry.second.generation == one.generation && entry.second.slot == self_.slot();
  });
}

const Request* Operations::visible(const std::string& key) const {
  const Request* found = state().find(key);
  if (found && found->stage == Stage::kReserved && !held_here(*found)) return nullptr;
  return found;
}

const Request& Operations::leased(uint64_t lease) const {
  const auto found = state().leases.find(lease);
  if (found == state().leases.end()) throw Refusal(Refusal::kLeaseLost, std::to_string(lease));
  return state().requests.at(found->second.generation);
}

// False when the dead must be buried first: one of them may be what is in the way.
bool Operations::check_keys(const std::vector<Wanted>& wanted, bool buried) const {
  std::unordered_set<std::string> taken;
  for (const Wanted& want : wanted) {
    const Request* there = state().find(want.key);
    if (there && there->stage == Stage::kReserved && !buried) return false;
    if (there || !taken.insert(want.key).second) throw Refusal(Refusal::kKeyExists, want.key);
  }
  return true;
}

// Which blocks are shared and which requests must go, oldest use first. `enough` says whether nobody must.
Operations::Plan Operations::plan_room(const std::vector<Wanted>& wanted, bool& enough) const {
  Plan plan;
  std::unordered_set<int32_t> pinned;
  uint64_t fresh = 0, bytes = 0, record_bytes = 0;  // bytes: of the state
  for (const Wanted& want : wanted) {
    auto& run = plan.shared.emplace_back();
    for (const Hash& hash : want.hashes) {
      const int32_t block = state().block_of(hash);
      if (block < 0) break;
      run.push_back(block);
      pinned.insert(block);
    }
    fresh += want.blocks - run.size();
    bytes += 92 + want.key.size() + 28 * want.blocks + 16 * want.hashes.size();
    record_bytes += 29 + want.key.size() + 4 * want.blocks + 8 * run.size() + 16 * (want.hashes.size() - run.size());
  }
  if (record_bytes > self_.transaction_bytes()) throw Refusal(Refusal::kTooLarge, wanted.front().key, record_bytes);
  uint64_t free = state().free_count(), all_bytes = state().bytes;
  const auto short_of = [&] { return free < fresh || all_bytes + bytes > self_.state_bytes(); };
  enough = !short_of();
  std::unordered_map<int32_t, uint32_t> let_go;
  for (auto next = state().evictable.begin(); short_of(); ++next) {
    if (next == state().evictable.end()) {
      if (free >= fresh) throw Refusal(Refusal::kTooLarge, wanted.front().key, bytes);
      throw Refusal(Refusal::kNoRoom, wanted.front().key, fresh, free);
    }
    const Request& victim = state().requests.at(next->second);
    plan.evicted.push_back(victim.generation);
    all_bytes -= victim.bytes();
    for (const int32_t block : victim.blocks)
      if (++let_go[block] == state().holders(block) && !pinned.contains(block)) ++free, all_bytes -= 24;
  }
  record_bytes += 9 * plan.evicted.size();
  if (record_bytes > self_.transaction_bytes()) throw Refusal(Refusal::kTooLarge, wanted.front().key, record_bytes);
  return plan;
}

void Operations::emit_reservation(const Wanted& want, const std::vector<int32_t>& shared) {
  std::vector<int32_t> blocks = shared;
  const auto fresh = state().free_blocks(want.blocks - shared.size());
  blocks.insert(blocks.end(), fresh.begin(), fresh.end());
  const std::vector<Hash> hashes(want.hashes.begin() + static_cast<ptrdiff_t>(shared.size()), want.hashes.end());
  self_.emit(Writer().put(Op::kReserve).text(want.key).put(want.prompt_tokens).put(want.append_tokens)
                 .put(static_cast<uint32_t>(shared.size())).list(blocks).list(hashes));
}

std::vector<Held> Operations::reserve(const std::vector<Wanted>& wanted) {
  std::vector<Held> made;
  if (wanted.empty()) return made;
  self_.transact([&](bool buried) {
    if (!check_keys(wanted, buried)) return false;
    bool enough = false;
    Plan plan;
    try {
      plan = plan_room(wanted, enough);
    } catch (const Refusal&) {
      if (buried) throw;
    }
    if (!enough && !buried) return false;  // the dead go before anything useful does
    std::vector<int32_t> pinned;
    for (const auto& run : plan.shared) pinned.insert(pinned.end(), run.begin(), run.end());
    if (plan.evicted.empty()) pinned.clear();
    if (!pinned.empty()) self_.emit(Writer().put(Op::kPin).list(pinned));
    for (const uint64_t generation : plan.evicted) self_.emit(Writer().put(Op::kDrop).put(generation));
    for (size_t i = 0; i < wanted.size(); ++i) {
      made.push_back(Held{state().next_lease, state().next_generation});
      emit_reservation(wanted[i], plan.shared[i]);
    }
    if (!pinned.empty()) self_.emit(Writer().put(Op::kUnpin).list(pinned));
    return true;
  });
  return made;
}

void Operations::publish(const std::vector<std::pair<uint64_t, uint32_t>>& lengths) {
  if (lengths.empty()) return;
  self_.transact([&](bool) {
    for (const auto& [lease, num_tokens] : lengths) {
      const Request& one = leased(lease);
      if (one.stage == Stage::kDeleted) throw Refusal(Refusal::kGone, one.key, one.generation);
    }
    for (const auto& [lease, num_tokens] : lengths) {
      const Request& one = leased(lease);
      if (one.stage == Stage::kReserved || one.appender == lease)
        self_.emit(Writer().put(Op::kPublish).put(lease).put(num_tokens));
    }
    return true;
  });
}

void Operations::take_append_right(uint64_t lease, uint32_t num_tokens) {
  self_.transact([&](bool buried) {
    const Request& one = leased(lease);
    if (one.appender != 0 && one.appender != lease) {
      if (!buried) return false;
      throw Refusal(Refusal::kAppender, one.key);
    }
    if (one.num_tokens != num_tokens) throw Refusal(Refusal::kGrown, one.key, one.num_tokens, num_tokens);
    if (one.appender != lease) self_.emit(Writer().put(Op::kAppender).put(lease));
    return true;
  });
}

std::vector<Held> Operations::lease(const std::vector<std::string>& keys) {
  std::vector<Held> taken(keys.size());
  if (keys.empty()) return taken;
  self_.transact([&](bool) {
    for (size_t i = 0; i < keys.size(); ++i) {
      const Request* one = state().find(keys[i]);
      if (!one || one->stage != Stage::kPublished) continue;
      taken[i] = Held{state().next_lease, one->generation};
      self_.emit(Writer().put(Op::kLease).put(one->generation));
    }
    return true;
  });
  return taken;
}

Held Operations::attach(uint64_t generation, const std::string& key, const std::vector<int32_t>& blocks) {
  Held taken;
  self_.transact([&](bool) {
    const auto found = state().requests.find(generation);
    if (found == state().requests.end() || found->second.stage != Stage::kPublished || found->second.key != key ||
        found->second.blocks != blocks)
      throw Refusal(Refusal::kGone, key, generation);
    taken = Held{state().next_lease, generation};
    self_.emit(Writer().put(Op::kLease).put(generation));
    return true;
  });
  return taken;
}

void Operations::release(const std::vector<uint64_t>& leases) {
  if (leases.empty()) return;
  self_.transact([&](bool) {
    for (const uint64_t lease : leases)
      if (state().leases.contains(lease)) self_.emit(Writer().put(Op::kRelease).put(lease));
    return true;
  });
}

std::vector<uint64_t> Operations::remove(const std::vector<std::string>& keys) {
  std::vector<uint64_t> gone;
  if (keys.empty()) return gone;
  self_.transact([&](bool) {
    for (const std::string& key : keys) {
      const Request* one = visible(key);
      if (!one) continue;
      const uint64_t generation = one->generation;
      self_.emit(Writer().put(Op::kDelete).put(generation));
      gone.push_back(generation);
    }
    return true;
  });
  return gone;
}

uint64_t Operations::used_blocks() {
  self_.sync();
  if (self_.anyone_to_bury()) self_.transact([](bool buried) { return buried; });
  return state().used_blocks;
}

// Two cache misses a hash, place and name; each is begun that many hashes ahead.
template <class Visit>
void Operations::each_block(const Hash* hashes, size_t count, Visit visit) const {
  constexpr size_t kNear = 12, kFar = 24;
  for (size_t i = 0; i < std::min(kFar, count); ++i) state().prefetch(hashes[i]);
  for (size_t i = 0; i < std::min(kNear, count); ++i) state().prefetch_name(hashes[i]);
  for (size_t i = 0; i < count; ++i) {
    if (i + kFar < count) state().prefetch(hashes[i + kFar]);
    if (i + kNear < count) state().prefetch_name(hashes[i + kNear]);
    if (!visit(i, state().block_of(hashes[i]))) return;
  }
}

void Operations::lookup(const Hash* hashes, size_t count, int32_t* blocks) {
  self_.sync();
  each_block(hashes, count, [&](size_t i, int32_t block) {
    blocks[i] = block;
    return true;
  });
}

size_t Operations::longest_prefix(const Hash* hashes, size_t count) {
  self_.sync();
  size_t found = 0;
  each_block(hashes, count, [&](size_t, int32_t block) { return block >= 0 && ++found; });
  return found;
}

}  // namespace pool
