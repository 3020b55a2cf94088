// What a client and its memory node share: file descriptors, mappings, and the rings of one queue pair.
#pragma once

#include <fcntl.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <bit>
#include <cerrno>
#include <stdexcept>
#include <string>
#include <system_error>
#include <utility>

#include "verbs.h"

namespace verbs {

[[noreturn]] inline void throw_errno(const std::string& what) {
  throw std::system_error(errno, std::generic_category(), what);
}

// An owned file descriptor.
class Fd {
 public:
  explicit Fd(int fd = -1) : fd_(fd) {}
  Fd(Fd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Fd& operator=(Fd&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~Fd() { reset(); }
  int get() const { return fd_; }
  void reset() {
    if (fd_ >= 0) ::close(std::exchange(fd_, -1));
  }

  static Fd duplicate(int fd) {
    Fd copy(::fcntl(fd, F_DUPFD_CLOEXEC, 0));
    if (copy.get() < 0) throw_errno("cannot duplicate a file descriptor");
    return copy;
  }
  static Fd event() {
    Fd event(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
    if (event.get() < 0) throw_errno("cannot make an eventfd");
    return event;
  }

 private:
  int fd_;
};

inline void ring_event(const Fd& event) {
  const uint64_t one = 1;
  // EAGAIN means that the counter is full: the sleeper is awake anyway.
  if (::write(event.get(), &one, sizeof one) < 0 && errno != EAGAIN) throw_errno("cannot ring an eventfd");
}

inline void clear_event(const Fd& event) {
  uint64_t count;
  if (::read(event.get(), &count, sizeof count) < 0 && errno != EAGAIN) throw_errno("cannot read an eventfd");
}

// Shared pages of a file, mapped read-write.
class Mapping {
 public:
  Mapping() = default;
  Mapping(int fd, size_t nbytes) : nbytes_(nbytes) {
    void* address = ::mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (address == MAP_FAILED) throw_errno("cannot map " + std::to_string(nbytes) + " bytes");
    data_ = static_cast<uint8_t*>(address);
  }
  Mapping(Mapping&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), nbytes_(std::exchange(other.nbytes_, 0)) {}
  Mapping& operator=(Mapping&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(nbytes_, other.nbytes_);
    return *this;
  }
  ~Mapping() {
    if (data_) ::munmap(data_, nbytes_);
  }
  uint8_t* data() const { return data_; }
  size_t size() const { return nbytes_; }

 private:
  uint8_t* data_ = nullptr;
  size_t nbytes_ = 0;
};

// A memfd whose pages are all there and whose size can never change: mapping it can not end in SIGBUS.
inline Fd sealed_memory(const char* name, size_t nbytes) {
  Fd fd(::memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (fd.get() < 0) throw_errno("cannot make shared memory");
  if (const int error = ::posix_fallocate(fd.get(), 0, static_cast<off_t>(nbytes)))
    throw std::system_error(error, std::generic_category(), "cannot allocate " + std::to_string(nbytes) + " bytes");
  if (::fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) < 0) throw_errno("cannot seal memory");
  return fd;
}

// Map memory that another process made; refuses what it could still truncate under us.
inline Mapping map_foreign(int fd, size_t nbytes) {
  struct stat status;
  const int seals = ::fcntl(fd, F_GET_SEALS);
  if (seals < 0 || !(seals & F_SEAL_SHRINK))
    throw std::invalid_argument("shared memory must be sealed against shrinking");
  if (::fstat(fd, &status) < 0) throw_errno("cannot stat shared memory");
  if (nbytes == 0 || static_cast<uint64_t>(status.st_size) < nbytes)
    throw std::invalid_argument("shared memory of " + std::to_string(status.st_size) + " bytes is shorter than " +
                                std::to_string(nbytes));
  return Mapping(fd, nbytes);
}

struct RingCompletion {
  uint64_t wr_id;
  uint64_t position;  // of the work request in the send queue, counted from 0
  Status status;
  Opcode opcode;
  uint8_t reserved[11];
};
static_assert(sizeof(RingCompletion) == 32);

// Counters only grow; entry i lies at i mod depth. Each has one writer and a line of its own.
struct RingHeader {
  alignas(64) std::atomic<uint64_t> sq_tail;  // client: posted
  alignas(64) std::atomic<uint64_t> sq_head;  // node: finished
  alignas(64) std::atomic<uint64_t> cq_tail;  // node: completed
  alignas(64) std::atomic<uint64_t> cq_head;  // client: polled
  alignas(64) std::atomic<uint32_t> node_sleeps;
  alignas(64) std::atomic<uint32_t> client_sleeps;
  alignas(64) std::atomic<uint32_t> abandoned;  // client: gave the node up, nothing may be executed any more
  alignas(64) std::atomic<uint32_t> max_outstanding_reads;
};
static_assert(std::atomic<uint64_t>::is_always_lock_free);

// Views of the rings in shared memory: [header | send queue | completion queue], both `depth` entries long.
struct Rings {
  static constexpr size_t kMaxDepth = 1 << 15;
  static void check(size_t depth) {
    if (depth < 2 || depth > kMaxDepth || !std::has_single_bit(depth))
      throw std::invalid_argument("send_queue_depth must be a power of two from 2 to " + std::to_string(kMaxDepth));
  }
  static size_t bytes(size_t depth) {
    return sizeof(RingHeader) + depth * (sizeof(WorkRequest) + sizeof(RingCompletion));
  }
  Rings(uint8_t* memory, size_t depth)
      : header(*reinterpret_cast<RingHeader*>(memory)),
        requests(reinterpret_cast<WorkRequest*>(memory + sizeof(RingHeader))),
        completions(reinterpret_cast<RingCompletion*>(requests + depth)),
        mask(depth - 1) {}
  WorkRequest& request(uint64_t position) const { return requests[position & mask]; }
  RingCompletion& completion(uint64_t position) const { return completions[position & mask]; }

  RingHeader& header;
  WorkRequest* requests;
  RingCompletion* completions;
  uint64_t mask;
};

}  // namespace verbs
