// One open pool: a slot, the log, the lock, and this host's copy of the state. Not safe for two threads at once,
// except beat(). docs/pool-format.md is the protocol.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "host.h"
#include "history.h"
#include "registers.h"
#include "state.h"

namespace pool {

struct Timeouts {
  int64_t expiry_ns = 10'000'000'000;  // silent for that long on an observer's clock: dead
  int64_t quarantine_ns = 100'000'000'000;
};

// What reading a pool has found.
struct Damage {
  std::vector<std::string> problems;
  std::vector<std::string> notes;  // traces of kills, which mean nothing
};

class Participant {
 public:
  Participant(Memory& memory, Host& host, const Geometry& geometry, Timeouts timeouts);
  // Read a pool that nobody has open as far as it can be read (check.cc); it cannot be entered then.
  Participant(Memory& memory, Host& host, const Geometry& geometry, Damage& damage);
  // Write it anew: what was read is kept, every lease and every participant is gone.
  void repair();

  // -- life
  // Take a slot of [first, last); the caller holds its machine's lock. Throws Fault::kBusy when none is free.
  // From then on beat() is called in time, and enter() makes it a member.
  void take(int first, int last);
  void enter();
  void leave();
  // A heartbeat, and a look at everybody else's. May run on a thread of its own.
  void beat();
  int slot() const { return slot_; }
  uint32_t epoch() const { return epoch_; }

  // -- reading
  const State& state() const { return state_; }
  // Apply what others have done up to now.
  void sync();
  // Refuse to go on when this participant's leases may be gone. Cheap: called before and after every batch of rows.
  void validate();
  // Slots whose participants are dead, or whose quarantine may end.
  bool anyone_to_bury();
  bool gone(int slot);  // proven dead, or silent for longer than it allows itself
  Identity identity(int slot);
  bool certain(int slot);
  int slots() const { return geometry_.slots; }

  // -- writing
  // Plan records on the newest state, in the lock; whatever emit() got is committed when it returns or throws.
  // The plan may return false once: then the dead are buried first and it is called again.
  using Plan = std::function<bool(bool buried)>;
  void transact(const Plan& plan);
  void emit(const Writer& records);
  // Bytes of records that one transaction takes at most.
  uint64_t transaction_bytes() const { return geometry_.ring_lines / 4 * kPayload - Dead::kBytes * static_cast<uint64_t>(geometry_.slots) - 32; }  // the dead's too
  uint64_t state_bytes() const { return geometry_.snapshot_lines * kPayload - 512; }

 private:
  Memory& memory_;
  Host& host_;
  const Geometry geometry_;
  const Timeouts timeouts_;
  Registers registers_;
  State state_;
  int slot_ = -1;
  uint32_t epoch_ = 0;
  bool stopped_ = false;
  std::atomic<bool> seated_{false};
  std::vector<uint8_t> records_;  // emitted, not committed
  std::vector<std::pair<uint64_t, uint64_t>> undecided_;  // transactions that count if the next commit does
  uint64_t freed_ = 0;            // lines of the own log before this one are in a snapshot
  Verdicts verdicts_;             // the own register
  Checkpoint checkpoint_;         // the own register
  uint64_t counter_ = 0;
  std::atomic<int64_t> deadline_{0};  // of the own leases, on this host's clock

  struct Watched {
    uint64_t epoch = 0, counter = 0;
    int64_t since_ns = 0;  // when this value was first seen
  };
  std::mutex watch_lock_;
  Watched watched_[kSlots];
  Watched joined_[kSlots];
  int64_t looked_ns_ = 0;

  // life.cc
  void take_slot(int slot);
  void stop(const std::string& why);
  bool expired();
  void write_identity(uint32_t state);
  int64_t silence_ns(int slot, uint32_t epoch);

  // lock.cc
  void lock();
  void unlock();
  void wait_for(int other, uint64_t number);
  void condemn(int slot, uint32_t epoch);
  Verdicts read_verdicts();  // for each slot the epoch that somebody condemned (only what matters now)
  bool condemned(const Verdicts& verdicts, int slot, uint32_t epoch) const;
  void check_verdict();
  void bury_the_dead(bool look);
  void give_up(const Fault& fault);

  // log.cc
  struct News {
    std::vector<Transaction> found;
    bool overtaken = false;
    bool partial = false;
  };
  News collect();
  bool read_transaction(int slot, uint64_t first, News& news);
  bool read_body(int slot, Transaction& one, Line& line, News& news);
  Line log_line(int slot, uint64_t number, uint32_t epoch, bool& there, News& news);
  void take_news(bool writing);
  bool counts(const Transaction& one) const;
  void apply(const Transaction& one);
  void commit();
  void write_checkpoint();
  std::vector<Checkpoint> checkpoints();
  void reload();
  bool newer_checkpoint();
  std::vector<uint8_t> read_snapshot(int slot, const Checkpoint& which);

  // check.cc
  int base_ = -1;          // whose snapshot was read
  uint64_t highest_ = 0;   // of all checkpoints
  void check_registers(Damage& damage);
  void start_from_any_snapshot(Damage& damage);
  void check_logs(Damage& damage);
  void take_news_if_whole();
};

}  // namespace pool
