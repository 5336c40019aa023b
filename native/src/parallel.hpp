// The kernels over whole ranges: checks the arguments, cuts the range into pieces and shares them among threads. How a
// range is cut depends on its length alone, never on the number of threads.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "adamw.hpp"
#include "exact_sum.hpp"
#include "formats.hpp"

namespace ssdplan {

Dtype parse_dtype(const std::string& name);      // throws std::invalid_argument
Moments parse_moments(const std::string& name);  // likewise

struct GradientStatistics {
    bool finite;
    ExactSum sum_of_squares;  // of the blocks that are finite
};

// Addresses of the arrays that AdamwStreams describes; 0 for what is not there.
struct AdamwArrays {
    std::int64_t elements;
    std::uintptr_t master;
    std::uintptr_t residual;
    std::uintptr_t exp_avg;
    std::uintptr_t exp_avg_sq;
    Moments moments;
    std::uintptr_t gradient;
    std::uintptr_t parameter;
    Dtype parameter_dtype;
    std::uintptr_t exp_avg_scales;
    std::uintptr_t exp_avg_sq_scales;
};

struct AdamwSettings {
    double lr;
    double beta1;
    double beta2;
    double eps;
    double weight_decay;
    std::int64_t step;
    double gradient_scale;
};

// Where a range's masters or residuals (where there are none, any number), exp_avg and exp_avg_sq, and with moments in
// int8 the scales of both, lie among bytes that are summed; and where the extents of these end. Scales are summed up to
// a whole kChecksumUnit, behind which others may lie only if theirs end there: a range is all of what shares that unit.
struct AdamwPlaces {
    std::vector<std::int64_t> positions;
    std::vector<std::int64_t> ends;
};

struct AdamwSummed {
    GradientStatistics statistics;
    std::vector<std::uint64_t> before;  // of each extent: what the range's states are of its sum (checksum.hpp)
    std::vector<std::uint64_t> after;
};

// All throw std::invalid_argument for a null or misaligned pointer, a negative size or a number out of range.
bool parallel_adamw(const AdamwArrays& arrays, const AdamwSettings& settings, std::int64_t threads);
GradientStatistics parallel_adamw_statistics(const AdamwArrays& arrays, const AdamwSettings& settings,
                                             std::int64_t threads);
AdamwSummed parallel_adamw_summed(const AdamwArrays& arrays, const AdamwSettings& settings, const AdamwPlaces& places,
                                  std::int64_t threads);
void parallel_stream_mix(const AdamwArrays& arrays, std::int64_t threads);
GradientStatistics parallel_statistics(std::uintptr_t gradient, std::int64_t elements, std::int64_t threads);
GradientStatistics parallel_copy_statistics(std::uintptr_t destination, std::uintptr_t source, std::int64_t elements,
                                            std::int64_t threads);
void parallel_copy(std::uintptr_t destination, std::uintptr_t source, std::int64_t nbytes, std::int64_t threads);
void parallel_accumulate(std::uintptr_t target, std::uintptr_t source, Dtype source_dtype, std::int64_t elements,
                         bool begin, std::int64_t threads);
void parallel_convert(std::uintptr_t destination, Dtype destination_dtype, std::uintptr_t source, Dtype source_dtype,
                      std::int64_t elements, std::int64_t threads);
bool parallel_is_finite(std::uintptr_t data, std::int64_t elements, Dtype dtype, std::int64_t threads);
bool parallel_quantize(std::uintptr_t values, std::uintptr_t scales, std::uintptr_t source, Dtype dtype,
                       std::int64_t elements, std::int64_t group, std::int64_t threads);
void parallel_dequantize(std::uintptr_t destination, Dtype dtype, std::uintptr_t values, std::uintptr_t scales,
                         std::int64_t elements, std::int64_t group, std::int64_t threads);

struct ZerothOrderArrays {
    std::uintptr_t parameters;
    Dtype parameters_dtype;
    std::uintptr_t plus;  // 0 where it is not wanted, as minus
    std::uintptr_t minus;
    Dtype dtype;
    std::int64_t first;  // the element of the tensor at which the arrays begin
    std::int64_t elements;
};

// One direction of a step, and how far to go along it.
struct Move {
    std::int64_t step;
    std::int64_t direction;
    double scale;
    double keep;
};

// The updates of `pending` one after the other, then the perturbations of `next`, if there is one.
void parallel_zeroth_order(const ZerothOrderArrays& arrays, std::uint64_t seed, std::int64_t tensor,
                           const std::vector<Move>& pending, const std::optional<Move>& next, std::int64_t threads);
std::uint64_t parallel_checksum(std::uintptr_t data, std::int64_t nbytes, std::int64_t threads);
std::uint64_t parallel_checksum_of(std::uint64_t sum, std::int64_t nbytes);

}  // namespace ssdplan
