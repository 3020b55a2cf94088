// Write-back, invalidation and non-temporal stores: the instructions are chosen once, by CPUID.
#include "visibility.h"

#include <cpuid.h>
#include <immintrin.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/string.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <string>

#include "registers.h"

using namespace nb::literals;

namespace {

struct Features {
  bool clflush = false, clflushopt = false, clwb = false;
};

Features probe() {
  Features features;
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (__get_cpuid(1, &a, &b, &c, &d)) features.clflush = (d >> 19) & 1;
  if (__get_cpuid_count(7, 0, &a, &b, &c, &d)) {
    features.clflushopt = (b >> 23) & 1;
    features.clwb = (b >> 24) & 1;
  }
  return features;
}

using LineOp = void (*)(const uint8_t* line);

void clflush(const uint8_t* line) { _mm_clflush(line); }
__attribute__((target("clflushopt"))) void clflushopt(const uint8_t* line) {
  _mm_clflushopt(const_cast<uint8_t*>(line));
}
__attribute__((target("clwb"))) void clwb(const uint8_t* line) { _mm_clwb(const_cast<uint8_t*>(line)); }

const Features kFeatures = probe();
const LineOp kInvalidate = kFeatures.clflushopt ? clflushopt : clflush;
const LineOp kWriteback = kFeatures.clwb ? clwb : kInvalidate;

int64_t for_each_line(const uint8_t* begin, size_t nbytes, LineOp op) {
  if (nbytes == 0) return 0;
  const auto address = reinterpret_cast<uintptr_t>(begin);
  const uint8_t* line = begin - address % kLineBytes;
  int64_t lines = 0;
  for (; line < begin + nbytes; line += kLineBytes, ++lines) op(line);
  return lines;
}

}  // namespace

int64_t writeback_lines(const uint8_t* begin, size_t nbytes) { return for_each_line(begin, nbytes, kWriteback); }

int64_t invalidate_lines(const uint8_t* begin, size_t nbytes) { return for_each_line(begin, nbytes, kInvalidate); }

void store_fence() { _mm_sfence(); }

void full_fence() { _mm_mfence(); }

int64_t nontemporal_copy(uint8_t* to, const uint8_t* from, size_t nbytes) {
  const size_t past = reinterpret_cast<uintptr_t>(to) % kLineBytes;
  const size_t head = past ? std::min(nbytes, kLineBytes - past) : 0;
  const size_t body = (nbytes - head) / kLineBytes * kLineBytes, tail = nbytes - head - body;
  std::memcpy(to, from, head);
  for (size_t i = head; i < head + body; i += sizeof(__m128i))
    _mm_stream_si128(reinterpret_cast<__m128i*>(to + i), _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i)));
  std::memcpy(to + head + body, from + head + body, tail);
  return writeback_lines(to, head) + writeback_lines(to + head + body, tail);
}

namespace {

using ConstBytes = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Bytes = nb::ndarray<uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// The range's first byte, refusing a range that does not lie in the memory.
const uint8_t* range(const ConstBytes& memory, size_t offset, size_t nbytes) {
  if (offset > memory.size() || nbytes > memory.size() - offset)
    throw std::out_of_range("the range lies past the memory's end");
  return memory.data() + offset;
}

int64_t writeback(const ConstBytes& memory, size_t offset, size_t nbytes) {
  nb::gil_scoped_release release;
  const int64_t lines = writeback_lines(range(memory, offset, nbytes), nbytes);
  store_fence();
  return lines;
}

int64_t invalidate(const ConstBytes& memory, size_t offset, size_t nbytes) {
  nb::gil_scoped_release release;
  const int64_t lines = invalidate_lines(range(memory, offset, nbytes), nbytes);
  full_fence();
  return lines;
}

int64_t copy(const Bytes& to, const ConstBytes& from) {
  nb::gil_scoped_release release;
  if (to.size() != from.size()) throw std::invalid_argument("dst and src differ in size");
  const int64_t lines = nontemporal_copy(to.data(), from.data(), to.size());
  store_fence();
  return lines;
}

std::map<std::string, bool> features() {
  return {{"clflush", kFeatures.clflush}, {"clflushopt", kFeatures.clflushopt}, {"clwb", kFeatures.clwb}};
}

}  // namespace

void register_visibility(nb::module_& m) {
  m.def("writeback", &writeback, "memory"_a.noconvert(), "offset"_a, "nbytes"_a,
        "Write dirty lines back to memory, then a store fence; returns the lines.");
  m.def("invalidate", &invalidate, "memory"_a.noconvert(), "offset"_a, "nbytes"_a,
        "Drop lines from this CPU's caches, then a full fence; returns the lines.");
  m.def("store_fence", &store_fence);
  m.def("full_fence", &full_fence);
  m.def("nontemporal_copy", &copy, "dst"_a.noconvert(), "src"_a.noconvert(),
        "Copy past the caches, then a store fence; returns the part lines that were written back.");
  m.def("visibility_features", &features, "The flush instructions of this CPU.");
}
