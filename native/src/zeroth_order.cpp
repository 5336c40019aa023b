#include "zeroth_order.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace ssdplan {
namespace {

constexpr std::size_t kLanes = 16;

struct Words {
    std::uint32_t word[4][kLanes];
};

SSDPLAN_INLINE void philox(Words& words, std::uint64_t seed) {
    std::uint32_t key0 = static_cast<std::uint32_t>(seed);
    std::uint32_t key1 = static_cast<std::uint32_t>(seed >> 32);
    for (int round = 0; round < 10; ++round) {
#pragma omp simd
        for (std::size_t lane = 0; lane < kLanes; ++lane) {
            const std::uint64_t first = std::uint64_t{0xD2511F53U} * words.word[0][lane];
            const std::uint64_t second = std::uint64_t{0xCD9E8D57U} * words.word[2][lane];
            words.word[0][lane] = static_cast<std::uint32_t>(second >> 32) ^ words.word[1][lane] ^ key0;
            words.word[1][lane] = static_cast<std::uint32_t>(second);
            words.word[2][lane] = static_cast<std::uint32_t>(first >> 32) ^ words.word[3][lane] ^ key1;
            words.word[3][lane] = static_cast<std::uint32_t>(first);
        }
        key0 += 0x9E3779B9U;
        key1 += 0xBB67AE85U;
    }
}

// The natural logarithm of a normal number in (0, 1], by the polynomial of the Cephes library (S. Moshier, 1989).
SSDPLAN_INLINE float logarithm(float u) {
    // u = 2^exponent * mantissa, the mantissa from sqrt(1/2) to sqrt(2).
    const std::uint32_t bits = bits_of(u);
    const std::uint32_t offset = bits - 0x3f3504f3U;
    const auto exponent = static_cast<float>(static_cast<std::int32_t>(offset) >> 23);
    const float x = float_of((offset & 0x007fffffU) + 0x3f3504f3U) - 1.0F;
    const float square = x * x;
    float y = 7.0376836292e-2F;
    y = y * x - 1.1514610310e-1F;
    y = y * x + 1.1676998740e-1F;
    y = y * x - 1.2420140846e-1F;
    y = y * x + 1.4249322787e-1F;
    y = y * x - 1.6668057665e-1F;
    y = y * x + 2.0000714765e-1F;
    y = y * x - 2.4999993993e-1F;
    y = y * x + 3.3333331174e-1F;
    y = (y * x) * square;
    y = y - 2.12194440e-4F * exponent;  // ln 2 in two parts
    y = y - 0.5F * square;
    return (x + y) + 0.693359375F * exponent;
}

SSDPLAN_INLINE void box_muller(std::uint32_t a, std::uint32_t b, float& first, float& second) {
    const float u = (static_cast<float>(static_cast<std::int32_t>(a >> 1)) + 0.5F) * 0x1p-31F;
    const float r = std::sqrt(-2.0F * logarithm(u));
    // The nearest quarter of a turn, and the angle from it, in (-pi/4, pi/4], by Cephes' polynomials.
    const std::uint32_t quarter = (b + 0x20000000U) >> 30;
    const float x = static_cast<float>(static_cast<std::int32_t>(b - (quarter << 30))) * 1.4629180793e-9F;  // pi 2^-31
    const float square = x * x;
    float sine = -1.9515295891e-4F;
    sine = sine * square + 8.3321608736e-3F;
    sine = sine * square - 1.6666654611e-1F;
    sine = (sine * square) * x + x;
    float cosine = 2.443315711809948e-5F;
    cosine = cosine * square - 1.388731625493765e-3F;
    cosine = cosine * square + 4.166664568298827e-2F;
    cosine = (cosine * square) * square - 0.5F * square + 1.0F;
    const bool swapped = (quarter & 1U) != 0;
    const std::uint32_t sine_sign = (quarter & 2U) << 30;
    const std::uint32_t cosine_sign = ((quarter + 1U) & 2U) << 30;
    first = r * float_of(bits_of(swapped ? sine : cosine) ^ cosine_sign);
    second = r * float_of(bits_of(swapped ? cosine : sine) ^ sine_sign);
}

SSDPLAN_INLINE void normals_of_group(const ZerothOrderPass& pass, const RandomDirection& direction, std::uint64_t group,
                                     float* out) {
    static_assert(kNormalGroup == 4 * kLanes);
    Words words;
    const std::uint64_t counter = group * kLanes;  // a multiple of 16: adding a lane carries into nothing
    for (std::size_t lane = 0; lane < kLanes; ++lane) {
        words.word[0][lane] = static_cast<std::uint32_t>(counter) + static_cast<std::uint32_t>(lane);
        words.word[1][lane] = static_cast<std::uint32_t>(counter >> 32) | (direction.direction << 16);
        words.word[2][lane] = pass.tensor;
        words.word[3][lane] = direction.step;
    }
    philox(words, pass.seed);
    for (std::size_t pair = 0; pair < 2; ++pair) {
        const std::uint32_t* const a = words.word[2 * pair];
        const std::uint32_t* const b = words.word[2 * pair + 1];
        float* const first = out + 2 * pair * kLanes;
        float* const second = first + kLanes;
#pragma omp simd
        for (std::size_t lane = 0; lane < kLanes; ++lane) box_muller(a[lane], b[lane], first[lane], second[lane]);
    }
}

// Part of a group: elements `begin` to `end` of it, which lie at the arrays' start.
template <typename Master, typename Format>
SSDPLAN_INLINE void group_pass(typename Master::Storage* __restrict parameters,
                               typename Format::Storage* __restrict plus, typename Format::Storage* __restrict minus,
                               std::uint64_t group, std::size_t begin, std::size_t end, const ZerothOrderPass& pass) {
    const std::size_t count = end - begin;
    alignas(64) float z[kNormalGroup];
    alignas(64) typename Master::Storage p[kNormalGroup] = {};
    std::memcpy(p + begin, parameters, count * sizeof p[0]);
    for (std::size_t number = 0; number < pass.updates; ++number) {
        const ZerothOrderUpdate& update = pass.pending[number];
        normals_of_group(pass, update.direction, group, z);
#pragma omp simd
        for (std::size_t i = 0; i < kNormalGroup; ++i) {
            p[i] = Master::store(update.keep * Master::load(p[i]) - update.scale * z[i]);
        }
    }
    if (pass.updates != 0) std::memcpy(parameters, p + begin, count * sizeof p[0]);
    if (plus == nullptr && minus == nullptr) return;
    alignas(64) typename Format::Storage above[kNormalGroup];
    alignas(64) typename Format::Storage below[kNormalGroup];
    normals_of_group(pass, pass.next, group, z);
#pragma omp simd
    for (std::size_t i = 0; i < kNormalGroup; ++i) {
        const float value = Format::load(Format::store(Master::load(p[i])));
        const float difference = pass.eps * z[i];
        above[i] = Format::store(value + difference);
        below[i] = Format::store(value - difference);
    }
    if (plus != nullptr) std::memcpy(plus, above + begin, count * sizeof above[0]);
    if (minus != nullptr) std::memcpy(minus, below + begin, count * sizeof below[0]);
}

template <typename Master, typename Format>
SSDPLAN_INLINE void zeroth_order_body(const ZerothOrderPlaces& places, const ZerothOrderPass& pass) {
    auto* const at = static_cast<typename Master::Storage*>(places.parameters);
    auto* const above = static_cast<typename Format::Storage*>(places.plus);
    auto* const below = static_cast<typename Format::Storage*>(places.minus);
    for (std::size_t i = 0; i < places.elements;) {
        const std::uint64_t element = places.first + i;
        const std::size_t begin = element % kNormalGroup;
        const std::size_t count = std::min(places.elements - i, kNormalGroup - begin);
        group_pass<Master, Format>(at + i, above == nullptr ? nullptr : above + i,
                                   below == nullptr ? nullptr : below + i, element / kNormalGroup, begin, begin + count,
                                   pass);
        i += count;
    }
}

#define SSDPLAN_ZEROTH_ORDER(suffix, Master, Format)                                                              \
    SSDPLAN_DISPATCHED void zeroth_order_##suffix(const ZerothOrderPlaces& places, const ZerothOrderPass& pass) { \
        zeroth_order_body<Master, Format>(places, pass);                                                          \
    }
SSDPLAN_ZEROTH_ORDER(fp32, Fp32, Fp32)
SSDPLAN_ZEROTH_ORDER(bf16, Bf16, Bf16)
SSDPLAN_ZEROTH_ORDER(fp16, Fp16, Fp16)
SSDPLAN_ZEROTH_ORDER(fp32_to_bf16, Fp32, Bf16)
SSDPLAN_ZEROTH_ORDER(fp32_to_fp16, Fp32, Fp16)
#undef SSDPLAN_ZEROTH_ORDER

}  // namespace

void zeroth_order(const ZerothOrderPlaces& places, const ZerothOrderPass& pass) {
    const bool masters = places.parameters_dtype == Dtype::fp32;
    switch (places.dtype) {
        case Dtype::bf16:
            return (masters ? zeroth_order_fp32_to_bf16 : zeroth_order_bf16)(places, pass);
        case Dtype::fp16:
            return (masters ? zeroth_order_fp32_to_fp16 : zeroth_order_fp16)(places, pass);
        case Dtype::fp32:
            break;
    }
    zeroth_order_fp32(places, pass);
}

}  // namespace ssdplan
