// The data path on load/store media: rows between a mapped device and the caller's buffers.
//
// Every call resolves and checks all its rows first and only then touches a byte, so a refused call changes
// nothing. The resolved list lives in per-thread scratch memory that only ever grows: no allocation per call.
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <string>
#include <vector>

#include "registers.h"
#include "row_arguments.h"
#include "visibility.h"

using namespace nb::literals;

namespace {

// Rows ahead of the copy whose first lines are fetched: 4 to 8 measured best, more gains nothing.
constexpr size_t kPrefetchRows = 6;

struct Move {
  const uint8_t* from;
  uint8_t* to;
  size_t nbytes;
};

std::vector<Move>& scratch(size_t moves) {
  thread_local std::vector<Move> list;
  if (list.size() < moves) list.resize(moves);
  return list;
}

// Calls visit(index of the first row in the batch's rows, byte offset, rows) for every run of rows that are
// contiguous in memory. `start` is checked by the caller.
template <typename Visit>
void for_each_run(const Region& region, const RequestTable& request, int64_t start,
                  int64_t count, Visit visit) {
  const RowTables& tables = region.tables;
  for (int64_t done = 0; done < count;) {
    const int64_t token = start + done;
    const int64_t run = std::min(count - done, tables.contiguous_tokens(request, token));
    visit(done, region.at(tables.row(request, token), run), run);
    done += run;
  }
}

void copy_moves(const Move* moves, size_t count) {
  for (size_t i = 0; i < count; ++i) {
    if (i + kPrefetchRows < count) {
      const Move& ahead = moves[i + kPrefetchRows];
      for (size_t byte = 0; byte < ahead.nbytes; byte += kLineBytes) __builtin_prefetch(ahead.from + byte);
    }
    // A call with a size known only at run time: inlined for a constant size, gcc 12 emits the slower `rep movs`.
    std::memcpy(moves[i].to, moves[i].from, moves[i].nbytes);
  }
}

int64_t gather_rows(const ConstBytes& memory, const Region& region, const Slots& slots, const Tokens& tokens,
                    const OutRows& out, const std::optional<Tokens>& out_rows) {
  std::vector<Move>& moves = scratch(tokens.shape(0) * tokens.shape(1));
  const auto nbytes = static_cast<size_t>(region.row_bytes);
  size_t count = 0;
  region.for_each_read(slots, tokens, out, out_rows, [&](size_t target, int64_t offset) {
    moves[count++] = {memory.data() + offset, out.data() + target * nbytes, nbytes};
  });
  copy_moves(moves.data(), count);
  return static_cast<int64_t>(count);
}

int64_t scatter_rows(const Bytes& memory, const Region& region, const Slots& slots,
                     const Starts& start, const InRows& rows, bool nontemporal) {
  const size_t batch = slots.shape(0);
  const auto n = static_cast<int64_t>(rows.shape(1));
  region.check_rows(slots, start, rows);
  std::vector<Move>& moves = scratch(batch * static_cast<size_t>(n / region.tables.block_tokens() + 3));
  size_t count = 0;
  for (size_t b = 0; b < batch; ++b) {
    const RequestTable& request = region.writable(slots.data()[b], start.data()[b], n);
    const uint8_t* from = rows.data() + static_cast<int64_t>(b) * n * region.row_bytes;
    for_each_run(region, request, start.data()[b], n, [&](int64_t first, int64_t offset, int64_t run) {
      moves[count++] = {from + first * region.row_bytes, memory.data() + offset,
                        static_cast<size_t>(run * region.row_bytes)};
    });
  }
  for (size_t i = 0; i < count; ++i) {
    if (nontemporal)
      nontemporal_copy(moves[i].to, moves[i].from, moves[i].nbytes);
    else
      std::memcpy(moves[i].to, moves[i].from, moves[i].nbytes);
  }
  if (nontemporal) store_fence();
  region.advance_lengths(slots, start, n);
  return static_cast<int64_t>(batch) * n;
}

// Write back the lines of tokens start[b] .. start[b] + n, which must have been written; fences.
int64_t writeback_rows(const ConstBytes& memory, const Region& region, const Slots& slots,
                       const Starts& start, int64_t n) {
  const size_t batch = slots.shape(0);
  RowTables& tables = region.tables;
  want(start.shape(0) == batch && n >= 0, "slots and start differ in length, or n is negative");
  for (size_t b = 0; b < batch; ++b) {
    const RequestTable& request = tables.at(slots.data()[b]);
    if (n == 0) continue;
    tables.readable_row(slots.data()[b], request, region.number, start.data()[b]);
    tables.readable_row(slots.data()[b], request, region.number, start.data()[b] + n - 1);
  }
  int64_t lines = 0;
  for (size_t b = 0; b < batch; ++b)
    for_each_run(region, tables.at(slots.data()[b]), start.data()[b], n,
                 [&](int64_t, int64_t offset, int64_t run) {
                   lines += writeback_lines(memory.data() + offset, static_cast<size_t>(run * region.row_bytes));
                 });
  store_fence();
  return lines;
}

// Drop the lines of the tokens and fence, so that the next loads see what other hosts wrote back.
int64_t invalidate_tokens(const ConstBytes& memory, const Region& region, const Slots& slots,
                          const Tokens& tokens) {
  int64_t lines = 0;
  region.for_each_token(slots, tokens, [&](size_t, int64_t offset) {
    lines += invalidate_lines(memory.data() + offset, static_cast<size_t>(region.row_bytes));
  });
  full_fence();
  return lines;
}

// Owned by the module; never released, so that a late exception finds them.
PyObject *slot_fault, *token_fault;

void translate_fault(const std::exception_ptr& pointer, void*) {
  try {
    std::rethrow_exception(pointer);
  } catch (const SlotFault& fault) {
    PyErr_SetObject(slot_fault, nb::make_tuple(fault.slot).ptr());
  } catch (const TokenFault& fault) {
    PyErr_SetObject(token_fault, nb::make_tuple(fault.slot, fault.token, fault.length).ptr());
  }
}

PyObject* new_exception(nb::module_& m, const char* name, PyObject* base) {
  const std::string full = std::string(PyModule_GetName(m.ptr())) + "." + name;
  PyObject* type = PyErr_NewException(full.c_str(), base, nullptr);
  if (!type) throw nb::python_error();
  m.attr(name) = nb::borrow(type);
  return type;
}

int region_index(const RowTables& tables, int region) {
  want(region >= 0 && region < tables.num_regions(), "no such region");
  return region;
}

void set_length(RowTables& tables, int64_t slot, int64_t length) {
  RequestTable& request = tables.at(slot);
  want(length >= 0 && length <= request.capacity, "the length does not fit the block table");
  std::fill(request.lengths.begin(), request.lengths.end(), static_cast<int32_t>(length));
}

void set_shared(RowTables& tables, int64_t slot, int64_t shared_tokens) {
  RequestTable& request = tables.at(slot);
  want(shared_tokens >= 0, "shared_tokens is negative");
  request.shared_tokens = shared_tokens;
}

void register_tables(nb::module_& m) {
  nb::class_<RowTables>(m, "RowTables", "Block tables of one store's requests. Not safe for two threads at once.")
      .def(nb::init<int, int>(), "block_tokens"_a, "num_regions"_a)
      .def(
          "add",
          [](RowTables& self, const Starts& blocks, int64_t prompt_tokens, int64_t shared_tokens, int64_t length,
             int64_t append_tokens) {
            return self.add(blocks.data(), static_cast<int64_t>(blocks.shape(0)), prompt_tokens, shared_tokens, length,
                            append_tokens);
          },
          "blocks"_a.noconvert(), "prompt_tokens"_a, "shared_tokens"_a, "length"_a, "append_tokens"_a = -1,
          "Add a request: blocks int32 [n], the prompt's first; -1 append_tokens: all that they hold. Returns its slot.")
      .def("remove", &RowTables::remove, "slot"_a)
      .def(
          "length",
          [](RowTables& self, int64_t slot, int region) {
            return self.at(slot).lengths[static_cast<size_t>(region_index(self, region))];
          },
          "slot"_a, "region"_a, "Tokens written in one region.")
      .def(
          "min_length",
          [](RowTables& self, int64_t slot) {
            const std::vector<int32_t>& lengths = self.at(slot).lengths;
            return *std::min_element(lengths.begin(), lengths.end());
          },
          "slot"_a, "Tokens written in every region.")
      .def("set_length", &set_length, "slot"_a, "length"_a, "Set the length of every region.")
      .def("set_shared", &set_shared, "slot"_a, "shared_tokens"_a,
           "Close the tokens before this one to writes; past the prompt, appended ones too.")
      .def(
          "capacity", [](RowTables& self, int64_t slot) { return self.at(slot).capacity; }, "slot"_a,
          "Tokens that may be written, the prompt's included.");
}

}  // namespace

