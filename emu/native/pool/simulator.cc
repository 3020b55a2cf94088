#include "simulator.h"

#include <algorithm>
#include <map>
#include <memory>
#include <set>
#include <utility>

#include "fiber.h"
#include "operations.h"
#include "shadow.h"

namespace pool {

namespace {

constexpr int kTokensPerBlock = 2;  // a row is a line here
constexpr uint64_t kBlocks = 6;
constexpr int64_t kExpiryNs = 20'000'000, kStepNs = 1000, kWaitNs = 100'000, kBeatNs = 1'000'000;

struct Crash {};  // a host ends at a primitive

class Random {
 public:
  explicit Random(uint64_t seed) : state_(mix(0x5EED, seed) | 1) {}
  uint64_t below(uint64_t n) {
    state_ ^= state_ << 13;
    state_ ^= state_ >> 7;
    state_ ^= state_ << 17;
    return (state_ >> 20) % n;
  }

 private:
  uint64_t state_;
};

Geometry small_pool() {
  Geometry geometry;
  geometry.num_blocks = kBlocks;
  geometry.block_tokens = kTokensPerBlock;
  geometry.slots = 7;
  geometry.ring_lines = 28;
  geometry.snapshot_lines = 48;
  geometry.meta_offset = kSuperblock + kBlocks * kTokensPerBlock * kLine;
  return geometry;
}

// What the truth is, kept outside of the pool.
struct Truth {
  struct Entry {
    std::string key;
    std::vector<uint64_t> tags;   // of each token that is written
    std::vector<int32_t> blocks;
    uint32_t prompt = 0;
    int holder = -1;              // the host that holds the lease of its reservation, -1: nobody for sure
    bool begun = false, confirmed = false;  // its publication
    bool doomed = false;          // a deletion began, or its holder may have lost it
    bool deleted = false;         // a deletion has returned
  };
  std::map<uint64_t, Entry> entries;  // by generation
  std::multiset<std::string> deleting;  // keys whose deletion has begun and not returned

  bool surely_there(const Entry& one) const { return one.confirmed && !one.doomed && one.holder >= 0; }
};

class Theatre;

// What befalls a host: at a step, or at the n-th time that it comes to a Site.
struct Strike {
  enum Kind { kNone, kCrash, kPause, kStall, kMeet } kind = kNone;
  int64_t step = -1;
  int site = -1;
  uint64_t times = 0;
  int until_site = -1;  // kMeet: where another host lets this one go on, and waits itself
};

class Actor : public Host {
 public:
  Actor(Theatre& theatre, int number, uint64_t seed);
  int64_t now_ns() override;
  void wait(int round) override;
  bool proven_dead(const Identity& who) override;
  Identity self() override;

  void play();  // the fiber's body
  void beat();
  void before(int site);
  void find_what_is_surely_there();
  void mourn();  // what only this host held is not sure any more

  Theatre& theatre;
  const int number;
  Random random;
  std::unique_ptr<ShadowHost> memory;
  std::unique_ptr<Participant> self_;
  std::unique_ptr<Fiber> fiber;
  void believes(uint64_t transaction, uint64_t place) override;

  int64_t asleep_until = 0, next_beat = 0;
  bool heart = false;                       // whether beat() is called in time
  bool silent = false, was_silent = false;  // while it is paused; whether it ever was
  int life = 0;
  Strike strike;
  bool in_fiber = false;
  int scenes = 0;

 private:
  void live();
  void scene(Operations& pool);
  void publish_one(Operations& pool);
  void read_one(Operations& pool);
  void append_one(Operations& pool);
  void delete_one(Operations& pool);
  void write_row(int32_t block, uint32_t row, uint64_t tag);
  bool rows_intact(const Request& one, const std::vector<uint64_t>& tags);
  std::map<uint64_t, uint64_t> held_;  // generation -> lease of a reservation
};

class Theatre {
 public:
  explicit Theatre(const Plot& plot_);
  Run run();
  void fail(const std::string& what);
  uint64_t place(int32_t block, uint32_t row) const {
    return kSuperblock + (static_cast<uint64_t>(block) * kTokensPerBlock + row) * kLine;
  }

