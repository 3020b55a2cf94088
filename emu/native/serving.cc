// The serving simulator's event loop: what emu/sac's decode instance does, without its bytes.
//
// Actors (decode GPUs, attaching requests, arrivals) are resumed in the order (time, push), and submit their
// transfers at their own time, exactly as emu/timing/actors.py and emu/sac/{attach,decode}.py do. What those two
// files yield is a push here: change them together (tests/test_sim_cross_check.py compares the times).
#include "registers.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cmath>
#include <deque>
#include <functional>
#include <memory>
#include <queue>
#include <utility>
#include <vector>

#include "link_model.h"

using namespace nb::literals;

namespace {

using link_model::Link;
using link_model::Timeline;

template <typename T>
using Column = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
template <typename T>
using Table = nb::ndarray<const T, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Out = nb::ndarray<int64_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using OutColumn = nb::ndarray<int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

constexpr int64_t kNever = -1;

void want(bool good, const char* what) {
  if (!good) throw std::invalid_argument(what);
}

size_t at(int64_t index) { return static_cast<size_t>(index); }

// Columns of the requests, in this order (emu/sim/native.py writes them).
enum Field : size_t {
  kArrivalNs, kGpu, kDevice, kPromptTokens, kOutputTokens, kHbmBytes, kHostBytes, kPrefillNs, kPublishRows,
  kPublishBlocks, kPromptRows, kPromptBlocks, kFitsHotBuffer, kFlushBytes, kFlushRequests, kIndexPath, kMissPath,
  kWritePath, kPrefetchPath, kPublishPath, kFlushPath, kFields
};

// Columns of the records.
enum Result : size_t { kArrived, kAttached, kQueueNs, kPrefillComputeNs, kAttachTransferNs, kRowsMissed, kRowsFirst, kResults };

struct Options {
  int64_t hbm_bytes, host_bytes;  // per GPU; of all hosts together, 0 is no limit
  double base_ns, per_request_ns, per_context_ns;
  int64_t kv_row_bytes, index_row_bytes, tokens_per_row;
  bool closed, prefill, prefetches, resident, by_device, work_requests, index_prefetch;
  int64_t stop_after;     // requests that end before the run does; 0: all
  int64_t lockstep_gpus;  // decode of so many GPUs waits while one of their prefetches runs; 0: it goes on
};

struct Sequence {
  int64_t request, produced = 0;
  std::vector<int64_t> written_ns;  // per layer: end of the last write-back
};

struct Gpu {
  std::deque<int64_t> waiting;
  std::vector<int64_t> active, batch;  // requests in order of attachment; those of the step in progress
  int64_t last_attach = -1;      // the last request that began to attach: a GPU copies for one at a time
  int64_t places = 0, attaching = 0, bytes_now = 0, bytes_peak = 0;
  int64_t compute_until = 0, compute_ns = 0, began_ns = 0, stall_ns = 0, now = 0, stalled_ns = 0, busy_ns = 0;
  size_t layer = 0;
  enum { kLoop, kComputed, kWritten, kRead, kParked, kHeld, kDone } state = kLoop;
  std::vector<int64_t> prefetched_ns;  // per layer: end of a prefetch, kNever where there is none
};

class Serving {
 public:
  Serving(Options options, Column<int64_t> gpu_places, Column<int32_t> anchors, Column<bool> has_index)
      : options_(options), anchors_(anchors.data(), anchors.data() + anchors.size()),
        has_index_(has_index.data(), has_index.data() + has_index.size()) {
    want(anchors_.size() == has_index_.size() && !anchors_.empty(), "anchors and has_index differ in length");
    want(options.tokens_per_row > 0, "tokens_per_row must be positive");
    gpus_.resize(gpu_places.size());
    for (size_t g = 0; g < gpus_.size(); ++g) {
      gpus_[g].places = gpu_places.data()[g];
      gpus_[g].prefetched_ns.assign(anchors_.size(), kNever);
    }
  }

  void add_link(double latency_ns, double read_bytes_per_ns, double write_bytes_per_ns, double per_request_ns) {
    links_.add_link(Link(latency_ns, read_bytes_per_ns, write_bytes_per_ns, per_request_ns));
  }

