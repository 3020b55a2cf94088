#include "memory.h"

namespace pool {

const char* site_name(Site site) {
  static constexpr const char* kNames[] = {
      "flush rows", "drop rows", "fence rows", "flush ticket", "fence choosing", "drop numbers", "fence numbers",
      "fence ticket", "drop ticket", "fence wait", "drop tail", "fence tail", "drop rest", "fence rest", "check line",
      "check sequence", "fence commit", "flush verdict", "fence verdict", "drop verdicts", "fence verdicts",
      "check verdict", "flush beat", "drop beats", "fence beats", "fence snapshot", "flush checkpoint",
      "drop checkpoints", "fence checkpoints", "drop snapshot", "fence snapshot read", "flush identity", "fence stop",
      "drop identities", "fence identities"};
  static_assert(sizeof kNames / sizeof kNames[0] == static_cast<size_t>(Site::kCount));
  return kNames[static_cast<int>(site)];
}

}  // namespace pool
