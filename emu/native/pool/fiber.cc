#include "fiber.h"

#include <cxxabi.h>

#include <cstring>

asm(R"(
.text
.globl emu_pool_switch
.type emu_pool_switch, @function
emu_pool_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size emu_pool_switch, .-emu_pool_switch
)");

namespace pool {

// The runtime keeps the exceptions that are being handled per thread; each stack has its own.
void Fiber::swap_exceptions() {
  auto* globals = reinterpret_cast<char*>(abi::__cxa_get_globals());
  std::pair<void*, uint64_t> here{};
  std::memcpy(&here.first, globals, sizeof(void*));
  uint32_t uncaught = 0;
  std::memcpy(&uncaught, globals + sizeof(void*), sizeof uncaught);
  here.second = uncaught;
  std::swap(here, exceptions_);
  uncaught = static_cast<uint32_t>(here.second);
  std::memcpy(globals, &here.first, sizeof(void*));
  std::memcpy(globals + sizeof(void*), &uncaught, sizeof uncaught);
}

void Fiber::enter() {
  Fiber* self = entering();
  self->body_();
  self->done_ = true;
  self->yield();
  __builtin_unreachable();
}

}  // namespace pool
