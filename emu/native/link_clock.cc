// Live links: the time until which each is busy lies in shared memory, so that processes queue behind one another;
// waiting is real. Arithmetic as in virtual time (link_model.h), host time = model time * dilation.
#include "registers.h"

#include <cpuid.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <sys/prctl.h>
#include <time.h>
#include <x86intrin.h>

#include <algorithm>
#include <atomic>
#include <fstream>
#include <string>

#include "link_model.h"

namespace {

using link_model::Link;
using link_model::Network;

constexpr size_t WORD_STRIDE_BYTES = 64;    // one cache line per link
constexpr int64_t SPIN_NS = 70'000;         // a sleeper wakes 35-60 us late: sleep short of the goal, then spin
constexpr int64_t SLICE_NS = 100'000'000;   // longest sleep between two looks at Python's signals
constexpr int64_t CALIBRATE_NS = 20'000'000;

int64_t clock_ns(clockid_t clock) {
  timespec t{};
  clock_gettime(clock, &t);
  return int64_t{t.tv_sec} * 1'000'000'000 + t.tv_nsec;
}

void sleep_ns(int64_t ns) {
  const timespec t{ns / 1'000'000'000, ns % 1'000'000'000};
  clock_nanosleep(CLOCK_MONOTONIC, 0, &t, nullptr);
}

// Why the TSC cannot be used as a clock that all processors share; "" where it can.
std::string tsc_fault() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (!__get_cpuid(0x80000007, &a, &b, &c, &d) || !(d & (1u << 8)))
    return "the processor does not promise a TSC of constant rate that never stops (CPUID 80000007h EDX bit 8)";
  std::ifstream file("/sys/devices/system/clocksource/clocksource0/available_clocksource");
  std::string name;
  while (file >> name)
    if (name == "tsc") return "";
  return "the kernel does not offer the TSC as a clock source: it found it unstable, or not the same on all processors";
}

// Ticks per nanosecond, measured once per process over 20 ms against CLOCK_MONOTONIC_RAW.
double tsc_ticks_per_ns() {
  static const double rate = [] {
    const int64_t ns0 = clock_ns(CLOCK_MONOTONIC_RAW);
    const uint64_t ticks0 = __rdtsc();
    sleep_ns(CALIBRATE_NS);
    const int64_t ns1 = clock_ns(CLOCK_MONOTONIC_RAW);
    const uint64_t ticks1 = __rdtsc();
    return static_cast<double>(ticks1 - ticks0) / static_cast<double>(ns1 - ns0);
  }();
  return rate;
}

class LinkClock {
 public:
  using Words = nb::ndarray<uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
  template <typename T>
  using Column = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

  LinkClock(Words words, double dilation, const std::string& source) : words_(std::move(words)) {
    if (!(dilation >= 1e-3 && dilation <= 1e9)) throw std::invalid_argument("dilation must be 1e-3 .. 1e9");
    if (reinterpret_cast<uintptr_t>(words_.data()) % alignof(uint64_t) != 0)
      throw std::invalid_argument("words must be aligned to 8 bytes");
    if (source != "auto" && source != "tsc" && source != "clock_gettime")
      throw std::invalid_argument("source must be auto, tsc or clock_gettime");
    const std::string fault = source == "clock_gettime" ? "not asked for" : tsc_fault();
    if (source == "tsc" && !fault.empty()) throw std::runtime_error("no usable TSC: " + fault);
    use_tsc_ = fault.empty();
    ticks_per_ns_ = use_tsc_ ? tsc_ticks_per_ns() : 1.0;
    ticks_per_model_ps_ = ticks_per_ns_ * dilation / static_cast<double>(link_model::PS_PER_NS);
    origin_ = ticks();
  }

  std::string source() const { return use_tsc_ ? "tsc" : "clock_gettime"; }
  double ticks_per_ns() const { return ticks_per_ns_; }

  int32_t add_link(double latency_ns, double read_bytes_per_ns, double write_bytes_per_ns, double per_request_ns) {
    if ((network_.num_links() + 1) * WORD_STRIDE_BYTES > words_.size())
      throw std::invalid_argument("words holds no more links: 64 bytes are needed for each");
    return network_.add_link(Link(latency_ns, read_bytes_per_ns, write_bytes_per_ns, per_request_ns));
  }

