// The memory node's side: one thread per queue pair that plays the adapter of both ends. It checks every key and
// bound before it moves a byte; the rings' content comes from another process and is never trusted.
#include <nanobind/stl/vector.h>
#include <poll.h>
#include <signal.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstring>
#include <mutex>
#include <thread>
#include <vector>

#include "verbs_domain.h"
#include "verbs_shared.h"

using namespace nb::literals;

namespace verbs {
namespace {

// READs in flight at once, whatever the client asks for.
constexpr uint32_t kMaxRdAtomic = 128;
constexpr uint64_t kMaxMessageBytes = uint64_t{1} << 31;
constexpr uint32_t kMaxPackRows = 1 << 20;
constexpr size_t kPrefetchRows = 6;

// The first lines of a row that is copied soon; the hardware follows by itself.
void prefetch(const uint8_t* data, uint64_t nbytes) {
  for (uint64_t byte = 0; byte < std::min<uint64_t>(nbytes, 1024); byte += 64) __builtin_prefetch(data + byte);
}

struct Piece {
  uint8_t* data;
  size_t nbytes;
};

// A work request, copied out of the ring and checked.
struct Issued {
  WorkRequest request;
  Status status;
  uint8_t* remote;
  uint64_t nbytes;
  std::array<Piece, kMaxSge> pieces;
};

class Responder {
 public:
  Responder(const NodeMemory& memory, const std::vector<int>& fds, size_t depth, uint32_t max_rd_atomic)
      : domain_(memory),
        mapping_(map_ring(fds, depth)),
        rings_(mapping_.data(), depth),
        depth_(depth),
        doorbell_(Fd::duplicate(fds[1])),
        completed_(Fd::duplicate(fds[2])),
        stop_(Fd::event()),
        window_(std::clamp<uint32_t>(max_rd_atomic, 1, kMaxRdAtomic)) {
    thread_ = std::thread([this] { run_guarded(); });
  }
  ~Responder() { close(); }

  void close() {
    if (!thread_.joinable()) return;
    stopping_.store(true, std::memory_order_release);
    ring_event(stop_);
    thread_.join();
  }
  ProtectionDomain& domain() { return domain_; }
  uint32_t max_rd_atomic() const { return static_cast<uint32_t>(window_.size()); }

 private:
  static Mapping map_ring(const std::vector<int>& fds, size_t depth) {
    if (fds.size() != 3) throw std::invalid_argument("a queue pair comes with three file descriptors");
    Rings::check(depth);
    return map_foreign(fds[0], Rings::bytes(depth));
  }

  // One client's trouble ends its queue pair only: the client sees no progress and gives up.
  void run_guarded() noexcept {
    try {
      run();
    } catch (const std::exception& error) {
      std::fprintf(stderr, "queue pair stopped: %s\n", error.what());
    }
  }

  void run() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, nullptr);  // signals are the main thread's
    while (!stopping_.load(std::memory_order_acquire)) {
      const uint64_t waiting = rings_.header.sq_tail.load(std::memory_order_acquire) - head_;
      if (waiting == 0) {
        sleep();
      } else if (waiting > depth_) {
        return;  // the ring is damaged: a client that waits sees its timeout
      } else if (failed_ || rings_.header.abandoned.load(std::memory_order_acquire)) {
        flush();
      } else {
        execute(waiting);
      }
    }
  }

  void sleep() {
    std::atomic<uint32_t>& sleeps = rings_.header.node_sleeps;
    sleeps.store(1, std::memory_order_relaxed);
    std::atomic_thread_fence(std::memory_order_seq_cst);
    if (rings_.header.sq_tail.load(std::memory_order_acquire) == head_) {
      pollfd fds[2] = {{doorbell_.get(), POLLIN, 0}, {stop_.get(), POLLIN, 0}};
      ::poll(fds, 2, -1);
      if (fds[0].revents) clear_event(doorbell_);
    }
    sleeps.store(0, std::memory_order_relaxed);
  }

