// The client's side: rows to work requests and back, on any queue pair.
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <optional>
#include <utility>
#include <vector>

#include "row_arguments.h"
#include "verbs_poster.h"

using namespace nb::literals;

namespace verbs {
namespace {

// The head of the staging memory holds PACK's messages, the rest rows of arrays that are not registered.
constexpr size_t kMaxPackRows = (kPackMessageBytes - sizeof(PackMessage)) / sizeof(uint64_t);

uint64_t address_of(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer); }

// The end of the remote memory is the rkey's business: a request past it completes in error.
constexpr size_t kUnbounded = std::numeric_limits<int64_t>::max();

class Requester {
 public:
  Requester(QueuePair& queue_pair, uint32_t rkey, const Local& staging)
      : poster_(queue_pair, rkey), message_(staging), bounce_(staging) {
    want(staging.nbytes > 2 * kPackMessageBytes, "the staging memory is too small");
    message_.nbytes = kPackMessageBytes;
    bounce_.address += kPackMessageBytes;
    bounce_.nbytes -= kPackMessageBytes;
  }

  void add_memory(const Local& memory) { registered_.push_back(memory); }

  int64_t read_rows(const Region& region, const Slots& slots, const Tokens& tokens, const OutRows& out,
                    const std::optional<Tokens>& out_rows) {
    resolve_reads(region, slots, tokens, out, out_rows);
    const auto width = static_cast<uint64_t>(region.row_bytes);
    if (const Local* local = find(out.data(), out.nbytes())) {
      const Local target = part(*local, out.data(), out.nbytes());
      poster_.transfer(Opcode::kRead, rows_.data(), rows_.size(), target, width);
    } else {
      in_chunks(bounce_.nbytes / width, [&](Row* rows, size_t count) {
        number_rows(rows, count);
        poster_.transfer(Opcode::kRead, rows, count, bounce_, width);
        copy_out(count, out.data(), width);
      });
    }
    return static_cast<int64_t>(rows_.size());
  }

  // Each message brings one contiguous reply, straight into `out` where its rows are wanted in that order.
  int64_t pack_rows(const Region& region, const Slots& slots, const Tokens& tokens, const OutRows& out,
                    const std::optional<Tokens>& out_rows) {
    resolve_reads(region, slots, tokens, out, out_rows);
    const auto width = static_cast<uint64_t>(region.row_bytes);
    const Local* local = find(out.data(), out.nbytes());
    bool in_order = true;
    for (size_t i = 1; i < rows_.size() && in_order; ++i) in_order = rows_[i].local == rows_[i - 1].local + 1;
    if (local && in_order) {
      in_chunks(kMaxPackRows, [&](Row* rows, size_t count) {
        pack_chunk(rows, count, part(*local, out.data() + rows[0].local * width, count * width), width);
      });
    } else {
      in_chunks(std::min<uint64_t>(kMaxPackRows, bounce_.nbytes / width), [&](Row* rows, size_t count) {
        number_rows(rows, count);
        pack_chunk(rows, count, bounce_, width);
        copy_out(count, out.data(), width);
      });
    }
    return static_cast<int64_t>(rows_.size());
  }

  int64_t write_rows(const Region& region, const Slots& slots, const Starts& start, const InRows& data) {
    resolve_writes(region, slots, start, data);
    const auto width = static_cast<uint64_t>(region.row_bytes);
    if (const Local* local = find(data.data(), data.nbytes())) {
      const Local source = part(*local, data.data(), data.nbytes());
      poster_.transfer(Opcode::kWrite, rows_.data(), rows_.size(), source, width);
    } else {
      in_chunks(bounce_.nbytes / width, [&](Row* rows, size_t count) {
        std::memcpy(pointer(bounce_), data.data() + rows[0].local * width, count * width);
        number_rows(rows, count);
        poster_.transfer(Opcode::kWrite, rows, count, bounce_, width);
      });
    }
    region.advance_lengths(slots, start, static_cast<int64_t>(data.shape(1)));
    return static_cast<int64_t>(rows_.size());
  }

