// One register function per source file: module.cc only calls them.
#pragma once

#include <nanobind/nanobind.h>

namespace nb = nanobind;

void register_rows(nb::module_& m);
void register_visibility(nb::module_& m);
void register_numa(nb::module_& m);
void register_hot_buffer(nb::module_& m);
void register_link_clock(nb::module_& m);
void register_time_engine(nb::module_& m);
void register_serving(nb::module_& m);
void register_locality(nb::module_& m);
void register_verbs(nb::module_& m);
void register_pool(nb::module_& m);
void register_pool_simulator(nb::module_& m);
