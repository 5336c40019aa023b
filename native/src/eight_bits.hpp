// Moments in 8 bits: blocks of 64 elements share an fp32 scale, the largest magnitude of the block, and an element is
// the number of the nearest of 256 fractions of it (Dettmers et al., 8-bit Optimizers via Block-wise Quantization,
// 2022).
//
// The fractions are those of dynamic quantization (section 1.3 there): 0, 1, and for each decade [10^(d-1), 10^d) from
// d = -6 to 0 the centres of 2^(d+6) equal parts of it, with both signs for a first moment; for a second moment, which
// is never negative, of 2^(d+7) parts. Number 0 is the fraction 0, so zeros are zeros in this format too. Number k is
// the k-th positive fraction, and number 256 - k its negative.
//
// A second moment that is not zero never becomes zero, but the smallest fraction: where the denominator of an update
// vanished, the first moment would become a step of any length (Li et al., Memory Efficient Optimizers with 4-bit
// States, 2023, section 4.1).
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>

#include "formats.hpp"

namespace ssdplan {

constexpr std::size_t kScaled = 64;  // elements that share a scale

namespace eight_bits {

// Every fraction from 2^-24 to 1 by its exponent and seven bits of its mantissa: no two ends of cells share such a
// range.
constexpr std::uint32_t kShift = 16;
constexpr std::uint32_t kFirst = (127U - 24U) << 7;
constexpr std::uint32_t kRanges = (127U << 7) - kFirst + 1;

struct Book {
    std::array<float, 256> fractions{};  // of each number
    std::array<float, 257> ends{};       // of the k-th positive one: the least fraction that is beyond its cell
    std::array<std::int32_t, kRanges> numbers{};  // of the least fraction of each range
};

constexpr Book make_book(bool is_signed) {
    Book book;
    std::array<double, 256> positive{};
    std::size_t count = 0;
    positive[count++] = 0.0;
    double decade = 1e-6;
    for (std::size_t parts = is_signed ? 1 : 2; count < (is_signed ? 128U : 255U); parts *= 2, decade *= 10.0) {
        for (std::size_t part = 0; part < parts; ++part) {
            const double centre = 0.1 + 0.9 * (static_cast<double>(part) + 0.5) / static_cast<double>(parts);
            positive[count++] = decade * centre;
        }
    }
    positive[count++] = 1.0;
    for (std::size_t number = 0; number < count; ++number) {
        book.fractions[number] = static_cast<float>(positive[number]);
        const bool last = number + 1 == count;
        book.ends[number] = last ? std::numeric_limits<float>::infinity()
                                 : static_cast<float>((positive[number] + positive[number + 1]) / 2.0);
        if (is_signed && number > 0 && !last) book.fractions[256 - number] = -book.fractions[number];
    }
    std::int32_t number = 0;
    for (std::uint32_t range = 0; range < kRanges; ++range) {
        const std::uint32_t key = kFirst + range;
        const auto exponent = static_cast<int>(key >> 7) - 127;
        double least = 1.0 + static_cast<double>(key & 127U) / 128.0;
        for (int each = exponent; each < 0; ++each) least /= 2.0;
        while (least >= static_cast<double>(book.ends[static_cast<std::size_t>(number)])) ++number;
        book.numbers[range] = number;
    }
    return book;
}

inline constexpr Book kSigned = make_book(true);
inline constexpr Book kUnsigned = make_book(false);

// The number of the fraction that is nearest to a magnitude from 0 to 1.
SSDPLAN_INLINE std::int32_t nearest(const Book& book, float fraction) {
    const std::int32_t key = static_cast<std::int32_t>(bits_of(fraction) >> kShift) - static_cast<std::int32_t>(kFirst);
    const std::int32_t least = key < 0 ? 0 : key;
    const std::int32_t number = book.numbers[least < static_cast<std::int32_t>(kRanges) ? least : kRanges - 1];
    return number + (fraction >= book.ends[number] ? 1 : 0);
}

}  // namespace eight_bits

// A block's moments as fp32.
template <bool is_signed>
SSDPLAN_INLINE void load_scaled(float* values, const std::uint8_t* numbers, float scale) {
    const eight_bits::Book& book = is_signed ? eight_bits::kSigned : eight_bits::kUnsigned;
#pragma omp simd
    for (std::size_t i = 0; i < kScaled; ++i) values[i] = book.fractions[numbers[i]] * scale;
}

// A block's moments as numbers; returns their scale.
template <bool is_signed>
SSDPLAN_INLINE float store_scaled(std::uint8_t* numbers, const float* values) {
    const eight_bits::Book& book = is_signed ? eight_bits::kSigned : eight_bits::kUnsigned;
    std::uint32_t largest = 0;
#pragma omp simd reduction(max : largest)
    for (std::size_t i = 0; i < kScaled; ++i) {
        const std::uint32_t magnitude = bits_of(values[i]) & 0x7fffffffU;
        largest = magnitude > largest ? magnitude : largest;
    }
    // The inverse of a subnormal scale may be infinite.
    const float scale = largest == 0 ? 0.0F : float_of(largest < 0x00800000U ? 0x00800000U : largest);
    const float inverse = largest == 0 ? 0.0F : 1.0F / scale;
    std::int32_t found[kScaled];
#pragma omp simd
    for (std::size_t i = 0; i < kScaled; ++i) {
        const std::uint32_t bits = bits_of(values[i]);
        const std::int32_t number = eight_bits::nearest(book, float_of(bits & 0x7fffffffU) * inverse);
        if (is_signed) {
            const std::int32_t below = number < 128 ? number : 127;  // 1 has no negative
            found[i] = (bits >> 31) != 0 ? -below : number;
        } else {
            found[i] = number == 0 && bits != 0 ? 1 : number;
        }
    }
#pragma omp simd
    for (std::size_t i = 0; i < kScaled; ++i) numbers[i] = static_cast<std::uint8_t>(found[i]);
    return scale;
}

}  // namespace ssdplan
