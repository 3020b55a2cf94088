// A pool from Python: one open participant, its heartbeat on a thread of its own.
#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <tuple>

#include "../registers.h"
#include "heart.h"
#include "mapped_memory.h"
#include "operations.h"
#include "process_host.h"

using namespace nb::literals;

namespace {

using Bytes = nb::ndarray<uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Hashes = nb::ndarray<const uint8_t, nb::shape<-1, 16>, nb::c_contig, nb::device::cpu>;
using Blocks = nb::ndarray<int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
// lease, generation, state (0 reserved, 1 published, 2 deleted), prompt, written, appendable and shared tokens, blocks
using Entry = std::tuple<uint64_t, uint64_t, int, int64_t, int64_t, int64_t, int64_t, std::vector<int32_t>>;
// key, prompt and appendable tokens, blocks, hashes
using Want = std::tuple<std::string, uint32_t, uint32_t, uint32_t, std::vector<nb::bytes>>;

PyObject *pool_fault, *pool_refusal;  // owned by the module; never released, so that a late exception finds them

class SharedPool {
 public:
  struct Offline {};

  SharedPool(Bytes memory, int fd, bool coherent, const pool::Geometry& geometry, Offline)
      : bytes_(std::move(memory)),
        memory_(bytes_.data(), bytes_.size(), coherent, fd),
        expiry_ns_(0),
        geometry_(salted(geometry)),
        self_(memory_, host_, geometry_, damage_),
        operations_(self_) {}

  SharedPool(Bytes memory, int fd, bool coherent, const pool::Geometry& geometry, int64_t expiry_ns, int64_t quarantine_ns)
      : bytes_(std::move(memory)),
        memory_(bytes_.data(), bytes_.size(), coherent, fd),
        expiry_ns_(expiry_ns),
        geometry_(salted(geometry)),
        self_(memory_, host_, geometry_, pool::Timeouts{expiry_ns, quarantine_ns}),
        operations_(self_) {}

  void join(int first, int last) {
    self_.take(first, last);
    heart_.start(self_, expiry_ns_ / 20);
    self_.enter();
  }

  void leave() {
    heart_.stop();
    self_.leave();
  }

  pool::Participant& self() { return self_; }
  pool::Operations& operations() { return operations_; }
  const pool::Damage& damage() const { return damage_; }
  int64_t lines_flushed() const { return memory_.lines_flushed(); }

  Entry entry(uint64_t lease, const pool::Request& one) const {
    return {lease, one.generation, static_cast<int>(one.stage), one.prompt_tokens, one.num_tokens, one.append_tokens, one.shared_tokens, one.blocks};
  }
  Entry entry(const pool::Held& held) const {
    if (held.lease == 0) return {};
    return entry(held.lease, self_.state().requests.at(held.generation));
  }

 private:
  Bytes bytes_;
  pool::MappedMemory memory_;
  pool::ProcessHost host_;
  int64_t expiry_ns_;
  pool::Geometry geometry_;
  pool::Damage damage_;
  pool::Participant self_;
  pool::Operations operations_;
  pool::Heart heart_;  // last: it stops before what it beats for goes