  const Plot plot;
  Random random;
  Geometry geometry = small_pool();
  std::vector<uint8_t> medium;
  ShadowPool pool;
  Truth truth;
  Run result;
  int64_t now = 1;
  int meeting_site = -1;  // where the next host to come lets the sleeper go on
  int64_t meeting_after = 0;
  Actor* sleeper = nullptr;
  unsigned switching;  // one primitive in that many lets another host run
  bool sure_of_death;  // whether the hosts can tell a dead host from a silent one
  std::vector<std::unique_ptr<Actor>> actors;
  std::set<std::pair<int, int>> dead;       // (host, life)
  std::map<uint64_t, uint64_t> history;     // transaction -> where it is, as the hosts believe

 private:
  void last_scene();
  void bury_everybody(Actor& witness);
  Actor* choose();
};

Temper temper_of(uint64_t seed) { return seed % 4 == 0 ? Temper::kLazy : seed % 4 == 1 ? Temper::kEager : Temper::kMixed; }

Theatre::Theatre(const Plot& plot_)
    : plot(plot_), random(plot.seed), medium(geometry.end()), pool(medium.data(), medium.size(), plot.seed, temper_of(plot.seed)) {
  medium[0] = 1;
  Line superblock;
  std::memcpy(&superblock, medium.data(), kLine);
  geometry.salt = superblock_salt(superblock);
  switching = 1u << random.below(8);
  sure_of_death = random.below(2) == 0;
  const int count = 2 + static_cast<int>(random.below(2));
  for (int number = 0; number < count; ++number) actors.push_back(std::make_unique<Actor>(*this, number, random.below(1u << 30)));
  pool.loss = random.below(2) ? 2 : 12;
  const Strike::Kind kinds[] = {Strike::kCrash, Strike::kPause, Strike::kStall, Strike::kStall};
  if (plot.victim_step >= 0) {
    actors[0]->strike = Strike{plot.pauses ? Strike::kPause : Strike::kCrash, plot.victim_step, -1, 0, -1};
    for (auto& actor : actors) actor->scenes = 3;
  } else if (plot.sleeps_at >= 0 || random.below(4) == 0) {
    const auto any_site = [&](int given) { return given >= 0 ? given : static_cast<int>(random.below(static_cast<uint64_t>(Site::kCount))); };
    Strike meet{Strike::kMeet, -1, any_site(plot.sleeps_at), random.below(12), any_site(plot.until_at)};
    actors[random.below(actors.size())]->strike = meet;
  } else {
    for (auto& actor : actors)
      if (random.below(3))
        actor->strike = Strike{kinds[random.below(4)], -1, static_cast<int>(random.below(static_cast<uint64_t>(Site::kCount))),
                               random.below(random.below(2) ? 4 : 24), -1};
  }
}

void Theatre::fail(const std::string& what) {
  if (result.violation.empty()) result.violation = what;
}

Actor* Theatre::choose() {
  std::vector<Actor*> ready;
  int64_t earliest = INT64_MAX;
  for (const auto& actor : actors) {
    if (actor->fiber->done()) continue;
    if (actor->asleep_until <= now) ready.push_back(actor.get());
    else earliest = std::min(earliest, actor->asleep_until);
  }
  if (ready.empty() && earliest != INT64_MAX) {
    now += std::min<int64_t>(earliest - now, kBeatNs);
    return nullptr;
  }
  return ready.empty() ? nullptr : ready[random.below(ready.size())];
}

Run Theatre::run() {
  for (auto& actor : actors) actor->fiber = std::make_unique<Fiber>([one = actor.get()] { one->play(); });
  while (result.violation.empty()) {
    bool any = false;
    for (const auto& actor : actors) any |= !actor->fiber->done();
    if (!any) break;
    for (auto& actor : actors) actor->beat();
    Actor* next = choose();
    if (!next) continue;
    next->in_fiber = true;
    next->fiber->resume();
    next->in_fiber = false;
    if (now > 400 * kExpiryNs) fail("stuck: somebody waits for ever");
  }
  if (result.violation.empty()) last_scene();
  if (result.violation.empty() && !pool.reports.empty()) fail(pool.reports.front().what);
  for (const auto& actor : actors) result.steps += actor->memory->steps;
  for (auto& actor : actors)
    if (!actor->fiber->done()) (void)actor->fiber.release();  // its stack cannot be unwound: what it owns is lost
  return result;
}

// A newcomer finds what is surely there, with its rows; and when everybody is gone for long, no block is lost.
void Theatre::last_scene() {
  pool.temper = Temper::kLazy;
  Actor witness(*this, 7, plot.seed);
  try {
    witness.self_ = std::make_unique<Participant>(*witness.memory, witness, geometry, Timeouts{kExpiryNs, 2 * kExpiryNs});
    witness.self_->take(6, 7);
    witness.self_->enter();
    witness.find_what_is_surely_there();
    for (auto& actor : actors) actor->self_.reset();
    bury_everybody(witness);
  } catch (const Fault& fault) {
    fail("a newcomer fails: " + fault.text);
  }
}

void Theatre::bury_everybody(Actor& witness) {
  Participant& self = *witness.self_;
  Operations pool_of(self);
  for (int round = 0; round < 12; ++round) {
    now += kExpiryNs / 4;
    self.beat();
    pool_of.used_blocks();
  }
  for (const auto& wrong : self.state().contradictions()) fail(wrong);
  std::vector<std::string> keys;
  for (const auto& [generation, one] : self.state().requests) {
    if (!truth.entries.contains(generation) || !truth.entries[generation].begun) fail("a request that nobody published is visible");
    if (one.stage == Stage::kDeleted) fail("a deleted request is still held after expiry");
    keys.push_back(one.key);
  }
  pool_of.remove(keys);
  if (pool_of.used_blocks() != 0) fail("blocks are lost");
}

void Actor::find_what_is_surely_there() {
  self_->sync();
  for (const auto& [generation, entry] : theatre.truth.entries) {
    if (!theatre.truth.surely_there(entry)) continue;
    const Request* found = self_->state().find(entry.key);
    if (!found || found->generation != generation) return theatre.fail("a published request is lost: " + std::to_string(generation) + " of host " + std::to_string(entry.holder));
    std::vector<uint64_t> tags = entry.tags;
    tags.resize(found->num_tokens);
    if (found->num_tokens > entry.tags.size() || !rows_intact(*found, tags)) return theatre.fail("a published request has other bytes");
  }
}

Actor::Actor(Theatre& theatre_, int number_, uint64_t seed)
    : theatre(theatre_), number(number_), random(seed), memory(std::make_unique<ShadowHost>(theatre_.pool, number_)) {
  memory->left_out = theatre.plot.left_out;
  memory->before = [this](int site) { before(site); };
  scenes = 2 + static_cast<int>(random.below(theatre.plot.seed % 7 == 0 ? 24 : 4));
  if (theatre.plot.scenes >= 0) scenes = theatre.plot.scenes;
}

int64_t Actor::now_ns() { return theatre.now; }

void Actor::wait(int) {
  theatre.now += kWaitNs;
  if (in_fiber) fiber->yield();
  else if (self_) self_->beat();  // the witness plays alone
}

bool Actor::proven_dead(const Identity& who) {
  return theatre.sure_of_death && theatre.dead.contains({who.pid >> 8, who.pid & 255});
}

Identity Actor::self() {
  Identity who;
  who.pid = number << 8 | life;
  return who;
}

void Actor::beat() {
  if (!self_ || !heart || theatre.now < next_beat || silent) return;
  next_beat = theatre.now + kBeatNs;
  self_->beat();
}

void Actor::before(int site) {
  if (!in_fiber) return;
  theatre.now += kStepNs;
  const bool now = strike.kind != Strike::kNone &&
                   (strike.step >= 0 ? memory->steps >= static_cast<uint64_t>(strike.step)
                                     : site == strike.site && strike.times-- == 0);
  if (theatre.meeting_site >= 0 && site == theatre.meeting_site && theatre.sleeper != this &&
      theatre.now >= theatre.meeting_after && random.below(2)) {
    theatre.meeting_site = -1;
    theatre.sleeper->asleep_until = 0;
    asleep_until = theatre.now + static_cast<int64_t>(random.below(600)) * kStepNs;
    fiber->yield();
  }
  if (!now) {
    if (random.below(theatre.switching) == 0) fiber->yield();
    return;
  }
  const auto kind = std::exchange(strike.kind, Strike::kNone);
  if (kind == Strike::kCrash) throw Crash{};
  if (kind == Strike::kMeet) {
    theatre.meeting_site = strike.until_site;
    theatre.sleeper = this;
  }
  if (kind == Strike::kPause || !heart || (kind == Strike::kMeet && random.below(2))) {
    mourn();
    silent = was_silent = true;
    asleep_until = theatre.now + 4 * kExpiryNs;
    if (kind == Strike::kMeet) theatre.meeting_after = theatre.now + kExpiryNs;  // when it may be condemned
  } else {
    asleep_until = theatre.now + static_cast<int64_t>(random.below(3000)) * kStepNs;
    if (kind == Strike::kMeet) asleep_until = theatre.now + kExpiryNs;
  }
  fiber->yield();
  silent = false;
}

void Actor::believes(uint64_t transaction, uint64_t place) {
  const auto [known, fresh] = theatre.history.emplace(transaction, place);
  if (!fresh && known->second != place)
    theatre.fail("two hosts believe in different histories: transaction " + std::to_string(transaction) + " at " +
                 std::to_string(known->second) + " and, host " + std::to_string(number) + ", at " + std::to_string(place));
}

void Actor::mourn() {
  for (auto& [generation, entry] : theatre.truth.entries)
    if (entry.holder == number) {
      if (!entry.confirmed) entry.doomed = true;
      entry.holder = -1;  // it may be evicted now
    }
  held_.clear();
}

void Actor::play() {
  while (scenes > 0 && theatre.result.violation.empty()) {
    try {
      live();
    } catch (const Crash&) {
      ++theatre.result.crashed;
      mourn();
      theatre.dead.insert({number, life});
      memory->crash();
      self_.reset();
      ++life;
      asleep_until = theatre.now + static_cast<int64_t>(random.below(3)) * kExpiryNs;
      silent = true;
      fiber->yield();
      silent = false;
    } catch (const Fault& fault) {
      if (fault.kind != Fault::kExpired) theatre.fail("a fault: " + fault.text);
      else if (!was_silent) theatre.fail("a host that never paused was declared dead");
      ++theatre.result.expired;
      mourn();
      self_.reset();
      ++life;
    }
  }
}

void Actor::live() {
  heart = false;
  self_ = std::make_unique<Participant>(*memory, *this, theatre.geometry, Timeouts{kExpiryNs, 8 * kExpiryNs});
  for (int round = 0;; ++round) try {
      self_->take(number * 2, number * 2 + 2);
      heart = true;  // as the thread that begins then
      self_->enter();
      break;
    } catch (const Fault& fault) {
      if (fault.kind != Fault::kBusy) throw;
      if (round > 2000) throw Fault{Fault::kDamaged, "no slot comes back"};
      wait(round);
      self_->sync();
    }
  Operations pool(*self_);
  while (scenes > 0 && theatre.result.violation.empty()) {
    --scenes;
    if (random.below(8) == 0) break;  // and come again
    try {
      scene(pool);
    } catch (const Refusal&) {
      ++theatre.result.refused;
    }
  }
  if (scenes > 0 || random.below(2)) {
    mourn();
    self_->leave();
  }
}

void Actor::scene(Operations& pool) {
  const auto dice = random.below(10);
  if (dice < 4) return publish_one(pool);
  if (dice < 7) return read_one(pool);
  if (dice < 9) return append_one(pool);
  delete_one(pool);
}

void Actor::write_row(int32_t block, uint32_t row, uint64_t tag) {
  uint64_t words[8];
  for (uint64_t i = 0; i < 8; ++i) words[i] = mix(tag, i);
  const uint64_t offset = theatre.place(block, row);
  memory->store(offset, words, kLine);
  memory->flush(offset, kLine, Site::kFlushRows);
}

bool Actor::rows_intact(const Request& one, const std::vector<uint64_t>& tags) {
  const uint32_t prompt_blocks = (one.prompt_tokens + kTokensPerBlock - 1) / kTokensPerBlock;
  bool intact = true;
  for (const bool load : {false, true}) {
    for (uint32_t token = 0; token < tags.size(); ++token) {
      const uint32_t past = token < one.prompt_tokens ? token : token - one.prompt_tokens;
      const uint32_t block = past / kTokensPerBlock + (token < one.prompt_tokens ? 0 : prompt_blocks);
      const uint64_t offset = theatre.place(one.blocks[block], past % kTokensPerBlock);
      if (!load) {
        memory->flush(offset, kLine, Site::kDropRows);
        continue;
      }
      uint64_t words[8];
      memory->load(offset, words, kLine);
      for (uint64_t i = 0; i < 8; ++i) intact &= words[i] == mix(tags[token], i);
    }
    if (!load) memory->fence(Site::kFenceRows);
  }
  return intact;
}

void Actor::publish_one(Operations& pool) {
  Truth& truth = theatre.truth;
  Wanted want;
  want.key = std::string(1, static_cast<char>('a' + random.below(4)));
  want.prompt_tokens = 1 + static_cast<uint32_t>(random.below(4));
  const uint32_t prompt_blocks = (want.prompt_tokens + kTokensPerBlock - 1) / kTokensPerBlock;
  want.blocks = prompt_blocks + 1;
  const uint64_t family = random.below(2);
  for (uint32_t i = 0; i < want.prompt_tokens / kTokensPerBlock; ++i) want.hashes.push_back(Hash{mix(family, i), i});
  const Held held = pool.reserve({want}).front();
  if (truth.entries.contains(held.generation)) return theatre.fail("a generation is given out twice");
  const Request one = self_->state().requests.at(held.generation);
  Truth::Entry entry;
  entry.key = want.key;
  entry.blocks = one.blocks;
  entry.prompt = want.prompt_tokens;
  entry.holder = number;
  entry.doomed = truth.deleting.contains(want.key);
  for (const auto& [generation, other] : truth.entries)
    if (other.holder >= 0 && !other.doomed)
      for (size_t i = one.first_hash; i < one.blocks.size(); ++i)
        if (std::count(other.blocks.begin(), other.blocks.end(), one.blocks[i])) theatre.fail("a block is owned twice: by request " + std::to_string(generation) + " of host " + std::to_string(other.holder) + " and " + std::to_string(held.generation) + " of host " + std::to_string(number));
  for (uint32_t token = 0; token < want.prompt_tokens; ++token) {
    const uint32_t block = token / kTokensPerBlock;
    entry.tags.push_back(block < want.hashes.size() ? mix(want.hashes[block].low, token) : mix(held.generation << 8, token));
  }
  truth.entries[held.generation] = entry;
  held_[held.generation] = held.lease;
  for (uint32_t token = one.shared_tokens; token < want.prompt_tokens; ++token) {
    write_row(one.blocks[token / kTokensPerBlock], token % kTokensPerBlock, entry.tags[token]);
    if (random.below(4) == 0) self_->validate();
  }
  self_->validate();
  truth.entries[held.generation].begun = true;
  pool.publish({{held.lease, want.prompt_tokens}});
  if (!was_silent || held_.contains(held.generation)) truth.entries[held.generation].confirmed = true;
  ++theatre.result.published;
  if (random.below(3) == 0) {
    truth.entries[held.generation].holder = -1;
    held_.erase(held.generation);
    pool.release({held.lease});
  }
}

void Actor::read_one(Operations& pool) {
  Truth& truth = theatre.truth;
  std::set<uint64_t> sure, surely_gone;
  for (const auto& [generation, entry] : truth.entries) {
    if (truth.surely_there(entry)) sure.insert(generation);
    if (entry.deleted) surely_gone.insert(generation);
  }
  self_->sync();
  for (const uint64_t generation : sure) {
    const Truth::Entry& entry = truth.entries[generation];
    const Request* found = self_->state().find(entry.key);
    if (truth.surely_there(entry) && (!found || found->generation != generation || found->stage != Stage::kPublished))
      return theatre.fail("a published request is not found");
  }
  const std::string key(1, static_cast<char>('a' + random.below(4)));
  const Held held = pool.lease({key}).front();
  if (!held.lease) return;
  if (surely_gone.contains(held.generation)) return theatre.fail("a deleted request is found");
  const auto entry = truth.entries.find(held.generation);
  if (entry == truth.entries.end() || !entry->second.begun) return theatre.fail("half a request is visible");
  const Request one = self_->state().requests.at(held.generation);
  std::vector<uint64_t> tags = entry->second.tags;
  if (tags.size() < one.num_tokens) return theatre.fail("more tokens than were written");
  tags.resize(one.num_tokens);
  const bool intact = rows_intact(one, tags);
  self_->validate();
  if (!intact) return theatre.fail("wrong bytes are returned as right");
  ++theatre.result.read;
  pool.release({held.lease});
}

void Actor::append_one(Operations& pool) {
  Truth& truth = theatre.truth;
  const std::string key(1, static_cast<char>('a' + random.below(4)));
  const Held held = pool.lease({key}).front();
  if (!held.lease) return;
  const Request one = self_->state().requests.at(held.generation);
  if (one.num_tokens < one.prompt_tokens + kTokensPerBlock) try {
      pool.take_append_right(held.lease, one.num_tokens);
      Truth::Entry& entry = truth.entries[held.generation];
      entry.tags.resize(one.num_tokens);
      entry.tags.push_back(mix(held.generation << 8 | static_cast<uint64_t>(number + 1), one.num_tokens + static_cast<uint64_t>(life) * 100));
      const uint32_t past = one.num_tokens - one.prompt_tokens;
      write_row(one.blocks.back(), past, entry.tags.back());
      self_->validate();
      pool.publish({{held.lease, one.num_tokens + 1}});
    } catch (const Refusal&) {
      ++theatre.result.refused;
    }
  pool.release({held.lease});
}

void Actor::delete_one(Operations& pool) {
  Truth& truth = theatre.truth;
  const std::string key(1, static_cast<char>('a' + random.below(4)));
  for (auto& [generation, entry] : truth.entries)
    if (entry.key == key) entry.doomed = true;
  const auto mark = truth.deleting.insert(key);  // stays if this host does not come back
  const auto gone = pool.remove({key});
  truth.deleting.erase(mark);
  for (const uint64_t generation : gone) {
    Truth::Entry& entry = truth.entries[generation];
    entry.deleted = true;
    entry.holder = -1;
    held_.erase(generation);
  }
}

}  // namespace

Run simulate(const Plot& plot) { return Theatre(plot).run(); }

}  // namespace pool
