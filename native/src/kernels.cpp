#include "kernels.hpp"

#include <cfenv>
#include <cstring>

#include "squares.hpp"

// Built without contraction of a * b + c and without fast math (CMakeLists.txt), so that each operation is IEEE 754's
// own and vectors of any width give a scalar's bits.
namespace ssdplan {
namespace {

constexpr std::size_t kPrefetch = 4096;  // bytes ahead: past the end of a page, where the processor's own ends

SSDPLAN_DISPATCHED double squares_fp32(const float* gradient, std::size_t elements) {
    Squares squares;
    std::size_t i = 0;
    for (; i + Squares::kGroup <= elements; i += Squares::kGroup) {
        __builtin_prefetch(gradient + i + kPrefetch / sizeof(float));
        squares.add(gradient + i);
    }
    return squares.total(gradient + i, elements - i);
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
    constexpr std::size_t kTurn = 256 / sizeof(Word);
    Word special = 0;
    std::size_t i = 0;
    for (; i + kTurn <= elements; i += kTurn) {
        for (std::size_t line = 0; line < kTurn; line += 64 / sizeof(Word)) {
            __builtin_prefetch(data + i + line + kPrefetch / sizeof(Word));
        }
#pragma omp simd reduction(| : special)
        for (std::size_t at = 0; at < kTurn; ++at) {
            special |= static_cast<Word>((data[i + at] & exponent) == exponent ? 1 : 0);
        }
    }
    for (; i < elements; ++i) special |= static_cast<Word>((data[i] & exponent) == exponent ? 1 : 0);
    return special == 0;
}

SSDPLAN_DISPATCHED bool is_finite_32(const std::uint32_t* data, std::size_t elements) {
    return is_finite_body<std::uint32_t>(data, elements, 0x7f800000U);
}

SSDPLAN_DISPATCHED bool is_finite_16(const std::uint16_t* data, std::size_t elements, std::uint16_t exponent) {
    return is_finite_body<std::uint16_t>(data, elements, exponent);
}

}  // namespace

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

double sum_of_squares(const float* gradient, std::size_t elements) {
    return squares_fp32(gradient, elements);
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
