// The queue pair of a real device: work requests go to it as linked lists, completions come from its queue.
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>
#include <netinet/in.h>
#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <tuple>
#include <utility>
#include <vector>

#include "verbs_device.h"
#include "verbs_rc_endpoint.h"
#include "verbs_shared.h"

using namespace nb::literals;
using namespace ibverbs;

namespace verbs {
namespace {

using Clock = std::chrono::steady_clock;

constexpr uint64_t kReply = ~uint64_t{0};  // wr_id of the receive that a PACK's answer takes
constexpr auto kSpin = std::chrono::microseconds(20);  // adapters answer in a few; sleeping costs about as much
constexpr size_t kPolled = 32;
constexpr size_t kLinked = 256;  // work requests of one doorbell

// Requests are counted; each one's number is its wr_id at the device, so that a completion says how far the send
// queue is free. A PACK is a SEND and the answer to it; nothing is posted behind one that is under way, as answers
// would come out of order.
class RcQueuePair final : public QueuePair {
 public:
  RcQueuePair(const Device& device, size_t depth, uint32_t max_rd_atomic, double timeout_s)
      : device_(device),
        max_rd_atomic_(max_rd_atomic),
        timeout_s_(timeout_s),
        posted_requests_(checked(device, depth)),
        sends_(kLinked),
        connection_(device, {static_cast<uint32_t>(depth), 1}) {
    if (max_rd_atomic == 0) throw std::invalid_argument("max_rd_atomic must be at least 1");
    if (!(timeout_s > 0)) throw std::invalid_argument("timeout_s must be positive");
    done_.reserve(depth + kPolled);
  }

  Endpoint endpoint() const { return connection_.endpoint(); }

  // `reads` in flight are what both devices allow; the socket's end of file says that the node is gone.
  void connect(const Endpoint& peer, uint32_t reads, int socket) {
    max_rd_atomic_ = std::min(max_rd_atomic_, reads);
    connection_.connect(peer, {static_cast<uint8_t>(max_rd_atomic_), 1}, timeout_s_);
    connection_.post_receive(kReply, nullptr);
    socket_ = Fd::duplicate(socket);
  }

  Keys register_memory(uint64_t address, size_t nbytes) {
    const ibv_mr& memory = connection_.register_memory(reinterpret_cast<void*>(address), nbytes,
                                                       IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE);
    return {memory.lkey, memory.rkey};
  }
  void deregister_memory(uint32_t lkey) { connection_.deregister_memory(lkey); }

  // Where offset 0 of the region lies for the device.
  void add_remote(uint32_t rkey, uint64_t address) { remotes_.push_back({rkey, address}); }

  size_t post(std::span<const WorkRequest> requests) override {
    if (socket_.get() < 0) throw std::logic_error("the queue pair is not connected");
    if (pack_.under_way) return 0;
    const size_t room = std::min<size_t>(requests.size(), posted_requests_.size() - (posted_ - reaped_));
    size_t count = 0;
    for (bool last = false; count < room && !last; ++count) last = requests[count].opcode == Opcode::kPack;
    for (size_t done = 0; done < count;) done += post_list(requests.subspan(done, count - done));
    return count;
  }

  size_t poll(std::span<Completion> completions) override {
    collect();
    const size_t count = std::min(completions.size(), done_.size());
    std::copy_n(done_.begin(), count, completions.begin());
    done_.erase(done_.begin(), done_.begin() + static_cast<std::ptrdiff_t>(count));
    return count;
  }

  void wait() override {
    if (socket_.get() < 0) throw std::logic_error("the queue pair is not connected");
    if (posted_ == reaped_ || collect()) return;
    static const bool may_spin = ::sysconf(_SC_NPROCESSORS_ONLN) > 1;
    for (const auto until = Clock::now() + kSpin; may_spin && Clock::now() < until;)
      if (collect()) return;
    const auto deadline =
        Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(timeout_s_));
    while (!collect()) sleep_until(deadline);
  }

