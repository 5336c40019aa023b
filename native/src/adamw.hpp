// AdamW's arithmetic on plain pointers and in one thread: an element's result depends on that element alone, in the
// same bits on every instruction set and in every range.
#pragma once

#include <cstddef>
#include <cstdint>

#include "checksum.hpp"
#include "formats.hpp"

namespace ssdplan {

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
    float* master;            // fp32; null where `residual` is given
    std::uint16_t* residual;  // the exact master's difference from the bf16 parameter, in units of its last place
    void* exp_avg;
    void* exp_avg_sq;
    const float* gradient;
    void* parameter;
    Dtype moment_dtype;     // fp32 or bf16
    Dtype parameter_dtype;  // bf16 with a residual

    AdamwStreams from(std::size_t element) const;  // the same streams, beginning at an element
};

// What a store needs to know of masters, exp_avg and exp_avg_sq, in this order: the sums of their bytes as they were
// before an update, and as it leaves them.
struct AdamwSums {
    ExtentSums before[3];
    ExtentSums after[3];
};

// Returns whether every scaled gradient is finite. `squares` is null, or receives the sum of squares of each block of
// the gradient, unscaled, taken while the pass has it at hand: sum_of_squares() of kBlock elements, or of the last
// ones. `sums` is null, or takes the bytes of the states, block after block, while these are in a cache: masters must
// be there, and a stream's bytes a multiple of kChecksumUnit.
bool adamw(const AdamwStreams& streams, std::size_t elements, const AdamwScalars& scalars, double* squares = nullptr,
           AdamwSums* sums = nullptr);

// Loads and stores what adamw does of streams with fp32 masters and a 2-byte parameter, and hardly computes: m ^= g,
// v ^= g, p ^= g and the parameter is p's upper half, all on bits. How fast this runs bounds any such update.
void stream_mix(const AdamwStreams& streams, std::size_t elements);

}  // namespace ssdplan
