// The thread that calls beat() in time.
#pragma once

#include <unistd.h>

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>

#include "participant.h"

namespace pool {

class Heart {
 public:
  void start(Participant& self, int64_t every_ns) {
    pid_ = getpid();
    beating_ = new Beating;
    beating_->thread = std::thread([&self, every_ns, beating = beating_] { beat(self, every_ns, *beating); });
  }

  // In a forked child there is no such thread, and what it waits with must not be destroyed: it is left as it is.
  void stop() {
    if (!beating_ || getpid() != pid_) return;
    {
      const std::lock_guard guard(beating_->lock);
      beating_->stopping = true;
    }
    beating_->stops.notify_all();
    beating_->thread.join();
    delete beating_;
    beating_ = nullptr;
  }

  ~Heart() { stop(); }

 private:
  struct Beating {
    std::thread thread;
    std::mutex lock;
    std::condition_variable stops;
    bool stopping = false;
  };
  Beating* beating_ = nullptr;
  int pid_ = 0;

  static void beat(Participant& self, int64_t every_ns, Beating& beating) {
    std::unique_lock guard(beating.lock);
    while (!beating.stops.wait_for(guard, std::chrono::nanoseconds(every_ns), [&] { return beating.stopping; })) try {
        self.beat();
      } catch (const Fault&) {
        return;  // the device is gone; whoever uses it is told
      }
  }
};

}  // namespace pool