void register_rows(nb::module_& m) {
  slot_fault = new_exception(m, "SlotFault", PyExc_KeyError);
  token_fault = new_exception(m, "TokenFault", PyExc_IndexError);
  nb::register_exception_translator(&translate_fault);
  register_tables(m);
  m.def(
      "gather_rows",
      [](RowTables& tables, const ConstBytes& memory, int region, int64_t region_offset, int64_t row_bytes,
         const Slots& slots, const Tokens& tokens, const OutRows& out, const std::optional<Tokens>& out_rows) {
        nb::gil_scoped_release release;
        return gather_rows(memory, Region(tables, region, region_offset, row_bytes, memory.size()), slots,
                           tokens, out, out_rows);
      },
      "tables"_a, "memory"_a.noconvert(), "region"_a, "region_offset"_a, "row_bytes"_a, "slots"_a.noconvert(),
      "tokens"_a.noconvert(), "out"_a.noconvert(), "out_rows"_a.noconvert().none() = nb::none(),
      "Copy the rows of tokens int32 [B, k] (-1 skips) to out uint8 [R, row_bytes]; returns the rows copied.");
  m.def(
      "scatter_rows",
      [](RowTables& tables, const Bytes& memory, int region, int64_t region_offset, int64_t row_bytes,
         const Slots& slots, const Starts& start, const InRows& rows, bool nontemporal) {
        nb::gil_scoped_release release;
        return scatter_rows(memory, Region(tables, region, region_offset, row_bytes, memory.size()), slots,
                            start, rows, nontemporal);
      },
      "tables"_a, "memory"_a.noconvert(), "region"_a, "region_offset"_a, "row_bytes"_a, "slots"_a.noconvert(),
      "start"_a.noconvert(), "rows"_a.noconvert(), "nontemporal"_a,
      "Write rows uint8 [B, n, row_bytes] at tokens start[b] .. start[b] + n; returns the rows written.");
  m.def(
      "writeback_rows",
      [](RowTables& tables, const ConstBytes& memory, int region, int64_t region_offset, int64_t row_bytes,
         const Slots& slots, const Starts& start, int64_t n) {
        nb::gil_scoped_release release;
        return writeback_rows(memory, Region(tables, region, region_offset, row_bytes, memory.size()), slots,
                              start, n);
      },
      "tables"_a, "memory"_a.noconvert(), "region"_a, "region_offset"_a, "row_bytes"_a, "slots"_a.noconvert(),
      "start"_a.noconvert(), "n"_a, "Write back the lines of tokens start[b] .. start[b] + n; returns the lines.");
  m.def(
      "invalidate_tokens",
      [](RowTables& tables, const ConstBytes& memory, int region, int64_t region_offset, int64_t row_bytes,
         const Slots& slots, const Tokens& tokens) {
        nb::gil_scoped_release release;
        return invalidate_tokens(memory, Region(tables, region, region_offset, row_bytes, memory.size()),
                                 slots, tokens);
      },
      "tables"_a, "memory"_a.noconvert(), "region"_a, "region_offset"_a, "row_bytes"_a, "slots"_a.noconvert(),
      "tokens"_a.noconvert(), "Drop the lines of tokens int32 [B, k] from the caches; returns the lines.");
}
