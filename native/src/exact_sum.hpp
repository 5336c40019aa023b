// A sum of float64 values without any rounding: the same whatever the order and the grouping.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace ssdplan {

// A fixed-point number that holds every non-negative float64 and 2^64 times the largest (Kulisch's long accumulator),
// in units of 2^-1074, the least float64. Digits have 32 bits in words of 64, so that carries can wait.
class ExactSum {
  public:
    static constexpr std::size_t kBytes = 272;

    // `value` is finite and not negative.
    void add(double value) {
        std::uint64_t bits;
        std::memcpy(&bits, &value, sizeof bits);
        const std::uint64_t exponent = bits >> 52;
        const std::uint64_t fraction = bits & ((std::uint64_t{1} << 52) - 1);
        const std::uint64_t mantissa = exponent == 0 ? fraction : fraction | (std::uint64_t{1} << 52);
        const std::uint64_t position = exponent == 0 ? 0 : exponent - 1;  // of the mantissa's lowest bit
        const std::uint64_t low = (mantissa & kDigit) << (position % 32);
        const std::uint64_t high = (mantissa >> 32) << (position % 32);
        std::uint64_t* const digits = digits_.data() + position / 32;
        digits[0] += low & kDigit;
        digits[1] += (low >> 32) + (high & kDigit);
        digits[2] += high >> 32;
        if (++waiting_ == kMostWaiting) carry();
    }

    void add(const ExactSum& other) {
        ExactSum settled = other;
        settled.carry();
        carry();
        for (std::size_t i = 0; i < digits_.size(); ++i) digits_[i] += settled.digits_[i];
        carry();
    }

    // The sum as a little-endian integer.
    std::array<unsigned char, kBytes> bytes() const {
        ExactSum settled = *this;
        settled.carry();
        std::array<unsigned char, kBytes> result;
        for (std::size_t i = 0; i < kBytes; ++i) {
            result[i] = static_cast<unsigned char>(settled.digits_[i / 4] >> (8 * (i % 4)));
        }
        return result;
    }

  private:
    static constexpr std::uint64_t kDigit = 0xffffffffU;
    static constexpr std::uint64_t kMostWaiting = std::uint64_t{1} << 30;  // each adds less than 2^33 to a digit

    void carry() {
        std::uint64_t over = 0;
        for (std::uint64_t& digit : digits_) {
            digit += over;
            over = digit >> 32;
            digit &= kDigit;
        }
        waiting_ = 0;
    }

    std::array<std::uint64_t, kBytes / 4> digits_{};
    std::uint64_t waiting_ = 0;
};

}  // namespace ssdplan
