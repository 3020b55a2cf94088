// Several hosts on the shadow medium, in one thread, by a seed: who runs when, who dies or pauses at which primitive,
// what the caches do. A run says the first thing that went wrong, if anything did.
#pragma once

#include <cstdint>
#include <string>

namespace pool {

struct Run {
  std::string violation;  // empty: all is well
  uint64_t steps = 0;     // primitives, of all hosts
  uint64_t published = 0, read = 0, refused = 0, expired = 0, crashed = 0, reloaded = 0;
};

struct Plot {
  uint64_t seed = 0;
  int left_out = -1;       // a Site that the protocol goes without
  int victim_step = -1;    // with a non-negative step: host 0 dies there (or pauses, by `pauses`)
  bool pauses = false;
  // A meeting: one host sleeps where it comes to the first Site until another comes to the second, which then waits.
  int sleeps_at = -1, until_at = -1;
  int scenes = -1;  // what each host does, at least: long runs wrap the logs and reload snapshots; -1: by the seed
};

Run simulate(const Plot& plot);

}  // namespace pool
