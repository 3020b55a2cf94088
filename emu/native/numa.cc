// NUMA policy by raw system call: no libnuma, whose numa_available() has lied in containers.
#include <nanobind/ndarray.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>

#include "registers.h"

using namespace nb::literals;

namespace {

// From the kernel's uapi/linux/mempolicy.h, which not every system has installed.
constexpr int kPolicyBind = 2;
constexpr unsigned kMoveExclusivePages = 1u << 1;
constexpr int kMaxNodes = 1024;

int bind_pages(uintptr_t address, size_t nbytes, int node) {
  if (node < 0 || node >= kMaxNodes) return EINVAL;
  constexpr size_t kWordBits = 8 * sizeof(unsigned long);
  std::array<unsigned long, kMaxNodes / kWordBits> mask{};
  mask[static_cast<size_t>(node) / kWordBits] = 1ul << (static_cast<size_t>(node) % kWordBits);
  nb::gil_scoped_release release;
  // The kernel reads one bit less than it is told.
  const long failed =
      syscall(SYS_mbind, address, nbytes, kPolicyBind, mask.data(), kMaxNodes + 1, kMoveExclusivePages);
  return failed ? errno : 0;
}

using Nodes = nb::ndarray<int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

int page_nodes(uintptr_t address, size_t page_bytes, const Nodes& nodes) {
  nb::gil_scoped_release release;
  std::array<void*, 1024> pages;
  for (size_t done = 0; done < nodes.size();) {
    const size_t count = std::min(pages.size(), nodes.size() - done);
    for (size_t i = 0; i < count; ++i) pages[i] = reinterpret_cast<void*>(address + (done + i) * page_bytes);
    if (syscall(SYS_move_pages, 0, count, pages.data(), nullptr, nodes.data() + done, 0)) return errno;
    done += count;
  }
  return 0;
}

}  // namespace

void register_numa(nb::module_& m) {
  m.def("mbind", &bind_pages, "address"_a, "nbytes"_a, "node"_a,
        "Bind whole pages to a node and move those that are there already; returns 0 or errno.");
  m.def("page_nodes", &page_nodes, "address"_a, "page_bytes"_a, "nodes"_a.noconvert(),
        "Fill nodes int32 [n] with the node of each page from address on, or its negative errno; returns 0 or errno.");
}
