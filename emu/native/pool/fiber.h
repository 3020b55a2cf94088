// A stack of its own that runs until it yields: several hosts take turns in one thread, as the scheduler says.
//
// ucontext would ask the kernel for the signal mask at every switch, which was most of the simulator's time.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

// Save the callee's registers and the stack's end to *save, go on where `to` was saved.
extern "C" void emu_pool_switch(void** save, void* to);

namespace pool {

class Fiber {
 public:
  explicit Fiber(std::function<void()> body) : body_(std::move(body)), stack_(take_stack()) {
    auto* top = reinterpret_cast<void**>((reinterpret_cast<uintptr_t>(stack_.get()) + kStackBytes) & ~uintptr_t{15});
    *--top = nullptr;  // where enter() would return to: it never does
    *--top = reinterpret_cast<void*>(&Fiber::enter);
    for (int i = 0; i < 6; ++i) *--top = nullptr;
    own_ = top;
  }
  ~Fiber() { spare_stacks().push_back(std::move(stack_)); }
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;

  void resume() {
    entering() = this;
    swap_exceptions();
    emu_pool_switch(&caller_, own_);
    swap_exceptions();
  }
  void yield() { emu_pool_switch(&own_, caller_); }
  bool done() const { return done_; }

 private:
  static constexpr size_t kStackBytes = 256 << 10;
  std::function<void()> body_;
  std::unique_ptr<char[]> stack_;
  void *own_ = nullptr, *caller_ = nullptr;
  bool done_ = false;
  std::pair<void*, uint64_t> exceptions_{};  // those being handled on this stack

  void swap_exceptions();
  static void enter();
  static Fiber*& entering() {
    thread_local Fiber* self = nullptr;
    return self;
  }
  // Stacks are kept: the system takes long to give fresh ones.
  static std::vector<std::unique_ptr<char[]>>& spare_stacks() {
    thread_local std::vector<std::unique_ptr<char[]>> spare;
    return spare;
  }
  static std::unique_ptr<char[]> take_stack() {
    auto& spare = spare_stacks();
    if (spare.empty()) return std::unique_ptr<char[]>(new char[kStackBytes]);
    auto stack = std::move(spare.back());
    spare.pop_back();
    return stack;
  }
};

}  // namespace pool
