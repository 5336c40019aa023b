#include "kernels.hpp"

#include <cfenv>
#include <cmath>
#include <cstring>

#include "dispatch.hpp"

// Built without contraction of a * b + c and without fast math (CMakeLists.txt), so that each operation is IEEE 754's
// own and vectors of any width give a scalar's bits.
namespace ssdplan {
namespace {

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
        const std::uint32_t rounded = bits + 0x7fffU + ((bits >> 16) & 1U);
        const std::uint32_t quiet = bits | 0x00400000U;  // rounding could carry a NaN into infinity or zero
        const bool nan = (bits & 0x7fffffffU) > 0x7f800000U;
        return static_cast<std::uint16_t>((nan ? quiet : rounded) >> 16);
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

constexpr std::size_t kLanes = 8;
constexpr std::size_t kGroup = 2 * kLanes;
typedef double Lanes __attribute__((vector_size(kLanes * sizeof(double))));
constexpr std::size_t kPrefetch = 1024;  // elements ahead, past the end of a page, where the processor's own ends

struct Updated {
    float master;
    float exp_avg;
    float exp_avg_sq;
};

SSDPLAN_INLINE Updated adamw_element(float p, float m, float v, float g, const AdamwScalars& s) {
    m = m + (g - m) * s.one_minus_beta1;
    v = v * s.beta2 + (g * g) * s.one_minus_beta2;
    // Dividers are the narrowest unit of a core: the correction of the bias is a product.
    const float denominator = std::sqrt(v) * s.inverse_bias2_sqrt + s.eps;
    return {p * s.decay - (s.step_size * m) / denominator, m, v};
}

SSDPLAN_INLINE std::uint32_t is_special(float value) {
    return (bits_of(value) & 0x7f800000U) == 0x7f800000U ? 1U : 0U;
}

// Of a block's lanes, in their order.
SSDPLAN_INLINE GradientStatistics statistics_of(const std::uint32_t* special, const double* sums) {
    std::uint32_t any_special = 0;
    double total = 0.0;
    for (std::size_t lane = 0; lane < kGroup; ++lane) {
        any_special |= special[lane];
        total += sums[lane];
    }
    return {any_special == 0, total};
}

// Squares of fp32 values are exact in fp64. Sixteen sums a block, then one fixed order: the same on any vector width.
// `parameter` may be `master`, so neither is said to be unaliased; an element depends on no other in any case.
template <typename Format>
SSDPLAN_INLINE GradientStatistics adamw_body(float* master, float* exp_avg, float* exp_avg_sq, const float* gradient,
                                             typename Format::Storage* parameter, std::size_t elements,
                                             const AdamwScalars& scalars) {
    const AdamwScalars s = scalars;
    Lanes low{};
    Lanes high{};
    std::uint32_t special[kGroup] = {};
    std::size_t i = 0;
    for (; i + kGroup <= elements; i += kGroup) {
        __builtin_prefetch(master + i + kPrefetch, 1);
        __builtin_prefetch(exp_avg + i + kPrefetch, 1);
        __builtin_prefetch(exp_avg_sq + i + kPrefetch, 1);
        __builtin_prefetch(gradient + i + kPrefetch, 0);
        if (i % (2 * kGroup) == 0) __builtin_prefetch(parameter + i + kPrefetch, 1);
        float scaled[kGroup];
#pragma omp simd
        for (std::size_t lane = 0; lane < kGroup; ++lane) {
            const std::size_t at = i + lane;
            const float g = gradient[at] * s.gradient_scale;
            const Updated updated = adamw_element(master[at], exp_avg[at], exp_avg_sq[at], g, s);
            exp_avg[at] = updated.exp_avg;
            exp_avg_sq[at] = updated.exp_avg_sq;
            master[at] = updated.master;
            parameter[at] = Format::store(updated.master);
            scaled[lane] = g;
            special[lane] |= is_special(g);
        }
        Lanes a;
        Lanes b;
        for (std::size_t lane = 0; lane < kLanes; ++lane) {
            a[lane] = static_cast<double>(scaled[lane]);
            b[lane] = static_cast<double>(scaled[kLanes + lane]);
        }
        low += a * a;
        high += b * b;
    }
    double sums[kGroup];
    for (std::size_t lane = 0; lane < kLanes; ++lane) {
        sums[lane] = low[lane];
        sums[kLanes + lane] = high[lane];
    }
    for (std::size_t lane = 0; i < elements; ++i, ++lane) {
        const float g = gradient[i] * s.gradient_scale;
        const Updated updated = adamw_element(master[i], exp_avg[i], exp_avg_sq[i], g, s);
        exp_avg[i] = updated.exp_avg;
        exp_avg_sq[i] = updated.exp_avg_sq;
        master[i] = updated.master;
        parameter[i] = Format::store(updated.master);
        special[lane] |= is_special(g);
        sums[lane] += static_cast<double>(g) * static_cast<double>(g);
    }
    return statistics_of(special, sums);
}

#define SSDPLAN_ADAMW(name, Format)                                                                                \
    SSDPLAN_DISPATCHED GradientStatistics name(float* master, float* exp_avg, float* exp_avg_sq,                   \
                                               const float* gradient, void* parameter, std::size_t elements,       \
                                               const AdamwScalars& scalars) {                                      \
        return adamw_body<Format>(master, exp_avg, exp_avg_sq, gradient, static_cast<Format::Storage*>(parameter), \
                                  elements, scalars);                                                              \
    }
SSDPLAN_ADAMW(adamw_fp32, Fp32)
SSDPLAN_ADAMW(adamw_bf16, Bf16)
SSDPLAN_ADAMW(adamw_fp16, Fp16)
#undef SSDPLAN_ADAMW

SSDPLAN_DISPATCHED GradientStatistics statistics_fp32(const float* gradient, std::size_t elements) {
    Lanes low{};
    Lanes high{};
    std::uint32_t special[kGroup] = {};
    std::size_t i = 0;
    for (; i + kGroup <= elements; i += kGroup) {
        Lanes a;
        Lanes b;
        for (std::size_t lane = 0; lane < kLanes; ++lane) {
            a[lane] = static_cast<double>(gradient[i + lane]);
            b[lane] = static_cast<double>(gradient[i + kLanes + lane]);
        }
#pragma omp simd
        for (std::size_t lane = 0; lane < kGroup; ++lane) special[lane] |= is_special(gradient[i + lane]);
        low += a * a;
        high += b * b;
    }
    double sums[kGroup];
    for (std::size_t lane = 0; lane < kLanes; ++lane) {
        sums[lane] = low[lane];
        sums[kLanes + lane] = high[lane];
    }
    for (std::size_t lane = 0; i < elements; ++i, ++lane) {
        special[lane] |= is_special(gradient[i]);
        sums[lane] += static_cast<double>(gradient[i]) * static_cast<double>(gradient[i]);
    }
    return statistics_of(special, sums);
}

template <typename To, typename From>
SSDPLAN_INLINE void convert_body(typename To::Storage* __restrict destination,
                                 const typename From::Storage* __restrict source, std::size_t elements) {
#pragma omp simd
    for (std::size_t i = 0; i < elements; ++i) destination[i] = To::store(From::load(source[i]));
}

#define SSDPLAN_CONVERT(name, To, From)                                                                           \
    SSDPLAN_DISPATCHED void name(void* destination, const void* source, std::size_t elements) {                   \
        convert_body<To, From>(static_cast<To::Storage*>(destination), static_cast<const From::Storage*>(source), \
                               elements);                                                                         \
    }
SSDPLAN_CONVERT(fp32_from_bf16, Fp32, Bf16)
SSDPLAN_CONVERT(fp32_from_fp16, Fp32, Fp16)
SSDPLAN_CONVERT(bf16_from_fp32, Bf16, Fp32)
SSDPLAN_CONVERT(bf16_from_fp16, Bf16, Fp16)
SSDPLAN_CONVERT(fp16_from_fp32, Fp16, Fp32)
SSDPLAN_CONVERT(fp16_from_bf16, Fp16, Bf16)
#undef SSDPLAN_CONVERT

template <typename Word>
SSDPLAN_INLINE bool is_finite_body(const Word* data, std::size_t elements, Word exponent) {
    Word special = 0;
#pragma omp simd reduction(| : special)
    for (std::size_t i = 0; i < elements; ++i) {
        special |= static_cast<Word>((data[i] & exponent) == exponent ? 1 : 0);
    }
    return special == 0;
}

SSDPLAN_DISPATCHED bool is_finite_32(const std::uint32_t* data, std::size_t elements) {
    return is_finite_body<std::uint32_t>(data, elements, 0x7f800000U);
}

SSDPLAN_DISPATCHED bool is_finite_16(const std::uint16_t* data, std::size_t elements, std::uint16_t exponent) {
    return is_finite_body<std::uint16_t>(data, elements, exponent);
}

}  // namespace

GradientStatistics adamw_block(float* master, float* exp_avg, float* exp_avg_sq, const float* gradient, void* parameter,
                               Dtype parameter_dtype, std::size_t elements, const AdamwScalars& scalars) {
    switch (parameter_dtype) {
        case Dtype::bf16:
            return adamw_bf16(master, exp_avg, exp_avg_sq, gradient, parameter, elements, scalars);
        case Dtype::fp16:
            return adamw_fp16(master, exp_avg, exp_avg_sq, gradient, parameter, elements, scalars);
        case Dtype::fp32:
            break;
    }
    return adamw_fp32(master, exp_avg, exp_avg_sq, gradient, parameter, elements, scalars);
}

void convert(void* destination, Dtype destination_dtype, const void* source, Dtype source_dtype, std::size_t elements) {
    if (destination_dtype == source_dtype) {
        std::memcpy(destination, source, elements * item_bytes(source_dtype));
    } else if (destination_dtype == Dtype::fp32) {
        (source_dtype == Dtype::bf16 ? fp32_from_bf16 : fp32_from_fp16)(destination, source, elements);
    } else if (destination_dtype == Dtype::bf16) {
        (source_dtype == Dtype::fp32 ? bf16_from_fp32 : bf16_from_fp16)(destination, source, elements);
    } else {
        (source_dtype == Dtype::fp32 ? fp16_from_fp32 : fp16_from_bf16)(destination, source, elements);
    }
}

GradientStatistics statistics_block(const float* gradient, std::size_t elements) {
    return statistics_fp32(gradient, elements);
}

bool is_finite(const void* data, Dtype dtype, std::size_t elements) {
    if (dtype == Dtype::fp32) return is_finite_32(static_cast<const std::uint32_t*>(data), elements);
    return is_finite_16(static_cast<const std::uint16_t*>(data), elements, dtype == Dtype::bf16 ? 0x7f80 : 0x7c00);
}

const char* isa() {
#ifdef SSDPLAN_TARGET_CLONES
    if (__builtin_cpu_supports("x86-64-v4")) return "x86-64-v4";
    if (__builtin_cpu_supports("x86-64-v3")) return "x86-64-v3";
#endif
    return "baseline";
}

FloatEnvironment::FloatEnvironment() noexcept {
    static_assert(sizeof(std::fenv_t) <= sizeof saved_);
    (void)std::fegetenv(reinterpret_cast<std::fenv_t*>(saved_));
    (void)std::fesetenv(FE_DFL_ENV);
}

FloatEnvironment::~FloatEnvironment() {
    (void)std::fesetenv(reinterpret_cast<const std::fenv_t*>(saved_));
}

}  // namespace ssdplan
