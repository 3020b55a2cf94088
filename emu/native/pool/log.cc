// The logs: reading what others wrote, choosing the history that counts, writing one's own, snapshots.
#include <algorithm>

#include "participant.h"

namespace pool {

namespace {

constexpr uint64_t kHead = 24;  // of a transaction, before its records
constexpr int kPatience = 200;  // looks at a log that does not make sense before it counts as damaged

struct Head {
  uint64_t number = 0, predecessor = 0;
  uint32_t nbytes = 0, epoch = 0;
};
static_assert(sizeof(Head) == kHead);

uint64_t lines_of(uint64_t record_bytes) { return (kHead + record_bytes + kPayload - 1) / kPayload; }

// What a log's line says of itself: its number, whether a transaction begins there, its writer's epoch.
uint64_t line_seq(uint64_t number, bool begins, uint32_t epoch) {
  return number << 17 | static_cast<uint64_t>(begins) << 16 | (epoch & 0xFFFF);
}

}  // namespace

// A line of a log as it should be; `there` is false when it is not (yet) that one.
Line Participant::log_line(int slot, uint64_t number, uint32_t epoch, bool& there, News& news) {
  const uint64_t offset = geometry_.ring_offset(slot, number);
  Line line;
  memory_.load(offset, &line, kLine);
  there = false;
  if (is_zero(line)) return line;
  if (!memory_.check(line.check == line_check(line, geometry_.salt, offset), Site::kCheckLine)) {
    news.partial = true;
    return line;
  }
  const uint64_t found = line.seq >> 17;
  const bool begins = epoch == 0;  // whoever's it is
  const uint32_t writer = begins ? static_cast<uint32_t>(line.seq) : epoch;
  there = memory_.check(line.seq == line_seq(number, begins, writer), Site::kCheckSequence);
  if (!there && found > number) news.overtaken = true;
  return line;
}

bool Participant::read_transaction(int slot, uint64_t first, News& news) {
  bool there = false;
  Line line = log_line(slot, first, 0, there, news);
  if (!there) return false;
  const auto head = payload_as<Head>(line);
  const Member& member = state_.members[slot];
  const bool stray = head.epoch < member.epoch || (head.epoch == member.epoch && member.seat != Seat::kTaken);
  if (stray || (head.epoch & 0xFFFF) != (line.seq & 0xFFFF) || lines_of(head.nbytes) > geometry_.ring_lines / 4) return false;
  Transaction one;
  one.number = head.number;
  one.predecessor = head.predecessor;
  one.first = first;
  one.slot = slot;
  one.epoch = head.epoch;
  one.lines = lines_of(head.nbytes);
  one.records.resize(head.nbytes);
  if (!read_body(slot, one, line, news)) return false;
  news.found.push_back(std::move(one));
  return true;
}

// The rest of a transaction whose first line is there.
bool Participant::read_body(int slot, Transaction& one, Line& line, News& news) {
  for (uint64_t i = 1; i <= one.lines; ++i)  // and the first line of the next one
    memory_.flush(geometry_.ring_offset(slot, one.first + i), kLine, Site::kDropRest);
  memory_.fence(Site::kFenceRest);
  uint64_t done = std::min<uint64_t>(kPayload - kHead, one.records.size());
  if (done) std::memcpy(one.records.data(), line.payload + kHead, done);
  for (uint64_t i = 1; i < one.lines; ++i) {
    bool there = false;
    line = log_line(slot, one.first + i, one.epoch, there, news);
    if (!there) {
      news.partial = true;
      return false;
    }
    const uint64_t part = std::min<uint64_t>(kPayload, one.records.size() - done);
    std::memcpy(one.records.data() + done, line.payload, part);
    done += part;
  }
  return true;
}

// Every transaction past what this participant has applied.
Participant::News Participant::collect() {
  News news;
  memory_.usable();
  memory_.flush(0, kLine, Site::kDropTail);
  for (int slot = 0; slot < geometry_.slots; ++slot)
    memory_.flush(geometry_.ring_offset(slot, state_.members[slot].log_end), kLine, Site::kDropTail);
  memory_.fence(Site::kFenceTail);
  Line superblock;
  memory_.load(0, &superblock, kLine);
  if (superblock_salt(superblock) != geometry_.salt) throw Fault{Fault::kReplaced, "the pool was formatted anew"};
  for (int slot = 0; slot < geometry_.slots; ++slot) {
    uint64_t first = state_.members[slot].log_end;
    while (read_transaction(slot, first, news)) first += news.found.back().lines;
  }
  return news;
}

// Whether a transaction is where its writer's log goes on: what the condemned write behind its end is nothing.
bool Participant::counts(const Transaction& one) const {
  const Member& member = state_.members[one.slot];
  const bool alive = one.epoch > member.epoch || (one.epoch == member.epoch && member.seat == Seat::kTaken);
  return alive && one.first == member.log_end;
}

void Participant::apply(const Transaction& one) {
  if (one.number != state_.number + 1) throw Fault{Fault::kDamaged, "a transaction has the wrong number"};
  state_.apply(one.slot, one.records);
  state_.number = one.number;
  state_.tip = one.place();
  state_.members[one.slot].log_end = one.first + one.lines;
}

void Participant::take_news(bool writing) {
  for (int round = 0;; ++round) {
    const News news = collect();
    if (news.overtaken || (news.partial && newer_checkpoint())) {
      if (round > kPatience) throw Fault{Fault::kDamaged, "a log goes on where no snapshot leads"};
      reload();
      continue;
    }
    if (news.found.empty()) return;
    const Verdicts verdicts = read_verdicts();
    const bool forked = std::any_of(news.found.begin(), news.found.end(), [&](const Transaction& one) {
      return one.number <= state_.number && counts(one) && !condemned(verdicts, one.slot, one.epoch);
    });
    if (forked) throw Fault{Fault::kDamaged, "the log has two histories"};
    const auto steps = choose_history(news.found, state_.tip, state_.number, writing, [&](const Transaction& one) {
      return condemned(verdicts, one.slot, one.epoch);
    });
    size_t applied = 0;
    for (const Transaction* one : steps) {
      if (!counts(*one)) break;
      apply(*one);
      ++applied;
      if (writing) undecided_.emplace_back(one->number, one->place());
      else host_.believes(one->number, one->place());
    }
    if (slot_ >= 0 && state_.members[slot_].epoch == epoch_ && state_.members[slot_].seat != Seat::kTaken)
      stop("others have declared it dead");
    if (applied == news.found.size()) return;
    if (applied && (writing || applied < steps.size())) continue;
    // What is left belongs to condemned writers, or follows something that was not there yet when we looked.
    const bool unexplained = std::any_of(news.found.begin(), news.found.end(), [&](const Transaction& one) {
      return one.number > state_.number && !condemned(verdicts, one.slot, one.epoch);
    });
    if (!unexplained) return;
    if (round > kPatience) throw Fault{Fault::kDamaged, "a transaction is missing from the log"};
    host_.wait(round);
  }
}

void Participant::sync() {
  if (stopped_) throw Fault{Fault::kExpired, "it has stopped"};
  take_news(false);
}

void Participant::emit(const Writer& records) {
  state_.apply(slot_, records.bytes);
  records_.insert(records_.end(), records.bytes.begin(), records.bytes.end());
}

// Write what was emitted behind the own log, in memory before anything else is read; then it has happened.
void Participant::commit() {
  Transaction one;
  one.number = state_.number + 1;
  one.predecessor = state_.tip;
  one.first = state_.members[slot_].log_end;
  one.slot = slot_;
  one.lines = lines_of(records_.size());
  if (one.lines > geometry_.ring_lines / 4 || one.first + one.lines - freed_ > geometry_.ring_lines)
    throw Fault{Fault::kFull, "the log has no room for the transaction"};
  std::vector<uint8_t> body(one.lines * kPayload);
  const Head head{one.number, one.predecessor, static_cast<uint32_t>(records_.size()), epoch_};
  std::memcpy(body.data(), &head, kHead);
  std::copy(records_.begin(), records_.end(), body.begin() + kHead);
  for (uint64_t i = 0; i < one.lines; ++i) {
    Line line;
    line.seq = line_seq(one.first + i, i == 0, epoch_);
    std::memcpy(line.payload, body.data() + i * kPayload, kPayload);
    const uint64_t offset = geometry_.ring_offset(slot_, one.first + i);
    line.check = line_check(line, geometry_.salt, offset);
    memory_.stream(offset, &line, kLine);
  }
  memory_.fence(Site::kFenceCommit);
  check_verdict();
  for (const auto& [number, place] : undecided_) host_.believes(number, place);
  undecided_.clear();
  host_.believes(one.number, one.place());
  records_.clear();
  state_.number = one.number;
  state_.tip = one.place();
  state_.members[slot_].log_end = one.first + one.lines;
  if (state_.members[slot_].log_end - freed_ > geometry_.ring_lines / 2) write_checkpoint();
}

void Participant::write_checkpoint() {
  const std::vector<uint8_t> bytes = state_.snapshot();
  const uint64_t lines = (bytes.size() + kPayload - 1) / kPayload;
  if (lines > geometry_.snapshot_lines) throw Fault{Fault::kFull, "the state does not fit a snapshot"};
  const uint64_t buffer = 1 - checkpoint_.buffer;
  for (uint64_t i = 0; i < lines; ++i) {
    Line line;
    line.seq = state_.number;
    std::memcpy(line.payload, bytes.data() + i * kPayload, std::min<size_t>(kPayload, bytes.size() - i * kPayload));
    const uint64_t offset = geometry_.snapshot_offset(slot_, static_cast<int>(buffer)) + i * kLine;
    line.check = line_check(line, geometry_.salt, offset);
    memory_.stream(offset, &line, kLine);
  }
  memory_.fence(Site::kFenceSnapshot);
  checkpoint_ = Checkpoint{state_.number, bytes.size(), buffer};
  registers_.store(slot_, Register::kCheckpoint, checkpoint_, Site::kFlushCheckpoint);
  freed_ = state_.members[slot_].log_end;  // the lock's fences come before the next line of the log
}

std::vector<Checkpoint> Participant::checkpoints() {
  registers_.drop_all(slot_, Register::kCheckpoint, Site::kDropCheckpoints);
  memory_.fence(Site::kFenceCheckpoints);
  std::vector<Checkpoint> all(static_cast<size_t>(geometry_.slots));
  for (int slot = 0; slot < geometry_.slots; ++slot)
    all[static_cast<size_t>(slot)] = registers_.load<Checkpoint>(slot, Register::kCheckpoint).value_or(Checkpoint{});
  return all;
}

bool Participant::newer_checkpoint() {
  const auto all = checkpoints();
  return std::any_of(all.begin(), all.end(), [&](const Checkpoint& one) { return one.number > state_.number; });
}

// Start again from the latest snapshot; the logs from there on are there.
void Participant::reload() {
  for (int round = 0; round < kPatience; ++round) {
    const auto all = checkpoints();
    const auto newest = std::max_element(
        all.begin(), all.end(), [](const Checkpoint& a, const Checkpoint& b) { return a.number < b.number; });
    if (newest->number == 0) {
      state_ = State(geometry_);
      freed_ = 0;
      return;
    }
    const auto bytes = read_snapshot(static_cast<int>(newest - all.begin()), *newest);
    if (!bytes.empty()) {
      state_ = State::restore(geometry_, bytes);
      if (slot_ >= 0) freed_ = std::max(freed_, state_.members[slot_].log_end);
      return;
    }
    host_.wait(round);  // its writer has begun the one after the next
  }
  throw Fault{Fault::kDamaged, "the latest snapshot cannot be read"};
}

// Its bytes; none if a line is not what it should be. An old copy of a line has another number, and is gone when
// reload() comes again: the fence for the checkpoints lies between.
std::vector<uint8_t> Participant::read_snapshot(int slot, const Checkpoint& which) {
  const uint64_t lines = (which.bytes + kPayload - 1) / kPayload;
  if (which.buffer > 1 || lines > geometry_.snapshot_lines) return {};
  const uint64_t begin = geometry_.snapshot_offset(slot, static_cast<int>(which.buffer));
  memory_.flush(begin, lines * kLine, Site::kDropSnapshot);
  memory_.fence(Site::kFenceSnapshotRead);
  std::vector<uint8_t> bytes(lines * kPayload);
  for (uint64_t i = 0; i < lines; ++i) {
    Line line;
    const uint64_t offset = begin + i * kLine;
    memory_.load(offset, &line, kLine);
    const bool whole = memory_.check(line.check == line_check(line, geometry_.salt, offset), Site::kCheckLine);
    const bool of_it = memory_.check(line.seq == which.number, Site::kCheckSequence);
    if (!whole || !of_it) return {};
    std::memcpy(bytes.data() + i * kPayload, line.payload, kPayload);
  }
  bytes.resize(which.bytes);
  return bytes;
}

}  // namespace pool
