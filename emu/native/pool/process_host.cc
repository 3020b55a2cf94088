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

// 0 where it cannot be read.
uint64_t hash_of_file(const char* path) {
  const std::string text = read_file(path);
  if (text.empty()) return 0;
  uint64_t h = 0x656D75;
  for (const char c : text) h = mix(h, static_cast<uint8_t>(c));
  return h | 1;
}

// What our time namespace adds to the start times that /proc shows (time_namespaces(7)).
int64_t boottime_offset_ticks() {
  std::istringstream lines(read_file("/proc/self/timens_offsets"));
  std::string clock;
  int64_t seconds = 0, nanoseconds = 0;
  while (lines >> clock >> seconds >> nanoseconds) {
    const int64_t ticks = sysconf(_SC_CLK_TCK);
    if (clock == "boottime") return seconds * ticks + nanoseconds * ticks / 1'000'000'000;
  }
  return 0;
}

// Without that offset; 0 where it cannot be told.
uint64_t start_time_of(int32_t pid, bool& running) {
  char state = 0;
  uint64_t threads = 0, start_time = 0;
  running = true;
  if (!read_stat(pid, state, threads, start_time)) {
    running = kill(pid, 0) == 0 || errno != ESRCH;
    return 0;
  }
  // A zombie's memory is gone, unless it is a main thread whose other threads still run.
  running = (state != 'Z' && state != 'X') || threads > 1;
  return start_time - static_cast<uint64_t>(boottime_offset_ticks());
}

}  // namespace

ProcessHost::ProcessHost() {
  self_.pid = getpid();
  bool running = true;
  self_.start_time = start_time_of(self_.pid, running);
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

// Only where the kernel says so: what cannot be told counts as running, so that nobody living loses what it holds.
bool ProcessHost::proven_dead(const Identity& who) {
  if (who.boot == 0 || who.boot != self_.boot) return false;
  if (who.pid_namespace == 0 || who.pid_namespace != self_.pid_namespace) return false;
  bool running = true;
  const uint64_t start_time = start_time_of(who.pid, running);
  if (!running) return true;
  if (start_time == 0 || who.start_time == 0) return false;
  // Offsets of time namespaces that are no whole ticks are rounded: one tick is no other process.
  const auto apart = static_cast<int64_t>(start_time - who.start_time);
  return apart > 1 || apart < -1;
}

}  // namespace pool
