// The simulator from Python: whole batches of seeds without the interpreter.
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "../registers.h"
#include "memory.h"
#include "simulator.h"

using namespace nb::literals;

namespace {

// Simulate seeds first .. first + count; stops at the first violation.
nb::typed<nb::dict, nb::str, nb::object> simulate_many(uint64_t first, uint64_t count, int left_out, int victim_step, bool pauses, int sleeps_at,
                       int until_at, int scenes) {
  pool::Run total;
  uint64_t seed = first;
  {
    nb::gil_scoped_release release;
    for (; seed < first + count; ++seed) {
      const pool::Run run = pool::simulate({seed, left_out, victim_step, pauses, sleeps_at, until_at, scenes});
      total.steps += run.steps;
      total.published += run.published;
      total.read += run.read;
      total.refused += run.refused;
      total.expired += run.expired;
      total.crashed += run.crashed;
      total.violation = run.violation;
      if (!run.violation.empty()) break;
    }
  }
  nb::typed<nb::dict, nb::str, nb::object> result;
  result["violation"] = total.violation;
  result["seed"] = seed;
  result["steps"] = total.steps;
  result["published"] = total.published;
  result["read"] = total.read;
  result["refused"] = total.refused;
  result["expired"] = total.expired;
  result["crashed"] = total.crashed;
  return result;
}

std::vector<std::string> site_names() {
  std::vector<std::string> names;
  for (int site = 0; site < static_cast<int>(pool::Site::kCount); ++site)
    names.emplace_back(pool::site_name(static_cast<pool::Site>(site)));
  return names;
}

}  // namespace

void register_pool_simulator(nb::module_& m) {
  m.def("pool_simulate", &simulate_many, "first_seed"_a, "count"_a, "left_out"_a = -1, "victim_step"_a = -1,
        "pauses"_a = false, "sleeps_at"_a = -1, "until_at"_a = -1, "scenes"_a = -1,
        "Run the pool's protocol on the shadow medium, one schedule a seed; stops at the first violation.");
  m.def("pool_sites", &site_names, "Every flush, fence and check of the protocol; left_out is an index into it.");
}
