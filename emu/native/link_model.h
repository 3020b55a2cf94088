// What a link and a path cost: the arithmetic that the virtual and the live clock share. Integers only (times in
// picoseconds), so that a result has the same bits on every machine.
#pragma once

#include <cmath>
#include <cstdint>
#include <algorithm>
#include <stdexcept>
#include <vector>

namespace link_model {

constexpr int64_t PS_PER_NS = 1000;
constexpr int64_t MAX_NS = int64_t{4} << 50;  // 52 days of model time: room to spare below 2^63 picoseconds
constexpr int64_t MAX_BYTES = int64_t{1} << 50;
constexpr int64_t MAX_ROWS = int64_t{1} << 40;
constexpr int RATE_BITS = 24;  // fraction bits of picoseconds per byte

__extension__ using Wide = unsigned __int128;

inline int64_t checked(int64_t value, int64_t limit, const char* what) {
  if (value < 0 || value > limit) throw std::invalid_argument(what);
  return value;
}

inline int64_t picoseconds(double ns, const char* what) {
  if (!(ns >= 0.0 && ns <= 1e12)) throw std::invalid_argument(what);
  return std::llround(ns * static_cast<double>(PS_PER_NS));
}

struct Link {
  int64_t latency_ps;
  uint64_t read_rate, write_rate;  // picoseconds per byte << RATE_BITS
  int64_t per_request_ps;

  Link(double latency_ns, double read_bytes_per_ns, double write_bytes_per_ns, double per_request_ns)
      : latency_ps(picoseconds(latency_ns, "latency_ns must be 0 .. 1e12")),
        read_rate(rate(read_bytes_per_ns)),
        write_rate(rate(write_bytes_per_ns)),
        per_request_ps(picoseconds(per_request_ns, "per_request_ns must be 0 .. 1e12")) {}

  // How long an operation keeps the link busy: its bytes or its requests, whichever takes longer.
  int64_t occupancy_ps(bool write, int64_t nbytes, int64_t requests) const {
    const Wide half = Wide{1} << (RATE_BITS - 1);
    const Wide bytes_ps = (static_cast<Wide>(nbytes) * (write ? write_rate : read_rate) + half) >> RATE_BITS;
    const Wide requests_ps = static_cast<Wide>(requests) * static_cast<Wide>(per_request_ps);
    const Wide longest = bytes_ps > requests_ps ? bytes_ps : requests_ps;
    if (longest > static_cast<Wide>(MAX_NS) * PS_PER_NS) throw std::overflow_error("an operation of over 52 days");
    return static_cast<int64_t>(longest);
  }

 private:
  static uint64_t rate(double bytes_per_ns) {
    if (!(bytes_per_ns >= 1e-6 && bytes_per_ns <= 1e6))
      throw std::invalid_argument("bytes per ns must be 1e-6 .. 1e6");
    return static_cast<uint64_t>(std::llround(static_cast<double>(PS_PER_NS << RATE_BITS) / bytes_per_ns));
  }
};

struct Hop {
  int32_t link;
  bool one_message;  // the link sees one request per operation, however many rows it moves
};

inline std::vector<Hop> hops(const int32_t* links, size_t num_links, const bool* one_message, size_t num_flags) {
  if (num_links != num_flags) throw std::invalid_argument("links and one_message differ in length");
  std::vector<Hop> out;
  for (size_t i = 0; i < num_links; ++i) out.push_back({links[i], one_message[i]});
  return out;
}

struct Path {
  std::vector<Hop> hops;
  bool write;
  int64_t setup_ps, latency_ps, parallelism;
};

// The links and paths of one system; what a link is busy until lies elsewhere.
class Network {
 public:
  int32_t add_link(const Link& link) {
    links_.push_back(link);
    return static_cast<int32_t>(links_.size() - 1);
  }

  int32_t add_path(const std::vector<Hop>& hops, bool write, double setup_ns, int64_t parallelism) {
    if (parallelism < 1) throw std::invalid_argument("parallelism must be at least 1");
    Path path{hops, write, picoseconds(setup_ns, "setup_ns must be 0 .. 1e12"), 0, parallelism};
    for (const Hop& hop : hops) {
      if (hop.link < 0 || hop.link >= static_cast<int32_t>(links_.size())) throw std::invalid_argument("no such link");
      path.latency_ps += links_[static_cast<size_t>(hop.link)].latency_ps;
    }
    paths_.push_back(path);
    return static_cast<int32_t>(paths_.size() - 1);
  }