  // Issue a window of READs, or one request of another kind, then finish what was issued in order.
  void execute(uint64_t waiting) {
    const std::lock_guard guard(domain_.mutex());
    uint32_t reads = 0;
    for (; reads < window_.size() && reads < waiting; ++reads) {
      Issued& next = window_[reads];
      fetch(rings_.request(head_ + reads), next);
      if (next.request.opcode != Opcode::kRead || next.status != Status::kSuccess) break;
      prefetch(next.remote, next.nbytes);
    }
    note_outstanding(reads);
    for (uint32_t i = 0; i < std::max(reads, 1u) && !failed_; ++i) finish(window_[i]);
  }

  void note_outstanding(uint32_t reads) {
    std::atomic<uint32_t>& most = rings_.header.max_outstanding_reads;
    if (reads > most.load(std::memory_order_relaxed)) most.store(reads, std::memory_order_release);
  }

  // Copy the request out of the ring, where it may still change, then check the copy.
  void fetch(const WorkRequest& shared, Issued& out) {
    std::memcpy(static_cast<void*>(&out.request), &shared, kWorkRequestHeaderBytes);
    const size_t pieces = std::min<size_t>(out.request.num_sge, kMaxSge);
    std::memcpy(out.request.sge, shared.sge, pieces * sizeof(Sge));
    out.status = out.request.num_sge > kMaxSge ? Status::kLocQpOpErr : check(out);
  }

  Status check(Issued& issued) {
    const WorkRequest& request = issued.request;
    uint64_t total = 0;
    for (int i = 0; i < request.num_sge; ++i) {
      const Sge& sge = request.sge[i];
      uint8_t* data = domain_.local(sge.lkey, sge.address, sge.length);
      if (!data) return Status::kLocProtErr;
      issued.pieces[static_cast<size_t>(i)] = {data, sge.length};
      total += sge.length;
    }
    issued.nbytes = total;
    if (total > kMaxMessageBytes) return Status::kLocQpOpErr;
    if (request.opcode == Opcode::kPack) return request.num_sge == 1 ? Status::kSuccess : Status::kRemInvReqErr;
    if (request.opcode != Opcode::kRead && request.opcode != Opcode::kWrite) return Status::kLocQpOpErr;
    const uint32_t access = request.opcode == Opcode::kRead ? kRemoteRead : kRemoteWrite;
    issued.remote = domain_.remote(request.rkey, request.remote_offset, total, access);
    return issued.remote ? Status::kSuccess : Status::kRemAccessErr;
  }

  void finish(Issued& issued) {
    if (issued.status == Status::kSuccess) issued.status = move(issued);
    failed_ = issued.status != Status::kSuccess;
    complete(issued.request, issued.status);
  }

  Status move(const Issued& issued) {
    if (issued.request.opcode == Opcode::kPack) return pack(issued.pieces[0]);
    uint8_t* remote = issued.remote;
    for (int i = 0; i < issued.request.num_sge; ++i) {
      const Piece& piece = issued.pieces[static_cast<size_t>(i)];
      if (issued.request.opcode == Opcode::kRead)
        std::memcpy(piece.data, remote, piece.nbytes);
      else
        std::memcpy(remote, piece.data, piece.nbytes);
      remote += piece.nbytes;
    }
    return Status::kSuccess;
  }

  // Check every row of the message's copy, then pack: a fault writes nothing.
  Status pack(const Piece& message) {
    PackMessage head;
    if (message.nbytes < sizeof head) return Status::kRemInvReqErr;
    std::memcpy(&head, message.data, sizeof head);
    const uint64_t expected = sizeof head + uint64_t{head.count} * sizeof(uint64_t);
    if (head.count > kMaxPackRows || message.nbytes != expected) return Status::kRemInvReqErr;
    offsets_.resize(head.count);
    std::memcpy(offsets_.data(), message.data + sizeof head, head.count * sizeof(uint64_t));
    rows_.resize(head.count);
    for (size_t i = 0; i < head.count; ++i) {
      rows_[i] = domain_.remote(head.rkey, offsets_[i], head.row_bytes, kRemoteRead);
      if (!rows_[i]) return Status::kRemAccessErr;
    }
    const uint64_t total = uint64_t{head.count} * head.row_bytes;
    uint8_t* target = domain_.local(head.target_key, head.target_address, total);
    if (!target || total > kMaxMessageBytes) return Status::kLocProtErr;
    for (size_t i = 0; i < head.count; ++i) {
      if (i + kPrefetchRows < head.count) prefetch(rows_[i + kPrefetchRows], head.row_bytes);
      std::memcpy(target + i * head.row_bytes, rows_[i], head.row_bytes);
    }
    return Status::kSuccess;
  }

