#include "shadow.h"

#include <algorithm>
#include <cstring>

namespace pool {

ShadowPool::ShadowPool(uint8_t* medium_, size_t nbytes, uint64_t seed, Temper temper_)
    : medium(medium_), size(nbytes), temper(temper_), random_(seed * 2 + 1) {}

uint64_t ShadowPool::below(uint64_t n) {
  random_ ^= random_ << 13;
  random_ ^= random_ >> 7;
  random_ ^= random_ << 17;
  return (random_ >> 20) % n;
}

bool ShadowPool::coin(unsigned one_in) { return temper != Temper::kLazy && below(one_in) == 0; }

void ShadowPool::record(Report report) {
  if (reports.size() < 64) reports.push_back(std::move(report));
}

ShadowHost::ShadowHost(ShadowPool& pool, int number)
    : pool_(pool), number_(number), copy_(pool.size), state_((pool.size + kLine - 1) / kLine) {
  pool_.hosts.push_back(this);
}

ShadowHost::~ShadowHost() { std::erase(pool_.hosts, this); }

void ShadowHost::step(int site) {
  ++steps;
  if (before) before(site);
  meddle();
  // The caches of those that do not run do the same.
  if (pool_.temper == Temper::kMixed && pool_.coin(4)) pool_.hosts[pool_.below(pool_.hosts.size())]->meddle();
}

// What caches do without being asked.
void ShadowHost::meddle() {
  if (pool_.temper == Temper::kLazy) return;
  if (pool_.temper == Temper::kMixed) {
    if (pool_.coin(4)) finish_flushes(false);
    if (pool_.coin(4)) drain(false);
    if (recent_.empty() || !pool_.coin(3)) return;
    const uint64_t line = recent_[pool_.below(recent_.size())];
    if (state_[line] == kInvalid) fill(line);
    else if (pool_.coin(3)) invalidate(line);
    return;
  }
  for (const uint64_t line : recent_)  // eager: whatever may be here is here, whatever may be there is there
    if (state_[line] == kDirty) write_back(line);
}

void ShadowHost::fill(uint64_t line) {
  std::memcpy(&copy_[line * kLine], pool_.medium + line * kLine, kLine);
  state_[line] = kClean;
}

void ShadowHost::write_back(uint64_t line) {
  std::memcpy(pool_.medium + line * kLine, &copy_[line * kLine], kLine);
  state_[line] = kClean;
}

void ShadowHost::invalidate(uint64_t line) {
  if (state_[line] == kDirty) write_back(line);
  state_[line] = kInvalid;
}

// All of them, or some, in any order.
void ShadowHost::finish_flushes(bool all) {
  for (size_t left = all ? flushes_.size() : (flushes_.size() + 1) / 2; left > 0; --left) {
    const size_t at = all ? flushes_.size() - 1 : pool_.below(flushes_.size());
    const uint64_t line = flushes_[at];
    flushes_[at] = flushes_.back();
    flushes_.pop_back();
    invalidate(line);
    if (pool_.temper == Temper::kEager || pool_.coin(2)) fill(line);
  }
}

// Streamed words arrive in any order; here from the last to the first, or in the order of a coin.
void ShadowHost::drain(bool all) {
  size_t count = all ? pieces_.size() : (pieces_.size() + 1) / 2;
  while (count-- > 0) {
    const size_t at = pool_.coin(2) ? 0 : pieces_.size() - 1;
    std::memcpy(pool_.medium + pieces_[at].offset, &pieces_[at].word, sizeof(uint64_t));
    pieces_.erase(pieces_.begin() + static_cast<ptrdiff_t>(at));
  }
}

void ShadowHost::note_write(uint64_t line) {
  for (const ShadowHost* other : pool_.hosts)
    if (other != this && other->dirty(line * kLine))
      pool_.record({"two writers in one line", number_, other->number_, line * kLine});
}

void ShadowHost::load(uint64_t offset, void* to, size_t nbytes) {
  step();
  for (uint64_t line = offset / kLine; line * kLine < offset + nbytes; ++line) {
    if (state_[line] == kInvalid) fill(line);
    if (recent_.size() < 32) recent_.push_back(line);
    else recent_[(steps + line) % 32] = line;
  }
  std::memcpy(to, &copy_[offset], nbytes);
}

void ShadowHost::store(uint64_t offset, const void* from, size_t nbytes) {
  for (size_t done = 0; done < nbytes; done += 8) {  // a line may be evicted between two of its words
    if (done % 32 == 0) step();
    const uint64_t line = (offset + done) / kLine;
    if (state_[line] == kInvalid) fill(line);
    note_write(line);
    std::memcpy(&copy_[offset + done], static_cast<const uint8_t*>(from) + done, std::min<size_t>(8, nbytes - done));
    state_[line] = kDirty;
    if (recent_.empty() || recent_.back() != line) recent_.push_back(line);
    if (recent_.size() > 32) recent_.erase(recent_.begin());
  }
}

void ShadowHost::stream(uint64_t offset, const void* from, size_t nbytes) {
  step();
  for (uint64_t line = offset / kLine; line * kLine < offset + nbytes; ++line) {
    note_write(line);
    invalidate(line);
  }
  for (size_t done = 0; done < nbytes; done += 8) {
    Piece piece{offset + done, 0};
    std::memcpy(&piece.word, static_cast<const uint8_t*>(from) + done, std::min<size_t>(8, nbytes - done));
    pieces_.push_back(piece);
  }
}

void ShadowHost::flush(uint64_t offset, size_t nbytes, Site site) {
  step(static_cast<int>(site));
  if (static_cast<int>(site) == left_out) return;
  for (uint64_t line = offset / kLine; line * kLine < offset + nbytes; ++line) flushes_.push_back(line);
  if (pool_.temper == Temper::kEager) finish_flushes(true);
}

void ShadowHost::fence(Site site) {
  step(static_cast<int>(site));
  if (static_cast<int>(site) == left_out) return;
  finish_flushes(true);
  drain(true);
}

bool ShadowHost::check(bool holds, Site site) { return holds || static_cast<int>(site) == left_out; }

bool ShadowHost::stale(uint64_t offset) const {
  const uint64_t line = offset / kLine;
  return state_[line] != kInvalid && std::memcmp(&copy_[line * kLine], pool_.medium + line * kLine, kLine) != 0;
}

void ShadowHost::crash() {
  const auto lost = [&] { return pool_.temper == Temper::kLazy || pool_.coin(pool_.loss); };
  for (uint64_t line = 0; line < state_.size(); ++line) {
    if (state_[line] == kDirty && !lost()) write_back(line);
    state_[line] = kInvalid;
  }
  for (const Piece& piece : pieces_)
    if (!lost()) std::memcpy(pool_.medium + piece.offset, &piece.word, sizeof(uint64_t));
  pieces_.clear();
  flushes_.clear();
}

}  // namespace pool