  void add_path(Column<int32_t> links, Column<bool> one_message, bool write, double setup_ns, int64_t parallelism) {
    links_.add_path(link_model::hops(links.data(), links.size(), one_message.data(), one_message.size()), write,
                    setup_ns, parallelism);
  }

  // misses, runs: int32 [streams, steps]; stream, phase: int32 [requests, layers].
  void run(Table<int64_t> requests, Table<int32_t> misses, Table<int32_t> runs, int64_t warm_steps,
           Table<int32_t> stream, Table<int32_t> phase, Out records, OutColumn token_ns, OutColumn stall_ns) {
    requests_ = &requests;
    count_ = requests.shape(0);
    want(requests.shape(1) == kFields, "requests has another number of columns");
    want(records.shape(0) == count_ && records.shape(1) == kResults, "records has another shape");
    want(misses.shape(0) == runs.shape(0) && misses.shape(1) == runs.shape(1), "misses and runs differ in shape");
    for (const auto* table : {&stream, &phase})
      want(table->shape(0) == count_ && table->shape(1) == anchors_.size(), "stream or phase has another shape");
    steps_ = static_cast<int64_t>(misses.shape(1));
    want(warm_steps >= 0 && warm_steps < steps_, "warm_steps must be below the steps of the streams");
    misses_ = misses.data(), runs_ = runs.data(), warm_ = warm_steps;
    stream_ = stream.data(), phase_ = phase.data();
    records_ = records.data(), token_ns_ = token_ns.data(), stall_out_ns_ = stall_ns.data();
    check(misses.shape(0), token_ns.size(), stall_ns.size());
    nb::gil_scoped_release unlocked;
    loop();
  }

  std::vector<int64_t> link_busy_ns() const { return links_.busy_ns(); }
  std::vector<int64_t> link_bytes() const { return links_.bytes(); }
  std::vector<int64_t> peak_bytes() const {
    std::vector<int64_t> out;
    for (const Gpu& gpu : gpus_) out.push_back(gpu.bytes_peak);
    return out;
  }
  std::vector<int64_t> stalled_ns() const {
    std::vector<int64_t> out;
    for (const Gpu& gpu : gpus_) out.push_back(gpu.stalled_ns);
    return out;
  }
  std::vector<int64_t> computing_ns() const {
    std::vector<int64_t> out;
    for (const Gpu& gpu : gpus_) out.push_back(gpu.busy_ns);
    return out;
  }
  int64_t host_peak = 0, hbm_refusals = 0, host_refusals = 0, events = 0;

 private:
  // An actor is a GPU (number), an attaching request (gpus + number) or a GPU's arrivals (behind the requests).
  struct Event {
    int64_t ns, push, actor;
    bool operator>(const Event& other) const { return std::pair(ns, push) > std::pair(other.ns, other.push); }
  };

  enum class Attach { kStart, kPrefilled, kTurn, kCopy, kDone };

  // What a request still has to copy, region by region.
  struct Copy {
    Field path;
    bool kv, index;
  };

  struct Attaching {
    Attach state = Attach::kStart;
    int64_t before = -1;      // whom it waits for
    int64_t next = -1;        // who waits for it
    bool copied = false, publishing = false;
    int64_t started_ns = 0;
    std::deque<Copy> copies;
    size_t region = 0;
  };

  int64_t field(int64_t request, Field name) const { return requests_->data()[at(request) * kFields + name]; }
  int64_t& record(int64_t request, Result name) { return records_[at(request) * kResults + name]; }
  int32_t path(int64_t request, Field name) const { return static_cast<int32_t>(field(request, name)); }