  size_t send_queue_depth() const override { return posted_requests_.size(); }
  size_t max_sge() const override { return device_.max_sge(); }
  uint32_t max_rd_atomic() const override { return max_rd_atomic_; }
  // What the device was given at once; it keeps at most max_rd_atomic of them in flight.
  uint32_t max_outstanding_reads() const override { return std::min(most_reads_, max_rd_atomic_); }
  void reset_max_outstanding_reads() override { most_reads_ = 0; }

 private:
  struct Posted {
    uint64_t wr_id;
    Opcode opcode;
  };
  struct Remote {
    uint32_t rkey;
    uint64_t address;
  };
  struct Pack {
    bool under_way = false, sent = false, answered = false;
    Status status = Status::kSuccess;
  };

  static size_t checked(const Device& device, size_t depth) {
    if (depth < 2 || depth > static_cast<size_t>(device.limits().max_qp_wr))
      throw std::invalid_argument("send_queue_depth must be from 2 to the device's " +
                                  std::to_string(device.limits().max_qp_wr));
    return depth;
  }

  Posted& posted(uint64_t number) { return posted_requests_[number % posted_requests_.size()]; }

  // An unknown key has no address here; the device refuses it, as any other that it does not know.
  uint64_t remote_address(const WorkRequest& request) const {
    for (const Remote& remote : remotes_)
      if (remote.rkey == request.rkey) return remote.address + request.remote_offset;
    return remotes_.empty() ? request.remote_offset : remotes_.front().address + request.remote_offset;
  }

  // Link requests and ring the doorbell once; returns how many.
  size_t post_list(std::span<const WorkRequest> requests) {
    const size_t count = std::min(requests.size(), sends_.size());
    for (size_t i = 0; i < count; ++i) {
      translate(requests[i], sends_[i], posted_ + i);
      sends_[i].next = i + 1 < count ? &sends_[i + 1] : nullptr;
      posted(posted_ + i) = {requests[i].wr_id, requests[i].opcode};
      reads_under_way_ += requests[i].opcode == Opcode::kRead;
      if (requests[i].opcode == Opcode::kPack) pack_ = {.under_way = true};
    }
    most_reads_ = std::max(most_reads_, reads_under_way_);
    connection_.post_send(sends_.data());
    posted_ += count;
    return count;
  }

  void translate(const WorkRequest& request, ibv_send_wr& send, uint64_t number) const {
    static_assert(sizeof(Sge) == sizeof(ibv_sge) && offsetof(Sge, lkey) == offsetof(ibv_sge, lkey));
    if (request.num_sge > device_.max_sge())
      throw std::invalid_argument("a work request has at most " + std::to_string(device_.max_sge()) +
                                  " scatter entries on " + device_.name());
    send = {};
    send.wr_id = number;
    send.sg_list = reinterpret_cast<ibv_sge*>(const_cast<Sge*>(request.sge));  // only read
    send.num_sge = request.num_sge;
    if (request.opcode == Opcode::kPack) {
      send.opcode = IBV_WR_SEND;
      send.send_flags = IBV_SEND_SIGNALED;
      return;
    }
    send.opcode = request.opcode == Opcode::kRead ? IBV_WR_RDMA_READ : IBV_WR_RDMA_WRITE;
    send.send_flags = request.signalled ? IBV_SEND_SIGNALED : 0u;
    send.wr.rdma.remote_addr = remote_address(request);
    send.wr.rdma.rkey = request.rkey;
  }

  // Take in what the device completed; true when poll() has something.
  bool collect() {
    if (done_.empty() && !lost_) {
      ibv_wc completions[kPolled];
      const size_t count = connection_.poll(completions);
      for (size_t i = 0; i < count; ++i) take(completions[i]);
    }
    return !done_.empty();
  }

  void take(const ibv_wc& completion) {
    const auto status = static_cast<Status>(completion.status);
    if (completion.wr_id == kReply) {
      take_reply(completion, status);
    } else if (posted(completion.wr_id).opcode == Opcode::kPack) {
      pack_.sent = true;
      if (status != Status::kSuccess) pack_.status = status;
    } else {
      complete(completion.wr_id, status);
    }
    // A SEND that failed gets no answer.
    if (pack_.under_way && pack_.sent && (pack_.answered || pack_.status != Status::kSuccess)) finish_pack();
  }

