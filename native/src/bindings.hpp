// What the rooms of the Python face share: each binds one part of the native core to the module.
#pragma once

#include <pybind11/pybind11.h>

namespace ssdplan {

using ReleaseLock = pybind11::call_guard<pybind11::gil_scoped_release>;

void bind_arena(pybind11::module_& module);
void bind_engine(pybind11::module_& module);
void bind_kernels(pybind11::module_& module);

}  // namespace ssdplan