  pool::Geometry salted(pool::Geometry geometry) {
    if (geometry.slots < 1 || geometry.slots > pool::kSlots || geometry.ring_lines < 28 || geometry.snapshot_lines < 16 ||
        geometry.meta_offset % pool::kLine || geometry.meta_offset > bytes_.size() || geometry.end() > bytes_.size())
      throw std::invalid_argument("the metadata does not lie in the memory");
    memory_.usable();
    memory_.flush(0, pool::kLine, pool::Site::kDropTail);
    memory_.fence(pool::Site::kFenceTail);
    pool::Line superblock;
    memory_.load(0, &superblock, pool::kLine);
    geometry.salt = pool::superblock_salt(superblock);
    return geometry;
  }
};

void translate(const std::exception_ptr& pointer, void*) {
  static constexpr const char* kFaults[] = {"DAMAGED", "REPLACED", "TRUNCATED", "EXPIRED", "BUSY", "FULL"};
  static constexpr const char* kRefusals[] = {"KEY_EXISTS", "NO_ROOM", "GONE", "LEASE_LOST", "APPENDER", "GROWN", "TOO_LARGE"};
  try {
    std::rethrow_exception(pointer);
  } catch (const pool::Fault& fault) {
    PyErr_SetObject(pool_fault, nb::make_tuple(kFaults[fault.kind], fault.text).ptr());
  } catch (const pool::Refusal& refusal) {
    PyErr_SetObject(pool_refusal, nb::make_tuple(kRefusals[refusal.kind], refusal.key, refusal.first, refusal.second).ptr());
  }
}

PyObject* new_exception(nb::module_& m, const char* name) {
  const std::string full = std::string(PyModule_GetName(m.ptr())) + "." + name;
  PyObject* type = PyErr_NewException(full.c_str(), PyExc_RuntimeError, nullptr);
  if (!type) throw nb::python_error();
  m.attr(name) = nb::borrow(type);
  return type;
}

std::vector<Entry> reserve(SharedPool& self, const std::vector<Want>& wants) {
  std::vector<pool::Wanted> wanted;
  for (const auto& [key, tokens, append_tokens, blocks, names] : wants) {
    pool::Wanted& want = wanted.emplace_back(pool::Wanted{key, tokens, blocks, {}, append_tokens});
    for (const nb::bytes& name : names) {
      if (name.size() != sizeof(pool::Hash)) throw std::invalid_argument("a chain hash is 16 bytes");
      std::memcpy(&want.hashes.emplace_back(), name.c_str(), sizeof(pool::Hash));
    }
  }
  nb::gil_scoped_release release;
  std::vector<Entry> made;
  for (const pool::Held& held : self.operations().reserve(wanted)) made.push_back(self.entry(held));
  return made;
}

std::vector<Entry> find(SharedPool& self, const std::vector<std::string>& keys) {
  nb::gil_scoped_release release;
  self.self().sync();
  std::vector<Entry> found;
  for (const auto& key : keys) {
    const pool::Request* one = self.operations().visible(key);
    found.push_back(one ? self.entry(0, *one) : Entry{});
  }
  return found;
}

std::vector<Entry> lease(SharedPool& self, const std::vector<std::string>& keys) {
  nb::gil_scoped_release release;
  std::vector<Entry> taken;
  for (const pool::Held& held : self.operations().lease(keys)) taken.push_back(self.entry(held));
  return taken;
}

const pool::Hash* hashes_of(const Hashes& names) { return reinterpret_cast<const pool::Hash*>(names.data()); }

void lookup(SharedPool& self, const Hashes& names, const Blocks& out) {
  if (names.shape(0) != out.shape(0)) throw std::invalid_argument("out is not as long as hashes");
  nb::gil_scoped_release release;
  self.operations().lookup(hashes_of(names), names.shape(0), out.data());
}

// As they were read last: a pool that is offline stays as it was read.
nb::list requests_read(SharedPool& self) {
  nb::list all;
  for (const auto& [generation, one] : self.self().state().requests) {
    size_t named = 0;
    for (const int32_t block : one.blocks) named += self.self().state().named(block);
    all.append(nb::make_tuple(generation, one.key, static_cast<int>(one.stage), one.prompt_tokens, one.num_tokens,
                              one.shared_tokens, one.blocks, one.leases, one.appender != 0, one.last_used, named));
  }
  return all;
}

// Per slot: epoch, seat (0 free, 1 taken, 2 in quarantine), pid, whether it is certainly gone, leases, log lines.
nb::list members(SharedPool& self) {
  nb::list all;
  const pool::State& state = self.self().state();
  for (int slot = 0; slot < self.self().slots(); ++slot) {
    const pool::Member& one = state.members[slot];
    size_t leases = 0;
    for (const auto& [id, lease] : state.leases) leases += lease.slot == slot;
    const pool::Identity who = self.self().identity(slot);
    all.append(nb::make_tuple(one.epoch, static_cast<int>(one.seat), who.pid, self.self().certain(slot), leases, one.log_end));
  }
  return all;
}

void bind_operations(nb::class_<SharedPool>& type) {
  type.def("reserve", &reserve, "wants"_a, "Make room for all of (key, prompt tokens, blocks, chain hashes), or for none.")
      .def(
          "publish",
          [](SharedPool& self, const std::vector<std::pair<uint64_t, uint32_t>>& lengths) {
            nb::gil_scoped_release release;
            self.operations().publish(lengths);
          },
          "lengths"_a, "Make (lease, tokens) visible.")
      .def(
          "take_append_right",
          [](SharedPool& self, uint64_t lease_, uint32_t tokens) {
            nb::gil_scoped_release release;
            self.operations().take_append_right(lease_, tokens);
          },
          "lease"_a, "num_tokens"_a)
      .def("find", &find, "keys"_a)
      .def("lease", &lease, "keys"_a)
      .def(
          "attach",
          [](SharedPool& self, uint64_t generation, const std::string& key, const std::vector<int32_t>& blocks) {
            nb::gil_scoped_release release;
            return self.entry(self.operations().attach(generation, key, blocks));
          },
          "generation"_a, "key"_a, "blocks"_a)
      .def(
          "release",
          [](SharedPool& self, const std::vector<uint64_t>& leases) {
            nb::gil_scoped_release release;
            self.operations().release(leases);
          },
          "leases"_a)
      .def(
          "remove",
          [](SharedPool& self, const std::vector<std::string>& keys) {
            nb::gil_scoped_release release;
            return self.operations().remove(keys);
          },
          "keys"_a, "Forget requests; returns their generations.")
      .def(
          "used_blocks",
          [](SharedPool& self) {
            nb::gil_scoped_release release;
            return self.operations().used_blocks();
          },
          "Blocks in use, after what the dead held has come back.")
      .def("lookup", &lookup, "hashes"_a.noconvert(), "out"_a.noconvert(), "Block of each chain hash uint8 [n, 16], -1: none.")
      .def(
          "longest_prefix",
          [](SharedPool& self, const Hashes& names) {
            nb::gil_scoped_release release;
            return self.operations().longest_prefix(hashes_of(names), names.shape(0));
          },
          "hashes"_a.noconvert(), "Leading chain hashes uint8 [n, 16] that are here.");
}

}  // namespace

