// The formats of numbers in memory, and their conversions from and to fp32, which a kernel inlines.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "dispatch.hpp"

namespace ssdplan {

enum class Dtype { fp32, bf16, fp16 };

constexpr std::size_t item_bytes(Dtype dtype) {
    return dtype == Dtype::fp32 ? 4 : 2;
}

SSDPLAN_INLINE std::uint32_t bits_of(float value) {
    std::uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

SSDPLAN_INLINE float float_of(std::uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

// 1 where the value is infinite or NaN: a number, so that a vector of them can be gathered by `or`.
SSDPLAN_INLINE std::uint32_t is_special(float value) {
    return (bits_of(value) & 0x7f800000U) == 0x7f800000U ? 1U : 0U;
}

// A format's storage, and its conversions from and to fp32: round to nearest even, NaN stays NaN.
struct Fp32 {
    using Storage = float;
    static SSDPLAN_INLINE float load(float value) { return value; }
    static SSDPLAN_INLINE float store(float value) { return value; }
};

struct Bf16 {
    using Storage = std::uint16_t;
    static SSDPLAN_INLINE float load(std::uint16_t bits) { return float_of(std::uint32_t{bits} << 16); }
    static SSDPLAN_INLINE std::uint16_t store(float value) {
        const std::uint32_t bits = bits_of(value);
        // Rounding could carry a NaN into infinity or zero.
        const std::uint32_t safe = value != value ? (bits & 0xffff0000U) | 0x00400000U : bits;
        return static_cast<std::uint16_t>((safe + 0x7fffU + ((safe >> 16) & 1U)) >> 16);
    }
};

struct Fp16 {
    using Storage = std::uint16_t;
    static SSDPLAN_INLINE float load(std::uint16_t half) {
        const std::uint32_t sign = (std::uint32_t{half} & 0x8000U) << 16;
        const std::uint32_t magnitude = (std::uint32_t{half} & 0x7fffU) << 13;
        const std::uint32_t exponent = magnitude & 0x0f800000U;
        const std::uint32_t normal = magnitude + 0x38000000U;   // the exponent's bias from 15 to 127
        const std::uint32_t special = magnitude + 0x70000000U;  // infinity and NaN keep the largest exponent
        // A subnormal half is a normal float: let one subtraction normalise it.
        const std::uint32_t subnormal = bits_of(float_of(magnitude + 0x38800000U) - float_of(0x38800000U));
        const std::uint32_t finite = exponent == 0 ? subnormal : normal;
        return float_of(sign | (exponent == 0x0f800000U ? special : finite));
    }
    static SSDPLAN_INLINE std::uint16_t store(float value) {
        const std::uint32_t bits = bits_of(value);
        const std::uint32_t sign = (bits & 0x80000000U) >> 16;
        const std::uint32_t magnitude = bits & 0x7fffffffU;
        // Adding 0.5 puts a subnormal half's unit at the sum's last place, so the addition rounds it.
        const std::uint32_t subnormal = bits_of(float_of(magnitude) + 0.5F) - 0x3f000000U;
        const std::uint32_t normal = (magnitude - 0x38000000U + 0xfffU + ((magnitude >> 13) & 1U)) >> 13;
        const std::uint32_t finite = magnitude < 0x38800000U ? subnormal : normal;
        const std::uint32_t special = magnitude > 0x7f800000U ? 0x7e00U : 0x7c00U;
        return static_cast<std::uint16_t>(sign | (magnitude >= 0x47800000U ? special : finite));
    }
};

}  // namespace ssdplan
