// The arithmetic of the CPU kernels, on plain pointers and in one thread. Nothing here is shared, allocated or thrown,
// and an element's result depends on that element alone: the same bits on every instruction set and in every range.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ssdplan {

enum class Dtype { fp32, bf16, fp16 };

constexpr std::size_t item_bytes(Dtype dtype) {
    return dtype == Dtype::fp32 ? 4 : 2;
}

// Sums are taken over blocks of this many elements, then over the blocks in order.
constexpr std::size_t kBlock = 2048;

// AdamW's scalars, each computed in float64 and rounded once.
struct AdamwScalars {
    float decay;               // 1 - lr * weight_decay
    float one_minus_beta1;     // 1 - beta1
    float beta2;               // beta2
    float one_minus_beta2;     // 1 - beta2
    float inverse_bias2_sqrt;  // 1 / sqrt(1 - beta2^step)
    float eps;                 // eps
    float step_size;           // lr / (1 - beta1^step)
    float gradient_scale;      // multiplies each gradient first
};

struct GradientStatistics {
    bool finite;
    double sum_of_squares;
};

// At most kBlock elements.
GradientStatistics adamw_block(float* master, float* exp_avg, float* exp_avg_sq, const float* gradient, void* parameter,
                               Dtype parameter_dtype, std::size_t elements, const AdamwScalars& scalars);

// At most kBlock elements; what adamw_block finds of them at a gradient_scale of 1, in the same bits.
GradientStatistics statistics_block(const float* gradient, std::size_t elements);

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
