#include "registers.h"

void register_link_clock(nb::module_& m) { (void)m; }
