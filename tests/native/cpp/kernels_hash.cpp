// Prints the instruction set that this program's kernels were built for and a hash of what they compute. No vector of
// the hash's inputs has a NaN: a NaN's payload is the one thing that may differ.
#include <cinttypes>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <vector>

#include "adamw.hpp"
#include "checksum.hpp"
#include "kernels.hpp"
#include "quantize.hpp"
#include "squares.hpp"
#include "zeroth_order.hpp"

using namespace ssdplan;

namespace {

std::uint64_t state = 88172645463325252U;

std::uint32_t next_bits() {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return static_cast<std::uint32_t>(state >> 16);
}

// Any finite fp32, subnormals among them.
float any_finite() {
    const std::uint32_t bits = next_bits();
    const std::uint32_t finite = (bits & 0x7f800000U) == 0x7f800000U ? bits & 0x807fffffU : bits;
    float value;
    std::memcpy(&value, &finite, sizeof value);
    return value;
}

std::uint64_t hash = 14695981039346656037U;

void add(const void* data, std::size_t nbytes) {
    const auto* const bytes = static_cast<const unsigned char*>(data);
    for (std::size_t i = 0; i < nbytes; ++i) hash = (hash ^ bytes[i]) * 1099511628211U;
}

bool supported() {
#if defined(__x86_64__)
    if (std::strcmp(SSDPLAN_ISA, "x86-64-v4") == 0) {
        return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
               __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq");
    }
    if (std::strcmp(SSDPLAN_ISA, "x86-64-v3") == 0) {
        return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2");
    }
#endif
    return true;
}

enum class Masters { fp32, residual, none };

struct Update {
    Dtype parameter_dtype;
    Moments moments;
    Masters masters;
};

constexpr Update kUpdates[] = {
    {Dtype::bf16, Moments::fp32, Masters::fp32},     {Dtype::fp16, Moments::fp32, Masters::fp32},
    {Dtype::fp32, Moments::fp32, Masters::fp32},     {Dtype::bf16, Moments::bf16, Masters::fp32},
    {Dtype::fp16, Moments::bf16, Masters::fp32},     {Dtype::fp32, Moments::bf16, Masters::fp32},
    {Dtype::bf16, Moments::fp32, Masters::residual}, {Dtype::bf16, Moments::bf16, Masters::residual},
    {Dtype::bf16, Moments::fp32, Masters::none},     {Dtype::bf16, Moments::bf16, Masters::none},
    {Dtype::bf16, Moments::int8, Masters::fp32},     {Dtype::bf16, Moments::int8, Masters::residual},
    {Dtype::bf16, Moments::int8, Masters::none},
};

}  // namespace

