#include "registers.h"

void register_visibility(nb::module_& m) { (void)m; }
