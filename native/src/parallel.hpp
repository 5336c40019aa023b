// The kernels over whole ranges: checks the arguments, cuts the range into pieces and shares them among threads. How a
// range is cut depends on its length alone, never on the number of threads.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "kernels.hpp"

namespace ssdplan {

Dtype parse_dtype(const std::string& name);  // throws std::invalid_argument

struct AdamwArguments {
    std::uintptr_t master;
    std::uintptr_t exp_avg;
    std::uintptr_t exp_avg_sq;
    std::uintptr_t gradient;
    std::uintptr_t parameter;
    Dtype parameter_dtype;
    std::int64_t elements;
    double lr;
    double beta1;
    double beta2;
    double eps;
    double weight_decay;
    std::int64_t step;
    double gradient_scale;
};

// All throw std::invalid_argument for a null or misaligned pointer, a negative size or a number out of range.
GradientStatistics parallel_adamw(const AdamwArguments& arguments, std::int64_t threads);
GradientStatistics parallel_statistics(std::uintptr_t gradient, std::int64_t elements, std::int64_t threads);
void parallel_copy(std::uintptr_t destination, std::uintptr_t source, std::int64_t nbytes, std::int64_t threads);
void parallel_convert(std::uintptr_t destination, Dtype destination_dtype, std::uintptr_t source, Dtype source_dtype,
                      std::int64_t elements, std::int64_t threads);
bool parallel_is_finite(std::uintptr_t data, std::int64_t elements, Dtype dtype, std::int64_t threads);
std::uint64_t parallel_checksum(std::uintptr_t data, std::int64_t nbytes, std::int64_t threads);

}  // namespace ssdplan
