// How a participant touches the pool's metadata: four primitives, whatever lies beneath.
//
// The protocol above is written once and runs on a coherent mapping, on real cache-line flushes, and on the shadow
// medium, which has hosts that see each other's stores only as far as flushes and fences make them.
#pragma once

#include <cstddef>
#include <cstdint>

namespace pool {

// Every flush, fence and check that the protocol needs. Only the shadow medium looks at it: it can leave one out, to
// show that the tests would notice (tests/test_pool_mutants.py).
enum class Site : int {
  kFlushRows,       // a writer's rows before they are published
  kDropRows,        // a reader's old copies of rows
  kFenceRows,       //   between that and the copy
  kFlushTicket,     // bakery: choosing, the number, and leaving
  kFenceChoosing,   //   before the numbers of others are read
  kDropNumbers,     //   old copies of the others' numbers
  kFenceNumbers,
  kFenceTicket,     //   before the copies of others' tickets are dropped: one filled early would be too old
  kDropTicket,      //   old copy of the one waited for
  kFenceWait,
  kDropTail,        // log: old copies of the first line past each log's known end
  kFenceTail,
  kDropRest,        //   and of a transaction's other lines
  kFenceRest,
  kCheckLine,       //   a line's checksum
  kCheckSequence,   //   and its number
  kFenceCommit,     // a transaction is in memory before its writer looks for verdicts
  kFlushVerdict,    // a verdict is in memory before the condemned one's log is read
  kFenceVerdict,    //   before the copies of that log are dropped
  kDropVerdicts,
  kFenceVerdicts,
  kCheckVerdict,    // a writer or reader that is condemned stops
  kFlushBeat,       // heartbeats
  kDropBeats,
  kFenceBeats,
  kFenceSnapshot,   // a snapshot is in memory before its register says so
  kFlushCheckpoint,
  kDropCheckpoints,
  kFenceCheckpoints,
  kDropSnapshot,
  kFenceSnapshotRead,
  kFlushIdentity,   // who has a slot
  kFenceStop,
  kDropIdentities,
  kFenceIdentities,
  kCount,
};

const char* site_name(Site site);

class Memory {
 public:
  virtual ~Memory() = default;

  // Copy through the caches. Aligned 8-byte words are not torn, lines may be.
  virtual void load(uint64_t offset, void* to, size_t nbytes) = 0;
  virtual void store(uint64_t offset, const void* from, size_t nbytes) = 0;

  // Store past the caches; in memory by the next fence, in any order before it.
  virtual void stream(uint64_t offset, const void* from, size_t nbytes) = 0;

  // Write dirty lines back and drop the copies; done by the next fence.
  virtual void flush(uint64_t offset, size_t nbytes, Site site) = 0;

  // Flushes and streamed stores before it are done before any load or store after it.
  virtual void fence(Site site) = 0;

  // Refuses a device that is not there any more: touching what was cut off would kill the process.
  virtual void usable() {}

  // A condition that the protocol relies on; the shadow medium may pretend that it holds.
  virtual bool check(bool holds, Site) { return holds; }
};

}  // namespace pool
