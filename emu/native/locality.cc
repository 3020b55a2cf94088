// Index streams: which tokens each decode step of one layer selects. The parts of a selection are told in
// emu/locality/model.py; here is the loop.
#include "registers.h"

#include <nanobind/ndarray.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <random>
#include <stdexcept>
#include <utility>
#include <vector>

using namespace nb::literals;

namespace {

using Out = nb::ndarray<int32_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

size_t at(int64_t index) { return static_cast<size_t>(index); }

struct Parts {
  int64_t context, window, background, active, pool;
  double drift_per_step, zipf, layer_overlap;
};

class Stream {
 public:
  Stream(const Parts& parts, uint64_t seed, uint64_t common_seed, int64_t steps)
      : parts_(parts), random_(seed), chosen_(at(parts.context + steps), 0) {
    if (parts.window < 1 || parts.background < 0 || parts.active < 0 || parts.pool < parts.active + parts.background ||
        parts.context < parts.pool + parts.window)
      throw std::invalid_argument("the parts of a selection do not fit the context");
    fill_pool(common_seed);
    // Inverse of the background's distribution: place r of the pool, counted from the end, has weight (r + 1)^-zipf.
    double total = 0;
    for (int64_t r = 0; r < parts.pool; ++r)
      cumulative_.push_back(total += std::pow(static_cast<double>(r + 1), -parts.zipf));
    for (double& value : cumulative_) value /= total;
  }

  // Fills one step's selection, int32 [k]; the newest token is context + step - 1.
  void step(int64_t number, int64_t k, int32_t* out) {
    ++epoch_;
    drift();
    int64_t filled = 0;
    const int64_t length = parts_.context + number;
    for (int64_t token = length - parts_.window; token < length; ++token) take(static_cast<int32_t>(token), out, filled);
    const int64_t from_active = k - parts_.window - parts_.background;
    for (int64_t i = 0; i < from_active; ++i) {
      std::swap(pool_[at(i)], pool_[at(i + below(parts_.active - i))]);
      take(pool_[at(i)], out, filled);
    }
    for (int64_t tries = 0; filled < k; ++tries) {
      // With a very skewed background new tokens become rare: the rest is drawn evenly.
      const int64_t place = tries < 64 * k ? skewed() : below(parts_.pool);
      take(pool_[at(parts_.pool - 1 - place)], out, filled);
    }
  }

 private:
  double unit() { return static_cast<double>(random_() >> 11) * 0x1.0p-53; }
  int64_t below(int64_t limit) { return static_cast<int64_t>(unit() * static_cast<double>(limit)); }

  int64_t skewed() {
    const auto found = std::lower_bound(cumulative_.begin(), cumulative_.end(), unit());
    return std::min<int64_t>(found - cumulative_.begin(), parts_.pool - 1);
  }

  // Part of the pool is common to the layers of a request, the rest this layer's own.
  void fill_pool(uint64_t common_seed) {
    const int64_t range = parts_.context - parts_.window;
    const auto common = static_cast<int64_t>(std::llround(parts_.layer_overlap * static_cast<double>(parts_.pool)));
    std::mt19937_64 shared(common_seed);
    ++epoch_;
    draw(shared, range, common);
    draw(random_, range, parts_.pool);
    for (int64_t i = parts_.pool - 1; i > 0; --i) std::swap(pool_[at(i)], pool_[at(below(i + 1))]);
  }

  void draw(std::mt19937_64& random, int64_t range, int64_t size) {
    while (static_cast<int64_t>(pool_.size()) < size) {
      const auto token = static_cast<int32_t>(static_cast<double>(random() >> 11) * 0x1.0p-53 * static_cast<double>(range));
      if (std::exchange(chosen_[at(token)], epoch_) != epoch_) pool_.push_back(token);
    }
  }

  void drift() {
    owed_ += parts_.drift_per_step;
    for (; owed_ >= 1; --owed_)
      if (parts_.active > 0 && parts_.pool > parts_.active)
        std::swap(pool_[at(below(parts_.active))], pool_[at(parts_.active + below(parts_.pool - parts_.active))]);
  }

  void take(int32_t token, int32_t* out, int64_t& filled) {
    if (std::exchange(chosen_[at(token)], epoch_) != epoch_) out[filled++] = token;
  }

  Parts parts_;
  std::mt19937_64 random_;
  std::vector<uint32_t> chosen_;  // per token: the last step that took it
  uint32_t epoch_ = 0;
  double owed_ = 0;
  std::vector<int32_t> pool_;  // the active set first
  std::vector<double> cumulative_;
};

}  // namespace

void register_locality(nb::module_& m) {
  m.def(
      "index_stream",
      [](int64_t context, int64_t window, int64_t background, int64_t active, int64_t pool, double drift_per_step,
         double zipf, double layer_overlap, uint64_t seed, uint64_t common_seed, Out out) {
        nb::gil_scoped_release unlocked;
        const auto steps = static_cast<int64_t>(out.shape(0)), k = static_cast<int64_t>(out.shape(1));
        if (window + background > k || k - window - background > active)
          throw std::invalid_argument("the parts of a selection do not fit k");
        Stream stream({context, window, background, active, pool, drift_per_step, zipf, layer_overlap}, seed,
                      common_seed, steps);
        for (int64_t step = 0; step < steps; ++step) stream.step(step, k, out.data() + step * k);
      },
      "context"_a, "window"_a, "background"_a, "active"_a, "pool"_a, "drift_per_step"_a, "zipf"_a, "layer_overlap"_a,
      "seed"_a, "common_seed"_a, "out"_a.noconvert(), "Fills int32 [steps, k] with the tokens that each step selects.");
}
