// The machine as a process sees it: its clock, and whether another process of it still lives.
#pragma once

#include "host.h"

namespace pool {

class ProcessHost : public Host {
 public:
  ProcessHost();
  int64_t now_ns() override;
  void wait(int round) override;
  bool proven_dead(const Identity& who) override;
  Identity self() override { return self_; }

 private:
  Identity self_;
};

}  // namespace pool
