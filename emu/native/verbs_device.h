// A device of libibverbs and reliable connections on it. libibverbs is loaded when a device is opened first.
#pragma once

#include <sys/types.h>

#include <array>
#include <memory>
#include <span>
#include <string>
#include <unordered_map>

#include "ibverbs_abi.h"
#include "verbs.h"

namespace verbs {

// One port of an open device, and the GID by which others reach it.
class Device {
 public:
  Device(const std::string& name, uint8_t port, uint8_t gid_index);
  ~Device();
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;

  ibverbs::ibv_context* context() const { return context_; }
  const ibverbs::ibv_device_attr& limits() const { return limits_; }
  const std::string& name() const { return name_; }
  uint8_t port() const { return port_; }
  uint8_t gid_index() const { return gid_index_; }
  int active_mtu() const { return active_mtu_; }  // enum ibv_mtu: 128 << n bytes
  const std::array<uint8_t, 16>& gid() const { return gid_; }
  // Scatter entries of one work request, for any operation.
  size_t max_sge() const;

 private:
  std::string name_;
  uint8_t port_, gid_index_;
  pid_t pid_;
  ibverbs::ibv_context* context_ = nullptr;
  ibverbs::ibv_device_attr limits_{};
  int active_mtu_ = 0;
  std::array<uint8_t, 16> gid_{};
};

// What one end must know of the other.
struct Endpoint {
  uint32_t qp_number, psn;
  int mtu;  // enum ibv_mtu
  std::array<uint8_t, 16> gid;
};

struct QueueDepths {
  uint32_t send, receive;
};

struct ReadDepths {
  uint8_t initiator, responder;  // READs in flight that this end starts, and that it answers
};

// One reliable connection with a protection domain, completion queue and registered memory of its own. In a forked
// child it lets the objects be: they are the parent's.
class RcConnection {
 public:
  RcConnection(const Device& device, QueueDepths depths);
  RcConnection(const RcConnection&) = delete;
  RcConnection& operator=(const RcConnection&) = delete;

  Endpoint endpoint() const;
  // Ready to send and receive. Without an answer the adapter gives a request up within timeout_s.
  void connect(const Endpoint& peer, ReadDepths reads, double timeout_s);
  // Into the error state: whatever is posted is flushed.
  void fail();

  // The registration; `access` has bits of enum ibv_access_flags. Throws std::system_error.
  const ibverbs::ibv_mr& register_memory(void* address, size_t nbytes, unsigned access);
  // Throws std::invalid_argument for a key that is not there.
  void deregister_memory(uint32_t lkey);

  // A linked list of requests, one doorbell. Throws WorkFault when the device refuses one.
  void post_send(ibverbs::ibv_send_wr* first);
  void post_receive(uint64_t wr_id, ibverbs::ibv_sge* sge);
  size_t poll(std::span<ibverbs::ibv_wc> completions);
  // Ask for an event at the next completion; poll() once more before waiting for it at event_fd().
  void arm();
  int event_fd() const { return channel_->fd; }
  // Take the event that made event_fd() readable.
  void take_event();

 private:
  struct Destroy {
    pid_t pid;
    void operator()(ibverbs::ibv_pd* pd) const;
    void operator()(ibverbs::ibv_comp_channel* channel) const;
    void operator()(ibverbs::ibv_cq* cq) const;
    void operator()(ibverbs::ibv_qp* qp) const;
    void operator()(ibverbs::ibv_mr* mr) const;
  };
  template <typename T>
  using Owned = std::unique_ptr<T, Destroy>;
  template <typename T>
  Owned<T> own(T* object, const char* what) const;

  const Device& device_;
  Destroy destroy_;
  uint32_t psn_;
  Owned<ibverbs::ibv_pd> pd_;
  Owned<ibverbs::ibv_comp_channel> channel_;
  Owned<ibverbs::ibv_cq> cq_;
  std::unordered_map<uint32_t, Owned<ibverbs::ibv_mr>> memory_;  // by lkey
  Owned<ibverbs::ibv_qp> qp_;                                    // goes first: then nothing moves any more
};

}  // namespace verbs
