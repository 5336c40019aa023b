#include "quantize.hpp"

#include <algorithm>
#include <limits>

namespace ssdplan {
namespace {

// Added to a number of magnitude below 2^22, it leaves the number, rounded to nearest even, in the lowest bits.
constexpr float kRounder = 0x1.8p23F;

template <typename Format>
SSDPLAN_INLINE bool quantize_body(std::int8_t* __restrict values, float* __restrict scales,
                                  const typename Format::Storage* __restrict source, std::size_t elements,
                                  std::size_t group) {
    bool finite = true;
    for (std::size_t begin = 0; begin < elements; begin += group) {
        const std::size_t end = std::min(elements, begin + group);
        // Magnitudes are ordered as their bits are, infinity and NaN above all.
        std::int32_t largest = 0;
#pragma omp simd reduction(max : largest)
        for (std::size_t i = begin; i < end; ++i) {
            largest = std::max(largest, static_cast<std::int32_t>(bits_of(Format::load(source[i])) & 0x7fffffffU));
        }
        if (largest >= 0x7f800000) {
            finite = false;
            *scales++ = std::numeric_limits<float>::quiet_NaN();
            std::fill(values + begin, values + end, std::int8_t{0});
            continue;
        }
        // Not below the least normal number, so that its inverse is finite and accurate.
        const float scale = std::max(float_of(static_cast<std::uint32_t>(largest)) / 127.0F, 0x1p-126F);
        const float inverse = 1.0F / scale;
        *scales++ = scale;
#pragma omp simd
        for (std::size_t i = begin; i < end; ++i) {
            values[i] = static_cast<std::int8_t>(bits_of(Format::load(source[i]) * inverse + kRounder) & 0xffU);
        }
    }
    return finite;
}

template <typename Format>
SSDPLAN_INLINE void dequantize_body(typename Format::Storage* __restrict destination,
                                    const std::int8_t* __restrict values, const float* __restrict scales,
                                    std::size_t elements, std::size_t group) {
    for (std::size_t begin = 0; begin < elements; begin += group) {
        const std::size_t end = std::min(elements, begin + group);
        const float scale = *scales++;
#pragma omp simd
        for (std::size_t i = begin; i < end; ++i) {
            destination[i] = Format::store(static_cast<float>(values[i]) * scale);
        }
    }
}

#define SSDPLAN_QUANTIZE(suffix, Format)                                                                            \
    SSDPLAN_DISPATCHED bool quantize_##suffix(std::int8_t* values, float* scales, const void* source,               \
                                              std::size_t elements, std::size_t group) {                            \
        return quantize_body<Format>(values, scales, static_cast<const Format::Storage*>(source), elements, group); \
    }                                                                                                               \
    SSDPLAN_DISPATCHED void dequantize_##suffix(void* destination, const std::int8_t* values, const float* scales,  \
                                                std::size_t elements, std::size_t group) {                          \
        dequantize_body<Format>(static_cast<Format::Storage*>(destination), values, scales, elements, group);       \
    }
SSDPLAN_QUANTIZE(fp32, Fp32)
SSDPLAN_QUANTIZE(bf16, Bf16)
SSDPLAN_QUANTIZE(fp16, Fp16)
#undef SSDPLAN_QUANTIZE

}  // namespace

bool quantize(std::int8_t* values, float* scales, const void* source, Dtype dtype, std::size_t elements,
              std::size_t group) {
    switch (dtype) {
        case Dtype::bf16:
            return quantize_bf16(values, scales, source, elements, group);
        case Dtype::fp16:
            return quantize_fp16(values, scales, source, elements, group);
        case Dtype::fp32:
            break;
    }
    return quantize_fp32(values, scales, source, elements, group);
}

void dequantize(void* destination, Dtype dtype, const std::int8_t* values, const float* scales, std::size_t elements,
                std::size_t group) {
    switch (dtype) {
        case Dtype::bf16:
            return dequantize_bf16(destination, values, scales, elements, group);
        case Dtype::fp16:
            return dequantize_fp16(destination, values, scales, elements, group);
        case Dtype::fp32:
            break;
    }
    dequantize_fp32(destination, values, scales, elements, group);
}

}  // namespace ssdplan
