// The client's side: rows to work requests and back, on any queue pair.
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <string>
#include <vector>

#include "row_tables.h"
#include "verbs.h"

using namespace nb::literals;

namespace verbs {
namespace {

using ConstBytes = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Bytes = nb::ndarray<uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using OutRows = nb::ndarray<uint8_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using InRows = nb::ndarray<const uint8_t, nb::ndim<3>, nb::c_contig, nb::device::cpu>;
using Slots = nb::ndarray<const int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Starts = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Tokens = nb::ndarray<const int32_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

constexpr uint64_t kMaxRequestBytes = uint64_t{1} << 30;
constexpr size_t kPostBatch = 64;  // work requests per doorbell
// The head of the staging memory holds PACK's messages, the rest rows of arrays that are not registered.
constexpr uint64_t kMessageBytes = uint64_t{256} << 10;
constexpr size_t kMaxPackRows = (kMessageBytes - sizeof(PackMessage)) / sizeof(uint64_t);

void want(bool good, const char* what) {
  if (!good) throw std::invalid_argument(what);
}

uint64_t address_of(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer); }

// Registered memory of this process.
struct Local {
  uint64_t address, nbytes;
  uint32_t lkey;
};

// One (component, layer) of the remote device.
struct Region {
  RowTables& tables;
  int number;
  int64_t offset, row_bytes;

  void check() const {
    want(number >= 0 && number < tables.num_regions(), "no such region");
    want(offset >= 0 && row_bytes > 0, "region_offset and row_bytes must be positive");
  }
};

// One row to move: where it lies remotely, and its row number in the caller's array.
struct Row {
  uint64_t remote;
  uint64_t local;
};

struct Counters {
  uint64_t work_requests = 0, reads = 0, writes = 0, packs = 0, completions = 0;
};

class Requester {
 public:
  Requester(QueuePair& queue_pair, uint32_t rkey, uint64_t staging_address, uint64_t staging_bytes, uint32_t lkey)
      : queue_pair_(queue_pair),
        rkey_(rkey),
        message_{staging_address, kMessageBytes, lkey},
        bounce_{staging_address + kMessageBytes, staging_bytes - kMessageBytes, lkey},
        batch_(kPostBatch),
        signal_every_(queue_pair.send_queue_depth() / 2) {
    want(staging_bytes > 2 * kMessageBytes, "the staging memory is too small");
  }

  void add_memory(uint64_t address, uint64_t nbytes, uint32_t lkey) { registered_.push_back({address, nbytes, lkey}); }

  int64_t read_rows(const Region& region, const Slots& slots, const Tokens& tokens, const OutRows& out,
                    const std::optional<Tokens>& out_rows) {
    resolve_reads(region, slots, tokens, out, out_rows);
    const auto width = static_cast<uint64_t>(region.row_bytes);
    if (const Local* local = find(out.data(), out.nbytes())) {
      transfer(Opcode::kRead, rows_.data(), rows_.size(), {address_of(out.data()), out.nbytes(), local->lkey}, width);
    } else {
      in_chunks(bounce_.nbytes / width, [&](Row* rows, size_t count) {
        number_rows(rows, count);
        transfer(Opcode::kRead, rows, count, bounce_, width);
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
        pack(rows, count, {address_of(out.data()) + rows[0].local * width, count * width, local->lkey}, width);
      });
    } else {
      in_chunks(std::min<uint64_t>(kMaxPackRows, bounce_.nbytes / width), [&](Row* rows, size_t count) {
        number_rows(rows, count);
        pack(rows, count, bounce_, width);
        copy_out(count, out.data(), width);
      });
    }
    return static_cast<int64_t>(rows_.size());
  }

  int64_t write_rows(const Region& region, const Slots& slots, const Starts& start, const InRows& data) {
    resolve_writes(region, slots, start, data);
    const auto width = static_cast<uint64_t>(region.row_bytes);
    if (const Local* local = find(data.data(), data.nbytes())) {
      transfer(Opcode::kWrite, rows_.data(), rows_.size(), {address_of(data.data()), data.nbytes(), local->lkey}, width);
    } else {
      in_chunks(bounce_.nbytes / width, [&](Row* rows, size_t count) {
        std::memcpy(pointer(bounce_), data.data() + rows[0].local * width, count * width);
        number_rows(rows, count);
        transfer(Opcode::kWrite, rows, count, bounce_, width);
      });
    }
    advance_lengths(region, slots, start, static_cast<int64_t>(data.shape(1)));
    return static_cast<int64_t>(rows_.size());
  }

