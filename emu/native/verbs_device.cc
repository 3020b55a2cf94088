// Opening devices and making connections by libibverbs.
#include "verbs_device.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <nanobind/stl/string.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <random>
#include <stdexcept>
#include <system_error>

using namespace nb::literals;
using namespace ibverbs;

namespace verbs {
namespace {

constexpr const char* kLibrary = "libibverbs.so.1";
constexpr uint32_t kPsnMask = 0xffffff;
constexpr int kRetries = 7;
// Receiver not ready: tried again some times, not for ever (7 would be for ever, and has locked up soft-RoCE).
constexpr uint8_t kRnrRetries = 6;
constexpr uint8_t kRnrTimer = 12;  // 0.64 ms, InfiniBand specification, table 45
constexpr double kTimeoutUnit_s = 4.096e-6;

// The functions of libibverbs that are symbols; the others go through the context.
struct Library {
  Library() {
    void* handle = ::dlopen(kLibrary, RTLD_NOW | RTLD_LOCAL);  // never closed: contexts point into it
    if (!handle) throw std::runtime_error(std::string("libibverbs cannot be loaded: ") + ::dlerror());
    load(handle, "ibv_get_device_list", get_device_list);
    load(handle, "ibv_free_device_list", free_device_list);
    load(handle, "ibv_open_device", open_device);
    load(handle, "ibv_close_device", close_device);
    load(handle, "ibv_query_device", query_device);
    load(handle, "ibv_query_port", query_port);
    load(handle, "ibv_query_gid", query_gid);
    load(handle, "ibv_alloc_pd", alloc_pd);
    load(handle, "ibv_dealloc_pd", dealloc_pd);
    load(handle, "ibv_reg_mr", reg_mr);
    load(handle, "ibv_dereg_mr", dereg_mr);
    load(handle, "ibv_create_comp_channel", create_comp_channel);
    load(handle, "ibv_destroy_comp_channel", destroy_comp_channel);
    load(handle, "ibv_create_cq", create_cq);
    load(handle, "ibv_destroy_cq", destroy_cq);
    load(handle, "ibv_get_cq_event", get_cq_event);
    load(handle, "ibv_ack_cq_events", ack_cq_events);
    load(handle, "ibv_create_qp", create_qp);
    load(handle, "ibv_modify_qp", modify_qp);
    load(handle, "ibv_destroy_qp", destroy_qp);
  }
  static const Library& get() {
    static const Library library;
    return library;
  }

  ibv_device** (*get_device_list)(int*);
  void (*free_device_list)(ibv_device**);
  ibv_context* (*open_device)(ibv_device*);
  int (*close_device)(ibv_context*);
  int (*query_device)(ibv_context*, ibv_device_attr*);
  int (*query_port)(ibv_context*, uint8_t, ibv_port_attr*);
  int (*query_gid)(ibv_context*, uint8_t, int, ibv_gid*);
  ibv_pd* (*alloc_pd)(ibv_context*);
  int (*dealloc_pd)(ibv_pd*);
  ibv_mr* (*reg_mr)(ibv_pd*, void*, size_t, int);
  int (*dereg_mr)(ibv_mr*);
  ibv_comp_channel* (*create_comp_channel)(ibv_context*);
  int (*destroy_comp_channel)(ibv_comp_channel*);
  ibv_cq* (*create_cq)(ibv_context*, int, void*, ibv_comp_channel*, int);
  int (*destroy_cq)(ibv_cq*);
  int (*get_cq_event)(ibv_comp_channel*, ibv_cq**, void**);
  void (*ack_cq_events)(ibv_cq*, unsigned);
  ibv_qp* (*create_qp)(ibv_pd*, ibv_qp_init_attr*);
  int (*modify_qp)(ibv_qp*, ibv_qp_attr*, int);
  int (*destroy_qp)(ibv_qp*);

