// AdamW's arithmetic on plain pointers and in one thread: an element's result depends on that element alone, in the
// same bits on every instruction set and in every range.
#pragma once

#include <cstddef>
#include <cstdint>

#include "checksum.hpp"
#include "eight_bits.hpp"
#include "formats.hpp"

namespace ssdplan {

// The format of both moments.
enum class Moments { fp32, bf16, int8 };

constexpr std::size_t item_bytes(Moments moments) {
    return moments == Moments::fp32 ? 4 : moments == Moments::bf16 ? 2 : 1;
}

// Each computed in float64 and rounded once.
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

// The arrays of one update, or one range of them.
struct AdamwStreams {
    float* master;            // fp32; null where `residual` is given, and where the parameter is the master
    std::uint16_t* residual;  // the exact master's difference from the bf16 parameter, in units of its last place
    void* exp_avg;
    void* exp_avg_sq;
    const float* gradient;
    void* parameter;
    Moments moments;
    Dtype parameter_dtype;  // bf16 without a master

    float* exp_avg_scales;  // with moments in int8, of each block of kScaled elements; else null
    float* exp_avg_sq_scales;

    AdamwStreams from(std::size_t element) const;  // the same streams, beginning at an element
};

// What a store needs to know of masters or their residuals, if there are any, exp_avg and exp_avg_sq, in this order:
// the sums of their bytes as they were before an update, and as it leaves them. Scales are not among them.
struct AdamwSums {
    ExtentSums before[3];
    ExtentSums after[3];
};

// Returns whether every scaled gradient is finite. `squares` is null, or receives the sum of squares of each block of
// the gradient, unscaled, taken while the pass has it at hand: sum_of_squares() of kBlock elements, or of the last
// ones. `sums` is null, or takes the bytes of the states, block after block, while these are in a cache: a stream's
// bytes are a multiple of kChecksumUnit. With moments in int8, elements are a multiple of kScaled.
bool adamw(const AdamwStreams& streams, std::size_t elements, const AdamwScalars& scalars, double* squares = nullptr,
           AdamwSums* sums = nullptr);

// Loads and stores what adamw does of streams with fp32 masters and a 2-byte parameter, and hardly computes: m ^= g,
// v ^= g, p ^= g and the parameter is p's upper half, all on bits. How fast this runs bounds any such update.
void stream_mix(const AdamwStreams& streams, std::size_t elements);

}  // namespace ssdplan