  void read(uint64_t offset, const Bytes& out) {
    for (uint64_t done = 0; done < out.size();) {
      const uint64_t nbytes = std::min(out.size() - done, bounce_.nbytes);
      const Row row{offset + done, 0};
      transfer(Opcode::kRead, &row, 1, bounce_, nbytes);
      std::memcpy(out.data() + done, pointer(bounce_), nbytes);
      done += nbytes;
    }
  }

  void write(uint64_t offset, const ConstBytes& data) {
    for (uint64_t done = 0; done < data.size();) {
      const uint64_t nbytes = std::min(data.size() - done, bounce_.nbytes);
      const Row row{offset + done, 0};
      std::memcpy(pointer(bounce_), data.data() + done, nbytes);
      transfer(Opcode::kWrite, &row, 1, bounce_, nbytes);
      done += nbytes;
    }
  }

  const Counters& counters() const { return counters_; }
  void reset_counters() {
    counters_ = {};
    queue_pair_.reset_max_outstanding_reads();
  }

 private:
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
    region.check();
    const size_t batch = slots.shape(0), k = tokens.shape(1);
    want(tokens.shape(0) == batch, "slots and tokens differ in length");
    want(static_cast<int64_t>(out.shape(1)) == region.row_bytes, "out's rows are not row_bytes wide");
    want(!out_rows || (out_rows->shape(0) == batch && out_rows->shape(1) == k), "out_rows and tokens differ in shape");
    rows_.clear();
    for (size_t b = 0; b < batch; ++b) {
      const RequestTable& request = region.tables.at(slots.data()[b]);
      for (size_t i = b * k; i < (b + 1) * k; ++i) {
        const int32_t token = tokens.data()[i];
        if (token == -1) continue;
        const int64_t row = region.tables.readable_row(slots.data()[b], request, region.number, token);
        // A negative out row becomes a huge one.
        const auto target = out_rows ? static_cast<uint64_t>(int64_t{out_rows->data()[i]}) : uint64_t{i};
        if (target >= out.shape(0)) throw std::out_of_range("an out row lies past the end of out");
        rows_.push_back({static_cast<uint64_t>(region.offset + row * region.row_bytes), target});
      }
    }
  }

  // Refuses a gap, a shared token, and more than was reserved, before anything is posted.
  void resolve_writes(const Region& region, const Slots& slots, const Starts& start, const InRows& data) {
    region.check();
    const size_t batch = slots.shape(0);
    const auto n = static_cast<int64_t>(data.shape(1));
    want(start.shape(0) == batch && data.shape(0) == batch, "slots, start and rows differ in length");
    want(static_cast<int64_t>(data.shape(2)) == region.row_bytes, "rows are not row_bytes wide");
    rows_.clear();
    for (size_t b = 0; b < batch; ++b) {
      const int64_t slot = slots.data()[b], first = start.data()[b];
      const RequestTable& request = region.tables.at(slot);
      const int64_t length = request.lengths[static_cast<size_t>(region.number)];
      const int64_t capacity = region.tables.capacity(request);
      if (first < request.shared_tokens || first > length) throw TokenFault(slot, first, length);
      if (first + n > capacity) throw TokenFault(slot, capacity, length);
      for (int64_t i = 0; i < n; ++i) {
        const int64_t row = region.tables.row(request, first + i);
        rows_.push_back({static_cast<uint64_t>(region.offset + row * region.row_bytes), b * data.shape(1) + static_cast<uint64_t>(i)});
      }
    }
  }

