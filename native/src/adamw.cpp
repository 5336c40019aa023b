#include "adamw.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <type_traits>

#include "squares.hpp"
#include "streaming.hpp"

namespace ssdplan {
namespace {

constexpr std::size_t kGroup = kLine / sizeof(std::uint16_t);  // elements of one turn: a line of 16-bit items
// Bytes that are fetched ahead of their use: past the end of a page, where the processor's own fetching ends; and,
// where a block is summed before it is updated, the whole next one.
constexpr std::size_t kPrefetch = 4096;
constexpr std::size_t kPrefetchBlock = kBlock * sizeof(float);

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

// Fetches, ahead of its use, what a later turn takes of a stream.
template <typename Item>
SSDPLAN_INLINE void prefetch(Item* stream, std::size_t ahead) {
    Item* const turn = stream + ahead / sizeof(Item);
    for (std::size_t at = 0; at < kGroup; at += kLine / sizeof(Item)) {
        __builtin_prefetch(turn + at, std::is_const_v<Item> ? 0 : 1);
    }
}

// Where masters and parameters lie: `load` takes one element, `store` the first `lanes` of a turn.

// fp32 masters and a 16-bit copy, rounded to nearest even.
template <typename Format>
struct CopiedMaster {
    explicit CopiedMaster(const AdamwStreams& streams)
        : master(streams.master), parameter(static_cast<std::uint16_t*>(streams.parameter)) {}

    SSDPLAN_INLINE float load(std::size_t i) const { return master[i]; }
    SSDPLAN_INLINE void store(std::size_t i, const float* values, std::size_t lanes) const {
        std::uint16_t turn[kGroup];
#pragma omp simd
        for (std::size_t lane = 0; lane < kGroup; ++lane) turn[lane] = Format::store(values[lane]);
        std::memcpy(master + i, values, lanes * sizeof *values);
        if (lanes == kGroup) {
            // Past the caches: the transfer that follows an update reads them from memory in any case.
            stream_line(parameter + i, turn);
        } else {
            std::memcpy(parameter + i, turn, lanes * sizeof *turn);
        }
    }
    SSDPLAN_INLINE void prefetch_turn(std::size_t i, std::size_t ahead) const { prefetch(master + i, ahead); }

    float* master;
    std::uint16_t* parameter;
};

// fp32 masters and fp32 parameters, which may be one array.
struct PlainMaster {
    explicit PlainMaster(const AdamwStreams& streams)
        : master(streams.master), parameter(static_cast<float*>(streams.parameter)) {}

    SSDPLAN_INLINE float load(std::size_t i) const { return master[i]; }
    SSDPLAN_INLINE void store(std::size_t i, const float* values, std::size_t lanes) const {
        std::memcpy(master + i, values, lanes * sizeof *values);
        std::memcpy(parameter + i, values, lanes * sizeof *values);
    }
    SSDPLAN_INLINE void prefetch_turn(std::size_t i, std::size_t ahead) const {
        prefetch(master + i, ahead);
        prefetch(parameter + i, ahead);
    }

    float* master;
    float* parameter;
};

// Masters as bf16 copy and residual: the bits of the master are those of the copy, as fp32, plus the residual as a
// signed number. So that 16 bits suffice, the copy rounds ties upward in magnitude: to nearest even would leave 65537
// differences. A NaN stays one, without its payload.
struct SplitMaster {
    explicit SplitMaster(const AdamwStreams& streams)
        : parameter(static_cast<std::uint16_t*>(streams.parameter)), residual(streams.residual) {}

    SSDPLAN_INLINE float load(std::size_t i) const {
        const std::uint32_t low = residual[i];
        const std::uint32_t negative = (low & 0x8000U) << 1;  // the upper half was rounded up by one
        return float_of((std::uint32_t{parameter[i]} << 16) + low - negative);
    }
    SSDPLAN_INLINE void store(std::size_t i, const float* values, std::size_t lanes) const {
#pragma omp simd
        for (std::size_t lane = 0; lane < lanes; ++lane) {
            const std::uint32_t bits = bits_of(values[lane]);
            const bool nan = (bits & 0x7fffffffU) > 0x7f800000U;
            const std::uint32_t kept = nan ? (bits & 0xffff0000U) | 0x00400000U : bits;
            parameter[i + lane] = static_cast<std::uint16_t>((kept + 0x8000U) >> 16);
            residual[i + lane] = static_cast<std::uint16_t>(kept);
        }
    }
    SSDPLAN_INLINE void prefetch_turn(std::size_t i, std::size_t ahead) const {
        prefetch(parameter + i, ahead);
        prefetch(residual + i, ahead);
    }