  void check(size_t streams, size_t tokens, size_t stalls) {
    first_token_.assign(count_ + 1, 0);
    for (size_t r = 0; r < count_; ++r) {
      const auto request = static_cast<int64_t>(r);
      want(field(request, kGpu) >= 0 && at(field(request, kGpu)) < gpus_.size(), "no such GPU");
      want(field(request, kOutputTokens) > 0 && field(request, kPromptTokens) > 0, "a request without tokens");
      first_token_[r + 1] = first_token_[r] + field(request, kOutputTokens);
    }
    want(at(first_token_[count_]) == tokens && tokens == stalls, "token_ns or stall_ns has another length");
    for (size_t i = 0; i < count_ * anchors_.size(); ++i)
      want(stream_[i] >= 0 && at(stream_[i]) < streams && phase_[i] >= 0, "no such stream, or a negative phase");
  }

  void push(int64_t actor, int64_t ns) { queue_.push({ns, pushes_++, actor}); }

  int64_t transfer(int32_t path, int64_t now, int64_t nbytes, int64_t requests) {
    return links_.transfer_ns(path, now, nbytes, requests);
  }

  void loop() {
    const auto num_gpus = static_cast<int64_t>(gpus_.size());
    sequences_.resize(count_);
    attach_.assign(count_, {});
    next_arrival_.assign(gpus_.size(), 0);
    prefetching_.assign(gpus_.size(), 0);
    arrivals_.resize(gpus_.size());
    for (size_t r = 0; r < count_; ++r) {
      const auto request = static_cast<int64_t>(r);
      gpus_[at(field(request, kGpu))].waiting.push_back(request);
      arrivals_[at(field(request, kGpu))].push_back(request);
    }
    for (int64_t g = 0; g < num_gpus; ++g) {
      push(g, 0);
      if (!options_.closed) push(num_gpus + static_cast<int64_t>(count_) + g, 0);
    }
    while (!queue_.empty()) {
      if (options_.stop_after > 0 && ended_ >= options_.stop_after) return;
      const Event event = queue_.top();
      queue_.pop();
      ++events;
      if (event.actor < num_gpus)
        resume_gpu(event.actor, event.ns);
      else if (event.actor < num_gpus + static_cast<int64_t>(count_))
        resume_attach(event.actor - num_gpus, event.ns);
      else
        resume_arrivals(event.actor, event.ns);
    }
    for (const Gpu& gpu : gpus_)
      if (gpu.state != Gpu::kDone) throw std::runtime_error("a GPU waits for what nobody brings");
  }

  // -- continuous batching ------------------------------------------------------------------------------------
  int64_t arrival_ns(int64_t request) const { return options_.closed ? 0 : field(request, kArrivalNs); }

  void resume_arrivals(int64_t actor, int64_t now) {
    const int64_t g = actor - static_cast<int64_t>(gpus_.size() + count_);
    auto& next = next_arrival_[at(g)];
    if (next > 0) wake(g, now);
    if (next < arrivals_[at(g)].size()) push(actor, std::max(now, arrival_ns(arrivals_[at(g)][next])));
    ++next;
  }

  void wake(int64_t g, int64_t now) {
    Gpu& gpu = gpus_[at(g)];
    if (gpu.state != Gpu::kParked) return;
    gpu.state = Gpu::kLoop;
    push(g, std::max(gpu.now, now));
  }

  void admit(int64_t g, int64_t now) {
    Gpu& gpu = gpus_[at(g)];
    while (!gpu.waiting.empty() && gpu.places > 0) {
      const int64_t request = gpu.waiting.front();
      if (arrival_ns(request) > now) return;
      if (gpu.bytes_now + field(request, kHbmBytes) > options_.hbm_bytes) {
        ++hbm_refusals;
        return;
      }
      if (options_.host_bytes > 0 && host_now_ + field(request, kHostBytes) > options_.host_bytes) {
        ++host_refusals;
        return;
      }
      gpu.waiting.pop_front();
      gpu.bytes_now += field(request, kHbmBytes);
      gpu.bytes_peak = std::max(gpu.bytes_peak, gpu.bytes_now);
      host_now_ += field(request, kHostBytes);
      host_peak = std::max(host_peak, host_now_);
      --gpu.places;
      ++gpu.attaching;
      push(static_cast<int64_t>(gpus_.size()) + request, now);
    }
  }

