#include "registers.h"

NB_MODULE(_native, m) {
  m.doc() = "The C++ core of emu: what Python cannot do in microseconds.";
  register_rows(m);
  register_visibility(m);
  register_numa(m);
  register_hot_buffer(m);
  register_link_clock(m);
  register_time_engine(m);
  register_serving(m);
  register_locality(m);
  register_verbs(m);
  register_pool(m);
  register_pool_simulator(m);
}