    std::uint16_t* parameter;
    std::uint16_t* residual;
};

// No masters: the parameter is what is updated, and is rounded to nearest even when it is stored.
template <typename Format>
struct OwnMaster {
    explicit OwnMaster(const AdamwStreams& streams) : parameter(static_cast<std::uint16_t*>(streams.parameter)) {}

    SSDPLAN_INLINE float load(std::size_t i) const { return Format::load(parameter[i]); }
    SSDPLAN_INLINE void store(std::size_t i, const float* values, std::size_t lanes) const {
#pragma omp simd
        for (std::size_t lane = 0; lane < lanes; ++lane) parameter[i + lane] = Format::store(values[lane]);
    }
    SSDPLAN_INLINE void prefetch_turn(std::size_t i, std::size_t ahead) const { prefetch(parameter + i, ahead); }

    std::uint16_t* parameter;
};

// No array is said to be unaliased, for the parameter may be the master; an element depends on no other in any case.
template <typename Master, typename Moment>
SSDPLAN_INLINE bool adamw_body(const AdamwStreams& streams, std::size_t elements, const AdamwScalars& scalars,
                               double* squares, std::size_t ahead) {
    const AdamwScalars s = scalars;
    const Master master(streams);
    auto* const exp_avg = static_cast<typename Moment::Storage*>(streams.exp_avg);
    auto* const exp_avg_sq = static_cast<typename Moment::Storage*>(streams.exp_avg_sq);
    const float* const gradient = streams.gradient;
    std::uint32_t special[kGroup] = {};
    float values[kGroup] = {};
    Squares block;
    const auto update = [&](std::size_t i, std::size_t lane) __attribute__((always_inline)) {
        const float g = gradient[i] * s.gradient_scale;
        const Updated updated =
            adamw_element(master.load(i), Moment::load(exp_avg[i]), Moment::load(exp_avg_sq[i]), g, s);
        exp_avg[i] = Moment::store(updated.exp_avg);
        exp_avg_sq[i] = Moment::store(updated.exp_avg_sq);
        values[lane] = updated.master;
        special[lane] |= is_special(g);
    };
    std::size_t i = 0;
    for (; i + kGroup <= elements; i += kGroup) {
        master.prefetch_turn(i, ahead);
        prefetch(exp_avg + i, ahead);
        prefetch(exp_avg_sq + i, ahead);
        prefetch(gradient + i, ahead);
#pragma omp simd
        for (std::size_t lane = 0; lane < kGroup; ++lane) update(i + lane, lane);
        master.store(i, values, kGroup);
        if (squares == nullptr) continue;
        for (std::size_t group = 0; group < kGroup; group += Squares::kGroup) block.add(gradient + i + group);
        if ((i + kGroup) % kBlock == 0) {
            *squares++ = block.total(nullptr, 0);
            block = Squares{};
        }
    }
    const std::size_t rest = elements - i;
    for (std::size_t lane = 0; lane < rest; ++lane) update(i + lane, lane);
    master.store(i, values, rest);
    if (squares != nullptr && elements % kBlock != 0) {
        for (; i + Squares::kGroup <= elements; i += Squares::kGroup) block.add(gradient + i);
        *squares = block.total(gradient + i, elements - i);
    }
    stream_fence();
    std::uint32_t any_special = 0;
    for (const std::uint32_t lane : special) any_special |= lane;
    return any_special == 0;
}

// The same with moments in int8, block by block of those that share a scale.
template <typename Master>
SSDPLAN_INLINE bool adamw_scaled_body(const AdamwStreams& streams, std::size_t elements, const AdamwScalars& scalars,
                                      double* squares, std::size_t ahead) {
    const AdamwScalars s = scalars;
    const Master master(streams);
    auto* const exp_avg = static_cast<std::uint8_t*>(streams.exp_avg);
    auto* const exp_avg_sq = static_cast<std::uint8_t*>(streams.exp_avg_sq);
    std::uint32_t special[kScaled] = {};
    float values[kScaled];
    float firsts[kScaled];
    float seconds[kScaled];
    Squares sums;
    for (std::size_t i = 0; i < elements; i += kScaled) {
        const float* const gradient = streams.gradient + i;
        for (std::size_t turn = i; turn < i + kScaled; turn += kGroup) {
            master.prefetch_turn(turn, ahead);
            prefetch(streams.gradient + turn, ahead);
        }
        __builtin_prefetch(exp_avg + i + ahead, 1);
        __builtin_prefetch(exp_avg_sq + i + ahead, 1);
        load_scaled<true>(firsts, exp_avg + i, streams.exp_avg_scales[i / kScaled]);
        load_scaled<false>(seconds, exp_avg_sq + i, streams.exp_avg_sq_scales[i / kScaled]);
#pragma omp simd
        for (std::size_t lane = 0; lane < kScaled; ++lane) {
            const float g = gradient[lane] * s.gradient_scale;
            const Updated updated = adamw_element(master.load(i + lane), firsts[lane], seconds[lane], g, s);
            firsts[lane] = updated.exp_avg;
            seconds[lane] = updated.exp_avg_sq;
            values[lane] = updated.master;
            special[lane] |= is_special(g);
        }
        for (std::size_t turn = 0; turn < kScaled; turn += kGroup) master.store(i + turn, values + turn, kGroup);
        streams.exp_avg_scales[i / kScaled] = store_scaled<true>(exp_avg + i, firsts);
        streams.exp_avg_sq_scales[i / kScaled] = store_scaled<false>(exp_avg_sq + i, seconds);
        if (squares == nullptr) continue;
        for (std::size_t group = 0; group < kScaled; group += Squares::kGroup) sums.add(gradient + group);
        if ((i + kScaled) % kBlock == 0 || i + kScaled == elements) {
            *squares++ = sums.total(nullptr, 0);
            sums = Squares{};
        }
    }
    stream_fence();
    std::uint32_t any_special = 0;
    for (const std::uint32_t lane : special) any_special |= lane;
    return any_special == 0;
}

#define SSDPLAN_ADAMW_SCALED(name, Master)                                                                       \
    SSDPLAN_DISPATCHED bool name(const AdamwStreams& streams, std::size_t elements, const AdamwScalars& scalars, \
                                 double* squares, std::size_t ahead) {                                           \
        return adamw_scaled_body<Master>(streams, elements, scalars, squares, ahead);                            \
    }
SSDPLAN_ADAMW_SCALED(adamw_fp32_moments_int8, PlainMaster)
SSDPLAN_ADAMW_SCALED(adamw_bf16_moments_int8, CopiedMaster<Bf16>)
SSDPLAN_ADAMW_SCALED(adamw_fp16_moments_int8, CopiedMaster<Fp16>)
SSDPLAN_ADAMW_SCALED(adamw_split_moments_int8, SplitMaster)
SSDPLAN_ADAMW_SCALED(adamw_own_moments_int8, OwnMaster<Bf16>)
#undef SSDPLAN_ADAMW_SCALED

#define SSDPLAN_ADAMW(name, Master, Moment)                                                                      \
    SSDPLAN_DISPATCHED bool name(const AdamwStreams& streams, std::size_t elements, const AdamwScalars& scalars, \
                                 double* squares, std::size_t ahead) {                                           \
        return adamw_body<Master, Moment>(streams, elements, scalars, squares, ahead);                           \
    }
SSDPLAN_ADAMW(adamw_fp32, PlainMaster, Fp32)
SSDPLAN_ADAMW(adamw_bf16, CopiedMaster<Bf16>, Fp32)
SSDPLAN_ADAMW(adamw_fp16, CopiedMaster<Fp16>, Fp32)
SSDPLAN_ADAMW(adamw_split, SplitMaster, Fp32)
SSDPLAN_ADAMW(adamw_fp32_moments_bf16, PlainMaster, Bf16)
SSDPLAN_ADAMW(adamw_bf16_moments_bf16, CopiedMaster<Bf16>, Bf16)
SSDPLAN_ADAMW(adamw_fp16_moments_bf16, CopiedMaster<Fp16>, Bf16)
SSDPLAN_ADAMW(adamw_split_moments_bf16, SplitMaster, Bf16)
SSDPLAN_ADAMW(adamw_own, OwnMaster<Bf16>, Fp32)
SSDPLAN_ADAMW(adamw_own_moments_bf16, OwnMaster<Bf16>, Bf16)
#undef SSDPLAN_ADAMW

SSDPLAN_INLINE std::uint32_t mixed(std::uint32_t word, std::uint32_t gradient) {
    return word ^ gradient;
}
SSDPLAN_INLINE std::uint16_t mixed(std::uint16_t word, std::uint32_t gradient) {
    return static_cast<std::uint16_t>(word ^ (gradient >> 16));
}

template <typename Moment>
SSDPLAN_INLINE void stream_mix_body(const AdamwStreams& streams, std::size_t elements) {
    // Bits, as unsigned words of the stored width.
    auto* const master = reinterpret_cast<std::uint32_t*>(streams.master);
    auto* const parameter = static_cast<std::uint16_t*>(streams.parameter);
    auto* const exp_avg = static_cast<Moment*>(streams.exp_avg);
    auto* const exp_avg_sq = static_cast<Moment*>(streams.exp_avg_sq);
    const auto* const gradient = reinterpret_cast<const std::uint32_t*>(streams.gradient);
    std::uint16_t turn[kGroup];
    const auto mix = [&](std::size_t i, std::size_t lane) __attribute__((always_inline)) {
        const std::uint32_t g = gradient[i];
        const std::uint32_t p = master[i] ^ g;
        exp_avg[i] = mixed(exp_avg[i], g);
        exp_avg_sq[i] = mixed(exp_avg_sq[i], g);
        master[i] = p;
        turn[lane] = static_cast<std::uint16_t>(p >> 16);
    };
    std::size_t i = 0;
    for (; i + kGroup <= elements; i += kGroup) {
        prefetch(master + i, kPrefetch);
        prefetch(exp_avg + i, kPrefetch);
        prefetch(exp_avg_sq + i, kPrefetch);
        prefetch(gradient + i, kPrefetch);
#pragma omp simd
        for (std::size_t lane = 0; lane < kGroup; ++lane) mix(i + lane, lane);
        stream_line(parameter + i, turn);
    }
    for (std::size_t lane = 0; i + lane < elements; ++lane) {
        mix(i + lane, lane);
        parameter[i + lane] = turn[lane];
    }
    stream_fence();
}

SSDPLAN_DISPATCHED void stream_mix_fp32(const AdamwStreams& streams, std::size_t elements) {
    stream_mix_body<std::uint32_t>(streams, elements);
}

SSDPLAN_DISPATCHED void stream_mix_bf16(const AdamwStreams& streams, std::size_t elements) {
    stream_mix_body<std::uint16_t>(streams, elements);
}

template <typename T>
T* advanced(T* pointer, std::size_t elements, std::size_t item) {
    using Byte = std::conditional_t<std::is_const_v<T>, const std::byte, std::byte>;
    return pointer == nullptr ? nullptr : reinterpret_cast<T*>(reinterpret_cast<Byte*>(pointer) + elements * item);
}

using Update = bool (*)(const AdamwStreams&, std::size_t, const AdamwScalars&, double*, std::size_t);

// Of each format of moments.
using Updates = std::array<Update, 3>;
constexpr Updates kSplit{adamw_split, adamw_split_moments_bf16, adamw_split_moments_int8};
constexpr Updates kOwn{adamw_own, adamw_own_moments_bf16, adamw_own_moments_int8};
constexpr Updates kFp32{adamw_fp32, adamw_fp32_moments_bf16, adamw_fp32_moments_int8};
constexpr Updates kBf16{adamw_bf16, adamw_bf16_moments_bf16, adamw_bf16_moments_int8};
constexpr Updates kFp16{adamw_fp16, adamw_fp16_moments_bf16, adamw_fp16_moments_int8};

Update update_of(const AdamwStreams& streams) {
    const auto moments = static_cast<std::size_t>(streams.moments);
    if (streams.residual != nullptr) return kSplit[moments];
    if (streams.master == nullptr) return kOwn[moments];
    switch (streams.parameter_dtype) {
        case Dtype::bf16:
            return kBf16[moments];
        case Dtype::fp16:
            return kFp16[moments];
        case Dtype::fp32:
            break;
    }
    return kFp32[moments];
}

void add_states(ExtentSums (&sums)[3], const AdamwStreams& streams, std::size_t elements) {
    const std::size_t moment_bytes = elements * item_bytes(streams.moments);
    if (streams.master != nullptr) sums[0].add(streams.master, elements * sizeof *streams.master);
    if (streams.residual != nullptr) sums[0].add(streams.residual, elements * sizeof *streams.residual);
    sums[1].add(streams.exp_avg, moment_bytes);
    sums[2].add(streams.exp_avg_sq, moment_bytes);
}

}  // namespace

AdamwStreams AdamwStreams::from(std::size_t element) const {
    return {advanced(master, element, 4),
            advanced(residual, element, 2),
            advanced(exp_avg, element, item_bytes(moments)),
            advanced(exp_avg_sq, element, item_bytes(moments)),
            advanced(gradient, element, 4),
            advanced(parameter, element, item_bytes(parameter_dtype)),
            moments,
            parameter_dtype,
            advanced(exp_avg_scales, element / kScaled, 4),
            advanced(exp_avg_sq_scales, element / kScaled, 4)};
}

bool adamw(const AdamwStreams& streams, std::size_t elements, const AdamwScalars& scalars, double* squares,
           AdamwSums* sums) {
    const Update update = update_of(streams);
    if (sums == nullptr) return update(streams, elements, scalars, squares, kPrefetch);
    bool finite = true;
    for (std::size_t begin = 0; begin < elements; begin += kBlock) {
        const AdamwStreams block = streams.from(begin);
        const std::size_t count = std::min(kBlock, elements - begin);
        add_states(sums->before, block, count);
        finite = update(block, count, scalars, squares, kPrefetchBlock) && finite;
        add_states(sums->after, block, count);
        if (squares != nullptr) ++squares;
    }
    return finite;
}

void stream_mix(const AdamwStreams& streams, std::size_t elements) {
    (streams.moments == Moments::bf16 ? stream_mix_bf16 : stream_mix_fp32)(streams, elements);
}

}  // namespace ssdplan