int main() {
    if (!supported()) {
        std::printf("%s skipped: this processor does not have it\n", SSDPLAN_ISA);
        return 0;
    }
    const AdamwScalars scalars{0.9999F, 0.1F, 0.999F, 0.001F, 31.6F, 1e-8F, 1e-2F, 0.75F};
    for (std::size_t elements = 1; elements <= kBlock; elements += elements < 70 ? 1 : 389) {
        std::vector<float> master(elements), exp_avg(elements), exp_avg_sq(elements), gradient(elements);
        std::vector<float> wide(elements);
        std::vector<std::uint16_t> narrow(elements), other(elements), first(elements), second(elements);
        std::vector<std::uint8_t> numbers(elements), numbers_sq(elements);
        std::vector<float> scales(elements / kScaled), scales_sq(elements / kScaled);
        for (const Update& update : kUpdates) {
            const bool scaled = update.moments == Moments::int8;
            if (scaled && elements % kScaled != 0) continue;
            for (std::size_t i = 0; i < elements; ++i) {
                master[i] = any_finite();
                exp_avg[i] = any_finite() * 1e-20F;
                exp_avg_sq[i] = exp_avg[i] * exp_avg[i];
                gradient[i] = any_finite() * 1e-19F;
                narrow[i] = static_cast<std::uint16_t>(next_bits());
                if ((narrow[i] & 0x7f80U) >= 0x7f00U) narrow[i] &= 0x80ffU;  // finite, with any residual
                other[i] = static_cast<std::uint16_t>(next_bits());
                first[i] = Bf16::store(exp_avg[i]);
                second[i] = Bf16::store(exp_avg_sq[i]);
                numbers[i] = static_cast<std::uint8_t>(next_bits());
                numbers_sq[i] = static_cast<std::uint8_t>(next_bits());
                if (scaled) gradient[i] *= 1e-2F;  // no square is infinite, which times 0 is a NaN
            }
            for (std::size_t i = 0; i < scales.size(); ++i) {
                scales[i] = std::abs(any_finite()) * 1e-20F;
                scales_sq[i] = scales[i] * scales[i];
            }
            const bool moments16 = update.moments == Moments::bf16;
            void* const parameter =
                update.parameter_dtype == Dtype::fp32 ? static_cast<void*>(wide.data()) : narrow.data();
            const auto moment = [&](auto& in_int8, auto& in_bf16, auto& in_fp32) -> void* {
                return scaled      ? static_cast<void*>(in_int8.data())
                       : moments16 ? static_cast<void*>(in_bf16.data())
                                   : in_fp32.data();
            };
            const AdamwStreams streams{update.masters == Masters::fp32 ? master.data() : nullptr,
                                       update.masters == Masters::residual ? other.data() : nullptr,
                                       moment(numbers, first, exp_avg),
                                       moment(numbers_sq, second, exp_avg_sq),
                                       gradient.data(),
                                       parameter,
                                       update.moments,
                                       update.parameter_dtype,
                                       scaled ? scales.data() : nullptr,
                                       scaled ? scales_sq.data() : nullptr};
            double fused = 0.0;
            const bool finite = adamw(streams, elements, scalars, &fused);
            const double squares = sum_of_squares(gradient.data(), elements);
            add(master.data(), elements * 4);
            add(streams.exp_avg, elements * item_bytes(update.moments));
            add(streams.exp_avg_sq, elements * item_bytes(update.moments));
            add(scales.data(), scales.size() * sizeof(float));
            add(scales_sq.data(), scales_sq.size() * sizeof(float));
            add(parameter, elements * item_bytes(update.parameter_dtype));
            add(other.data(), elements * 2);
            add(&finite, 1);
            add(&squares, sizeof squares);
            add(&fused, sizeof fused);
            if (update.masters != Masters::fp32 || scaled || update.parameter_dtype == Dtype::fp32) continue;
            stream_mix(streams, elements);
            add(master.data(), elements * 4);
            add(streams.exp_avg, elements * item_bytes(update.moments));
            add(streams.exp_avg_sq, elements * item_bytes(update.moments));
            add(parameter, elements * 2);
        }
        for (const Dtype dtype : {Dtype::bf16, Dtype::fp16}) {
            convert(narrow.data(), dtype, gradient.data(), Dtype::fp32, elements);
            convert(wide.data(), Dtype::fp32, narrow.data(), dtype, elements);
            convert(other.data(), dtype == Dtype::bf16 ? Dtype::fp16 : Dtype::bf16, narrow.data(), dtype, elements);
            const bool finite = is_finite(other.data(), Dtype::fp16, elements);
            for (const bool begin : {true, false}) {
                accumulate(master.data(), narrow.data(), dtype, elements, begin);
                accumulate(exp_avg.data(), gradient.data(), Dtype::fp32, elements, begin);
            }
            add(master.data(), elements * 4);
            add(exp_avg.data(), elements * 4);
            add(narrow.data(), elements * 2);
            add(wide.data(), elements * 4);
            add(other.data(), elements * 2);
            add(&finite, 1);
        }
    }
    for (std::size_t elements = 1; elements <= 9000; elements += elements < 300 ? 7 : 1511) {
        std::vector<float> source(elements), wide(elements), scales(elements / 32 + 1), plus(elements), minus(elements);
        std::vector<std::uint16_t> narrow(elements), above(elements), below(elements);
        std::vector<std::int8_t> values(elements);
        for (std::size_t i = 0; i < elements; ++i) {
            source[i] = any_finite();
            narrow[i] = Bf16::store(source[i] * 0.5F);
        }
        for (std::size_t group = kLeastQuantizedGroup; group <= kMostQuantizedGroup; group *= 2) {
            for (const Dtype dtype : {Dtype::fp32, Dtype::bf16, Dtype::fp16}) {
                void* const data = dtype == Dtype::fp32 ? static_cast<void*>(source.data()) : narrow.data();
                void* const back = dtype == Dtype::fp32 ? static_cast<void*>(wide.data()) : above.data();
                const bool finite = quantize(values.data(), scales.data(), data, dtype, elements, group);
                dequantize(back, dtype, values.data(), scales.data(), elements, group);
                add(&finite, 1);
                add(values.data(), elements);
                add(scales.data(), (elements + group - 1) / group * sizeof(float));
                add(back, elements * item_bytes(dtype));
            }
        }
        const ZerothOrderUpdate pending[] = {{{7, 0}, 1e-3F, 1.0F}, {{7, 5}, -2e-3F, 0.75F}};
        const ZerothOrderPass pass{elements, 3, pending, 2, {8, 1}, 1e-2F};
        for (float& value : source) value = Bf16::load(static_cast<std::uint16_t>(next_bits() & 0xbfffU));
        zeroth_order({source.data(), Dtype::fp32, plus.data(), minus.data(), Dtype::fp32, 13 * elements, elements},
                     pass);
        const std::uint64_t far = (1ULL << 40) + 13 * elements;
        zeroth_order({narrow.data(), Dtype::bf16, above.data(), below.data(), Dtype::bf16, far, elements}, pass);
        for (const std::vector<float>* array : {&source, &plus, &minus}) add(array->data(), elements * 4);
        for (const std::vector<std::uint16_t>* array : {&narrow, &above, &below}) add(array->data(), elements * 2);
    }
    std::vector<std::uint32_t> page(1 << 16);
    for (std::uint32_t& word : page) word = next_bits();
    for (std::size_t nbytes = 0; nbytes <= 4 * page.size(); nbytes += nbytes < 4096 ? kChecksumUnit : 50944) {
        const std::uint64_t sum =
            checksum_carry(checksum_sum(page.data(), nbytes), 4096) ^ checksum_sum(page.data(), 4096);
        const std::uint64_t finished = checksum_finish(sum, nbytes);
        add(&finished, sizeof finished);
    }
    std::printf("%s %016" PRIx64 "\n", SSDPLAN_ISA, hash);
    return 0;
}
