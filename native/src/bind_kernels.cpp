// The Python face of the kernels: addresses and numbers in, results out, without the interpreter lock.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <string>
#include <utility>

#include "bindings.hpp"
#include "kernels.hpp"
#include "parallel.hpp"

namespace py = pybind11;
using namespace py::literals;

namespace ssdplan {

void bind_kernels(py::module_& module) {
    module.def(
        "adamw",
        [](std::uintptr_t master, std::uintptr_t exp_avg, std::uintptr_t exp_avg_sq, std::uintptr_t gradient,
           std::uintptr_t parameter, const std::string& parameter_dtype, std::int64_t elements, double lr, double beta1,
           double beta2, double eps, double weight_decay, std::int64_t step, double gradient_scale,
           std::int64_t threads) {
            const AdamwArguments arguments{master,     exp_avg,
                                           exp_avg_sq, gradient,
                                           parameter,  parse_dtype(parameter_dtype),
                                           elements,   lr,
                                           beta1,      beta2,
                                           eps,        weight_decay,
                                           step,       gradient_scale};
            const py::gil_scoped_release release;
            const GradientStatistics statistics = parallel_adamw(arguments, threads);
            return std::pair<bool, double>{statistics.finite, statistics.sum_of_squares};
        },
        "master"_a, "exp_avg"_a, "exp_avg_sq"_a, "gradient"_a, "parameter"_a, "parameter_dtype"_a, "elements"_a,
        py::kw_only(), "lr"_a, "beta1"_a, "beta2"_a, "eps"_a, "weight_decay"_a, "step"_a, "gradient_scale"_a = 1.0,
        "threads"_a = 2,
        R"(One AdamW step on a range of elements, in one pass over memory.

master, exp_avg, exp_avg_sq: addresses of fp32 arrays, updated in place. gradient: address of an fp32 array, only read.
parameter: address of an array of parameter_dtype ("bf16", "fp16" or "fp32") that receives the new master weights,
rounded to nearest even. All have `elements` elements; parameter may be master when both are fp32. `step` counts from 1.
The gradient is multiplied by gradient_scale first.

The arithmetic is torch.optim.AdamW's without amsgrad, in fp32, its scalars computed in float64 and rounded once. An
element's result has the same bits in whatever range it lies, on any instruction set and number of threads (only the
payload of a NaN may differ).

Returns (finite, sum_of_squares): whether every scaled gradient is finite, by its exponent bits, fused into the pass
(MemAscend's overflow check); and the float64 sum of their squares, over blocks of 2048 elements in order, so that the
number of threads does not change it. The update is made in either case.

Raises ValueError for a null or misaligned pointer, a negative size or a hyperparameter out of range.)");
    module.def(
        "gradient_statistics",
        [](std::uintptr_t gradient, std::int64_t elements, std::int64_t threads) {
            GradientStatistics statistics{};
            {
                const py::gil_scoped_release release;
                statistics = parallel_statistics(gradient, elements, threads);
            }
            return std::pair<bool, double>{statistics.finite, statistics.sum_of_squares};
        },
        "gradient"_a, "elements"_a, py::kw_only(), "threads"_a = 1,
        R"(What `adamw` returns of a gradient, without an update: (finite, sum_of_squares).

gradient: address of an fp32 array of `elements` elements. Raises ValueError as `adamw`.)");
    module.def(
        "copy",
        [](std::uintptr_t destination, std::uintptr_t source, std::int64_t nbytes, std::int64_t threads) {
            parallel_copy(destination, source, nbytes, threads);
        },
        "destination"_a, "source"_a, "nbytes"_a, py::kw_only(), "threads"_a = 1, ReleaseLock(),
        "Copy nbytes bytes between two addresses. Raises ValueError for a null pointer, a negative size or an "
        "overlap.");
    module.def(
        "convert",
        [](std::uintptr_t destination, const std::string& destination_dtype, std::uintptr_t source,
           const std::string& source_dtype, std::int64_t elements, std::int64_t threads) {
            parallel_convert(destination, parse_dtype(destination_dtype), source, parse_dtype(source_dtype), elements,
                             threads);
        },
        "destination"_a, "destination_dtype"_a, "source"_a, "source_dtype"_a, "elements"_a, py::kw_only(),
        "threads"_a = 1, ReleaseLock(),
        R"(Convert elements among "fp32", "bf16" and "fp16".

Rounds to nearest even; overflow gives infinity, subnormals are kept and NaN stays NaN. Raises ValueError for a null or
misaligned pointer, a negative size, an unknown dtype or an overlap.)");
    module.def(
        "is_finite",
        [](std::uintptr_t address, std::int64_t elements, const std::string& dtype, std::int64_t threads) {
            return parallel_is_finite(address, elements, parse_dtype(dtype), threads);
        },
        "address"_a, "elements"_a, "dtype"_a, "threads"_a = 1, ReleaseLock(),
        R"(Whether no element of an array of dtype "fp32", "bf16" or "fp16" is infinite or NaN.

Looks at exponent bits alone and needs no memory (MemAscend's fused overflow check). Raises ValueError as `convert`.)");
    module.def(
        "checksum",
        [](std::uintptr_t address, std::int64_t nbytes, std::int64_t threads) {
            return parallel_checksum(address, nbytes, threads);
        },
        "address"_a, "nbytes"_a, "threads"_a = 1, ReleaseLock(),
        R"(The 64-bit checksum of nbytes at an address, a multiple of 256: one value on every processor.

Detects for certain every change inside one aligned 8-byte word, every burst of up to 60 bits and every two flipped bits
up to 16 MiB apart; any other change, a length among them, with a chance of 1 - 2^-64. native/src/checksum.hpp defines
it. Raises ValueError for a null pointer or another nbytes.)");
    module.def("isa", &isa,
               R"(The instruction set that the kernels use here: "x86-64-v4", "x86-64-v3" or "baseline".)");
}

}  // namespace ssdplan
