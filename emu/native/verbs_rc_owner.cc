// The memory node's end of a reliable connection. READs and WRITEs are the device's alone; a thread answers PACKs.
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>
#include <netinet/in.h>
#include <poll.h>
#include <signal.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstring>
#include <mutex>
#include <optional>
#include <thread>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include "verbs_device.h"
#include "verbs_domain.h"
#include "verbs_rc_endpoint.h"

using namespace nb::literals;
using namespace ibverbs;

namespace verbs {
namespace {

constexpr uint32_t kSendDepth = 64;          // WRITEs of one doorbell; one more place is the answer's
constexpr uint64_t kMessage = 0, kSent = 1;  // wr_id of the receive, and of whatever is sent

struct Exposed {
  uint64_t offset, length;
  uint32_t access, lkey;
};

class RcOwner {
 public:
  RcOwner(const NodeMemory& memory, const Device& device, double timeout_s)
      : memory_(memory),
        timeout_s_(timeout_s),
        max_sge_(device.max_sge()),
        connection_(device, {kSendDepth + 1, 1}),
        message_(kPackMessageBytes),
        message_key_(connection_.register_memory(message_.data(), message_.size(), IBV_ACCESS_LOCAL_WRITE).lkey),
        stop_(Fd::event()) {}
  ~RcOwner() { close(); }

  // Ready for the peer, which may start at once.
  void connect(const Endpoint& peer, uint32_t reads) {
    if (thread_.joinable()) throw std::logic_error("the queue pair is connected already");
    receive();
    connection_.connect(peer, {1, static_cast<uint8_t>(reads)}, timeout_s_);
    thread_ = std::thread([this] { run_guarded(); });
  }
  Endpoint endpoint() const { return connection_.endpoint(); }

  // The key of a range for this client, and where the range begins for its device.
  std::tuple<uint32_t, uint64_t> expose(uint64_t offset, uint64_t length, uint32_t access) {
    if (!inside(offset, length, memory_.size))
      throw std::invalid_argument("the region passes the end of the node's memory");
    // A device writes to no memory that its own process may not write to.
    const unsigned local = access & kRemoteWrite ? kLocalWrite : 0u;
    const std::lock_guard guard(mutex_);
    const ibv_mr& region = connection_.register_memory(memory_.mapping.data() + offset, length, access | local);
    exposed_[region.rkey] = {offset, length, access, region.lkey};
    return {region.rkey, reinterpret_cast<uintptr_t>(region.addr)};
  }

  void close() {
    if (!thread_.joinable()) return;
    ring_event(stop_);
    thread_.join();
  }

 private:
  void receive() {
    ibv_sge sge{reinterpret_cast<uintptr_t>(message_.data()), static_cast<uint32_t>(message_.size()), message_key_};
    connection_.post_receive(kMessage, &sge);
  }

  // One client's trouble ends its queue pair only.
  void run_guarded() noexcept {
    try {
      sigset_t all;
      sigfillset(&all);
      pthread_sigmask(SIG_BLOCK, &all, nullptr);  // signals are the main thread's
      while (const std::optional<ibv_wc> message = next_message()) {
        if (message->status != 0) break;  // the client is gone, or did what it may not
        const Status status = pack(message->byte_len);
        receive();  // before the client may send again
        answer(status);
      }
    } catch (const std::exception& error) {
      std::fprintf(stderr, "queue pair stopped: %s\n", error.what());
    }
    connection_.fail();  // a client that still waits hears of it
  }

  std::optional<ibv_wc> next_message() { return early_ ? std::exchange(early_, std::nullopt) : next_completion(); }

  // Sleeps until the next completion; none when the connection shall end.
  std::optional<ibv_wc> next_completion() {
    ibv_wc done;
    for (;;) {
      if (connection_.poll({&done, 1})) return done;
      connection_.arm();
      if (connection_.poll({&done, 1})) return done;
      pollfd fds[2] = {{connection_.event_fd(), POLLIN, 0}, {stop_.get(), POLLIN, 0}};
      ::poll(fds, 2, -1);
      if (fds[1].revents) return std::nullopt;
      if (fds[0].revents) connection_.take_event();
    }
  }

  // Check every row of the message, then gather: a fault writes nothing.
  Status pack(size_t nbytes) {
    PackMessage head;
    const Status status = resolve(nbytes, head);
    if (status == Status::kSuccess) write_rows(head);
    return status;
  }

