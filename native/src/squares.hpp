// The sum of squares of a block of an fp32 gradient: one order of additions, whoever makes them, on every instruction
// set. It is finite where every element is: no 2048 squares of finite fp32 values overflow float64.
#pragma once

#include <cstddef>

#include "dispatch.hpp"

namespace ssdplan {

// Sums of squares are taken in float64 over blocks of this many elements, then exactly over the blocks.
constexpr std::size_t kBlock = 2048;

// Element i of a block goes to the sum of lane i mod 16; then the lanes are added, first to last. Squares of fp32
// values are exact in float64.
class Squares {
  public:
    static constexpr std::size_t kGroup = 16;

    // The next kGroup elements.
    SSDPLAN_INLINE void add(const float* group) {
        Lanes a;
        Lanes b;
        for (std::size_t lane = 0; lane < kLanes; ++lane) {
            a[lane] = static_cast<double>(group[lane]);
            b[lane] = static_cast<double>(group[kLanes + lane]);
        }
        low_ += a * a;
        high_ += b * b;
    }

    // The sum, with the last elements: fewer than kGroup.
    SSDPLAN_INLINE double total(const float* rest, std::size_t elements) const {
        double sums[kGroup];
        for (std::size_t lane = 0; lane < kLanes; ++lane) {
            sums[lane] = low_[lane];
            sums[kLanes + lane] = high_[lane];
        }
        for (std::size_t lane = 0; lane < elements; ++lane) {
            sums[lane] += static_cast<double>(rest[lane]) * static_cast<double>(rest[lane]);
        }
        double total = 0.0;
        for (const double sum : sums) total += sum;
        return total;
    }

  private:
    static constexpr std::size_t kLanes = kGroup / 2;
    typedef double Lanes __attribute__((vector_size(kLanes * sizeof(double))));

    Lanes low_{};
    Lanes high_{};
};

}  // namespace ssdplan
