// A participant's life: its slot, its heartbeat, its end; and those of the others as seen from here.
#include <algorithm>

#include "participant.h"

namespace pool {

Participant::Participant(Memory& memory, Host& host, const Geometry& geometry, Timeouts timeouts)
    : memory_(memory), host_(host), geometry_(geometry), timeouts_(timeouts), registers_(memory, geometry_),
      state_(geometry_) {
  reload();
  take_news(false);
}

Identity Participant::identity(int slot) {
  registers_.drop(slot, Register::kIdentity, Site::kDropIdentities);
  memory_.fence(Site::kFenceIdentities);
  return registers_.load<Identity>(slot, Register::kIdentity).value_or(Identity{});
}

void Participant::write_identity(uint32_t state) {
  Identity who = host_.self();
  who.epoch = epoch_;
  who.state = state;
  who.expiry_ms = static_cast<uint32_t>(timeouts_.expiry_ns / 1'000'000);
  registers_.store(slot_, Register::kIdentity, who, Site::kFlushIdentity);
}

// First one that nobody has, then one whose last participant is certainly gone.
void Participant::take(int first, int last) {
  for (const bool certainly_gone : {false, true})
    for (int slot = first; slot < last; ++slot) {
      const Seat seat = state_.members[slot].seat;
      const Identity who = identity(slot);
      const bool over = who.state != kOpen || host_.proven_dead(who);
      if (certainly_gone ? over : over && seat == Seat::kFree) return take_slot(slot);
    }
  throw Fault{Fault::kBusy, "every slot of the pool is taken"};
}

void Participant::take_slot(int slot) {
  slot_ = slot;
  epoch_ = std::max(state_.members[slot].epoch, identity(slot).epoch) + 1;
  if ((epoch_ & 0xFFFF) == 0) ++epoch_;  // 0 means nobody in a verdict
  for (const Register which : {Register::kHeartbeat, Register::kTicket, Register::kVerdicts, Register::kCheckpoint})
    registers_.drop(slot, which, Site::kDropIdentities);  // another host may have had the slot before
  memory_.fence(Site::kFenceIdentities);
  verdicts_ = registers_.load<Verdicts>(slot, Register::kVerdicts).value_or(Verdicts{});
  checkpoint_ = registers_.load<Checkpoint>(slot, Register::kCheckpoint).value_or(Checkpoint{});
  freed_ = 0;
  deadline_ = host_.now_ns() + timeouts_.expiry_ns / 2;
  write_identity(kOpen);
  seated_ = true;
  beat();
}

void Participant::enter() {
  reload();  // the latest snapshot says which part of this slot's log is free
  transact([&](bool) {
    emit(Writer().put(Op::kJoin).put(epoch_));
    return true;
  });
}

void Participant::leave() {
  if (slot_ < 0 || stopped_) return;
  transact([&](bool) {
    emit(Writer().put(Op::kLeave));
    return true;
  });
  write_identity(kClosed);
  stopped_ = true;
}

void Participant::beat() {
  memory_.usable();
  const int64_t now = host_.now_ns();
  const bool lives = seated_ && now < deadline_;  // too late: it must not come back
  if (lives) {
    registers_.store(slot_, Register::kHeartbeat, Heartbeat{epoch_, ++counter_}, Site::kFlushBeat);
  }
  registers_.drop_all(slot_, Register::kHeartbeat, Site::kDropBeats);
  memory_.fence(Site::kFenceBeats);
  if (lives) deadline_ = now + timeouts_.expiry_ns / 2;
  Heartbeat beats[kSlots];
  for (int slot = 0; slot < geometry_.slots; ++slot)
    beats[slot] = registers_.load<Heartbeat>(slot, Register::kHeartbeat).value_or(Heartbeat{});
  // Silence lasts from after a look to before a later one: a pause of the observer's own is no silence of others.
  const int64_t seen_ns = host_.now_ns();
  const std::lock_guard guard(watch_lock_);
  looked_ns_ = now;
  for (int slot = 0; slot < geometry_.slots; ++slot) {
    const Heartbeat& seen = beats[slot];
    Watched& known = watched_[slot];
    if (known.since_ns == 0 || seen.epoch != known.epoch || seen.counter != known.counter)
      known = Watched{seen.epoch, seen.counter, seen_ns};
  }
}

// How long a participant of that epoch has shown no heartbeat to this one.
int64_t Participant::silence_ns(int slot, uint32_t epoch) {
  const std::lock_guard guard(watch_lock_);
  Watched seen = watched_[slot];
  if (seen.epoch != epoch) {  // it has joined, and no heartbeat of it was seen yet
    Watched& known = joined_[slot];
    if (known.epoch != epoch) known = Watched{epoch, 0, host_.now_ns()};
    seen = known;
  }
  return seen.since_ns ? looked_ns_ - seen.since_ns : 0;
}

bool Participant::expired() { return host_.now_ns() >= deadline_; }

// Whoever reads that it has stopped may write where it wrote. So its rows must be in memory before: every caller has
// fenced since the last of them.
void Participant::stop(const std::string& why) {
  stopped_ = true;
  memory_.fence(Site::kFenceStop);
  if (slot_ >= 0) write_identity(kStopped);
  throw Fault{Fault::kExpired, why};
}

void Participant::validate() {
  if (stopped_) throw Fault{Fault::kExpired, "it has stopped"};
  check_verdict();
  if (expired()) stop("it was silent for longer than its leases last");
}

// Silent for the time that it granted itself, or certainly gone. For one in quarantine: nothing of it can come late.
bool Participant::gone(int slot) {
  if (certain(slot)) return true;
  const Identity who = identity(slot);
  const int64_t silent_ns = silence_ns(slot, who.epoch);
  if (state_.members[slot].seat == Seat::kQuarantined) return silent_ns > timeouts_.quarantine_ns;
  return silent_ns > static_cast<int64_t>(who.expiry_ms) * 1'000'000;
}

// Whether nothing of a slot's participant can come any more: it said so itself, or its process is gone.
bool Participant::certain(int slot) {
  const Identity who = identity(slot);
  return who.epoch != 0 && (who.state != kOpen || host_.proven_dead(who));
}

bool Participant::anyone_to_bury() {
  for (int slot = 0; slot < geometry_.slots; ++slot)
    if (slot != slot_ && state_.members[slot].seat != Seat::kFree && gone(slot)) return true;
  return false;
}

}  // namespace pool