  Status resolve(size_t nbytes, PackMessage& head) {
    if (nbytes < sizeof head) return Status::kRemInvReqErr;
    std::memcpy(&head, message_.data(), sizeof head);
    if (nbytes != sizeof head + uint64_t{head.count} * sizeof(uint64_t)) return Status::kRemInvReqErr;
    const std::lock_guard guard(mutex_);
    const auto found = exposed_.find(head.rkey);
    if (found == exposed_.end() || !(found->second.access & kRemoteRead)) return Status::kRemAccessErr;
    rows_.resize(head.count);
    for (size_t i = 0; i < head.count; ++i) {
      uint64_t offset;
      std::memcpy(&offset, message_.data() + sizeof head + i * sizeof offset, sizeof offset);
      if (!inside(offset, head.row_bytes, found->second.length)) return Status::kRemAccessErr;
      const uint8_t* row = memory_.mapping.data() + found->second.offset + offset;
      rows_[i] = {reinterpret_cast<uintptr_t>(row), head.row_bytes, found->second.lkey};
    }
    return Status::kSuccess;
  }

  // WRITEs that gather as many rows as the device takes at once; the rows stay in order at the target.
  void write_rows(const PackMessage& head) {
    std::array<ibv_send_wr, kSendDepth> writes;
    uint64_t target = head.target_address;
    for (size_t done = 0; done < rows_.size();) {
      size_t count = 0;
      for (; count < writes.size() && done < rows_.size(); ++count) {
        const size_t rows = std::min(max_sge_, rows_.size() - done);
        ibv_send_wr& write = writes[count] = {};
        write.wr_id = kSent;
        write.sg_list = &rows_[done];
        write.num_sge = static_cast<int>(rows);
        write.opcode = IBV_WR_RDMA_WRITE;
        write.wr.rdma.remote_addr = target;
        write.wr.rdma.rkey = head.target_key;
        if (count > 0) writes[count - 1].next = &write;
        target += rows * head.row_bytes;
        done += rows;
      }
      writes[count - 1].send_flags = IBV_SEND_SIGNALED;
      post(writes.data());
    }
  }

  void answer(Status status) {
    ibv_send_wr reply{};
    reply.wr_id = kSent;
    reply.opcode = IBV_WR_SEND_WITH_IMM;
    reply.send_flags = IBV_SEND_SIGNALED;
    reply.imm_data = htonl(static_cast<uint32_t>(status));
    post(&reply);
  }

  // Post requests of which the last is signalled, and wait until they are done. The next message may come first.
  void post(ibv_send_wr* first) {
    connection_.post_send(first);
    for (;;) {
      const std::optional<ibv_wc> done = next_completion();
      if (!done) throw std::runtime_error("the node ends");
      if (done->wr_id == kMessage) {
        early_ = done;
        continue;
      }
      if (done->status == 0) return;
      throw std::runtime_error(std::string("an answer failed: ") + status_name(static_cast<Status>(done->status)));
    }
  }

  const NodeMemory& memory_;
  double timeout_s_;
  size_t max_sge_;
  std::mutex mutex_;
  std::unordered_map<uint32_t, Exposed> exposed_;  // by rkey
  RcConnection connection_;
  std::vector<uint8_t> message_;
  uint32_t message_key_;
  std::vector<ibv_sge> rows_;
  std::optional<ibv_wc> early_;  // a message that came while an answer was under way
  Fd stop_;
  std::thread thread_;
};

}  // namespace

void register_rc_owner(nb::module_& m) {
  nb::class_<RcOwner>(m, "RcOwner", "A memory node's end of one reliable connection.")
      .def(nb::init<const NodeMemory&, const Device&, double>(), nb::keep_alive<1, 2>(), nb::keep_alive<1, 3>(),
           "memory"_a, "device"_a, "timeout_s"_a)
      .def_prop_ro("endpoint", [](const RcOwner& self) { return endpoint_values(self.endpoint()); }, kEndpointDoc)
      .def(
          "connect",
          [](RcOwner& self, const EndpointValues& peer, uint32_t reads) { self.connect(endpoint_from(peer), reads); },
          "peer"_a, "max_reads"_a, "max_reads: in flight, of the client's.")
      .def(
          "expose",
          [](RcOwner& self, uint64_t offset, uint64_t nbytes, bool remote_read, bool remote_write) {
            uint32_t access = 0;
            if (remote_read) access |= kRemoteRead;
            if (remote_write) access |= kRemoteWrite;
            return self.expose(offset, nbytes, access);
          },
          nb::call_guard<nb::gil_scoped_release>(), "offset"_a, "nbytes"_a, "remote_read"_a, "remote_write"_a,
          "Let the client reach a range; returns its rkey and the address of its beginning.")
      .def("close", &RcOwner::close, nb::call_guard<nb::gil_scoped_release>(), "Stop the thread; twice is allowed.");
}

}  // namespace verbs