  void resume_attach(int64_t r, int64_t now) {
    const int64_t actor = static_cast<int64_t>(gpus_.size()) + r;
    Attaching& self = attach_[at(r)];
    Gpu& gpu = gpus_[at(field(r, kGpu))];
    switch (self.state) {
      case Attach::kStart:
        record(r, kArrived) = options_.closed ? now : arrival_ns(r);
        self.before = std::exchange(gpu.last_attach, r);
        if (!options_.prefill) return await_turn(r, now);
        record(r, kPrefillComputeNs) = field(r, kPrefillNs);
        prefill_until_ = std::max(prefill_until_, now) + field(r, kPrefillNs);
        self.state = Attach::kPrefilled;
        return push(actor, prefill_until_);
      case Attach::kPrefilled:
        self.started_ns = now;
        self.publishing = true;
        self.copies.push_back({kPublishPath, true, true});
        self.state = Attach::kCopy;
        return copy(r, now);
      case Attach::kTurn:
        return begin_copies(r, now);
      case Attach::kCopy:
        return copy(r, now);
      case Attach::kDone:
        return;
    }
  }

  void await_turn(int64_t r, int64_t now) {
    Attaching& self = attach_[at(r)];
    if (self.before < 0) return begin_copies(r, now);
    self.state = Attach::kTurn;
    if (attach_[at(self.before)].copied)
      push(static_cast<int64_t>(gpus_.size()) + r, now);
    else
      attach_[at(self.before)].next = r;
  }

  void begin_copies(int64_t r, int64_t now) {
    Attaching& self = attach_[at(r)];
    self.started_ns = now;
    self.state = Attach::kCopy;
    if (options_.prefetches) {
      self.copies.push_back({kPrefetchPath, true, true});
      ++prefetching_[at(group_of_gpu(field(r, kGpu)))];
    }
    self.copies.push_back({kIndexPath, false, true});
    if (field(r, kFitsHotBuffer)) self.copies.push_back({kMissPath, true, false});
    copy(r, now);
  }

  // Submits the next region's copy: the KV layers, then the layers with index keys.
  void copy(int64_t r, int64_t now) {
    Attaching& self = attach_[at(r)];
    const size_t layers = anchors_.size();
    while (!self.copies.empty()) {
      const Copy& what = self.copies.front();
      while (self.region < 2 * layers) {
        const size_t region = self.region++;
        const bool kv = region < layers;
        if (kv ? !what.kv : !what.index || !has_index_[region - layers]) continue;
        const int64_t rows = self.publishing ? field(r, kPublishRows) : field(r, kPromptRows);
        const int64_t blocks = self.publishing ? field(r, kPublishBlocks) : field(r, kPromptBlocks);
        return push(static_cast<int64_t>(gpus_.size()) + r,
                    transfer(path(r, what.path), now, rows * (kv ? options_.kv_row_bytes : options_.index_row_bytes),
                             blocks));
      }
      if (self.copies.front().path == kPrefetchPath) end_prefetch(group_of_gpu(field(r, kGpu)), now);
      self.copies.pop_front();
      self.region = 0;
    }
    record(r, kAttachTransferNs) += now - self.started_ns;
    if (std::exchange(self.publishing, false)) return await_turn(r, now);
    attached(r, now);
  }

  int64_t group_of_gpu(int64_t g) const { return options_.lockstep_gpus > 0 ? g / options_.lockstep_gpus : 0; }

  void end_prefetch(int64_t group, int64_t now) {
    if (--prefetching_[at(group)] > 0) return;
    for (size_t g = 0; g < gpus_.size(); ++g) {
      const auto number = static_cast<int64_t>(g);
      if (gpus_[g].state != Gpu::kHeld || group_of_gpu(number) != group) continue;
      gpus_[g].state = Gpu::kLoop;
      push(number, std::max(gpus_[g].now, now));
    }
  }

