#include "registers.h"

void register_hot_buffer(nb::module_& m) { (void)m; }
