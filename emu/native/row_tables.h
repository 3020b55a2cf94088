// Block tables of the requests of one store: where the row of a token lies. Pure arithmetic, no memory access.
#pragma once

#include <bit>
#include <cstdint>
#include <limits>
#include <stdexcept>
#include <vector>

// A slot that names no request (any more).
struct SlotFault : std::runtime_error {
  explicit SlotFault(int64_t slot_) : std::runtime_error("stale slot"), slot(slot_) {}
  int64_t slot;
};

// A token past what the request's region holds (reads), or one that may not be written (writes).
struct TokenFault : std::runtime_error {
  TokenFault(int64_t slot_, int64_t token_, int64_t length_)
      : std::runtime_error("no such token"), slot(slot_), token(token_), length(length_) {}
  int64_t slot, token, length;
};

struct RequestTable {
  std::vector<int32_t> blocks;   // the prompt's ceil(prompt_tokens / block_tokens), then the appended ones
  std::vector<int32_t> lengths;  // per region: tokens written
  int64_t prompt_tokens = 0;
  int64_t shared_tokens = 0;  // leading tokens that must not be written: others may read them
  int64_t prompt_blocks = 0;
  int64_t capacity = 0;  // tokens that may be written: what was asked for, which may end within the last block
  uint32_t generation = 0;
  bool live = false;
};

class RowTables {
 public:
  RowTables(int block_tokens, int num_regions) : block_tokens_(block_tokens), num_regions_(num_regions) {
    if (block_tokens <= 0 || num_regions <= 0) throw std::invalid_argument("block_tokens and num_regions must be positive");
    const auto n = static_cast<unsigned>(block_tokens);
    if (std::has_single_bit(n)) shift_ = std::countr_zero(n);
  }

  // A new slot; `length` tokens count as written in every region, `append_tokens` may follow the prompt (-1: as many
  // as the blocks hold). Slots carry a generation: one that was removed is detected even when its place was taken
  // again.
  int64_t add(const int32_t* blocks, int64_t num_blocks, int64_t prompt_tokens, int64_t shared_tokens, int64_t length,
              int64_t append_tokens) {
    const int64_t prompt_blocks = (prompt_tokens + block_tokens_ - 1) / block_tokens_;
    if (prompt_tokens < 0 || shared_tokens < 0 || shared_tokens > prompt_tokens || num_blocks < prompt_blocks)
      throw std::invalid_argument("the block table is shorter than the prompt");
    const int64_t room = (num_blocks - prompt_blocks) * block_tokens_;
    if (append_tokens < -1 || append_tokens > room)
      throw std::invalid_argument("append_tokens do not fit the block table");
    const int64_t capacity = prompt_tokens + (append_tokens == -1 ? room : append_tokens);
    if (length < 0 || length > capacity || capacity > std::numeric_limits<int32_t>::max())
      throw std::invalid_argument("the length does not fit the block table");
    for (int64_t i = 0; i < num_blocks; ++i)
      if (blocks[i] < 0) throw std::invalid_argument("a block number is negative");
    size_t place;
    if (free_.empty()) {
      place = requests_.size();
      requests_.emplace_back();
    } else {
      place = static_cast<size_t>(free_.back());
      free_.pop_back();
    }
    RequestTable& r = requests_[place];
    r.blocks.assign(blocks, blocks + num_blocks);
    r.lengths.assign(static_cast<size_t>(num_regions_), static_cast<int32_t>(length));
    r.prompt_tokens = prompt_tokens;
    r.shared_tokens = shared_tokens;
    r.prompt_blocks = prompt_blocks;
    r.capacity = capacity;
    r.generation = next_generation_++ & 0x7fffffffu;
    r.live = true;
    return static_cast<int64_t>(place) | (static_cast<int64_t>(r.generation) << 32);
  }

  void remove(int64_t slot) {
    RequestTable& r = at(slot);
    r.live = false;
    free_.push_back(static_cast<int32_t>(slot & 0xffffffff));
  }

  RequestTable& at(int64_t slot) {
    const auto place = static_cast<uint64_t>(slot) & 0xffffffffu;
    if (slot < 0 || place >= requests_.size()) throw SlotFault(slot);
    RequestTable& r = requests_[place];
    if (!r.live || r.generation != static_cast<uint32_t>(slot >> 32)) throw SlotFault(slot);
    return r;
  }

  // Row number within a region: block * block_tokens + row in block. The caller has checked the token's range.
  int64_t row(const RequestTable& r, int64_t token) const {
    const bool appended = token >= r.prompt_tokens;
    const int64_t t = appended ? token - r.prompt_tokens : token;
    const int64_t quotient = block_of(t), entry = quotient + (appended ? r.prompt_blocks : 0);
    return static_cast<int64_t>(r.blocks[static_cast<size_t>(entry)]) * block_tokens_ + t - quotient * block_tokens_;
  }

  // Tokens from this one on whose rows lie one behind the other: to the end of its block or of the prompt.
  int64_t contiguous_tokens(const RequestTable& r, int64_t token) const {
    const bool appended = token >= r.prompt_tokens;
    const int64_t t = appended ? token - r.prompt_tokens : token;
    const int64_t in_block = (block_of(t) + 1) * block_tokens_ - t;
    return appended || in_block < r.prompt_tokens - t ? in_block : r.prompt_tokens - t;
  }

  // Same, refusing a token that was not written in that region.
  int64_t readable_row(int64_t slot, const RequestTable& r, int region, int64_t token) const {
    const int64_t length = r.lengths[static_cast<size_t>(region)];
    if (token < 0 || token >= length) throw TokenFault(slot, token, length);
    return row(r, token);
  }

  int block_tokens() const { return block_tokens_; }
  int num_regions() const { return num_regions_; }

 private:
  // A 64-bit division takes longer than the rest of row(); block sizes are powers of two in practice.
  int64_t block_of(int64_t t) const { return shift_ >= 0 ? t >> shift_ : t / block_tokens_; }

  int block_tokens_, num_regions_, shift_ = -1;
  uint32_t next_generation_ = 1;
  std::vector<RequestTable> requests_;
  std::vector<int32_t> free_;
};