  void read(uint64_t offset, const Bytes& out) {
    for (uint64_t done = 0; done < out.size();) {
      const uint64_t nbytes = std::min(out.size() - done, bounce_.nbytes);
      const Row row{offset + done, 0};
      poster_.transfer(Opcode::kRead, &row, 1, bounce_, nbytes);
      std::memcpy(out.data() + done, pointer(bounce_), nbytes);
      done += nbytes;
    }
  }

  void write(uint64_t offset, const ConstBytes& data) {
    for (uint64_t done = 0; done < data.size();) {
      const uint64_t nbytes = std::min(data.size() - done, bounce_.nbytes);
      const Row row{offset + done, 0};
      std::memcpy(pointer(bounce_), data.data() + done, nbytes);
      poster_.transfer(Opcode::kWrite, &row, 1, bounce_, nbytes);
      done += nbytes;
    }
  }

  const Counters& counters() const { return poster_.counters(); }
  void reset_counters() { poster_.reset_counters(); }

 private:
  static Local part(const Local& whole, const void* data, uint64_t nbytes) {
    return {address_of(data), nbytes, whole.lkey, whole.remote_key};
  }
  static uint8_t* pointer(const Local& local) { return reinterpret_cast<uint8_t*>(local.address); }

  const Local* find(const void* data, uint64_t nbytes) const {
    const uint64_t address = address_of(data);
    for (const Local& local : registered_)
      if (address >= local.address && nbytes <= local.nbytes && address - local.address <= local.nbytes - nbytes)
        return &local;
    return nullptr;
  }

  void resolve_reads(const Region& region, const Slots& slots, const Tokens& tokens, const OutRows& out,
                     const std::optional<Tokens>& out_rows) {
    rows_.clear();
    region.for_each_read(slots, tokens, out, out_rows, [&](size_t target, int64_t offset) {
      rows_.push_back({static_cast<uint64_t>(offset), target});
    });
  }

  // Every write is checked before anything is posted.
  void resolve_writes(const Region& region, const Slots& slots, const Starts& start, const InRows& data) {
    region.check_rows(slots, start, data);
    const auto n = static_cast<int64_t>(data.shape(1));
    rows_.clear();
    for (size_t b = 0; b < slots.shape(0); ++b) {
      const int64_t first = start.data()[b];
      const RequestTable& request = region.writable(slots.data()[b], first, n);
      for (int64_t i = 0; i < n; ++i) {
        const int64_t offset = region.at(region.tables.row(request, first + i));
        rows_.push_back({static_cast<uint64_t>(offset), b * data.shape(1) + static_cast<size_t>(i)});
      }
    }
  }

  template <typename Visit>
  void in_chunks(uint64_t rows_per_chunk, Visit visit) {
    want(rows_per_chunk > 0, "a row is larger than the staging memory");
    for (size_t done = 0; done < rows_.size();) {
      const size_t count = std::min<size_t>(rows_per_chunk, rows_.size() - done);
      visit(rows_.data() + done, count);
      done += count;
    }
  }

  // Stage the rows one behind the other, remembering where they belong.
  void number_rows(Row* rows, size_t count) {
    targets_.resize(count);
    for (size_t i = 0; i < count; ++i) targets_[i] = std::exchange(rows[i].local, i);
  }

  void copy_out(size_t count, uint8_t* out, uint64_t width) const {
    for (size_t i = 0; i < count; ++i) std::memcpy(out + targets_[i] * width, pointer(bounce_) + i * width, width);
  }

  void pack_chunk(const Row* rows, size_t count, const Local& target, uint64_t width) {
    const PackMessage head{poster_.rkey(), static_cast<uint32_t>(width), static_cast<uint32_t>(count),
                           target.remote_key, target.address};
    uint8_t* message = pointer(message_);
    std::memcpy(message, &head, sizeof head);
    for (size_t i = 0; i < count; ++i)
      std::memcpy(message + sizeof head + i * sizeof(uint64_t), &rows[i].remote, sizeof(uint64_t));
    poster_.send_pack(part(message_, message, sizeof head + count * sizeof(uint64_t)));
  }