  void take_reply(const ibv_wc& completion, Status status) {
    if (!pack_.under_way) return;  // the receive was flushed after another request's error
    pack_.answered = true;
    if (pack_.status == Status::kSuccess)
      pack_.status = status == Status::kSuccess ? static_cast<Status>(ntohl(completion.imm_data)) : status;
    if (status == Status::kSuccess) connection_.post_receive(kReply, nullptr);
  }

  // A PACK that the owner refuses is an error like any other: what follows it is flushed.
  void finish_pack() {
    const Status status = pack_.status;
    pack_ = {};
    if (status != Status::kSuccess) connection_.fail();
    complete(posted_ - 1, status);
  }

  void complete(uint64_t number, Status status) {
    for (; reaped_ <= number; ++reaped_) reads_under_way_ -= posted(reaped_).opcode == Opcode::kRead;
    in_error_ = in_error_ || status != Status::kSuccess;
    done_.push_back({posted(number).wr_id, status, posted(number).opcode});
  }

  void sleep_until(Clock::time_point deadline) {
    connection_.arm();
    if (collect()) return;
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now()).count();
    pollfd fds[2] = {{connection_.event_fd(), POLLIN, 0}, {socket_.get(), POLLRDHUP, 0}};
    const int ready = ::poll(fds, 2, static_cast<int>(std::max<int64_t>(left, 0)));
    if (ready < 0 && errno != EINTR) throw_errno("cannot wait for a completion");
    if (ready > 0 && fds[0].revents) connection_.take_event();
    const bool gone = ready > 0 && fds[1].revents;
    if (!collect() && (gone || ready == 0)) lose();
  }

  // The node is gone, or silent for too long: the oldest request ran out of retries, the others are flushed.
  void lose() {
    connection_.fail();
    lost_ = true;
    for (; reaped_ != posted_; ++reaped_) {
      const Status status = std::exchange(in_error_, true) ? Status::kWrFlushErr : Status::kRetryExcErr;
      done_.push_back({posted(reaped_).wr_id, status, posted(reaped_).opcode});
    }
    reads_under_way_ = 0;
    pack_ = {};
  }

  const Device& device_;
  uint32_t max_rd_atomic_;
  double timeout_s_;
  std::vector<Posted> posted_requests_;
  std::vector<ibv_send_wr> sends_;
  std::vector<Completion> done_;
  std::vector<Remote> remotes_;
  RcConnection connection_;
  Fd socket_;
  Pack pack_;
  uint64_t posted_ = 0, reaped_ = 0;
  uint32_t reads_under_way_ = 0, most_reads_ = 0;
  bool in_error_ = false, lost_ = false;
};

}  // namespace

void register_rc(nb::module_& m) {
  nb::class_<RcQueuePair, QueuePair>(m, "RcQueuePair", "A reliable connection of a RoCE device.")
      .def(nb::init<const Device&, size_t, uint32_t, double>(), nb::keep_alive<1, 2>(), "device"_a,
           "send_queue_depth"_a, "max_rd_atomic"_a, "timeout_s"_a)
      .def_prop_ro("endpoint", [](const RcQueuePair& self) { return endpoint_values(self.endpoint()); }, kEndpointDoc)
      .def(
          "connect",
          [](RcQueuePair& self, const EndpointValues& peer, uint32_t reads, int socket) {
            self.connect(endpoint_from(peer), reads, socket);
          },
          "peer"_a, "max_reads"_a, "socket"_a, "The socket's end says that the node is gone.")
      .def(
          "register_memory",
          [](RcQueuePair& self, uint64_t address, size_t nbytes) {
            const Keys keys = self.register_memory(address, nbytes);
            return std::tuple(keys.lkey, keys.rkey);
          },
          nb::call_guard<nb::gil_scoped_release>(), "address"_a, "nbytes"_a, "Returns (lkey, rkey).")
      .def("deregister_memory", &RcQueuePair::deregister_memory, "lkey"_a)
      .def("add_remote", &RcQueuePair::add_remote, "rkey"_a, "address"_a, "Where offset 0 of a region lies.");
}

}  // namespace verbs