 private:
  template <typename Function>
  static void load(void* handle, const char* name, Function& function) {
    function = reinterpret_cast<Function>(::dlsym(handle, name));
    if (!function) throw std::runtime_error(std::string(kLibrary) + " has no " + name);
  }
};

[[noreturn]] void refuse(int error, const std::string& what) {
  throw std::system_error(error, std::generic_category(), what);
}

// Calls that return an errno.
void check(int error, const std::string& what) {
  if (error) refuse(error, what);
}

ibv_context* open_context(const std::string& name) {
  const Library& library = Library::get();
  int count = 0;
  ibv_device** devices = library.get_device_list(&count);
  if (!devices) refuse(errno, "the RDMA devices cannot be listed");
  ibv_context* context = nullptr;
  int error = ENODEV;
  for (int i = 0; i < count && !context; ++i) {
    if (name != devices[i]->name) continue;
    context = library.open_device(devices[i]);
    error = errno;
  }
  library.free_device_list(devices);
  if (!context) refuse(error, "libibverbs cannot open " + name);
  return context;
}

// The largest exponent with which all tries together end within the time (ibv_modify_qp(3): 4.096 us * 2 ** n).
uint8_t timeout_exponent(double timeout_s) {
  const double each = timeout_s / (kRetries + 1) / kTimeoutUnit_s;
  return static_cast<uint8_t>(std::clamp(std::floor(std::log2(std::max(1.0, each))), 1.0, 31.0));
}

}  // namespace

Device::Device(const std::string& name, uint8_t port, uint8_t gid_index)
    : name_(name), port_(port), gid_index_(gid_index), pid_(::getpid()), context_(open_context(name)) {
  const Library& library = Library::get();
  try {
    ibv_port_attr state{};
    check(library.query_device(context_, &limits_), name + " cannot be queried");
    check(library.query_port(context_, port, &state), name + ": the port cannot be queried");
    if (state.state != IBV_PORT_ACTIVE) throw std::runtime_error(name + ": the port is not active");
    if (state.link_layer != IBV_LINK_LAYER_ETHERNET) throw std::runtime_error(name + " is not a RoCE device");
    active_mtu_ = state.active_mtu;
    ibv_gid gid{};
    check(library.query_gid(context_, port, gid_index, &gid), name + ": the GID cannot be read");
    std::copy(std::begin(gid.raw), std::end(gid.raw), gid_.begin());
  } catch (...) {
    library.close_device(context_);
    throw;
  }
}

Device::~Device() {
  if (::getpid() == pid_) Library::get().close_device(context_);
}

size_t Device::max_sge() const {
  int most = std::min(limits_.max_sge, kMaxSge);
  if (limits_.max_sge_rd > 0) most = std::min(most, limits_.max_sge_rd);
  return static_cast<size_t>(std::max(most, 1));
}

void RcConnection::Destroy::operator()(ibv_pd* pd) const {
  if (::getpid() == pid) Library::get().dealloc_pd(pd);
}
void RcConnection::Destroy::operator()(ibv_comp_channel* channel) const {
  if (::getpid() == pid) Library::get().destroy_comp_channel(channel);
}
void RcConnection::Destroy::operator()(ibv_cq* cq) const {
  if (::getpid() == pid) Library::get().destroy_cq(cq);
}
void RcConnection::Destroy::operator()(ibv_qp* qp) const {
  if (::getpid() == pid) Library::get().destroy_qp(qp);
}
void RcConnection::Destroy::operator()(ibv_mr* mr) const {
  if (::getpid() == pid) Library::get().dereg_mr(mr);
}

template <typename T>
RcConnection::Owned<T> RcConnection::own(T* object, const char* what) const {
  if (!object) refuse(errno, device_.name() + ": " + what);
  return Owned<T>(object, destroy_);
}

RcConnection::RcConnection(const Device& device, QueueDepths depths)
    : device_(device),
      destroy_{::getpid()},
      psn_(std::random_device()() & kPsnMask),
      pd_(own(Library::get().alloc_pd(device.context()), "no protection domain")),
      channel_(own(Library::get().create_comp_channel(device.context()), "no completion channel")),
      cq_(own(Library::get().create_cq(device.context(), static_cast<int>(depths.send + depths.receive), nullptr,
                                       channel_.get(), 0),
              "no completion queue")),
      qp_(nullptr, destroy_) {
  if (::fcntl(channel_->fd, F_SETFL, O_NONBLOCK) < 0) refuse(errno, "the completion channel");
  ibv_qp_init_attr wanted{};
  wanted.send_cq = wanted.recv_cq = cq_.get();
  wanted.cap = {depths.send, depths.receive, static_cast<uint32_t>(device.max_sge()), 1, 0};
  wanted.qp_type = IBV_QPT_RC;
  qp_ = own(Library::get().create_qp(pd_.get(), &wanted), "no queue pair");
  ibv_qp_attr attributes{};
  attributes.qp_state = IBV_QPS_INIT;
  attributes.port_num = device.port();
  attributes.qp_access_flags = IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE;
  check(Library::get().modify_qp(qp_.get(), &attributes,
                                 IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS),
        "the queue pair does not become INIT");
}

Endpoint RcConnection::endpoint() const { return {qp_->qp_num, psn_, device_.active_mtu(), device_.gid()}; }

void RcConnection::connect(const Endpoint& peer, ReadDepths reads, double timeout_s) {
  ibv_qp_attr attributes{};
  attributes.qp_state = IBV_QPS_RTR;
  attributes.path_mtu = std::min(peer.mtu, device_.active_mtu());
  attributes.dest_qp_num = peer.qp_number;
  attributes.rq_psn = peer.psn;
  attributes.max_dest_rd_atomic = reads.responder;
  attributes.min_rnr_timer = kRnrTimer;
  attributes.ah_attr.is_global = 1;
  attributes.ah_attr.port_num = device_.port();
  attributes.ah_attr.grh.sgid_index = device_.gid_index();
  attributes.ah_attr.grh.hop_limit = 64;
  std::copy(peer.gid.begin(), peer.gid.end(), attributes.ah_attr.grh.dgid.raw);
  check(Library::get().modify_qp(qp_.get(), &attributes,
                                 IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
                                     IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER),
        "the queue pair does not become RTR");
  attributes = {};
  attributes.qp_state = IBV_QPS_RTS;
  attributes.sq_psn = psn_;
  attributes.timeout = timeout_exponent(timeout_s);
  attributes.retry_cnt = kRetries;
  attributes.rnr_retry = kRnrRetries;
  attributes.max_rd_atomic = reads.initiator;
  check(Library::get().modify_qp(qp_.get(), &attributes,
                                 IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN |
                                     IBV_QP_MAX_QP_RD_ATOMIC),
        "the queue pair does not become RTS");
}

void RcConnection::fail() {
  ibv_qp_attr attributes{};
  attributes.qp_state = IBV_QPS_ERR;
  Library::get().modify_qp(qp_.get(), &attributes, IBV_QP_STATE);  // a device that is gone has failed already
}

const ibv_mr& RcConnection::register_memory(void* address, size_t nbytes, unsigned access) {
  auto memory = own(Library::get().reg_mr(pd_.get(), address, nbytes, static_cast<int>(access)),
                    "memory cannot be registered");
  const ibv_mr& registered = *memory;
  memory_.emplace(registered.lkey, std::move(memory));
  return registered;
}

void RcConnection::deregister_memory(uint32_t lkey) {
  if (!memory_.erase(lkey)) throw std::invalid_argument("no registered memory has this lkey");
}

void RcConnection::post_send(ibv_send_wr* first) {
  ibv_send_wr* bad = nullptr;
  if (const int error = qp_->context->ops.post_send(qp_.get(), first, &bad))
    throw WorkFault(Status::kLocQpOpErr, bad ? bad->wr_id : 0,
                    std::string("the device refuses a work request: ") + std::strerror(error));
}

void RcConnection::post_receive(uint64_t wr_id, ibv_sge* sge) {
  ibv_recv_wr request{wr_id, nullptr, sge, sge ? 1 : 0}, *bad = nullptr;
  check(qp_->context->ops.post_recv(qp_.get(), &request, &bad), "the device refuses a receive");
}

size_t RcConnection::poll(std::span<ibv_wc> completions) {
  const int count =
      cq_->context->ops.poll_cq(cq_.get(), static_cast<int>(completions.size()), completions.data());
  if (count < 0) throw std::runtime_error("the completion queue cannot be polled");
  return static_cast<size_t>(count);
}

void RcConnection::arm() { check(cq_->context->ops.req_notify_cq(cq_.get(), 0), "the completion queue cannot be armed"); }

void RcConnection::take_event() {
  ibv_cq* cq = nullptr;
  void* context = nullptr;
  if (Library::get().get_cq_event(channel_.get(), &cq, &context) == 0) Library::get().ack_cq_events(cq, 1);
}

void register_device(nb::module_& m) {
  nb::class_<Device>(m, "VerbsDevice", "An active RoCE port of a device that libibverbs opened.")
      .def(nb::init<const std::string&, uint8_t, uint8_t>(), "name"_a, "port"_a, "gid_index"_a)
      .def_prop_ro("name", &Device::name)
      .def_prop_ro(
          "address",
          [](const Device& self) {
            const auto& gid = self.gid();
            std::string text = std::to_string(gid[12]);
            for (size_t i = 13; i < gid.size(); ++i) text += "." + std::to_string(gid[i]);
            return text;
          },
          "IPv4 address that the GID maps.")
      .def_prop_ro("max_sge", &Device::max_sge, "Scatter entries of one work request.")
      .def_prop_ro("max_send_wr", [](const Device& self) { return self.limits().max_qp_wr; })
      .def_prop_ro("max_reads_started", [](const Device& self) { return self.limits().max_qp_init_rd_atom; },
                   "READs in flight of one queue pair (max_qp_init_rd_atom).")
      .def_prop_ro("max_reads_answered", [](const Device& self) { return self.limits().max_qp_rd_atom; },
                   "READs that one queue pair answers at a time (max_qp_rd_atom).")
      .def_prop_ro("mtu_bytes", [](const Device& self) { return 128 << self.active_mtu(); });
}

}  // namespace verbs