  void attached(int64_t r, int64_t now) {
    Gpu& gpu = gpus_[at(field(r, kGpu))];
    Attaching& self = attach_[at(r)];
    self.state = Attach::kDone;
    self.copied = true;
    record(r, kAttached) = now;
    sequences_[at(r)] = {r, 0, std::vector<int64_t>(anchors_.size(), kNever)};
    if (self.next >= 0) push(static_cast<int64_t>(gpus_.size()) + self.next, now);
    --gpu.attaching;
    gpu.active.push_back(r);
    wake(field(r, kGpu), now);
  }

  void retire(int64_t g, int64_t now) {
    Gpu& gpu = gpus_[at(g)];
    bool freed_host = false;
    std::vector<int64_t> left;
    for (const int64_t r : gpu.active) {
      if (sequences_[at(r)].produced < field(r, kOutputTokens)) {
        left.push_back(r);
        continue;
      }
      ++ended_;
      ++gpu.places;
      gpu.bytes_now -= field(r, kHbmBytes);
      host_now_ -= field(r, kHostBytes);
      freed_host = freed_host || field(r, kHostBytes) > 0;
      if (options_.prefetches) transfer(path(r, kFlushPath), now, field(r, kFlushBytes), field(r, kFlushRequests));
      sequences_[at(r)].written_ns = {};
    }
    gpu.active = std::move(left);
    if (freed_host && options_.host_bytes > 0)
      for (int64_t other = 0; other < static_cast<int64_t>(gpus_.size()); ++other)
        if (other != g) wake(other, now);
  }

  // -- a decode step --------------------------------------------------------------------------------------------
  void resume_gpu(int64_t g, int64_t now) {
    Gpu& gpu = gpus_[at(g)];
    gpu.now = now;
    switch (gpu.state) {
      case Gpu::kComputed:
        gpu.began_ns = now;
        gpu.state = Gpu::kWritten;
        return push(g, wait_for_writes(gpu, now));
      case Gpu::kWritten:
        if (options_.resident) {
          write_back(gpu, now);
          return next_layer(g, now);
        }
        gpu.state = Gpu::kRead;
        return push(g, read_misses(gpu, now));
      case Gpu::kRead:
        write_back(gpu, now);
        return next_layer(g, now);
      default:
        return turn(g, now);
    }
  }

  void turn(int64_t g, int64_t now) {
    Gpu& gpu = gpus_[at(g)];
    admit(g, now);
    if (!gpu.active.empty() && options_.lockstep_gpus > 0 && prefetching_[at(group_of_gpu(g))] > 0) {
      gpu.state = Gpu::kHeld;
    } else if (!gpu.active.empty()) {
      begin_step(g, now);
    } else if (gpu.attaching > 0) {
      gpu.state = Gpu::kParked;
    } else if (!gpu.waiting.empty()) {
      const int64_t arrival = arrival_ns(gpu.waiting.front());
      if (arrival > now) {
        gpu.state = Gpu::kLoop;
        push(g, arrival);
      } else {
        gpu.state = Gpu::kParked;  // for host memory that another GPU holds
      }
    } else {
      gpu.state = Gpu::kDone;
    }
  }

  void begin_step(int64_t g, int64_t now) {
    Gpu& gpu = gpus_[at(g)];
    int64_t tokens = 0;
    gpu.batch = gpu.active;
    for (const int64_t r : gpu.batch) {
      const Sequence& sequence = sequences_[at(r)];
      tokens += field(r, kPromptTokens) + sequence.produced + 1;
      if (sequence.produced == 0)
        record(r, kQueueNs) = now - record(r, kArrived) - record(r, kPrefillComputeNs) - record(r, kAttachTransferNs);
    }
    const auto batch = static_cast<double>(gpu.batch.size());
    const double per_request = options_.per_request_ns + options_.per_context_ns * (static_cast<double>(tokens) / batch);
    gpu.compute_ns = static_cast<int64_t>(std::nearbyint(options_.base_ns + per_request * batch));
    gpu.layer = 0;
    gpu.stall_ns = 0;
    compute(g, now);
  }

  void compute(int64_t g, int64_t now) {
    Gpu& gpu = gpus_[at(g)];
    gpu.compute_until = std::max(gpu.compute_until, now) + gpu.compute_ns;
    gpu.busy_ns += gpu.compute_ns;
    gpu.state = Gpu::kComputed;
    push(g, gpu.compute_until);
  }

