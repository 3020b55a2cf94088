#include "registers.h"

void register_rows(nb::module_& m) { (void)m; }
