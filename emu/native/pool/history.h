// Which of the transactions that lie in the logs have happened.
#pragma once

#include <functional>
#include <vector>

#include "state.h"

namespace pool {

// One transaction as it lies in a log.
struct Transaction {
  uint64_t number = 0, predecessor = 0, first = 0, lines = 0;
  int slot = 0;
  uint32_t epoch = 0;
  std::vector<uint8_t> records;

  uint64_t place() const { return (first + 1) << 8 | static_cast<uint64_t>(slot); }  // never 0
};

// The transactions that follow the one at `tip`, in order.
//
// Readers take what leads to a writer whom nobody has condemned. One who writes, which has condemned whom it must and is
// alone, also decides about what the condemned have left behind. There a transaction X that somebody relies on (its
// writer was told that it has happened, or a reader has applied it) is told from one that nobody does: whoever wrote a
// Y that does not follow X was in the lock together with X's writer, so one of the two has condemned the other before
// it read its log for the last time. If Y's writer had condemned X's, it would have seen X, or X's writer the verdict.
// So it was X's writer, and X, or what X follows, says that Y's writer is dead.
std::vector<const Transaction*> choose_history(const std::vector<Transaction>& found, uint64_t tip, uint64_t number,
                                               bool writing,
                                               const std::function<bool(const Transaction&)>& condemned);

}  // namespace pool