  static void advance_lengths(const Region& region, const Slots& slots, const Starts& start, int64_t n) {
    for (size_t b = 0; b < slots.shape(0); ++b) {
      int32_t& length = region.tables.at(slots.data()[b]).lengths[static_cast<size_t>(region.number)];
      length = std::max(length, static_cast<int32_t>(start.data()[b] + n));
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

  // One work request per remote-contiguous run; rows that are neighbours locally too share a scatter entry.
  void transfer(Opcode opcode, const Row* rows, size_t count, const Local& local, uint64_t width) {
    guarded([&] {
      WorkRequest* run = nullptr;
      uint64_t run_bytes = 0;
      for (size_t i = 0; i < count; ++i) {
        const uint64_t address = local.address + rows[i].local * width;
        const bool joins = run && rows[i].remote == run->remote_offset + run_bytes && run_bytes + width <= kMaxRequestBytes;
        Sge* last = joins ? &run->sge[run->num_sge - 1] : nullptr;
        if (last && last->address + last->length == address) {
          last->length += static_cast<uint32_t>(width);
        } else {
          if (!joins || run->num_sge == kMaxSge) {
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

  void pack(const Row* rows, size_t count, const Local& target, uint64_t width) {
    const PackMessage head{rkey_, static_cast<uint32_t>(width), static_cast<uint32_t>(count), target.lkey, target.address};
    uint8_t* message = pointer(message_);
    std::memcpy(message, &head, sizeof head);
    for (size_t i = 0; i < count; ++i)
      std::memcpy(message + sizeof head + i * sizeof(uint64_t), &rows[i].remote, sizeof(uint64_t));
    guarded([&] {
      WorkRequest& request = next_request(Opcode::kPack, 0);
      const auto nbytes = static_cast<uint32_t>(sizeof head + count * sizeof(uint64_t));
      request.sge[request.num_sge++] = {message_.address, nbytes, message_.lkey};
      finish();
    });
  }

  // After a fault nothing more is posted, as on a queue pair in the error state.
  template <typename Work>
  void guarded(Work work) {
    if (!broken_.empty()) throw WorkFault(Status::kWrFlushErr, next_id_, "the queue pair is in the error state: " + broken_);
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
  Local message_, bounce_;
  std::vector<Local> registered_;
  std::vector<WorkRequest> batch_;
  size_t batched_ = 0;
  size_t signal_every_, unsignalled_ = 0;
  uint64_t next_id_ = 0, completed_ = 0;
  std::vector<Row> rows_;          // scratch of one call, only ever grows
  std::vector<uint64_t> targets_;  // scratch of one chunk
  Counters counters_;
  std::string broken_;
};

}  // namespace

void register_requester(nb::module_& m) {
  nb::class_<Requester>(m, "Requester", "Moves rows by work requests. Not safe for two threads at once.")
      .def(nb::init<QueuePair&, uint32_t, uint64_t, uint64_t, uint32_t>(), nb::keep_alive<1, 2>(), "queue_pair"_a,
           "rkey"_a, "staging_address"_a, "staging_bytes"_a, "staging_lkey"_a)
      .def("add_memory", &Requester::add_memory, "address"_a, "nbytes"_a, "lkey"_a,
           "Registered memory: arrays inside it are moved without a copy.")
      .def(
          "read_rows",
          [](Requester& self, RowTables& tables, int region, int64_t region_offset, int64_t row_bytes,
             const Slots& slots, const Tokens& tokens, const OutRows& out, const std::optional<Tokens>& out_rows) {
            nb::gil_scoped_release release;
            return self.read_rows({tables, region, region_offset, row_bytes}, slots, tokens, out, out_rows);
          },
          "tables"_a, "region"_a, "region_offset"_a, "row_bytes"_a, "slots"_a.noconvert(), "tokens"_a.noconvert(),
          "out"_a.noconvert(), "out_rows"_a.noconvert().none() = nb::none(),
          "READ the rows of tokens int32 [B, k] (-1 skips) into out uint8 [R, row_bytes]; returns the rows read.")
      .def(
          "pack_rows",
          [](Requester& self, RowTables& tables, int region, int64_t region_offset, int64_t row_bytes,
             const Slots& slots, const Tokens& tokens, const OutRows& out, const std::optional<Tokens>& out_rows) {
            nb::gil_scoped_release release;
            return self.pack_rows({tables, region, region_offset, row_bytes}, slots, tokens, out, out_rows);
          },
          "tables"_a, "region"_a, "region_offset"_a, "row_bytes"_a, "slots"_a.noconvert(), "tokens"_a.noconvert(),
          "out"_a.noconvert(), "out_rows"_a.noconvert().none() = nb::none(),
          "As read_rows, but the owner packs the rows into one message.")
      .def(
          "write_rows",
          [](Requester& self, RowTables& tables, int region, int64_t region_offset, int64_t row_bytes,
             const Slots& slots, const Starts& start, const InRows& rows) {
            nb::gil_scoped_release release;
            return self.write_rows({tables, region, region_offset, row_bytes}, slots, start, rows);
          },
          "tables"_a, "region"_a, "region_offset"_a, "row_bytes"_a, "slots"_a.noconvert(), "start"_a.noconvert(),
          "rows"_a.noconvert(), "WRITE rows uint8 [B, n, row_bytes] at tokens start[b] .. start[b] + n; returns the rows.")
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
