// Prints the instruction set that this program's kernels were built for and a hash of what they compute. No vector of
// the hash's inputs has a NaN: a NaN's payload is the one thing that may differ.
#include <cinttypes>
#include <cstdio>
#include <cstring>
#include <vector>

#include "checksum.hpp"
#include "kernels.hpp"

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
        std::vector<std::uint16_t> narrow(elements), other(elements);
        for (const Dtype dtype : {Dtype::bf16, Dtype::fp16, Dtype::fp32}) {
            for (std::size_t i = 0; i < elements; ++i) {
                master[i] = any_finite();
                exp_avg[i] = any_finite() * 1e-20F;
                exp_avg_sq[i] = exp_avg[i] * exp_avg[i];
                gradient[i] = any_finite() * 1e-19F;
            }
            void* const parameter = dtype == Dtype::fp32 ? static_cast<void*>(wide.data()) : narrow.data();
            const GradientStatistics statistics = adamw_block(master.data(), exp_avg.data(), exp_avg_sq.data(),
                                                              gradient.data(), parameter, dtype, elements, scalars);
            add(master.data(), elements * 4);
            add(exp_avg.data(), elements * 4);
            add(exp_avg_sq.data(), elements * 4);
            add(parameter, elements * item_bytes(dtype));
            add(&statistics.sum_of_squares, sizeof statistics.sum_of_squares);
            add(&statistics.finite, 1);
        }
        for (const Dtype dtype : {Dtype::bf16, Dtype::fp16}) {
            convert(narrow.data(), dtype, gradient.data(), Dtype::fp32, elements);
            convert(wide.data(), Dtype::fp32, narrow.data(), dtype, elements);
            convert(other.data(), dtype == Dtype::bf16 ? Dtype::fp16 : Dtype::bf16, narrow.data(), dtype, elements);
            const bool finite = is_finite(other.data(), Dtype::fp16, elements);
            add(narrow.data(), elements * 2);
            add(wide.data(), elements * 4);
            add(other.data(), elements * 2);
            add(&finite, 1);
        }
    }
    std::vector<std::uint32_t> page(1 << 16);
    for (std::uint32_t& word : page) word = next_bits();
    for (std::size_t nbytes = 0; nbytes <= 4 * page.size(); nbytes += nbytes < 4096 ? kChecksumUnit : 50944) {
        const std::uint64_t sum = checksum_join(checksum_sum(page.data(), nbytes), checksum_sum(page.data(), 4096));
        const std::uint64_t finished = checksum_finish(sum, nbytes);
        add(&finished, sizeof finished);
    }
    std::printf("%s %016" PRIx64 "\n", SSDPLAN_ISA, hash);
    return 0;
}
