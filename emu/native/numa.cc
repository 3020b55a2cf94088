#include "registers.h"

void register_numa(nb::module_& m) { (void)m; }
