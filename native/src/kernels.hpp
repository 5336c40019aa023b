// The arithmetic of conversions and of the statistics of gradients, on plain pointers and in one thread. Nothing here
// is shared, allocated or thrown, and an element's result depends on that element alone: the same bits on every
// instruction set and in every range.
#pragma once

#include <cstddef>
#include <cstdint>

#include "formats.hpp"

namespace ssdplan {

// Of at most kBlock elements (squares.hpp); finite where all of them are.
double sum_of_squares(const float* gradient, std::size_t elements);

// target += source, in fp32; or, to begin with, target = 0 + source: a zero has the sign that it has where zeros were
// added to.
void accumulate(float* target, const void* source, Dtype source_dtype, std::size_t elements, bool begin);

void convert(void* destination, Dtype destination_dtype, const void* source, Dtype source_dtype, std::size_t elements);

bool is_finite(const void* data, Dtype dtype, std::size_t elements);

// The instruction set that this processor runs the above with: "x86-64-v4", "x86-64-v3" or "baseline".
const char* isa();

// The default floating-point environment for as long as it lives: round to nearest, subnormals kept. A library built
// with fast math, or torch.set_flush_denormal, may have changed the thread's.
class FloatEnvironment {
  public:
    FloatEnvironment() noexcept;
    ~FloatEnvironment();
    FloatEnvironment(const FloatEnvironment&) = delete;
    FloatEnvironment& operator=(const FloatEnvironment&) = delete;

  private:
    alignas(16) unsigned char saved_[64];
};

}  // namespace ssdplan
