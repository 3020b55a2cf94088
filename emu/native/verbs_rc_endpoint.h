// Endpoints and keys as Python sees them.
#pragma once

#include <algorithm>
#include <stdexcept>
#include <tuple>
#include <vector>

#include "verbs_device.h"

namespace verbs {

struct Keys {
  uint32_t lkey, rkey;
};

constexpr const char* kEndpointDoc = "(queue pair number, first packet number, enum ibv_mtu, GID as 16 numbers)";
using EndpointValues = std::tuple<uint32_t, uint32_t, int, std::vector<uint8_t>>;

inline EndpointValues endpoint_values(const Endpoint& endpoint) {
  return {endpoint.qp_number, endpoint.psn, endpoint.mtu, {endpoint.gid.begin(), endpoint.gid.end()}};
}

inline Endpoint endpoint_from(const EndpointValues& values) {
  const auto& [number, psn, mtu, gid] = values;
  Endpoint endpoint{number, psn, mtu, {}};
  if (gid.size() != endpoint.gid.size()) throw std::invalid_argument("a GID has 16 bytes");
  std::copy(gid.begin(), gid.end(), endpoint.gid.begin());
  return endpoint;
}

}  // namespace verbs
