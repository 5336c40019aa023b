#include "kernels.hpp"

#include <cfenv>
#include <cstring>
#include <type_traits>

#include "squares.hpp"
#include "streaming.hpp"

// Built without contraction of a * b + c and without fast math (CMakeLists.txt), so that each operation is IEEE 754's
// own and vectors of any width give a scalar's bits.
namespace ssdplan {
namespace {

constexpr std::size_t kPrefetch = 1024;  // bytes ahead: of 512 to 4096 the best for what is in no cache

// Fetches, ahead of its use, what a later turn takes of a stream.
template <std::size_t elements, typename Item>
SSDPLAN_INLINE void prefetch(Item* stream) {
    Item* const turn = stream + kPrefetch / sizeof(Item);
    for (std::size_t at = 0; at < elements; at += kLine / sizeof(Item)) {
        __builtin_prefetch(turn + at, std::is_const_v<Item> ? 0 : 1);
    }
}

SSDPLAN_DISPATCHED double squares_fp32(const float* gradient, std::size_t elements) {
    Squares squares;
    std::size_t i = 0;
    for (; i + Squares::kGroup <= elements; i += Squares::kGroup) {
        __builtin_prefetch(gradient + i + kPrefetch / sizeof(float));
        squares.add(gradient + i);
    }
    return squares.total(gradient + i, elements - i);
}

template <typename From>
SSDPLAN_INLINE void add_to(float* __restrict target, const typename From::Storage* __restrict source,
                           std::size_t elements) {
    constexpr std::size_t kTurn = 64;
    std::size_t i = 0;
    for (; i + kTurn <= elements; i += kTurn) {
        prefetch<kTurn>(source + i);
        prefetch<kTurn>(target + i);
#pragma omp simd
        for (std::size_t at = i; at < i + kTurn; ++at) target[at] += From::load(source[at]);
    }
#pragma omp simd
    for (std::size_t at = i; at < elements; ++at) target[at] += From::load(source[at]);
}

// Past the caches: so much else is computed until the next micro-batch adds to it.
template <typename From>
SSDPLAN_INLINE void begin_at(float* target, const typename From::Storage* source, std::size_t elements) {
    constexpr std::size_t kTurn = kLine / sizeof(float);
    const std::size_t before = (kLine - reinterpret_cast<std::uintptr_t>(target) % kLine) % kLine / sizeof(float);
    std::size_t i = 0;
    for (; i < elements && i < before; ++i) target[i] = 0.0F + From::load(source[i]);
    for (; i + kTurn <= elements; i += kTurn) {
        prefetch<kTurn>(source + i);
        float turn[kTurn];
#pragma omp simd
        for (std::size_t at = 0; at < kTurn; ++at) turn[at] = 0.0F + From::load(source[i + at]);
        stream_line(target + i, turn);
    }
    for (; i < elements; ++i) target[i] = 0.0F + From::load(source[i]);
    stream_fence();
}

#define SSDPLAN_ACCUMULATE(name, From)                                                                  \
    SSDPLAN_DISPATCHED void name(float* target, const void* source, std::size_t elements, bool begin) { \
        const auto* const items = static_cast<const From::Storage*>(source);                            \
        begin ? begin_at<From>(target, items, elements) : add_to<From>(target, items, elements);        \
    }
SSDPLAN_ACCUMULATE(accumulate_fp32, Fp32)
SSDPLAN_ACCUMULATE(accumulate_bf16, Bf16)
SSDPLAN_ACCUMULATE(accumulate_fp16, Fp16)
#undef SSDPLAN_ACCUMULATE

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

void accumulate(float* target, const void* source, Dtype source_dtype, std::size_t elements, bool begin) {
    switch (source_dtype) {
        case Dtype::fp32:
            return accumulate_fp32(target, source, elements, begin);
        case Dtype::bf16:
            return accumulate_bf16(target, source, elements, begin);
        case Dtype::fp16:
            return accumulate_fp16(target, source, elements, begin);
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
