// An argument that must be so.
#pragma once

#include <stdexcept>

inline void want(bool good, const char* what) {
  if (!good) throw std::invalid_argument(what);
}