  void flush() {
    const uint64_t tail = rings_.header.sq_tail.load(std::memory_order_acquire);
    for (uint64_t left = std::min(tail - head_, depth_); left > 0; --left) {
      Issued& next = window_[0];
      std::memcpy(static_cast<void*>(&next.request), &rings_.request(head_), kWorkRequestHeaderBytes);
      complete(next.request, Status::kWrFlushErr);
    }
  }

  void complete(const WorkRequest& request, Status status) {
    RingHeader& header = rings_.header;
    if (request.signalled || status != Status::kSuccess) {
      // The queue is as long as the send queue, so it overflows only for a client that breaks the rules: its loss.
      rings_.completion(completions_) = {request.wr_id, head_, status, request.opcode, {}};
      header.cq_tail.store(++completions_, std::memory_order_release);
      std::atomic_thread_fence(std::memory_order_seq_cst);
      if (header.client_sleeps.exchange(0, std::memory_order_relaxed)) ring_event(completed_);
    }
    header.sq_head.store(++head_, std::memory_order_release);
  }

  ProtectionDomain domain_;
  Mapping mapping_;
  Rings rings_;
  uint64_t depth_;
  Fd doorbell_, completed_, stop_;
  std::vector<Issued> window_;
  std::vector<uint64_t> offsets_;
  std::vector<const uint8_t*> rows_;
  uint64_t head_ = 0, completions_ = 0;
  bool failed_ = false;
  std::atomic<bool> stopping_ = false;
  std::thread thread_;
};

}  // namespace

void register_responder(nb::module_& m) {
  nb::class_<NodeMemory>(m, "NodeMemory", "The memory of a node: a memfd sealed against shrinking, or a device.")
      .def(nb::init<int, size_t>(), "fd"_a, "nbytes"_a)
      .def(nb::init<int, size_t, size_t>(), "fd"_a, "nbytes"_a, "device_bytes"_a);
  nb::class_<Responder>(m, "Responder", "A memory node's end of one queue pair, with a thread of its own.")
      .def(nb::init<const NodeMemory&, const std::vector<int>&, size_t, uint32_t>(), nb::keep_alive<1, 2>(), "memory"_a,
           "fds"_a, "send_queue_depth"_a, "max_rd_atomic"_a)
      .def_prop_ro("max_rd_atomic", &Responder::max_rd_atomic, "READs that it takes in flight.")
      .def(
          "register_memory",
          [](Responder& self, int fd, size_t nbytes, uint64_t address) {
            return self.domain().add_local(fd, nbytes, address);
          },
          "fd"_a, "nbytes"_a, "address"_a, "Map a client's memory; returns its lkey.")
      .def(
          "deregister_memory", [](Responder& self, uint32_t lkey) { self.domain().remove_local(lkey); }, "lkey"_a)
      .def(
          "expose",
          [](Responder& self, uint64_t offset, uint64_t nbytes, bool remote_read, bool remote_write) {
            uint32_t access = 0;
            if (remote_read) access |= kRemoteRead;
            if (remote_write) access |= kRemoteWrite;
            return self.domain().expose(offset, nbytes, access);
          },
          "offset"_a, "nbytes"_a, "remote_read"_a, "remote_write"_a, "Let the client reach a range; returns its rkey.")
      .def("close", &Responder::close, nb::call_guard<nb::gil_scoped_release>(), "Stop the thread; twice is allowed.");
}

}  // namespace verbs
