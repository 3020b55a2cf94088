// Reading a pool that nobody has open, whatever state it is in; and writing it anew from what can be read.
#include <algorithm>
#include <string>

#include "participant.h"

namespace pool {

namespace {

constexpr const char* kRegisterNames[] = {"identity", "heartbeat", "ticket", "verdicts", "checkpoint"};

std::string in_slot(int slot) { return " of slot " + std::to_string(slot); }

}  // namespace

Participant::Participant(Memory& memory, Host& host, const Geometry& geometry, Damage& damage)
    : memory_(memory), host_(host), geometry_(geometry), timeouts_(), registers_(memory, geometry_), state_(geometry_) {
  check_registers(damage);
  start_from_any_snapshot(damage);
  try {
    take_news(false);
  } catch (const Fault& fault) {
    if (fault.kind != Fault::kDamaged) throw;
    damage.problems.push_back(fault.text);
  }
  check_logs(damage);
  for (const std::string& what : state_.contradictions()) damage.problems.push_back(what);
}

// One bad line of two is what a kill in the middle of a store leaves; the value before it counts.
void Participant::check_registers(Damage& damage) {
  for (int slot = 0; slot < geometry_.slots; ++slot)
    for (int which = 0; which < static_cast<int>(Register::kCount); ++which) {
      bool torn = false;
      registers_.drop(slot, static_cast<Register>(which), Site::kDropIdentities);
      memory_.fence(Site::kFenceIdentities);
      const auto value = registers_.load<Line>(slot, static_cast<Register>(which), &torn);
      if (!torn) continue;
      const std::string name = kRegisterNames[which] + in_slot(slot);
      if (value) damage.notes.push_back("the last write of the " + name + " was cut short");
      else damage.problems.push_back("the " + name + " cannot be read");
    }
}

void Participant::start_from_any_snapshot(Damage& damage) {
  const auto all = checkpoints();
  std::vector<int> order;
  for (int slot = 0; slot < geometry_.slots; ++slot)
    if (all[static_cast<size_t>(slot)].number) order.push_back(slot);
  std::sort(order.begin(), order.end(), [&](int a, int b) { return all[static_cast<size_t>(a)].number > all[static_cast<size_t>(b)].number; });
  for (const int slot : order) {
    const Checkpoint& one = all[static_cast<size_t>(slot)];
    highest_ = std::max(highest_, one.number);
    try {
      const auto bytes = read_snapshot(slot, one);
      if (!bytes.empty()) {
        state_ = State::restore(geometry_, bytes);
        base_ = slot;
        return;
      }
    } catch (const Fault&) {  // said below
    }
    damage.problems.push_back("the snapshot of transaction " + std::to_string(one.number) + in_slot(slot) + " cannot be read");
  }
}

// A transaction begins only after the one before it was whole: one that lies behind a line that is not was hidden by it.
void Participant::check_logs(Damage& damage) {
  for (int slot = 0; slot < geometry_.slots; ++slot) {
    const uint64_t end = state_.members[slot].log_end;
    for (uint64_t number = end + 1; number < end + geometry_.ring_lines; ++number) {
      const uint64_t offset = geometry_.ring_offset(slot, number);
      Line line;
      memory_.load(offset, &line, kLine);
      const bool whole = line.check == line_check(line, geometry_.salt, offset);
      if (!whole || line.seq >> 17 != number || !(line.seq >> 16 & 1)) continue;
      damage.problems.push_back("the log" + in_slot(slot) + " is damaged at line " + std::to_string(end) +
                                ": a transaction lies behind it, in line " + std::to_string(number));
      break;
    }
  }
}

// First a snapshot that is newer than all others, then nothing but it: a kill in between leaves what repair() finds again.
void Participant::repair() {
  take_news_if_whole();
  for (int slot = 0; slot < geometry_.slots; ++slot)
    if (state_.members[slot].seat != Seat::kFree) state_.apply(slot, Writer().put(Op::kLeave).bytes);
  const uint64_t keep = state_.number;
  state_.number = std::max(highest_, keep) + 1;
  slot_ = base_ == 0 ? 1 : 0;
  checkpoint_ = Checkpoint{0, 0, 1};  // the first buffer is written
  write_checkpoint();
  memory_.fence(Site::kFenceCheckpoints);
  const uint64_t first = geometry_.snapshot_offset(slot_, 0), last = first + geometry_.snapshot_lines * kLine;
  const uint64_t mine = geometry_.register_offset(slot_, Register::kCheckpoint);
  const Line zero;
  for (uint64_t offset = geometry_.meta_offset; offset < geometry_.end(); offset += kLine)
    if ((offset < first || offset >= last) && (offset < mine || offset >= mine + 2 * kLine)) memory_.stream(offset, &zero, kLine);
  memory_.fence(Site::kFenceSnapshot);
}

// Whoever writes next also decides about what the dead have left behind.
void Participant::take_news_if_whole() {
  try {
    take_news(true);
  } catch (const Fault& fault) {
    if (fault.kind != Fault::kDamaged) throw;
  }
  undecided_.clear();
}

}  // namespace pool
