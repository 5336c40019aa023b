// int8 quantisation by groups: symmetric, one fp32 scale a group. A group's result depends on that group alone, in the
// same bits on every instruction set.
#pragma once

#include <cstddef>
#include <cstdint>

#include "formats.hpp"

namespace ssdplan {

constexpr std::size_t kLeastQuantizedGroup = 32;
constexpr std::size_t kMostQuantizedGroup = 4096;

// `group` is a power of two within the bounds above; the last group may be shorter. Returns whether every element is
// finite.
bool quantize(std::int8_t* values, float* scales, const void* source, Dtype dtype, std::size_t elements,
              std::size_t group);

void dequantize(void* destination, Dtype dtype, const std::int8_t* values, const float* scales, std::size_t elements,
                std::size_t group);

}  // namespace ssdplan