  const Path& path(int32_t number) const {
    if (number < 0 || number >= static_cast<int32_t>(paths_.size())) throw std::invalid_argument("no such path");
    return paths_[static_cast<size_t>(number)];
  }

  // End of an operation submitted at start_ps. reserve(link, start_ps, occupancy_ps) queues it on one link, first in
  // first out, and returns when that link is through with it. An operation of no bytes ends at once.
  template <typename Reserve>
  int64_t transfer_ps(const Path& path, int64_t start_ps, int64_t nbytes, int64_t rows, Reserve&& reserve) const {
    checked(nbytes, MAX_BYTES, "nbytes must be 0 .. 2^50");
    checked(rows, MAX_ROWS, "rows must be 0 .. 2^40");
    if (nbytes == 0) return start_ps;
    if (rows == 0) rows = 1;
    int64_t through = start_ps;
    for (const Hop& hop : path.hops) {
      const Link& link = links_[static_cast<size_t>(hop.link)];
      const int64_t occupancy = link.occupancy_ps(path.write, nbytes, hop.one_message ? 1 : rows);
      const int64_t done = reserve(hop.link, start_ps, occupancy);
      if (done > through) through = done;
    }
    const int64_t rounds = (rows + path.parallelism - 1) / path.parallelism;
    const Wide waves = static_cast<Wide>(path.latency_ps) * static_cast<Wide>(rounds);
    if (waves > static_cast<Wide>(MAX_NS) * PS_PER_NS) throw std::overflow_error("an operation of over 52 days");
    const int64_t by_bandwidth = path.setup_ps + path.latency_ps + through;
    const int64_t by_latency = path.setup_ps + static_cast<int64_t>(waves) + start_ps;
    return by_bandwidth > by_latency ? by_bandwidth : by_latency;
  }

  size_t num_links() const { return links_.size(); }

 private:
  std::vector<Link> links_;
  std::vector<Path> paths_;
};

// Whole nanoseconds, never early.
inline int64_t to_ns(int64_t ps) { return (ps + PS_PER_NS - 1) / PS_PER_NS; }

inline int64_t to_ps(int64_t ns) { return checked(ns, MAX_NS, "a time must be 0 .. 52 days") * PS_PER_NS; }

// A network in virtual time: links are first in, first out in the order of the calls.
class Timeline {
 public:
  int32_t add_link(const Link& link) {
    const int32_t number = network_.add_link(link);
    use_.resize(network_.num_links());
    return number;
  }

  int32_t add_path(const std::vector<Hop>& hops, bool write, double setup_ns, int64_t parallelism) {
    return network_.add_path(hops, write, setup_ns, parallelism);
  }

  // End of an operation submitted at start_ns, on links that it reserves.
  int64_t transfer_ns(int32_t path_number, int64_t start_ns, int64_t nbytes, int64_t rows) {
    const Path& path = network_.path(path_number);
    return to_ns(
        network_.transfer_ps(path, to_ps(start_ns), nbytes, rows, [&](int32_t link, int64_t start, int64_t occupancy) {
          LinkUse& use = use_[static_cast<size_t>(link)];
          use.busy_until_ps = std::max(use.busy_until_ps, start) + occupancy;
          if (use.busy_until_ps > MAX_NS * PS_PER_NS) throw std::overflow_error("a link is busy for over 52 days");
          use.busy_ps += occupancy;
          use.bytes += nbytes;
          return use.busy_until_ps;
        }));
  }

  std::vector<int64_t> busy_ns() const {
    std::vector<int64_t> out;
    for (const LinkUse& use : use_) out.push_back(to_ns(use.busy_ps));
    return out;
  }

  std::vector<int64_t> bytes() const {
    std::vector<int64_t> out;
    for (const LinkUse& use : use_) out.push_back(use.bytes);
    return out;
  }

  void reset() { use_.assign(network_.num_links(), LinkUse{}); }

 private:
  struct LinkUse {
    int64_t busy_until_ps = 0, busy_ps = 0, bytes = 0;
  };

  Network network_;
  std::vector<LinkUse> use_;
};

}  // namespace link_model
