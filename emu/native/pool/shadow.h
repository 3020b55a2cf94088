// Hosts without coherence, on one machine: each sees the medium through a private copy of its lines, and only flushes
// and fences, or an adversary, move lines between the copy and the medium.
//
// What the adversary may do is what caches do: evict a line, fill one early, let streamed stores arrive in any order
// and in pieces, and finish a flush at any time up to the next fence.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "format.h"
#include "memory.h"

namespace pool {

// How caches behave in one run.
enum class Temper : int {
  kLazy,   // nothing happens before it must: dirty lines stay, copies stay, flushes wait for the fence
  kEager,  // everything happens at once: flushed lines are filled again at once, dirty lines are evicted at once
  kMixed,  // a coin for each
};

struct Report {
  std::string what;  // "two writers in one line", "read-modify-write across hosts", ...
  int host = 0, other = 0;
  uint64_t offset = 0;
};

class ShadowHost;

// The medium and the hosts that share it.
class ShadowPool {
 public:
  ShadowPool(uint8_t* medium, size_t nbytes, uint64_t seed, Temper temper);
  uint8_t* medium;
  const size_t size;
  Temper temper;
  unsigned loss = 2;  // of what a dying host had not written back, one word in that many is lost
  std::vector<ShadowHost*> hosts;
  std::vector<Report> reports;

  bool coin(unsigned one_in);
  uint64_t below(uint64_t n);
  void record(Report report);

 private:
  uint64_t random_;
};

class ShadowHost : public Memory {
 public:
  ShadowHost(ShadowPool& pool, int number);
  ~ShadowHost() override;

  // Called before every primitive, with its Site (-1: a load or store): to switch hosts, or to throw where one dies.
  std::function<void(int site)> before;
  int left_out = -1;  // a Site whose flush, fence or check is not done
  uint64_t steps = 0;

  void load(uint64_t offset, void* to, size_t nbytes) override;
  void store(uint64_t offset, const void* from, size_t nbytes) override;
  void stream(uint64_t offset, const void* from, size_t nbytes) override;
  void flush(uint64_t offset, size_t nbytes, Site site) override;
  void fence(Site site) override;
  bool check(bool holds, Site site) override;

  // The host dies: of what it had not written back, anything may reach the medium.
  void crash();
  // Its copy of a line, and whether it differs from the medium.
  bool dirty(uint64_t offset) const { return state_[offset / kLine] == kDirty; }
  bool stale(uint64_t offset) const;
  int number() const { return number_; }

 private:
  enum : uint8_t { kInvalid, kClean, kDirty };
  struct Piece {
    uint64_t offset, word;
  };
  ShadowPool& pool_;
  const int number_;
  std::vector<uint8_t> copy_;
  std::vector<uint8_t> state_;  // per line
  std::vector<uint64_t> flushes_;  // lines, not yet done
  std::vector<Piece> pieces_;      // streamed words, not yet in the medium
  std::vector<uint64_t> recent_;   // lines that the adversary likes to fill early

  void step(int site = -1);
  void fill(uint64_t line);
  void write_back(uint64_t line);
  void invalidate(uint64_t line);
  void finish_flushes(bool all);
  void drain(bool all);
  void meddle();
  void note_write(uint64_t line);
};

}  // namespace pool
