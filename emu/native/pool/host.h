// What a participant needs of the machine that it runs on; the simulator has its own.
#pragma once

#include <cstdint>

#include "format.h"

namespace pool {

class Host {
 public:
  virtual ~Host() = default;

  // This host's own clock; never compared with another's.
  virtual int64_t now_ns() = 0;

  // Let others run; `round` counts the calls in a row.
  virtual void wait(int round) = 0;

  // Whether a participant's process is certainly gone: false where that cannot be known from here.
  virtual bool proven_dead(const Identity& who) = 0;

  // Told of every transaction that is part of the history, in order: for the simulator.
  virtual void believes(uint64_t number, uint64_t place) { (void)number, (void)place; }

  // Who this process is; epoch, state and expiry are filled in by the participant.
  virtual Identity self() = 0;
};

}  // namespace pool
