#include "registers.h"

void register_verbs(nb::module_& m) { (void)m; }