  int64_t wait_for_writes(const Gpu& gpu, int64_t now) const {
    for (const int64_t r : gpu.batch) now = std::max(now, sequences_[at(r)].written_ns[gpu.layer]);
    return now;
  }

  // Position in a stream: its first steps once, then the rest round and round from the request's own phase.
  size_t place_in_stream(int64_t r, size_t layer) const {
    const size_t cell = at(r) * anchors_.size() + layer;
    int64_t step = sequences_[at(r)].produced;
    if (step >= warm_) step = warm_ + (step - warm_ + phase_[cell]) % (steps_ - warm_);
    return at(stream_[cell]) * at(steps_) + at(step);
  }

  // One batched read per device (or one in all), in the order in which the batch first names the device.
  struct Group {
    int64_t device, first, rows, requests;
  };

  Group& group_of(std::vector<Group>& groups, int64_t r) const {
    const int64_t device = options_.by_device ? field(r, kDevice) : 0;
    for (Group& group : groups)
      if (group.device == device) return group;
    groups.push_back({device, r, 0, 0});
    return groups.back();
  }

  int64_t fetch(const Gpu& gpu, size_t layer, int64_t now) {
    groups_.clear();
    for (const int64_t r : gpu.batch) {
      const size_t place = place_in_stream(r, layer);
      const int64_t rows = misses_[place];
      if (rows == 0) continue;
      Group& group = group_of(groups_, r);
      group.rows += rows;
      group.requests += runs_[place];
      record(r, kRowsMissed) += rows;
      if (sequences_[at(r)].produced == 0) record(r, kRowsFirst) += rows;
    }
    int64_t end = now;
    for (const Group& group : groups_)
      end = std::max(end, transfer(path(group.first, kMissPath), now, group.rows * options_.kv_row_bytes,
                                   options_.work_requests ? group.requests : group.rows));
    return end;
  }

  int64_t read_misses(Gpu& gpu, int64_t now) {
    if (gpu.prefetched_ns[gpu.layer] != kNever) {
      const int64_t end = std::max(now, gpu.prefetched_ns[gpu.layer]);
      gpu.prefetched_ns[gpu.layer] = kNever;
      return end;
    }
    const int64_t end = fetch(gpu, gpu.layer, now);
    // Layers that share this layer's selection miss the same rows: they are read ahead.
    if (options_.index_prefetch)
      for (size_t next = gpu.layer + 1; next < anchors_.size() && at(anchors_[next]) == gpu.layer; ++next)
        gpu.prefetched_ns[next] = fetch(gpu, next, now);
    return end;
  }

  void write_back(Gpu& gpu, int64_t now) {
    groups_.clear();
    for (const int64_t r : gpu.batch) {
      const int64_t length = field(r, kPromptTokens) + sequences_[at(r)].produced + 1;
      if (length % options_.tokens_per_row != 0) continue;
      ++group_of(groups_, r).rows;
    }
    const int64_t row_bytes = options_.kv_row_bytes + (has_index_[gpu.layer] ? options_.index_row_bytes : 0);
    for (Group& group : groups_)
      group.requests = transfer(path(group.first, kWritePath), now, group.rows * row_bytes, group.rows);
    for (const int64_t r : gpu.batch) {
      const int64_t length = field(r, kPromptTokens) + sequences_[at(r)].produced + 1;
      if (length % options_.tokens_per_row != 0) continue;
      sequences_[at(r)].written_ns[gpu.layer] = group_of(groups_, r).requests;
    }
  }

  void next_layer(int64_t g, int64_t now) {
    Gpu& gpu = gpus_[at(g)];
    gpu.stall_ns += now - gpu.began_ns;
    if (++gpu.layer < anchors_.size()) return compute(g, now);
    for (const int64_t r : gpu.batch) {
      Sequence& sequence = sequences_[at(r)];
      const size_t token = at(first_token_[at(r)] + sequence.produced++);
      token_ns_[token] = now;
      stall_out_ns_[token] = gpu.stall_ns;
    }
    gpu.stalled_ns += gpu.stall_ns;
    retire(g, now);
    turn(g, now);
  }

