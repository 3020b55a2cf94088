// Virtual time: links with a busy-until, operations that reserve them first in first out, and the replay of a log.
#include "registers.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <queue>
#include <utility>

#include "link_model.h"

namespace {

using link_model::Link;
using link_model::Timeline;
using link_model::to_ns;
using link_model::to_ps;

template <typename T>
using Column = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Times = nb::ndarray<nb::numpy, int64_t, nb::ndim<1>>;

// Operations of a log, in columns; dependencies in compressed rows: deps[dep_offsets[i] .. dep_offsets[i + 1]).
struct Operations {
  const int32_t *actor, *path;
  const int64_t *nbytes, *rows, *duration_ns, *dep_offsets, *deps, *not_before_ns;
  size_t count, num_deps;
};

class TimeEngine {
 public:
  int32_t add_link(double latency_ns, double read_bytes_per_ns, double write_bytes_per_ns, double per_request_ns) {
    return timeline_.add_link(Link(latency_ns, read_bytes_per_ns, write_bytes_per_ns, per_request_ns));
  }

  int32_t add_path(Column<int32_t> links, Column<bool> one_message, bool write, double setup_ns, int64_t parallelism) {
    return timeline_.add_path(
        link_model::hops(links.data(), links.size(), one_message.data(), one_message.size()), write, setup_ns,
        parallelism);
  }

  int64_t transfer(int32_t path, int64_t start_ns, int64_t nbytes, int64_t rows) {
    return timeline_.transfer_ns(path, start_ns, nbytes, rows);
  }

  // One actor computes one thing at a time; actor -1 is a mere delay.
  int64_t compute(int32_t actor, int64_t start_ns, int64_t duration_ns) {
    return to_ns(compute_ps(actor, to_ps(start_ns), to_ps(duration_ns)));
  }

  std::vector<int64_t> link_busy_ns() const { return timeline_.busy_ns(); }
  std::vector<int64_t> link_bytes() const { return timeline_.bytes(); }

  void reset() {
    timeline_.reset();
    actor_busy_until_ps_.clear();
  }

  std::tuple<Times, Times> replay(Column<int32_t> actor, Column<int32_t> path, Column<int64_t> nbytes,
                                  Column<int64_t> rows, Column<int64_t> duration_ns, Column<int64_t> dep_offsets,
                                  Column<int64_t> deps, Column<int64_t> not_before_ns) {
    const size_t n = actor.size();
    if (path.size() != n || nbytes.size() != n || rows.size() != n || duration_ns.size() != n ||
        not_before_ns.size() != n || dep_offsets.size() != n + 1)
      throw std::invalid_argument("the columns of a log differ in length");
    const Operations ops{actor.data(), path.data(), nbytes.data(), rows.data(), duration_ns.data(),
                         dep_offsets.data(), deps.data(), not_before_ns.data(), n, deps.size()};
    std::vector<int64_t> start_ns(n), end_ns(n);
    {
      nb::gil_scoped_release unlocked;
      reset();
      run(ops, start_ns, end_ns);
    }
    return {to_array(std::move(start_ns)), to_array(std::move(end_ns))};
  }

 private:
  int64_t compute_ps(int32_t actor, int64_t start_ps, int64_t duration_ps) {
    if (actor < -1) throw std::invalid_argument("actor must be -1 or more");
    if (actor == -1) return start_ps + duration_ps;
    const auto place = static_cast<size_t>(actor);
    if (place >= actor_busy_until_ps_.size()) actor_busy_until_ps_.resize(place + 1, 0);
    int64_t& busy_until = actor_busy_until_ps_[place];
    busy_until = std::max(busy_until, start_ps) + duration_ps;
    if (busy_until > link_model::MAX_NS * link_model::PS_PER_NS)
      throw std::overflow_error("over 52 days of model time");
    return busy_until;
  }

  static Times to_array(std::vector<int64_t>&& values) {
    auto owned = std::make_unique<std::vector<int64_t>>(std::move(values));
    std::vector<int64_t>* raw = owned.release();
    nb::capsule owner(raw, [](void* p) noexcept { delete static_cast<std::vector<int64_t>*>(p); });
    return Times(raw->data(), {raw->size()}, owner);
  }

