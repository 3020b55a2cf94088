// A queue pair as the verbs have it: work requests in, completions out. Who executes them is the subclass's
// business (verbs_ring.cc: a memory node's thread; verbs_rc.cc: a RoCE device).
#pragma once

#include <cstdint>
#include <span>
#include <stdexcept>
#include <string>

#include "registers.h"

namespace verbs {

// Local scatter/gather entries of one work request at most; common adapters allow 30, a device may allow fewer.
constexpr int kMaxSge = 30;

// PACK is the one operation that is not a verb: a message (a SEND on hardware) that asks the owner of the remote
// memory to pack scattered rows into one contiguous WRITE back.
enum class Opcode : uint8_t { kRead = 1, kWrite = 2, kPack = 3 };

// Numbers and names of enum ibv_wc_status (ibv_poll_cq(3)).
enum class Status : uint32_t {
  kSuccess = 0,
  kLocLenErr = 1,
  kLocQpOpErr = 2,
  kLocEecOpErr = 3,
  kLocProtErr = 4,
  kWrFlushErr = 5,
  kMwBindErr = 6,
  kBadRespErr = 7,
  kLocAccessErr = 8,
  kRemInvReqErr = 9,
  kRemAccessErr = 10,
  kRemOpErr = 11,
  kRetryExcErr = 12,
  kRnrRetryExcErr = 13,
  kLocRddViolErr = 14,
  kRemInvRdReqErr = 15,
  kRemAbortErr = 16,
  kInvEecnErr = 17,
  kInvEecStateErr = 18,
  kFatalErr = 19,
  kRespTimeoutErr = 20,
  kGeneralErr = 21,
};

// Bits of enum ibv_access_flags.
enum Access : uint32_t { kLocalWrite = 1, kRemoteWrite = 2, kRemoteRead = 4 };

const char* status_name(Status status);
const char* status_meaning(Status status);
const char* opcode_name(Opcode opcode);

// One piece of local registered memory; address is the caller's own.
struct Sge {
  uint64_t address;
  uint32_t length;
  uint32_t lkey;
};

// One remote-contiguous range at remote_offset of the region rkey, and up to kMaxSge local pieces.
struct WorkRequest {
  uint64_t wr_id;
  uint64_t remote_offset;
  uint32_t rkey;
  Opcode opcode;
  uint8_t signalled;  // a success makes a completion too; an error always does
  uint16_t num_sge;
  uint64_t reserved;
  Sge sge[kMaxSge];
};
constexpr size_t kWorkRequestHeaderBytes = 32;
static_assert(sizeof(WorkRequest) == 512 && offsetof(WorkRequest, sge) == kWorkRequestHeaderBytes);

struct Completion {
  uint64_t wr_id;
  Status status;
  Opcode opcode;
};

// A PACK's message, followed by `count` offsets (uint64) in the region rkey. The work request's only sge is the
// message; the rows go to target_address, in order, without gaps. target_key is the one by which the owner reaches it:
// the rkey of a device, the lkey where a memory node plays both adapters.
struct PackMessage {
  uint32_t rkey;
  uint32_t row_bytes;
  uint32_t count;
  uint32_t target_key;
  uint64_t target_address;
};
static_assert(sizeof(PackMessage) == 24);
// Of a whole message, and so of the memory in which it is received.
constexpr uint64_t kPackMessageBytes = uint64_t{256} << 10;

// A reliable connection: completions come in posting order; after the first error everything posted before or
// after it is flushed. Not safe for two threads at once.
class QueuePair {
 public:
  virtual ~QueuePair() = default;
  // Post as many as the send queue takes, ring the doorbell once; returns how many were taken.
  virtual size_t post(std::span<const WorkRequest> requests) = 0;
  // Completions that are there, without waiting; returns how many.
  virtual size_t poll(std::span<Completion> completions) = 0;
  // Sleep until poll() has something. A lost peer counts: its requests complete in error.
  virtual void wait() = 0;
  virtual size_t send_queue_depth() const = 0;
  virtual size_t max_sge() const = 0;
  virtual uint32_t max_rd_atomic() const = 0;
  // Most READs that were in flight at once since the last reset.
  virtual uint32_t max_outstanding_reads() const = 0;
  virtual void reset_max_outstanding_reads() = 0;
};

// A work request that completed in error.
struct WorkFault : std::runtime_error {
  WorkFault(Status status_, uint64_t wr_id_, const std::string& message)
      : std::runtime_error(message), status(status_), wr_id(wr_id_) {}
  Status status;
  uint64_t wr_id;
};

void register_ring(nb::module_& m);       // verbs_ring.cc
void register_responder(nb::module_& m);  // verbs_responder.cc
void register_requester(nb::module_& m);  // verbs_requester.cc
void register_device(nb::module_& m);     // verbs_device.cc
void register_rc(nb::module_& m);         // verbs_rc.cc
void register_rc_owner(nb::module_& m);   // verbs_rc_owner.cc

}  // namespace verbs
