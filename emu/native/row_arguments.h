// The arguments of every call that moves rows by block table, and what is checked of them, whatever the medium.
#pragma once

#include <nanobind/ndarray.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>

#include "row_tables.h"
#include "want.h"

namespace nb = nanobind;

using ConstBytes = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Bytes = nb::ndarray<uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using OutRows = nb::ndarray<uint8_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using InRows = nb::ndarray<const uint8_t, nb::ndim<3>, nb::c_contig, nb::device::cpu>;
using Slots = nb::ndarray<const int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Starts = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Tokens = nb::ndarray<const int32_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

// One (component, layer) of a device's memory.
struct Region {
  Region(RowTables& tables_, int number_, int64_t offset, int64_t row_bytes_, size_t memory_bytes)
      : tables(tables_), number(number_), row_bytes(row_bytes_) {
    if (number < 0 || number >= tables.num_regions())
      throw std::invalid_argument("region " + std::to_string(number) + " of " + std::to_string(tables.num_regions()));
    const auto size = static_cast<int64_t>(memory_bytes);
    if (row_bytes <= 0 || offset < 0 || offset > size)
      throw std::invalid_argument("region_offset and row_bytes do not lie in the memory");
    start = offset;
    rows = (size - offset) / row_bytes;
  }

  // Byte offset in the memory of a row, refusing one that does not lie in it whole.
  int64_t at(int64_t row, int64_t count = 1) const {
    if (row < 0 || row + count > rows)
      throw std::out_of_range("row " + std::to_string(row) + " lies past the memory's end");
    return start + row * row_bytes;
  }

  // The request of a slot, refusing a write that would leave a gap, touch a shared token, or pass what was reserved.
  const RequestTable& writable(int64_t slot, int64_t first, int64_t count) const {
    const RequestTable& request = tables.at(slot);
    const int64_t length = request.lengths[static_cast<size_t>(number)];
    if (first < request.shared_tokens || first > length) throw TokenFault(slot, first, length);
    if (first + count > request.capacity) throw TokenFault(slot, request.capacity, length);
    return request;
  }

  // Tokens start[b] .. start[b] + n count as written from now on.
  void advance_lengths(const Slots& slots, const Starts& starts, int64_t n) const {
    for (size_t b = 0; b < slots.shape(0); ++b) {
      int32_t& length = tables.at(slots.data()[b]).lengths[static_cast<size_t>(number)];
      length = std::max(length, static_cast<int32_t>(starts.data()[b] + n));
    }
  }

  // Calls visit(out row, byte offset) for every token that is not -1; throws at the first bad one. Without out_rows,
  // the out row of tokens[b, j] is b * k + j.
  template <typename Visit>
  void for_each_read(const Slots& slots, const Tokens& tokens, const OutRows& out,
                     const std::optional<Tokens>& out_rows, Visit visit) const {
    want(static_cast<int64_t>(out.shape(1)) == row_bytes, "out's rows are not row_bytes wide");
    want(!out_rows || (out_rows->shape(0) == tokens.shape(0) && out_rows->shape(1) == tokens.shape(1)),
         "out_rows and tokens differ in shape");
    const int32_t* targets = out_rows ? out_rows->data() : nullptr;
    const size_t out_count = out.shape(0);
    for_each_token(slots, tokens, [&](size_t index, int64_t offset) {
      const size_t target = targets ? static_cast<size_t>(targets[index]) : index;  // a negative one is past the end
      if (target >= out_count) throw std::out_of_range("an out row lies past the end of out");
      visit(target, offset);
    });
  }

  // Calls visit(b * k + j, byte offset) for every token that is not -1; throws at the first bad one.
  template <typename Visit>
  void for_each_token(const Slots& slots, const Tokens& tokens, Visit visit) const {
    const size_t batch = slots.shape(0), k = tokens.shape(1);
    want(tokens.shape(0) == batch, "slots and tokens differ in length");
    for (size_t b = 0; b < batch; ++b) {
      const RequestTable& request = tables.at(slots.data()[b]);
      const int32_t* row = tokens.data() + b * k;
      for (size_t j = 0; j < k; ++j) {
        if (row[j] == -1) continue;
        visit(b * k + j, at(tables.readable_row(slots.data()[b], request, number, row[j])));
      }
    }
  }

  // Rows uint8 [B, n, row_bytes] fit slots [B] and start [B].
  void check_rows(const Slots& slots, const Starts& starts, const InRows& data) const {
    want(starts.shape(0) == slots.shape(0) && data.shape(0) == slots.shape(0),
         "slots, start and rows differ in length");
    want(static_cast<int64_t>(data.shape(2)) == row_bytes, "rows are not row_bytes wide");
  }

  RowTables& tables;
  int number;
  int64_t row_bytes, start = 0, rows = 0;
};