  Poster poster_;
  Local message_, bounce_;
  std::vector<Local> registered_;
  std::vector<Row> rows_;          // scratch of one call, only ever grows
  std::vector<uint64_t> targets_;  // scratch of one chunk
};

}  // namespace

void register_requester(nb::module_& m) {
  nb::class_<Local>(m, "LocalMemory", "Registered memory of this process and its keys.")
      .def(
          "__init__",
          [](Local* self, uint64_t address, uint64_t nbytes, uint32_t lkey, uint32_t remote_key) {
            new (self) Local{address, nbytes, lkey, remote_key};
          },
          "address"_a, "nbytes"_a, "lkey"_a, "remote_key"_a)
      .def_ro("address", &Local::address)
      .def_ro("lkey", &Local::lkey)
      .def_ro("remote_key", &Local::remote_key, "By which the owner reaches it.");
  nb::class_<Requester>(m, "Requester", "Moves rows by work requests. Not safe for two threads at once.")
      .def(nb::init<QueuePair&, uint32_t, const Local&>(), nb::keep_alive<1, 2>(), "queue_pair"_a, "rkey"_a,
           "staging"_a)
      .def("add_memory", &Requester::add_memory, "memory"_a, "Arrays inside it are moved without a copy.")
      .def(
          "read_rows",
          [](Requester& self, RowTables& tables, int region, int64_t region_offset, int64_t row_bytes,
             const Slots& slots, const Tokens& tokens, const OutRows& out, const std::optional<Tokens>& out_rows) {
            nb::gil_scoped_release release;
            return self.read_rows({tables, region, region_offset, row_bytes, kUnbounded}, slots, tokens, out, out_rows);
          },
          "tables"_a, "region"_a, "region_offset"_a, "row_bytes"_a, "slots"_a.noconvert(), "tokens"_a.noconvert(),
          "out"_a.noconvert(), "out_rows"_a.noconvert().none() = nb::none(),
          "READ the rows of tokens int32 [B, k] (-1 skips) into out uint8 [R, row_bytes]; returns the rows read.")
      .def(
          "pack_rows",
          [](Requester& self, RowTables& tables, int region, int64_t region_offset, int64_t row_bytes,
             const Slots& slots, const Tokens& tokens, const OutRows& out, const std::optional<Tokens>& out_rows) {
            nb::gil_scoped_release release;
            return self.pack_rows({tables, region, region_offset, row_bytes, kUnbounded}, slots, tokens, out, out_rows);
          },
          "tables"_a, "region"_a, "region_offset"_a, "row_bytes"_a, "slots"_a.noconvert(), "tokens"_a.noconvert(),
          "out"_a.noconvert(), "out_rows"_a.noconvert().none() = nb::none(),
          "As read_rows, but the owner packs the rows into one message.")
      .def(
          "write_rows",
          [](Requester& self, RowTables& tables, int region, int64_t region_offset, int64_t row_bytes,
             const Slots& slots, const Starts& start, const InRows& rows) {
            nb::gil_scoped_release release;
            return self.write_rows({tables, region, region_offset, row_bytes, kUnbounded}, slots, start, rows);
          },
          "tables"_a, "region"_a, "region_offset"_a, "row_bytes"_a, "slots"_a.noconvert(), "start"_a.noconvert(),
          "rows"_a.noconvert(),
          "WRITE rows uint8 [B, n, row_bytes] at tokens start[b] .. start[b] + n; returns the rows.")
      .def("read", &Requester::read, nb::call_guard<nb::gil_scoped_release>(), "offset"_a, "out"_a.noconvert())
      .def("write", &Requester::write, nb::call_guard<nb::gil_scoped_release>(), "offset"_a, "data"_a.noconvert())
      .def_prop_ro("work_requests", [](const Requester& self) { return self.counters().work_requests; })
      .def_prop_ro("reads", [](const Requester& self) { return self.counters().reads; })
      .def_prop_ro("writes", [](const Requester& self) { return self.counters().writes; })
      .def_prop_ro("packs", [](const Requester& self) { return self.counters().packs; })
      .def_prop_ro("completions", [](const Requester& self) { return self.counters().completions; })
      .def("reset_counters", &Requester::reset_counters);
}

}  // namespace verbs
