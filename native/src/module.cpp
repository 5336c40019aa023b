// The extension module: its parts convert arguments, let go of the interpreter lock, and convert results and errors.
#include <pybind11/pybind11.h>

#include "bindings.hpp"

PYBIND11_MODULE(_native, module) {
    module.doc() = "The native core of ssdplan; its public face is ssdplan.native.";
    ssdplan::bind_arena(module);
    ssdplan::bind_engine(module);
    ssdplan::bind_kernels(module);
}
