// From rows to work requests: runs are joined, posted in batches, and waited for.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "verbs.h"

namespace verbs {

// Registered memory of this process; remote_key is the one by which the owner reaches it.
struct Local {
  uint64_t address, nbytes;
  uint32_t lkey, remote_key;
};

// One row to move: where it lies remotely, and its row number in the caller's array.
struct Row {
  uint64_t remote;
  uint64_t local;
};

struct Counters {
  uint64_t work_requests = 0, reads = 0, writes = 0, packs = 0, completions = 0;
};

// Not safe for two threads at once.
class Poster {
 public:
  Poster(QueuePair& queue_pair, uint32_t rkey)
      : queue_pair_(queue_pair),
        rkey_(rkey),
        batch_(kPostBatch),
        // Half of the queue: completions free it before it is full.
        signal_every_(queue_pair.send_queue_depth() / 2),
        max_sge_(queue_pair.max_sge()) {}

  uint32_t rkey() const { return rkey_; }
  const Counters& counters() const { return counters_; }
  void reset_counters() {
    counters_ = {};
    queue_pair_.reset_max_outstanding_reads();
  }

  // One work request per remote-contiguous run; rows that are neighbours locally too share a scatter entry.
  void transfer(Opcode opcode, const Row* rows, size_t count, const Local& local, uint64_t width) {
    guarded([&] {
      WorkRequest* run = nullptr;
      uint64_t run_bytes = 0;
      for (size_t i = 0; i < count; ++i) {
        const uint64_t address = local.address + rows[i].local * width;
        const bool joins = run && rows[i].remote == run->remote_offset + run_bytes && run_bytes + width <= kMaxBytes;
        Sge* last = joins ? &run->sge[run->num_sge - 1] : nullptr;
        if (last && last->address + last->length == address) {
          last->length += static_cast<uint32_t>(width);
        } else {
          if (!joins || run->num_sge == max_sge_) {
            run = &next_request(opcode, rows[i].remote);
            run_bytes = 0;
          }
          run->sge[run->num_sge++] = {address, static_cast<uint32_t>(width), local.lkey};
        }
        run_bytes += width;
      }
      finish();
    });
  }

  // One message, which lies in registered memory, to the owner.
  void send_pack(const Local& message) {
    guarded([&] {
      WorkRequest& request = next_request(Opcode::kPack, 0);
      request.sge[request.num_sge++] = {message.address, static_cast<uint32_t>(message.nbytes), message.lkey};
      finish();
    });
  }

 private:
  static constexpr uint64_t kMaxBytes = uint64_t{1} << 30;
  static constexpr size_t kPostBatch = 256;  // work requests per doorbell

  // After a fault nothing more is posted, as on a queue pair in the error state.
  template <typename Work>
  void guarded(Work work) {
    if (!broken_.empty())
      throw WorkFault(Status::kWrFlushErr, next_id_, "the queue pair is in the error state: " + broken_);
    try {
      work();
    } catch (const std::exception& error) {
      broken_ = error.what();
      throw;
    }
  }

  WorkRequest& next_request(Opcode opcode, uint64_t remote) {
    if (batched_ == batch_.size()) post_batch();
    WorkRequest& request = batch_[batched_++];
    request.wr_id = next_id_++;
    request.remote_offset = remote;
    request.rkey = rkey_;
    request.opcode = opcode;
    request.num_sge = 0;
    // Often enough that completions free the send queue before it is full.
    request.signalled = ++unsignalled_ >= signal_every_;
    if (request.signalled) unsignalled_ = 0;
    count(opcode);
    return request;
  }

  void count(Opcode opcode) {
    ++counters_.work_requests;
    ++(opcode == Opcode::kRead ? counters_.reads : opcode == Opcode::kWrite ? counters_.writes : counters_.packs);
  }

  void post_batch() {
    for (size_t done = 0; done < batched_;) {
      done += queue_pair_.post(std::span(batch_).subspan(done, batched_ - done));
      if (done < batched_) reap();
    }
    batched_ = 0;
  }

  void finish() {
    if (batched_ == 0) return;
    batch_[batched_ - 1].signalled = 1;
    unsignalled_ = 0;
    post_batch();
    while (completed_ != next_id_) reap();
  }

  void reap() {
    Completion completions[16];
    size_t got = queue_pair_.poll(completions);
    if (got == 0) {
      queue_pair_.wait();
      got = queue_pair_.poll(completions);
      if (got == 0) throw std::runtime_error("a completion is missing");
    }
    counters_.completions += got;
    for (size_t i = 0; i < got; ++i) {
      const Completion& done = completions[i];
      if (done.status != Status::kSuccess)
        throw WorkFault(done.status, done.wr_id,
                        std::string(opcode_name(done.opcode)) + " completed with " + status_name(done.status) + ": " +
                            status_meaning(done.status));
      completed_ = done.wr_id + 1;
    }
  }

  QueuePair& queue_pair_;
  uint32_t rkey_;
  std::vector<WorkRequest> batch_;
  size_t batched_ = 0;
  size_t signal_every_, max_sge_, unsignalled_ = 0;
  uint64_t next_id_ = 0, completed_ = 0;
  Counters counters_;
  std::string broken_;  // what put the queue pair into the error state
};

}  // namespace verbs
