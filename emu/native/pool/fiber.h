// A stack of its own that runs until it yields: several hosts take turns in one thread, as the scheduler says.
#pragma once

#include <ucontext.h>

#include <functional>
#include <memory>

namespace pool {

class Fiber {
 public:
  explicit Fiber(std::function<void()> body) : body_(std::move(body)), stack_(new char[kStackBytes]) {
    getcontext(&own_);
    own_.uc_stack.ss_sp = stack_.get();
    own_.uc_stack.ss_size = kStackBytes;
    own_.uc_link = &caller_;
    const auto self = reinterpret_cast<uintptr_t>(this);
    makecontext(&own_, reinterpret_cast<void (*)()>(&Fiber::enter), 2, static_cast<unsigned>(self >> 32),
                static_cast<unsigned>(self));
  }
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;

  void resume() { swapcontext(&caller_, &own_); }
  void yield() { swapcontext(&own_, &caller_); }
  bool done() const { return done_; }

 private:
  static constexpr size_t kStackBytes = 256 << 10;
  std::function<void()> body_;
  std::unique_ptr<char[]> stack_;
  ucontext_t own_{}, caller_{};
  bool done_ = false;

  static void enter(unsigned high, unsigned low) {
    auto* self = reinterpret_cast<Fiber*>(static_cast<uintptr_t>(high) << 32 | low);
    self->body_();
    self->done_ = true;
  }
};

}  // namespace pool
