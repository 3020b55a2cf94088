// The hot buffer's replacement rule, exactly HiSparse's (SGLang, load_cache_to_device_buffer_kernel): an LRU over
// decode steps, not over single accesses.
//
// Per layer and request there are D slots in an order whose front is replaced first. One step with the selected
// tokens `topk`: slots whose token is selected are hits, the others can be evicted; misses, as they come in topk,
// take slots from the front of the evictable ones; the new order is stale | just loaded | hits. The newest token
// has a slot of its own, number D, and never enters the order; an older copy of it elsewhere counts as stale.
#include <nanobind/ndarray.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <bit>
#include <numeric>
#include <stdexcept>
#include <utility>
#include <vector>

#include "registers.h"
#include "want.h"

using namespace nb::literals;

namespace {

using Ids = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Tokens = nb::ndarray<const int32_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Out = nb::ndarray<int32_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

// Selected tokens -> place in the selection. Open addressing with Knuth's multiplier; an epoch empties it at once.
class Selection {
 public:
  explicit Selection(size_t tokens)
      : shift_(32 - static_cast<int>(std::bit_width(2 * tokens - 1))), entries_(size_t{1} << (32 - shift_)) {}

  void clear() {
    if (++epoch_ == 0) {  // after 2^32 clears, old entries would look new
      std::fill(entries_.begin(), entries_.end(), Entry{});
      epoch_ = 1;
    }
  }

  // False when the token is there already.
  bool insert(int32_t token, int32_t place) {
    Entry& entry = find(token);
    if (entry.epoch == epoch_) return false;
    entry = {epoch_, token, place};
    return true;
  }

  // Place of the token, -1 when it is not selected.
  int32_t place(int32_t token) {
    const Entry& entry = find(token);
    return entry.epoch == epoch_ ? entry.place : -1;
  }

 private:
  struct Entry {
    uint32_t epoch = 0;
    int32_t token = 0, place = 0;
  };

  Entry& find(int32_t token) {
    const size_t mask = entries_.size() - 1;
    size_t at = (static_cast<uint32_t>(token) * 2654435761u) >> shift_;
    while (entries_[at].epoch == epoch_ && entries_[at].token != token) at = (at + 1) & mask;
    return entries_[at];
  }

  int shift_;
  uint32_t epoch_ = 0;
  std::vector<Entry> entries_;
};

class HotBuffer {
 public:
  HotBuffer(int num_layers, int max_requests, int slots, int top_k)
      : layers_(num_layers), requests_(max_requests), slots_(slots), top_k_(top_k),
        selection_(static_cast<size_t>(std::max(top_k, 1))) {
    want(num_layers > 0 && max_requests > 0 && top_k > 0, "num_layers, max_requests and top_k must be positive");
    want(top_k < 1 << 24, "top_k is too large");
    want(slots >= top_k, "the hot buffer must have at least top_k slots");
    const size_t total = static_cast<size_t>(layers_) * static_cast<size_t>(requests_) * static_cast<size_t>(slots_);
    tokens_.assign(total, -1);
    order_.resize(total);
    admitted_.assign(static_cast<size_t>(requests_), false);
    seen_.assign(static_cast<size_t>(requests_), 0);
    stale_.resize(static_cast<size_t>(slots_));
    hits_.resize(static_cast<size_t>(slots_));
  }

  void admit(int request, int64_t resident_tokens) {
    want(request >= 0 && request < requests_, "no such request index");
    want(resident_tokens >= 0, "resident_tokens must not be negative");
    const int resident = resident_tokens <= slots_ ? static_cast<int>(resident_tokens) : 0;
    for (int layer = 0; layer < layers_; ++layer) {
      int32_t *tokens = &tokens_[base(layer, request)], *order = &order_[base(layer, request)];
      std::iota(tokens, tokens + resident, 0);
      std::fill(tokens + resident, tokens + slots_, -1);
      std::iota(order, order + slots_, 0);
      std::rotate(order, order + resident, order + slots_);  // empty slots are taken first
    }
    admitted_[static_cast<size_t>(request)] = true;
  }

  void release(int request) {
    check_admitted(request);
    admitted_[static_cast<size_t>(request)] = false;
  }

  int64_t resolve(int layer, const Ids& requests, const Tokens& tokens, const Ids& newest, const Out& locs,
                  const Out& miss_tokens, const Out& miss_slots) {
    const size_t batch = requests.shape(0), k = tokens.shape(1);
    want(newest.shape(0) == batch && tokens.shape(0) == batch, "requests, tokens and newest differ in length");
    for (const Out* out : {&locs, &miss_tokens, &miss_slots})
      want(out->shape(0) == batch && out->shape(1) == k, "an output differs from tokens in shape");
    want(k <= static_cast<size_t>(top_k_), "more tokens than top_k");
    check(layer, requests, tokens);
    int64_t misses = 0;
    for (size_t b = 0; b < batch; ++b)
      misses += step({layer, requests.data()[b], newest.data()[b], tokens.data() + b * k, k, locs.data() + b * k,
                      miss_tokens.data() + b * k, miss_slots.data() + b * k});
    return misses;
  }

  std::vector<int32_t> slot_tokens(int layer, int request) const { return state(tokens_, layer, request); }
  std::vector<int32_t> order(int layer, int request) const { return state(order_, layer, request); }

  int64_t hits = 0, misses = 0, evictions = 0;

 private:
  struct Row {
    int layer, request;
    int32_t newest;
    const int32_t* tokens;
    size_t k;
    int32_t *locs, *miss_tokens, *miss_slots;
  };

