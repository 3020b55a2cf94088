#include "history.h"

#include <algorithm>
#include <unordered_map>

namespace pool {

namespace {

struct Node {
  const Transaction* one = nullptr;
  int parent = -1;
  bool forked = false;  // it has siblings
};

// What follows the tip, each after what it follows.
std::vector<Node> grow(const std::vector<Transaction>& found, uint64_t tip, uint64_t number) {
  std::unordered_map<uint64_t, std::vector<const Transaction*>> after;
  for (const Transaction& one : found)
    if (one.number > number) after[one.predecessor].push_back(&one);
  std::vector<Node> nodes;
  const auto add = [&](uint64_t place, uint64_t next_number, int parent) {
    const auto next = after.find(place);
    if (next == after.end()) return;
    const size_t before = nodes.size();
    for (const Transaction* one : next->second)
      if (one->number == next_number) nodes.push_back({one, parent, false});
    if (nodes.size() > before + 1)
      for (size_t i = before; i < nodes.size(); ++i) nodes[i].forked = true;
  };
  add(tip, number + 1, -1);
  for (size_t i = 0; i < nodes.size(); ++i) add(nodes[i].one->place(), nodes[i].one->number + 1, static_cast<int>(i));
  return nodes;
}

std::vector<const Transaction*> path_to(const std::vector<Node>& nodes, int at) {
  std::vector<const Transaction*> path;
  for (; at >= 0; at = nodes[static_cast<size_t>(at)].parent) path.push_back(nodes[static_cast<size_t>(at)].one);
  std::reverse(path.begin(), path.end());
  return path;
}

bool kills(const Transaction& one, const Transaction& other) {
  if (one.records.size() < Dead::kBytes) return false;
  Reader in(one.records);
  while (!in.done() && in.get<Op>() == Op::kDead) {
    const Dead dead = Dead::read(in);
    if (dead.slot == other.slot && other.epoch <= dead.epoch && other.first >= dead.end) return true;
  }
  return false;
}

bool leads_to(const std::vector<Node>& nodes, int from, int to) {
  while (to > from) to = nodes[static_cast<size_t>(to)].parent;
  return to == from;
}

// Whether somebody may rely on a node: whatever does not fit it was written by one whom its history declares dead.
bool may_have_happened(const std::vector<Node>& nodes, int at) {
  const auto path = path_to(nodes, at);
  for (int other = 0; other < static_cast<int>(nodes.size()); ++other) {
    if (leads_to(nodes, other, at) || leads_to(nodes, at, other)) continue;
    const Transaction& rival = *nodes[static_cast<size_t>(other)].one;
    const bool dead = std::any_of(path.begin(), path.end(), [&](const Transaction* step) { return kills(*step, rival); });
    if (!dead || kills(rival, *nodes[static_cast<size_t>(at)].one)) return false;
  }
  return true;
}

}  // namespace

std::vector<const Transaction*> choose_history(const std::vector<Transaction>& found, uint64_t tip, uint64_t number,
                                               bool writing,
                                               const std::function<bool(const Transaction&)>& condemned) {
  const std::vector<Node> nodes = grow(found, tip, number);
  const auto count = static_cast<int>(nodes.size());
  int solid = -1;
  for (int i = 0; i < count; ++i) {
    if (condemned(*nodes[static_cast<size_t>(i)].one)) continue;
    if (!leads_to(nodes, solid, i) && solid >= 0) throw Fault{Fault::kDamaged, "the log has two histories"};
    solid = i;
  }
  if (!writing) return path_to(nodes, solid);
  const bool forked = std::any_of(nodes.begin(), nodes.end(), [](const Node& one) { return one.forked; });
  int chosen = forked ? solid : count - 1;
  for (int i = count - 1; forked && i > solid; --i)  // deeper ones come later
    if ((solid < 0 || leads_to(nodes, solid, i)) && may_have_happened(nodes, i)) {
      chosen = i;
      break;
    }
  return path_to(nodes, chosen);
}

}  // namespace pool
