// The queue pair that needs no kernel module: rings in memory shared with a memory node, whose thread plays the
// adapter of both sides. The client never maps the node's memory.
#include <nanobind/ndarray.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>
#include <poll.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstring>
#include <tuple>
#include <utility>
#include <vector>

#include "verbs_shared.h"

using namespace nb::literals;

namespace verbs {
namespace {

using Clock = std::chrono::steady_clock;

class RingQueuePair final : public QueuePair {
 public:
  RingQueuePair(size_t depth, uint32_t max_rd_atomic, double timeout_s)
      : depth_(checked(depth)),
        max_rd_atomic_(max_rd_atomic),
        timeout_(std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(timeout_s))),
        file_(sealed_memory("emu-queue-pair", Rings::bytes(depth))),
        mapping_(file_.get(), Rings::bytes(depth)),
        doorbell_(Fd::event()),
        completed_(Fd::event()),
        rings_(mapping_.data(), depth) {
    if (max_rd_atomic == 0) throw std::invalid_argument("max_rd_atomic must be at least 1");
    if (!(timeout_s > 0)) throw std::invalid_argument("timeout_s must be positive");
  }

  // The rings, the doorbell and the completion event: what the node must be given.
  std::vector<int> fds() const { return {file_.get(), doorbell_.get(), completed_.get()}; }

  // The socket whose end of file says that the node is gone. It stays the caller's.
  void connect(int socket) { socket_ = Fd::duplicate(socket); }

  size_t post(std::span<const WorkRequest> requests) override {
    if (socket_.get() < 0) throw std::logic_error("the queue pair is not connected");
    const size_t count = std::min<size_t>(requests.size(), depth_ - (posted_ - reaped_));
    for (size_t i = 0; i < count; ++i) {
      const WorkRequest& request = requests[i];
      if (request.num_sge > kMaxSge)
        throw std::invalid_argument("a work request has at most " + std::to_string(kMaxSge) + " scatter entries");
      std::memcpy(static_cast<void*>(&rings_.request(posted_ + i)), &request,
                  kWorkRequestHeaderBytes + request.num_sge * sizeof(Sge));
    }
    posted_ += count;
    rings_.header.sq_tail.store(posted_, std::memory_order_release);
    std::atomic_thread_fence(std::memory_order_seq_cst);
    if (rings_.header.node_sleeps.load(std::memory_order_relaxed)) ring_event(doorbell_);
    return count;
  }

  size_t poll(std::span<Completion> completions) override {
    size_t count = 0;
    const uint64_t tail = rings_.header.cq_tail.load(std::memory_order_acquire);
    for (; count < completions.size() && polled_ != tail; ++polled_) {
      const RingCompletion& entry = rings_.completion(polled_);
      reaped_ = entry.position + 1;
      in_error_ = in_error_ || entry.status != Status::kSuccess;
      completions[count++] = {entry.wr_id, entry.status, entry.opcode};
    }
    rings_.header.cq_head.store(polled_, std::memory_order_release);
    if (lost_ && polled_ == tail) count += flush_lost(completions.subspan(count));
    return count;
  }

  void wait() override {
    if (socket_.get() < 0) throw std::logic_error("the queue pair is not connected");
    auto deadline = Clock::now() + timeout_;
    uint64_t head = finished();
    if (head == posted_ && !lost_) return;  // nothing is under way: whatever completed is there already
    while (!lost_ && !sleep_until(deadline)) {
      if (Clock::now() < deadline) continue;
      const uint64_t now = finished();
      if (now == posted_) return;
      if (now == head) lost_ = true;  // a whole timeout without one request finished
      head = now;
      deadline = Clock::now() + timeout_;
    }
    if (lost_) rings_.header.abandoned.store(1, std::memory_order_release);
  }

  size_t send_queue_depth() const override { return depth_; }
  size_t max_sge() const override { return kMaxSge; }
  uint32_t max_rd_atomic() const override { return max_rd_atomic_; }
  uint32_t max_outstanding_reads() const override {
    return rings_.header.max_outstanding_reads.load(std::memory_order_acquire);
  }
  void reset_max_outstanding_reads() override {
    rings_.header.max_outstanding_reads.store(0, std::memory_order_release);
  }

 private:
  static size_t checked(size_t depth) {
    Rings::check(depth);
    return depth;
  }

  // Requests that the node finished: a number that it writes, so never trusted past what was posted.
  uint64_t finished() const { return std::min(rings_.header.sq_head.load(std::memory_order_acquire), posted_); }

  bool completion_there() const { return rings_.header.cq_tail.load(std::memory_order_acquire) != polled_; }

  // True when a completion is there or the node is lost.
  bool sleep_until(Clock::time_point deadline) {
    std::atomic<uint32_t>& sleeps = rings_.header.client_sleeps;
    sleeps.store(1, std::memory_order_relaxed);
    std::atomic_thread_fence(std::memory_order_seq_cst);
    if (!completion_there()) {
      const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now()).count();
      pollfd fds[2] = {{completed_.get(), POLLIN, 0}, {socket_.get(), POLLRDHUP, 0}};
      const int ready = ::poll(fds, 2, static_cast<int>(std::max<int64_t>(left, 0)));
      if (ready < 0 && errno != EINTR) throw_errno("cannot wait for a completion");
      if (ready > 0 && fds[0].revents) clear_event(completed_);
      if (ready > 0 && fds[1].revents && !completion_there()) lost_ = true;
    }
    sleeps.store(0, std::memory_order_relaxed);
    return lost_ || completion_there();
  }