  size_t base(int layer, int request) const {
    return (static_cast<size_t>(layer) * static_cast<size_t>(requests_) + static_cast<size_t>(request)) *
           static_cast<size_t>(slots_);
  }

  void check_admitted(int request) const {
    want(request >= 0 && request < requests_ && admitted_[static_cast<size_t>(request)], "the request is not admitted");
  }

  std::vector<int32_t> state(const std::vector<int32_t>& all, int layer, int request) const {
    want(layer >= 0 && layer < layers_, "no such layer");
    check_admitted(request);
    const auto first = all.begin() + static_cast<std::ptrdiff_t>(base(layer, request));
    return {first, first + slots_};
  }

  // Before any state changes: a refused call leaves the buffer as it was.
  void check(int layer, const Ids& requests, const Tokens& tokens) {
    want(layer >= 0 && layer < layers_, "no such layer");
    ++call_;
    for (size_t b = 0; b < requests.shape(0); ++b) {
      const int32_t request = requests.data()[b];
      check_admitted(request);
      want(std::exchange(seen_[static_cast<size_t>(request)], call_) != call_, "a request comes twice in one batch");
      selection_.clear();
      const int32_t* row = tokens.data() + b * tokens.shape(1);
      for (size_t j = 0; j < tokens.shape(1); ++j) {
        want(row[j] >= -1, "a token is negative");
        want(row[j] == -1 || selection_.insert(row[j], static_cast<int32_t>(j)), "a token comes twice in one row");
      }
    }
  }

  int64_t step(const Row& row) {
    constexpr int32_t kMissing = -2;
    selection_.clear();
    for (size_t j = 0; j < row.k; ++j) {
      const int32_t token = row.tokens[j];
      row.miss_tokens[j] = row.miss_slots[j] = -1;
      row.locs[j] = token == -1 ? -1 : token == row.newest ? slots_ : kMissing;
      hits += row.locs[j] == slots_;
      if (row.locs[j] == kMissing) selection_.insert(token, static_cast<int32_t>(j));
    }
    int32_t *tokens = &tokens_[base(row.layer, row.request)], *order = &order_[base(row.layer, row.request)];
    size_t stale = 0, hit = 0, missed = 0;
    for (int i = 0; i < slots_; ++i) {
      const int32_t slot = order[i], place = tokens[slot] == -1 ? -1 : selection_.place(tokens[slot]);
      if (place < 0) {
        stale_[stale++] = slot;
      } else {
        hits_[hit++] = slot;
        row.locs[place] = slot;
      }
    }
    for (size_t j = 0; j < row.k; ++j) {
      if (row.locs[j] != kMissing) continue;
      const int32_t slot = stale_[missed];
      evictions += tokens[slot] != -1;
      tokens[slot] = row.miss_tokens[missed] = row.tokens[j];
      row.locs[j] = row.miss_slots[missed++] = slot;
    }
    const auto loaded = stale_.begin() + static_cast<std::ptrdiff_t>(missed);
    order = std::copy(loaded, stale_.begin() + static_cast<std::ptrdiff_t>(stale), order);
    order = std::copy(stale_.begin(), loaded, order);
    std::copy_n(hits_.begin(), hit, order);
    hits += static_cast<int64_t>(hit);
    misses += static_cast<int64_t>(missed);
    return static_cast<int64_t>(missed);
  }

  int layers_, requests_, slots_, top_k_;
  Selection selection_;
  std::vector<int32_t> tokens_, order_;  // [layer, request, slot]: the slot's token; the slots, next victim first
  std::vector<bool> admitted_;
  std::vector<uint64_t> seen_;  // per request: the last call that named it
  uint64_t call_ = 0;
  std::vector<int32_t> stale_, hits_;  // scratch of step()
};

}  // namespace

void register_hot_buffer(nb::module_& m) {
  nb::class_<HotBuffer>(m, "HotBuffer", "HiSparse's replacement rule. Not safe for two threads at once.")
      .def(nb::init<int, int, int, int>(), "num_layers"_a, "max_requests"_a, "slots"_a, "top_k"_a)
      .def("admit", &HotBuffer::admit, "request_index"_a, "resident_tokens"_a,
           "Forget what the index held; up to `slots` tokens count as resident, of more none does.")
      .def("release", &HotBuffer::release, "request_index"_a)
      .def(
          "resolve",
          [](HotBuffer& self, int layer, const Ids& requests, const Tokens& tokens, const Ids& newest, const Out& locs,
             const Out& miss_tokens, const Out& miss_slots) {
            nb::gil_scoped_release release;
            return self.resolve(layer, requests, tokens, newest, locs, miss_tokens, miss_slots);
          },
          "layer"_a, "requests"_a.noconvert(), "tokens"_a.noconvert(), "newest"_a.noconvert(), "locs"_a.noconvert(),
          "miss_tokens"_a.noconvert(), "miss_slots"_a.noconvert(),
          "One decode step of one layer: fills the outputs int32 [B, k]; returns the misses.")
      .def("slot_tokens", &HotBuffer::slot_tokens, "layer"_a, "request_index"_a, "Token of each slot, -1 if empty.")
      .def("order", &HotBuffer::order, "layer"_a, "request_index"_a, "The slots, next victim first.")
      .def_ro("hits", &HotBuffer::hits)
      .def_ro("misses", &HotBuffer::misses)
      .def_ro("evictions", &HotBuffer::evictions);
}
