#include "process_host.h"

#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include <cerrno>
#include <sstream>
#include <string>

namespace pool {

namespace {

// Empty where it cannot be read: a process may end between open and read, which a stream would throw for.
std::string read_file(const std::string& path) {
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) return {};
  char text[4096];
  const ssize_t got = read(fd, text, sizeof text);
  close(fd);
  return std::string(text, got < 0 ? 0 : static_cast<size_t>(got));
}

// State and start time of a process (proc_pid_stat(5), fields 3 and 22); false if there is none.
bool read_stat(int32_t pid, char& state, uint64_t& threads, uint64_t& start_time) {
  const std::string text = read_file("/proc/" + std::to_string(pid) + "/stat");
  const size_t name_end = text.rfind(')');  // the name may hold blanks and brackets
  if (name_end == std::string::npos) return false;
  std::istringstream fields(text.substr(name_end + 1));
  std::string skipped;
  fields >> state;
  for (int i = 4; i < 20; ++i) fields >> skipped;
  fields >> threads >> skipped >> start_time;
  return static_cast<bool>(fields);
}

uint64_t hash_of_file(const char* path) {
  uint64_t h = 0x656D75;
  for (const char c : read_file(path)) h = mix(h, static_cast<uint8_t>(c));
  return h;
}

}  // namespace

ProcessHost::ProcessHost() {
  self_.pid = getpid();
  char state = 0;
  uint64_t threads = 0;
  read_stat(self_.pid, state, threads, self_.start_time);
  self_.boot = hash_of_file("/proc/sys/kernel/random/boot_id");
  struct stat status {};
  if (stat("/proc/self/ns/pid", &status) == 0) self_.pid_namespace = status.st_ino;
}

int64_t ProcessHost::now_ns() {
  timespec now{};
  clock_gettime(CLOCK_BOOTTIME, &now);  // goes on while the machine sleeps
  return now.tv_sec * 1'000'000'000 + now.tv_nsec;
}

void ProcessHost::wait(int round) {
  if (round < 16) {
    sched_yield();
    return;
  }
  const timespec nap{0, round < 64 ? 50'000 : 1'000'000};
  nanosleep(&nap, nullptr);
}

bool ProcessHost::proven_dead(const Identity& who) {
  if (who.boot != self_.boot || who.pid_namespace != self_.pid_namespace) return false;
  char state = 0;
  uint64_t threads = 0, start_time = 0;
  if (!read_stat(who.pid, state, threads, start_time)) return kill(who.pid, 0) != 0 && errno == ESRCH;
  // A zombie's memory is gone, unless it is a main thread whose other threads still run.
  const bool running = (state != 'Z' && state != 'X') || threads > 1;
  return !running || start_time != who.start_time;
}

}  // namespace pool
