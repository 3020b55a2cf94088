// The order of transactions: Lamport's bakery over registers with one writer, and what becomes of those who die in it.
#include <algorithm>

#include "participant.h"

namespace pool {

void Participant::lock() {
  registers_.store(slot_, Register::kTicket, Ticket{epoch_, 1, 0}, Site::kFlushTicket);
  memory_.fence(Site::kFenceChoosing);
  registers_.drop_all(slot_, Register::kTicket, Site::kDropNumbers);
  memory_.fence(Site::kFenceNumbers);
  uint64_t highest = 0;
  for (int other = 0; other < geometry_.slots; ++other)
    if (const auto ticket = registers_.load<Ticket>(other, Register::kTicket)) highest = std::max(highest, ticket->number);
  const uint64_t number = highest + 1;
  registers_.store(slot_, Register::kTicket, Ticket{epoch_, 0, number}, Site::kFlushTicket);
  memory_.fence(Site::kFenceTicket);
  for (int other = 0; other < geometry_.slots; ++other)
    if (other != slot_) wait_for(other, number);
}

void Participant::unlock() {
  registers_.store(slot_, Register::kTicket, Ticket{epoch_, 0, 0}, Site::kFlushTicket);
}

void Participant::wait_for(int other, uint64_t number) {
  for (int round = 0;; ++round) {
    registers_.drop(other, Register::kTicket, Site::kDropTicket);
    memory_.fence(Site::kFenceWait);
    bool torn = false;
    const auto ticket = registers_.load<Ticket>(other, Register::kTicket, &torn);
    if (!ticket && !torn) return;
    if (ticket) {
      const bool waits = ticket->number > number || (ticket->number == number && other > slot_);
      if (!ticket->choosing && (ticket->number == 0 || waits)) return;
      // What an epoch left behind that is over counts for nothing.
      const Member& member = state_.members[other];
      const uint64_t epoch = ticket->epoch;
      if (epoch < member.epoch || (epoch == member.epoch && member.seat != Seat::kTaken)) return;
      if (condemned(read_verdicts(), other, static_cast<uint32_t>(epoch))) return;
    }
    if (round > 0) {
      const Identity who = identity(other);
      if (ticket && ticket->epoch < who.epoch) return;
      if (gone(other)) {
        condemn(other, who.epoch);
        return;
      }
    }
    if (expired()) stop("it was silent for longer than its leases last");
    host_.wait(round);
    sync();
  }
}

// Never taken back: whoever is condemned stops, and only then is its log read for the last time.
// collect()'s own fence is too late: its copies of the log may be filled again before this verdict is in memory.
void Participant::condemn(int slot, uint32_t epoch) {
  verdicts_.epoch[slot] = static_cast<uint16_t>(epoch);
  registers_.store(slot_, Register::kVerdicts, verdicts_, Site::kFlushVerdict);
  memory_.fence(Site::kFenceVerdict);
}

// For each slot a condemned epoch that is this participant's own, or that of a member.
Verdicts Participant::read_verdicts() {
  registers_.drop_all(slot_, Register::kVerdicts, Site::kDropVerdicts);
  memory_.fence(Site::kFenceVerdicts);
  Verdicts found;
  for (int judge = 0; judge < geometry_.slots; ++judge) {
    const auto given = registers_.load<Verdicts>(judge, Register::kVerdicts);
    if (!given) continue;
    for (int slot = 0; slot < geometry_.slots; ++slot) {
      const uint16_t epoch = given->epoch[slot];
      const bool newer = static_cast<int16_t>(epoch - found.epoch[slot]) > 0;
      if (epoch && (found.epoch[slot] == 0 || newer)) found.epoch[slot] = epoch;
    }
  }
  return found;
}

bool Participant::condemned(const Verdicts& verdicts, int slot, uint32_t epoch) const {
  return verdicts.epoch[slot] != 0 && verdicts.epoch[slot] == static_cast<uint16_t>(epoch);
}

void Participant::check_verdict() {
  if (!memory_.check(!condemned(read_verdicts(), slot_, epoch_), Site::kCheckVerdict))
    stop("others have declared it dead");
}

// In the lock: end what condemned participants held, and let go what nobody can still be writing.
void Participant::bury_the_dead(bool look) {
  if (look)
    for (int slot = 0; slot < geometry_.slots; ++slot)
      if (slot != slot_ && state_.members[slot].seat == Seat::kTaken && gone(slot))
        condemn(slot, state_.members[slot].epoch);
  take_news(true);  // the logs of the condemned, for the last time
  const Verdicts verdicts = read_verdicts();
  for (int slot = 0; slot < geometry_.slots; ++slot) {
    const Member& member = state_.members[slot];
    if (slot == slot_) continue;
    // The epoch that was condemned: this member's, or that of one who was about to join.
    const auto ahead = static_cast<uint16_t>(verdicts.epoch[slot] - member.epoch);
    const bool due = ahead == 0 ? member.seat == Seat::kTaken : ahead < 0x8000;
    if (verdicts.epoch[slot] != 0 && due) {
      const Dead dead{static_cast<uint8_t>(slot), static_cast<uint8_t>(certain(slot)), member.epoch + ahead, member.log_end};
      emit(dead.write());
    } else if (look && member.seat == Seat::kQuarantined && gone(slot)) {
      emit(Writer().put(Op::kClear).put(static_cast<uint8_t>(slot)));
    }
  }
}

void Participant::transact(const Plan& plan) {
  validate();
  records_.clear();
  undecided_.clear();
  try {
    lock();
    bury_the_dead(false);
    try {
      if (!plan(false)) {
        bury_the_dead(true);
        plan(true);
      }
    } catch (const std::runtime_error&) {  // the plan was refused; the dead are buried all the same
      if (!records_.empty()) commit();
      unlock();
      throw;
    }
    if (!records_.empty()) commit();
    unlock();
  } catch (const Fault& fault) {
    give_up(fault);
    throw;
  }
}

// Leave the lock to others after a fault in it; what was emitted has not happened.
void Participant::give_up(const Fault& fault) {
  if (fault.kind == Fault::kFull) {
    reload();
    unlock();
  } else if (fault.kind == Fault::kDamaged) {
    unlock();
    stopped_ = true;
    write_identity(kStopped);
  }
}

}  // namespace pool