  Options options_;
  std::vector<int32_t> anchors_;
  std::vector<bool> has_index_;
  Timeline links_;
  std::vector<Gpu> gpus_;
  const Table<int64_t>* requests_ = nullptr;
  size_t count_ = 0;
  const int32_t *misses_ = nullptr, *runs_ = nullptr, *stream_ = nullptr, *phase_ = nullptr;
  int64_t *records_ = nullptr, *token_ns_ = nullptr, *stall_out_ns_ = nullptr;
  int64_t steps_ = 0, warm_ = 0, pushes_ = 0, host_now_ = 0, prefill_until_ = 0, ended_ = 0;
  std::vector<int64_t> prefetching_;  // per group of GPUs that step together
  std::priority_queue<Event, std::vector<Event>, std::greater<>> queue_;
  std::vector<Sequence> sequences_;
  std::vector<Attaching> attach_;
  std::vector<int64_t> first_token_;
  std::vector<std::vector<int64_t>> arrivals_;
  std::vector<size_t> next_arrival_;
  std::vector<Group> groups_;  // scratch of a layer
};

}  // namespace

void register_serving(nb::module_& m) {
  nb::class_<Options>(m, "ServingOptions")
      .def(nb::init<>())
      .def_rw("hbm_bytes", &Options::hbm_bytes)
      .def_rw("host_bytes", &Options::host_bytes)
      .def_rw("base_ns", &Options::base_ns)
      .def_rw("per_request_ns", &Options::per_request_ns)
      .def_rw("per_context_ns", &Options::per_context_ns)
      .def_rw("kv_row_bytes", &Options::kv_row_bytes)
      .def_rw("index_row_bytes", &Options::index_row_bytes)
      .def_rw("tokens_per_row", &Options::tokens_per_row)
      .def_rw("closed", &Options::closed)
      .def_rw("prefill", &Options::prefill)
      .def_rw("prefetches", &Options::prefetches)
      .def_rw("resident", &Options::resident)
      .def_rw("by_device", &Options::by_device)
      .def_rw("work_requests", &Options::work_requests)
      .def_rw("index_prefetch", &Options::index_prefetch)
      .def_rw("stop_after", &Options::stop_after)
      .def_rw("lockstep_gpus", &Options::lockstep_gpus);
  nb::class_<Serving>(m, "Serving", "One simulated run; not for two threads, not for two runs.")
      .def(nb::init<Options, Column<int64_t>, Column<int32_t>, Column<bool>>(), "options"_a, "gpu_places"_a.noconvert(),
           "anchors"_a.noconvert(), "has_index"_a.noconvert())
      .def("add_link", &Serving::add_link, "latency_ns"_a, "read_bytes_per_ns"_a, "write_bytes_per_ns"_a,
           "per_request_ns"_a)
      .def("add_path", &Serving::add_path, "links"_a.noconvert(), "one_message"_a.noconvert(), "write"_a, "setup_ns"_a,
           "parallelism"_a)
      .def("run", &Serving::run, "requests"_a.noconvert(), "misses"_a.noconvert(), "runs"_a.noconvert(),
           "warm_steps"_a, "stream"_a.noconvert(), "phase"_a.noconvert(), "records"_a.noconvert(),
           "token_ns"_a.noconvert(), "stall_ns"_a.noconvert())
      .def("link_busy_ns", &Serving::link_busy_ns)
      .def("link_bytes", &Serving::link_bytes)
      .def("peak_bytes", &Serving::peak_bytes, "GPU memory held at most, per GPU.")
      .def("stalled_ns", &Serving::stalled_ns, "Time that each GPU's steps waited for rows.")
      .def("computing_ns", &Serving::computing_ns, "Time that each GPU computed.")
      .def_ro("host_peak", &Serving::host_peak)
      .def_ro("hbm_refusals", &Serving::hbm_refusals)
      .def_ro("host_refusals", &Serving::host_refusals)
      .def_ro("events", &Serving::events);
}
