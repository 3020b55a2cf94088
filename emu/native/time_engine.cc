#include "registers.h"

void register_time_engine(nb::module_& m) { (void)m; }