  // Successors in compressed rows, counting sort over the dependencies. A dependency has a lower number than what
  // depends on it, so there is no cycle.
  static void invert(const Operations& ops, std::vector<int64_t>& offsets, std::vector<int64_t>& successors) {
    if (ops.dep_offsets[0] != 0 || ops.dep_offsets[ops.count] != static_cast<int64_t>(ops.num_deps))
      throw std::invalid_argument("dep_offsets must run from 0 to the number of dependencies");
    offsets.assign(ops.count + 1, 0);
    for (size_t i = 0; i < ops.count; ++i) {
      if (ops.dep_offsets[i + 1] < ops.dep_offsets[i]) throw std::invalid_argument("dep_offsets must not fall");
      for (int64_t k = ops.dep_offsets[i]; k < ops.dep_offsets[i + 1]; ++k) {
        if (ops.deps[k] < 0 || ops.deps[k] >= static_cast<int64_t>(i))
          throw std::invalid_argument("an operation must depend on earlier ones");
        ++offsets[static_cast<size_t>(ops.deps[k]) + 1];
      }
    }
    for (size_t i = 0; i < ops.count; ++i) offsets[i + 1] += offsets[i];
    successors.resize(ops.num_deps);
    std::vector<int64_t> next(offsets.begin(), offsets.end() - 1);
    for (size_t i = 0; i < ops.count; ++i)
      for (int64_t k = ops.dep_offsets[i]; k < ops.dep_offsets[i + 1]; ++k)
        successors[static_cast<size_t>(next[static_cast<size_t>(ops.deps[k])]++)] = static_cast<int64_t>(i);
  }

  // Operations start when their dependencies have ended, in the order (that time, number).
  void run(const Operations& ops, std::vector<int64_t>& start_ns, std::vector<int64_t>& end_ns) {
    std::vector<int64_t> offsets, successors;
    invert(ops, offsets, successors);
    using Ready = std::pair<int64_t, int64_t>;
    std::priority_queue<Ready, std::vector<Ready>, std::greater<>> ready;
    std::vector<int64_t> waits_for(ops.count);
    for (size_t i = 0; i < ops.count; ++i) {
      start_ns[i] = link_model::checked(ops.not_before_ns[i], link_model::MAX_NS, "not_before_ns must be 0 .. 52 days");
      waits_for[i] = ops.dep_offsets[i + 1] - ops.dep_offsets[i];
      if (waits_for[i] == 0) ready.emplace(start_ns[i], static_cast<int64_t>(i));
    }
    while (!ready.empty()) {
      const auto i = static_cast<size_t>(ready.top().second);
      ready.pop();
      end_ns[i] = ops.path[i] < 0 ? compute(ops.actor[i], start_ns[i], ops.duration_ns[i])
                                  : transfer(ops.path[i], start_ns[i], ops.nbytes[i], ops.rows[i]);
      for (int64_t k = offsets[i]; k < offsets[i + 1]; ++k) {
        const auto next = static_cast<size_t>(successors[static_cast<size_t>(k)]);
        start_ns[next] = std::max(start_ns[next], end_ns[i]);
        if (--waits_for[next] == 0) ready.emplace(start_ns[next], static_cast<int64_t>(next));
      }
    }
  }

  Timeline timeline_;
  std::vector<int64_t> actor_busy_until_ps_;
};

}  // namespace

void register_time_engine(nb::module_& m) {
  nb::class_<TimeEngine>(m, "TimeEngine")
      .def(nb::init<>())
      .def("add_link", &TimeEngine::add_link, nb::arg("latency_ns"), nb::arg("read_bytes_per_ns"),
           nb::arg("write_bytes_per_ns"), nb::arg("per_request_ns"))
      .def("add_path", &TimeEngine::add_path, nb::arg("links").noconvert(), nb::arg("one_message").noconvert(), nb::arg("write"),
           nb::arg("setup_ns"), nb::arg("parallelism"))
      .def("transfer", &TimeEngine::transfer, nb::arg("path"), nb::arg("start_ns"), nb::arg("nbytes"), nb::arg("rows"))
      .def("compute", &TimeEngine::compute, nb::arg("actor"), nb::arg("start_ns"), nb::arg("duration_ns"))
      .def("link_busy_ns", &TimeEngine::link_busy_ns)
      .def("link_bytes", &TimeEngine::link_bytes)
      .def("reset", &TimeEngine::reset)
      .def("replay", &TimeEngine::replay, nb::arg("actor").noconvert(), nb::arg("path").noconvert(),
           nb::arg("nbytes").noconvert(), nb::arg("rows").noconvert(), nb::arg("duration_ns").noconvert(),
           nb::arg("dep_offsets").noconvert(), nb::arg("deps").noconvert(), nb::arg("not_before_ns").noconvert());
}
