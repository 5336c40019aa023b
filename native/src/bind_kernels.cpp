// The Python face of the kernels: addresses and numbers in, results out, without the interpreter lock.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "bindings.hpp"
#include "kernels.hpp"
#include "parallel.hpp"

namespace py = pybind11;
using namespace py::literals;

namespace ssdplan {

namespace {

// Runs `compute` without the interpreter lock; its exact sum becomes a Python integer.
template <typename Compute>
py::tuple released(const Compute& compute) {
    std::optional<GradientStatistics> statistics;
    {
        const py::gil_scoped_release release;
        statistics = compute();
    }
    const auto bytes = statistics->sum_of_squares.bytes();
    const py::bytes little(reinterpret_cast<const char*>(bytes.data()), bytes.size());
    const auto integer = py::type::of(py::int_(0)).attr("from_bytes")(little, "little");
    return py::make_tuple(statistics->finite, integer);
}

// Addresses of the scales of both moments; 0 where these are not in int8.
using Scales = std::array<std::uintptr_t, 2>;

// Binds `update(arrays, settings, threads)` under a name.
template <typename Update>
void define_adamw(py::module_& module, const char* name, const Update& update, const char* doc) {
    module.def(
        name,
        [update](std::optional<std::uintptr_t> master, std::uintptr_t exp_avg, std::uintptr_t exp_avg_sq,
                 std::uintptr_t gradient, std::uintptr_t parameter, const std::string& parameter_dtype,
                 std::int64_t elements, std::optional<std::uintptr_t> residual, const std::string& moment_dtype,
                 const Scales& scales, double lr, double beta1, double beta2, double eps, double weight_decay,
                 std::int64_t step, double gradient_scale, std::int64_t threads) {
            const AdamwArrays arrays{elements,  master.value_or(0), residual.value_or(0),
                                     exp_avg,   exp_avg_sq,         parse_moments(moment_dtype),
                                     gradient,  parameter,          parse_dtype(parameter_dtype),
                                     scales[0], scales[1]};
            return update(arrays, AdamwSettings{lr, beta1, beta2, eps, weight_decay, step, gradient_scale}, threads);
        },
        "master"_a, "exp_avg"_a, "exp_avg_sq"_a, "gradient"_a, "parameter"_a, "parameter_dtype"_a, "elements"_a,
        py::kw_only(), "residual"_a = py::none(), "moment_dtype"_a = "fp32", "scales"_a = Scales{}, "lr"_a, "beta1"_a,
        "beta2"_a, "eps"_a, "weight_decay"_a, "step"_a, "gradient_scale"_a = 1.0, "threads"_a = 2, doc);
}

using Update = std::tuple<std::int64_t, std::int64_t, double, double>;

std::vector<Move> moves_of(const std::vector<Update>& updates) {
    std::vector<Move> moves;
    moves.reserve(updates.size());
    for (const auto& [step, direction, scale, keep] : updates) moves.push_back({step, direction, scale, keep});
    return moves;
}

}  // namespace

void bind_kernels(py::module_& module) {
    define_adamw(
        module, "adamw",
        [](const AdamwArrays& arrays, const AdamwSettings& settings, std::int64_t threads) {
            const py::gil_scoped_release release;
            return parallel_adamw(arrays, settings, threads);
        },
        R"(One AdamW step on a range of elements, in one pass. Returns whether every scaled gradient is finite.

Arrays, by address, all of `elements` elements:
parameter: receives the new master weights in parameter_dtype ("bf16", "fp16" or "fp32").
master: fp32 masters, updated in place; the parameter is the master rounded to nearest even, and may be the same array
    when it is fp32. Or None: a bf16 parameter is updated in fp32 and rounded to nearest even once, or has a
residual: 16-bit integers, updated in place, that with a bf16 parameter are the master: its bits are those of the
    parameter, as fp32, plus the residual as a signed number. For 16 bits to suffice, the parameter is rounded to
    nearest with ties away from zero. The masters' trajectory is that of fp32 masters bit for bit, given the same
    gradients; the payload of a NaN is lost.
exp_avg, exp_avg_sq: the moments in moment_dtype ("fp32", "bf16" or "int8"), updated in place. With bf16 they are read
    into fp32, and what is computed in fp32 from the unrounded new moments is stored rounded to nearest even (MemAscend's
    half-precision optimizer). With 8 bits a moment stands still where its change is below 2^-9 of it, as the second
    does at a beta2 of 0.999 unless a squared gradient exceeds about three times it: lossy, a user's choice.
    With int8 a byte is the number of a fraction of the `scales` that its block of 64 elements has, one fp32 for each of
    both moments: block-wise dynamic quantization (Dettmers et al., 2022; native/src/eight_bits.hpp). Elements are whole
    blocks.
gradient: fp32, only read.

`step` counts from 1. The gradient is multiplied by gradient_scale, rounded to fp32, first: the inverse of the loss
scale times the clipping coefficient. One factor gives the bits of GradScaler.unscale_ followed by clip_grad_norm_ where
the loss scale is a power of two and no unscaled gradient is subnormal. The arithmetic is torch.optim.AdamW's without
amsgrad, in fp32, its scalars computed in float64 and rounded once. An element's result has the same bits in whatever
range it lies, on any instruction set and number of threads (only the payload of a NaN may differ).

Finiteness is seen by exponent bits, fused into the pass (MemAscend's overflow check); the update is made in either
case.

Raises ValueError for a null or misaligned pointer, both master and residual, neither
of them or a residual with another parameter than bf16, an unknown dtype, a negative size or a number out of range.)");
    define_adamw(
        module, "adamw_statistics",
        [](const AdamwArrays& arrays, const AdamwSettings& settings, std::int64_t threads) {
            return released([&] { return parallel_adamw_statistics(arrays, settings, threads); });
        },
        R"(`adamw`, and the sum of squares of the gradient before it is scaled: (finite, sum_of_squares), in the one pass.

finite is what `adamw` returns, parameters and moments get the same bits, and sum_of_squares is that of
`gradient_statistics`. Raises ValueError as `adamw`.)");
    module.def(
        "adamw_summed",
        [](std::optional<std::uintptr_t> master, std::uintptr_t exp_avg, std::uintptr_t exp_avg_sq,
           std::uintptr_t gradient, std::uintptr_t parameter, const std::string& parameter_dtype, std::int64_t elements,
           const std::vector<std::int64_t>& positions, const std::vector<std::int64_t>& ends,
           std::optional<std::uintptr_t> residual, const std::string& moment_dtype, const Scales& scales, double lr,
           double beta1, double beta2, double eps, double weight_decay, std::int64_t step, double gradient_scale,
           std::int64_t threads) {
            const AdamwArrays arrays{elements,  master.value_or(0), residual.value_or(0),
                                     exp_avg,   exp_avg_sq,         parse_moments(moment_dtype),
                                     gradient,  parameter,          parse_dtype(parameter_dtype),
                                     scales[0], scales[1]};
            const AdamwSettings settings{lr, beta1, beta2, eps, weight_decay, step, gradient_scale};
            AdamwSummed summed;
            const py::tuple statistics = released([&] {
                summed = parallel_adamw_summed(arrays, settings, {positions, ends}, threads);
                return summed.statistics;
            });
            return py::make_tuple(statistics[0], statistics[1], summed.before, summed.after);
        },
        "master"_a, "exp_avg"_a, "exp_avg_sq"_a, "gradient"_a, "parameter"_a, "parameter_dtype"_a, "elements"_a,
        py::kw_only(), "positions"_a, "ends"_a, "residual"_a = py::none(), "moment_dtype"_a = "fp32",
        "scales"_a = Scales{}, "lr"_a, "beta1"_a, "beta2"_a, "eps"_a, "weight_decay"_a, "step"_a,
        "gradient_scale"_a = 1.0, "threads"_a = 2,
        R"(`adamw_statistics`, and the sums of the states as they were and as they are, in the one pass: (finite,
sum_of_squares, before, after).

The states lie among bytes that are cut into extents: `positions` are the bytes at which the range's masters or
residuals (where there are none, any number), exp_avg, exp_avg_sq and in int8 the scales of both begin there, `ends` those at which the extents end. before and after are lists, one sum an extent: the
exclusive or of what ranges that make up an extent give, put into `checksum_of`, is the `checksum` of that extent before
and after these updates. What is summed is in a cache anyway, so this takes much less than two passes more.

Scales are summed up to a multiple of 256 bytes; what lies behind them there is zero or another range's to leave out.

Raises ValueError as `adamw_statistics`, and where the bytes of a stream, a position or an end is no multiple of 256, ends
do not rise or states lie beyond them.)");
    module.def("checksum_of", &parallel_checksum_of, "sum"_a, "nbytes"_a,
               "The `checksum` of nbytes of which `sum` is the sum, as `adamw_summed` tells it. Raises ValueError for "
               "a size that `checksum` refuses.");
    module.def(
        "stream_mix",
        [](std::uintptr_t master, std::uintptr_t exp_avg, std::uintptr_t exp_avg_sq, std::uintptr_t gradient,
           std::uintptr_t parameter, std::int64_t elements, const std::string& moment_dtype, std::int64_t threads) {
            const AdamwArrays arrays{elements, master,    0,           exp_avg, exp_avg_sq, parse_moments(moment_dtype),
                                     gradient, parameter, Dtype::bf16, 0,       0};
            parallel_stream_mix(arrays, threads);
        },
        "master"_a, "exp_avg"_a, "exp_avg_sq"_a, "gradient"_a, "parameter"_a, "elements"_a, py::kw_only(),
        "moment_dtype"_a = "fp32", "threads"_a = 2, ReleaseLock(),
        R"(Touch memory as `adamw` does with fp32 masters and a 2-byte parameter, and hardly compute: its bound.

On bits: master, exp_avg and exp_avg_sq become their exclusive or with gradient (bf16 moments: with its upper half), and
parameter the upper half of the new master. Same arrays, pieces, threads and errors as `adamw`.)");
    module.def(
        "gradient_statistics",
        [](std::uintptr_t gradient, std::int64_t elements, std::int64_t threads) {
            return released([&] { return parallel_statistics(gradient, elements, threads); });
        },
        "gradient"_a, "elements"_a, py::kw_only(), "threads"_a = 1,
        R"(Whether an fp32 array is finite, and its sum of squares: (finite, sum_of_squares).

sum_of_squares is an integer in units of 2**-1074, the least float64: sum_of_squares / (1 << 1074) is it as a float.
Squares are summed in float64 over blocks of 2048 elements from the array's start, in one fixed order, and the blocks'
sums exactly: so the sums of ranges cut at multiples of 2048 elements add up, in any order, to that of the whole. Blocks
with an element that is not finite are left out.

Raises ValueError for a null or misaligned pointer or a negative size.)");
    module.def(
        "copy_statistics",
        [](std::uintptr_t destination, std::uintptr_t source, std::int64_t elements, std::int64_t threads) {
            return released([&] { return parallel_copy_statistics(destination, source, elements, threads); });
        },
        "destination"_a, "source"_a, "elements"_a, py::kw_only(), "threads"_a = 1,
        R"(Copy an fp32 array and return its `gradient_statistics`, in one pass over memory.

Raises ValueError as `gradient_statistics`, and for an overlap.)");
    module.def(
        "copy",
        [](std::uintptr_t destination, std::uintptr_t source, std::int64_t nbytes, std::int64_t threads) {
            parallel_copy(destination, source, nbytes, threads);
        },
        "destination"_a, "source"_a, "nbytes"_a, py::kw_only(), "threads"_a = 1, ReleaseLock(),
        "Copy nbytes bytes between two addresses. Raises ValueError for a null pointer, a negative size or an "
        "overlap.");
    module.def(
        "accumulate",
        [](std::uintptr_t target, std::uintptr_t source, const std::string& source_dtype, std::int64_t elements,
           bool begin, std::int64_t threads) {
            parallel_accumulate(target, source, parse_dtype(source_dtype), elements, begin, threads);
        },
        "target"_a, "source"_a, "source_dtype"_a, "elements"_a, py::kw_only(), "begin"_a, "threads"_a = 1,
        ReleaseLock(),
        R"(Add elements of dtype "fp32", "bf16" or "fp16" to an fp32 array, in one pass.

With `begin`, what the array holds counts as zero and is not read. The bits are those of torch's `target.add_(source)`,
after `target.zero_()` with `begin` (only the payload of a NaN may differ), in any range and on any instruction set.
Raises ValueError for a null or misaligned pointer, a negative size, an unknown dtype or an overlap.)");
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
        "quantize",
        [](std::uintptr_t values, std::uintptr_t scales, std::uintptr_t source, const std::string& source_dtype,
           std::int64_t elements, std::int64_t group, std::int64_t threads) {
            return parallel_quantize(values, scales, source, parse_dtype(source_dtype), elements, group, threads);
        },
        "values"_a, "scales"_a, "source"_a, "source_dtype"_a, "elements"_a, py::kw_only(), "group"_a = 64,
        "threads"_a = 1, ReleaseLock(),
        R"(Quantise to int8 by groups, symmetrically (PyAO). Returns whether every element is finite.

values: address of int8 [elements]. scales: of fp32 [ceil(elements / group)]. source: of an array of source_dtype "fp32",
"bf16" or "fp16". group: a power of two from 32 to 4096; the last group may be shorter. A group's scale is its largest
magnitude / 127 in fp32, at least 2**-126; a value is the element / scale, rounded to nearest even, from -127 to 127.
The error of an element is at most half a scale (and 2e-5 of it for rounding); zeros are exact. A group with an element
that is not finite gets zeros and a scale of NaN, so that what is dequantised is NaN.

The default of 64 takes 8.5 bits an element: one outlier spoils 63 others, and twice the group would save a quarter of a
bit. Scales are fp32 because a bf16 scale's own rounding, of up to 2**-9, would move the largest values by a quarter of
a unit.

A group has the same bits wherever a range is cut at a multiple of it, with any number of threads and instruction set.
Raises ValueError for a null or misaligned pointer, a negative size, another group or dtype, or an overlap.)");
    module.def(
        "dequantize",
        [](std::uintptr_t destination, const std::string& destination_dtype, std::uintptr_t values,
           std::uintptr_t scales, std::int64_t elements, std::int64_t group, std::int64_t threads) {
            parallel_dequantize(destination, parse_dtype(destination_dtype), values, scales, elements, group, threads);
        },
        "destination"_a, "destination_dtype"_a, "values"_a, "scales"_a, "elements"_a, py::kw_only(), "group"_a = 64,
        "threads"_a = 1, ReleaseLock(),
        R"(Undo `quantize`: value * scale in fp32, rounded to nearest even to destination_dtype "fp32", "bf16" or "fp16".

Raises ValueError as `quantize`.)");
    module.def(
        "zeroth_order",
        [](std::uintptr_t parameters, std::uintptr_t plus, std::uintptr_t minus, const std::string& dtype,
           std::int64_t elements, std::uint64_t seed, std::int64_t tensor, std::int64_t step, double eps,
           std::int64_t direction, const std::vector<Update>& pending, const std::optional<std::string>& masters,
           std::int64_t first, std::int64_t threads) {
            const Dtype format = parse_dtype(dtype);
            parallel_zeroth_order(
                {parameters, masters ? parse_dtype(*masters) : format, plus, minus, format, first, elements}, seed,
                tensor, moves_of(pending), Move{step, direction, eps, 1.0}, threads);
        },
        "parameters"_a, "plus"_a, "minus"_a, "dtype"_a, "elements"_a, py::kw_only(), "seed"_a, "tensor"_a, "step"_a,
        "eps"_a, "direction"_a = 0, "pending"_a = std::vector<Update>{}, "masters"_a = py::none(), "first"_a = 0,
        "threads"_a = 1, ReleaseLock(),
        R"(The zeroth-order (MeZO) pass over parameters: the updates that are pending, then both perturbations.

parameters, plus, minus: addresses of arrays of dtype "fp32", "bf16" or "fp16" that do not overlap, elements `first` to
first + elements of a tensor. masters: "fp32" where parameters are fp32 and plus and minus of another dtype. One of plus
and minus may be 0, and is not made then. With z(step, direction) one of the tensor's random normal directions of a step:

    parameters = keep * parameters - scale * z(step, direction)   for each (step, direction, scale, keep) of pending
    plus       = rounded(parameters) + eps * z(step, direction)
    minus      = rounded(parameters) - eps * z(step, direction)

in fp32, each line rounded to nearest even to the format that it is stored in, the second and third reading what the
updates stored, rounded to dtype. scale is lr times the projected gradient; keep is 1 - lr * weight decay. In bf16 without
masters updates below half a unit in the last place are lost, as they are in MeZO's own half-precision.

z is a function of (seed, tensor, step, direction, element) alone (Philox4x32-10 and Box-Muller;
native/src/zeroth_order.hpp defines it), so it has the same bits in any range, on any instruction set and number of
threads. seed has 64 bits, tensor and steps 32, directions 16; elements are below 2**50.

Raises ValueError for a null or misaligned pointer, an overlap, another dtype, a negative size or a number out of
range.)");
    module.def(
        "zeroth_order_update",
        [](std::uintptr_t parameters, const std::string& dtype, std::int64_t elements, std::uint64_t seed,
           std::int64_t tensor, const std::vector<Update>& pending, std::int64_t first, std::int64_t threads) {
            const Dtype format = parse_dtype(dtype);
            parallel_zeroth_order({parameters, format, 0, 0, format, first, elements}, seed, tensor, moves_of(pending),
                                  std::nullopt, threads);
        },
        "parameters"_a, "dtype"_a, "elements"_a, py::kw_only(), "seed"_a, "tensor"_a, "pending"_a, "first"_a = 0,
        "threads"_a = 1, ReleaseLock(),
        R"(The updates of `zeroth_order` alone, to flush or to replay them, to the same bits.

pending: (step, direction, scale, keep) one after the other. Raises ValueError as `zeroth_order`.)");
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