  // What a lost node left undone: the oldest request ran out of retries, the others are flushed.
  size_t flush_lost(std::span<Completion> completions) {
    reaped_ = std::max(reaped_, finished());
    size_t count = 0;
    for (; count < completions.size() && reaped_ != posted_; ++reaped_) {
      const WorkRequest& request = rings_.request(reaped_);
      const Status status = std::exchange(in_error_, true) ? Status::kWrFlushErr : Status::kRetryExcErr;
      completions[count++] = {request.wr_id, status, request.opcode};
    }
    return count;
  }

  size_t depth_;
  uint32_t max_rd_atomic_;
  Clock::duration timeout_;
  Fd file_;
  Mapping mapping_;
  Fd doorbell_, completed_, socket_;
  Rings rings_;
  uint64_t posted_ = 0, reaped_ = 0, polled_ = 0;
  bool in_error_ = false;  // some completion said so already
  bool lost_ = false;
};

// Pages that the client hands out as arrays and registers with the node.
struct RegisteredMemory {
  explicit RegisteredMemory(size_t nbytes)
      : file(sealed_memory("emu-registered", nbytes)), mapping(file.get(), nbytes) {}
  Fd file;
  Mapping mapping;
};

using SgeList = std::vector<std::tuple<uint64_t, uint32_t, uint32_t>>;
using Bytes = nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>, nb::c_contig>;

std::vector<Completion> poll_all(QueuePair& self, size_t limit) {
  std::vector<Completion> completions(limit);
  completions.resize(self.poll(completions));
  return completions;
}

WorkRequest make_request(Opcode opcode, uint64_t wr_id, uint32_t rkey, uint64_t remote_offset,
                         const SgeList& sge, bool signalled) {
  if (sge.size() > kMaxSge)
    throw std::invalid_argument("a work request has at most " + std::to_string(kMaxSge) + " scatter entries");
  WorkRequest request{};
  request.wr_id = wr_id;
  request.remote_offset = remote_offset;
  request.rkey = rkey;
  request.opcode = opcode;
  request.signalled = signalled;
  for (const auto& [address, length, lkey] : sge) request.sge[request.num_sge++] = {address, length, lkey};
  return request;
}

}  // namespace

void register_ring(nb::module_& m) {
  nb::class_<RegisteredMemory>(m, "RegisteredMemory", "Pages for the local side of a queue pair.")
      .def(nb::init<size_t>(), "nbytes"_a)
      .def_prop_ro("fd", [](const RegisteredMemory& self) { return self.file.get(); })
      .def_prop_ro("address",
                   [](const RegisteredMemory& self) { return reinterpret_cast<uintptr_t>(self.mapping.data()); })
      .def(
          "array", [](const RegisteredMemory& self) { return Bytes(self.mapping.data(), {self.mapping.size()}); },
          nb::rv_policy::reference_internal, "uint8 [nbytes]; keeps the pages mapped.")
      .def("close_fd", [](RegisteredMemory& self) { self.file.reset(); }, "Once registered: the mapping stays.");
  nb::enum_<Opcode>(m, "Opcode")
      .value("READ", Opcode::kRead)
      .value("WRITE", Opcode::kWrite)
      .value("PACK", Opcode::kPack);
  nb::class_<WorkRequest>(m, "WorkRequest", "sge: (address, length, lkey) of registered memory, at most 30.")
      .def("__init__",
           [](WorkRequest* self, Opcode opcode, uint64_t wr_id, uint32_t rkey, uint64_t remote_offset,
              const SgeList& sge, bool signalled) {
             new (self) WorkRequest(make_request(opcode, wr_id, rkey, remote_offset, sge, signalled));
           },
           "opcode"_a, "wr_id"_a, "rkey"_a, "remote_offset"_a, "sge"_a, "signalled"_a = true);
  nb::class_<Completion>(m, "Completion")
      .def_prop_ro("status", [](const Completion& self) { return status_name(self.status); });
  nb::class_<QueuePair>(m, "QueuePair", "A reliable connection. Not safe for two threads at once.")
      .def("post", [](QueuePair& self, const std::vector<WorkRequest>& requests) { return self.post(requests); },
           "requests"_a, "Post as many as the send queue takes; returns how many were.")
      .def("poll", &poll_all, "limit"_a = 64, "Completions that are there already.")
      .def("wait", &QueuePair::wait, nb::call_guard<nb::gil_scoped_release>(), "Sleep until poll() has something.")
      .def_prop_ro("send_queue_depth", &QueuePair::send_queue_depth)
      .def_prop_ro("max_sge", &QueuePair::max_sge, "Scatter entries of one work request.")
      .def_prop_ro("max_rd_atomic", &QueuePair::max_rd_atomic)
      .def_prop_ro("max_outstanding_reads", &QueuePair::max_outstanding_reads);
  nb::class_<RingQueuePair, QueuePair>(m, "RingQueuePair", "A queue pair executed by a memory node.")
      .def(nb::init<size_t, uint32_t, double>(), "send_queue_depth"_a, "max_rd_atomic"_a, "timeout_s"_a)
      .def_prop_ro("fds", &RingQueuePair::fds, "(rings, doorbell, completion event), for the node.")
      .def("connect", &RingQueuePair::connect, "socket"_a, "The socket whose end says that the node is gone.");
}

}  // namespace verbs