  int32_t add_path(Column<int32_t> links, Column<bool> one_message, bool write, double setup_ns, int64_t parallelism) {
    return network_.add_path(
        link_model::hops(links.data(), links.size(), one_message.data(), one_message.size()), write, setup_ns,
        parallelism);
  }

  int64_t now_ns() const { return link_model::to_ns(model_ps(ticks())); }

  // Queues an operation of a path behind what every process put on its links; returns when it ends.
  int64_t reserve(int32_t path, int64_t start_ns, int64_t nbytes, int64_t rows) {
    const auto queue = [this](int32_t link, int64_t start_ps, int64_t occupancy_ps) {
      std::atomic_ref<uint64_t> word(*busy_until(link));
      const uint64_t start = tick_at(start_ps);
      const auto cost = static_cast<uint64_t>(static_cast<double>(occupancy_ps) * ticks_per_model_ps_);
      uint64_t old = word.load(std::memory_order_relaxed);
      while (old < start && !word.compare_exchange_weak(old, start)) {  // pull an idle link forward to the start
      }
      return model_ps(word.fetch_add(cost) + cost);
    };
    return link_model::to_ns(
        network_.transfer_ps(network_.path(path), link_model::to_ps(start_ns), nbytes, rows, queue));
  }

  // Host ns waited, 0 when the time was past already.
  int64_t wait_until_ns(int64_t time_ns) {
    const uint64_t target = tick_at(link_model::to_ps(time_ns));
    const uint64_t begin = ticks();
    if (begin >= target) return 0;
    static thread_local const int slack = prctl(PR_SET_TIMERSLACK, 1UL);  // else the kernel may add 50 us
    (void)slack;
    while (true) {
      const uint64_t now = ticks();
      if (now >= target) break;
      const auto left_ns = static_cast<int64_t>(static_cast<double>(target - now) / ticks_per_ns_);
      wait_a_slice(target, left_ns);
      if (PyErr_CheckSignals() != 0) throw nb::python_error();
    }
    return static_cast<int64_t>(static_cast<double>(ticks() - begin) / ticks_per_ns_);
  }

 private:
  void wait_a_slice(uint64_t target, int64_t left_ns) const {
    nb::gil_scoped_release unlocked;
    if (left_ns > SPIN_NS) {
      sleep_ns(std::min(left_ns - SPIN_NS, SLICE_NS));
    } else {
      while (ticks() < target) _mm_pause();
    }
  }

  uint64_t ticks() const { return use_tsc_ ? __rdtsc() : static_cast<uint64_t>(clock_ns(CLOCK_MONOTONIC)); }

  uint64_t tick_at(int64_t model_ps) const {
    return origin_ + static_cast<uint64_t>(static_cast<double>(model_ps) * ticks_per_model_ps_);
  }

  int64_t model_ps(uint64_t tick) const {
    return tick <= origin_ ? 0 : static_cast<int64_t>(static_cast<double>(tick - origin_) / ticks_per_model_ps_);
  }

  uint64_t* busy_until(int32_t link) const {
    return reinterpret_cast<uint64_t*>(words_.data() + static_cast<size_t>(link) * WORD_STRIDE_BYTES);
  }

  Words words_;
  bool use_tsc_ = false;
  double ticks_per_ns_ = 1.0, ticks_per_model_ps_ = 1.0;
  uint64_t origin_ = 0;
  Network network_;
};

}  // namespace

void register_link_clock(nb::module_& m) {
  nb::class_<LinkClock>(m, "LinkClock")
      .def(nb::init<LinkClock::Words, double, const std::string&>(), nb::arg("words").noconvert(), nb::arg("dilation"),
           nb::arg("source") = "auto")
      .def_prop_ro("source", &LinkClock::source)
      .def_prop_ro("ticks_per_ns", &LinkClock::ticks_per_ns)
      .def("add_link", &LinkClock::add_link, nb::arg("latency_ns"), nb::arg("read_bytes_per_ns"),
           nb::arg("write_bytes_per_ns"), nb::arg("per_request_ns"))
      .def("add_path", &LinkClock::add_path, nb::arg("links").noconvert(), nb::arg("one_message").noconvert(), nb::arg("write"),
           nb::arg("setup_ns"), nb::arg("parallelism"))
      .def("now_ns", &LinkClock::now_ns)
      .def("reserve", &LinkClock::reserve, nb::arg("path"), nb::arg("start_ns"), nb::arg("nbytes"), nb::arg("rows"))
      .def("wait_until_ns", &LinkClock::wait_until_ns, nb::arg("time_ns"));
}