void register_pool(nb::module_& m) {
  pool_fault = new_exception(m, "PoolFault");
  pool_refusal = new_exception(m, "PoolRefusal");
  nb::register_exception_translator(&translate);
  nb::class_<SharedPool> type(m, "SharedPool", "The metadata of a pool in a device's memory; docs/pool-format.md.");
  type.def(
          "__init__",
          [](SharedPool* self, Bytes memory, int fd, bool coherent, uint64_t num_blocks, int block_tokens, uint64_t meta_offset,
             int slots, uint64_t ring_lines, uint64_t snapshot_lines, double expiry_s, double quarantine_s, bool offline) {
            pool::Geometry geometry;
            geometry.num_blocks = num_blocks;
            geometry.block_tokens = block_tokens;
            geometry.meta_offset = meta_offset;
            geometry.slots = slots;
            geometry.ring_lines = ring_lines;
            geometry.snapshot_lines = snapshot_lines;
            nb::gil_scoped_release release;
            if (offline) new (self) SharedPool(std::move(memory), fd, coherent, geometry, SharedPool::Offline{});
            else new (self) SharedPool(std::move(memory), fd, coherent, geometry, static_cast<int64_t>(expiry_s * 1e9),
                                       static_cast<int64_t>(quarantine_s * 1e9));
          },
          "memory"_a.noconvert(), "fd"_a, "coherent"_a, "num_blocks"_a, "block_tokens"_a, "meta_offset"_a, "slots"_a,
          "ring_lines"_a, "snapshot_lines"_a, "expiry_s"_a, "quarantine_s"_a, "offline"_a = false)
      .def(
          "join",
          [](SharedPool& self, int first, int last) {
            nb::gil_scoped_release release;
            self.join(first, last);
          },
          "first"_a, "last"_a, "Take a slot of that range and begin to beat.")
      .def(
          "leave",
          [](SharedPool& self) {
            nb::gil_scoped_release release;
            self.leave();
          },
          "Give up every lease and the slot.")
      .def(
          "validate",
          [](SharedPool& self) {
            nb::gil_scoped_release release;
            self.self().validate();
          },
          "Refuse to go on when the leases may be gone.")
      .def_prop_ro("slot", [](SharedPool& self) { return self.self().slot(); })
      .def_prop_ro("lines_flushed", &SharedPool::lines_flushed)
      .def_prop_ro("transactions", [](SharedPool& self) { return self.self().state().number; })
      .def("requests_read", &requests_read,
           nb::sig("def requests_read(self) -> list[tuple[int, str, int, int, int, int, list[int], int, bool, int, int]]"))
      .def("members", &members, nb::sig("def members(self) -> list[tuple[int, int, int, bool, int, int]]"))
      .def(
          "repair",
          [](SharedPool& self) {
            nb::gil_scoped_release release;
            self.self().repair();
          },
          "Write a pool that was read offline anew from what could be read.")
      .def_prop_ro("problems", [](SharedPool& self) { return self.damage().problems; })
      .def_prop_ro("notes", [](SharedPool& self) { return self.damage().notes; })
      .def("contradictions", [](SharedPool& self) { return self.self().state().contradictions(); });
  bind_operations(type);
}
