// The kernels over whole ranges: any number of threads, and several callers at once, give the same bits.
#include <array>
#include <cmath>
#include <cstring>
#include <iterator>
#include <limits>
#include <random>
#include <stdexcept>
#include <thread>
#include <vector>

#include "check.hpp"
#include "parallel.hpp"

using namespace ssdplan;

namespace {

template <typename T>
std::uintptr_t address(std::vector<T>& values) {
    return reinterpret_cast<std::uintptr_t>(values.data());
}

constexpr AdamwSettings kSettings{1e-3, 0.9, 0.999, 1e-8, 0.1, 3, 0.5};

struct State {
    explicit State(std::size_t elements)
        : master(elements), exp_avg(elements), exp_avg_sq(elements), gradient(elements), parameter(elements) {
        std::mt19937 random(1);
        std::normal_distribution<float> normal;
        for (std::size_t i = 0; i < elements; ++i) {
            master[i] = normal(random);
            exp_avg[i] = normal(random);
            exp_avg_sq[i] = std::abs(normal(random));
            gradient[i] = normal(random);
        }
    }

    AdamwArrays arrays() {
        return {static_cast<std::int64_t>(master.size()),
                address(master),
                0,
                address(exp_avg),
                address(exp_avg_sq),
                Moments::fp32,
                address(gradient),
                address(parameter),
                Dtype::bf16,
                0,
                0};
    }

    bool update(std::int64_t threads) { return parallel_adamw(arrays(), kSettings, threads); }

    GradientStatistics update_statistics(std::int64_t threads) {
        return parallel_adamw_statistics(arrays(), kSettings, threads);
    }

    GradientStatistics statistics(std::int64_t threads) {
        std::vector<float> copied(gradient.size());
        const auto elements = static_cast<std::int64_t>(gradient.size());
        const GradientStatistics statistics =
            parallel_copy_statistics(address(copied), address(gradient), elements, threads);
        CHECK(std::memcmp(copied.data(), gradient.data(), copied.size() * sizeof(float)) == 0);
        CHECK(parallel_statistics(address(gradient), elements, threads).sum_of_squares.bytes() ==
              statistics.sum_of_squares.bytes());
        return statistics;
    }

    std::vector<float> master, exp_avg, exp_avg_sq, gradient;
    std::vector<std::uint16_t> parameter;
};

// Bytes of moments in int8, with residuals or without any master.
struct Scaled {
    Scaled(std::size_t elements, bool residuals)
        : residual(residuals ? elements : 0),
          parameter(elements, 0x3f80),
          exp_avg(elements),
          exp_avg_sq(elements),
          scales(elements / 64),
          scales_sq(elements / 64),
          gradient(State(elements).gradient) {}

    bool update(std::int64_t threads) {
        const AdamwArrays arrays{static_cast<std::int64_t>(parameter.size()),
                                 0,
                                 residual.empty() ? 0 : address(residual),
                                 address(exp_avg),
                                 address(exp_avg_sq),
                                 Moments::int8,
                                 address(gradient),
                                 address(parameter),
                                 Dtype::bf16,
                                 address(scales),
                                 address(scales_sq)};
        return parallel_adamw(arrays, kSettings, threads);
    }

    std::vector<std::uint16_t> residual, parameter;
    std::vector<std::uint8_t> exp_avg, exp_avg_sq;
    std::vector<float> scales, scales_sq, gradient;
};

bool same(const std::vector<float>& a, const std::vector<float>& b) {
    return std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

// Exact sums are integers: here of values that float64 adds in no order without rounding.
void sums_are_exact() {
    const double values[] = {1.0, 0x1p-1074, 0x1p1023, 0x1.fffffffffffffp+1023, 0x1.23456789abcdep-30, 0x1p-1022, 0.0};
    ExactSum forward, backward, part;
    for (const double value : values) forward.add(value);
    for (std::size_t i = std::size(values); i-- > 0;) (i % 2 == 0 ? backward : part).add(values[i]);
    backward.add(part);
    CHECK(forward.bytes() == backward.bytes());
    ExactSum one;
    one.add(1.0);
    std::array<unsigned char, ExactSum::kBytes> unit{};
    unit[1074 / 8] = 1U << (1074 % 8);
    CHECK(one.bytes() == unit);
    for (int i = 0; i < 1074; ++i) {  // doubled to 2^1074 units, times 2^1074
        const ExactSum half = one;
        one.add(half);
    }
    unit = {};
    unit[2148 / 8] = 1U << (2148 % 8);
    CHECK(one.bytes() == unit);
}

}  // namespace

int main() {
    sums_are_exact();
    for (const std::size_t elements : {64, 2048, 131072 + 64}) {
        for (const bool residuals : {false, true}) {
            Scaled alone(elements, residuals);
            Scaled shared(elements, residuals);
            for (int step = 0; step < 2; ++step) CHECK(alone.update(1) && shared.update(3));
            CHECK(alone.residual == shared.residual && alone.parameter == shared.parameter);
            CHECK(alone.exp_avg == shared.exp_avg && alone.exp_avg_sq == shared.exp_avg_sq);
            CHECK(same(alone.scales, shared.scales) && same(alone.scales_sq, shared.scales_sq));
            CHECK(alone.exp_avg != std::vector<std::uint8_t>(elements));
        }
    }
    for (const std::size_t elements : {1, 7, 2048, 2049, 65536, 300001}) {
        State alone(elements);
        CHECK(alone.update(1));
        const GradientStatistics expected = alone.statistics(1);
        CHECK(expected.finite);
        std::vector<std::thread> callers;
        for (int caller = 0; caller < 3; ++caller) {
            callers.emplace_back([&alone, &expected, elements, caller] {
                State shared(elements);
                for (const GradientStatistics& got :
                     {shared.update_statistics(caller + 2), shared.statistics(caller + 2)}) {
                    CHECK(got.finite && got.sum_of_squares.bytes() == expected.sum_of_squares.bytes());
                }
                CHECK(same(shared.master, alone.master) && same(shared.exp_avg, alone.exp_avg));
                CHECK(same(shared.exp_avg_sq, alone.exp_avg_sq) && shared.parameter == alone.parameter);
            });
        }
        for (std::thread& caller : callers) caller.join();

        if (elements % 2048 == 0) {
            // Threads add to the sums of extents at once; these end within a stream, and within a block of one.
            const auto n = static_cast<std::int64_t>(elements);
            const std::int64_t streams[] = {4 * n, 8 * n, 12 * n};
            const AdamwPlaces places{{0, streams[0], streams[1]}, {4096, streams[0] + 4096, streams[2]}};
            State summed(elements);
            const std::vector<float> before[] = {summed.master, summed.exp_avg, summed.exp_avg_sq};
            const AdamwSummed sums = parallel_adamw_summed(summed.arrays(), kSettings, places, 3);
            CHECK(same(summed.master, alone.master) && same(summed.exp_avg_sq, alone.exp_avg_sq));
            CHECK(sums.statistics.sum_of_squares.bytes() == expected.sum_of_squares.bytes());
            const std::vector<float> after[] = {summed.master, summed.exp_avg, summed.exp_avg_sq};
            std::int64_t begin = 0;
            for (std::size_t extent = 0; extent < places.ends.size(); begin = places.ends[extent], ++extent) {
                const auto lies = [&](const std::vector<float>(&states)[3]) {
                    std::vector<float> all;
                    for (const auto& stream : states) all.insert(all.end(), stream.begin(), stream.end());
                    return parallel_checksum(address(all) + static_cast<std::uintptr_t>(begin),
                                             places.ends[extent] - begin, 1);
                };
                CHECK(parallel_checksum_of(sums.before[extent], places.ends[extent] - begin) == lies(before));
                CHECK(parallel_checksum_of(sums.after[extent], places.ends[extent] - begin) == lies(after));
            }
            const AdamwPlaces short_of_it{places.positions, {4096}};
            CHECK_THROWS(std::invalid_argument, parallel_adamw_summed(summed.arrays(), kSettings, short_of_it, 1));
        }

        std::vector<std::uint16_t> half(elements);
        std::vector<float> back(elements);
        const auto n = static_cast<std::int64_t>(elements);
        parallel_convert(address(half), Dtype::bf16, address(alone.master), Dtype::fp32, n, 3);
        CHECK(half == alone.parameter);
        parallel_convert(address(back), Dtype::fp32, address(half), Dtype::bf16, n, 3);
        for (std::size_t i = 0; i < elements; ++i)
            CHECK(std::abs(back[i] - alone.master[i]) <= std::abs(back[i]) / 128);
        parallel_copy(address(back), address(alone.master), n * 4, 3);
        CHECK(same(back, alone.master));

        std::vector<std::int8_t> values(elements);
        std::vector<float> scales((elements + 63) / 64);
        CHECK(parallel_quantize(address(values), address(scales), address(back), Dtype::fp32, n, 64, 3));
        std::vector<float> restored(elements);
        parallel_dequantize(address(restored), Dtype::fp32, address(values), address(scales), n, 64, 3);
        for (std::size_t i = 0; i < elements; ++i) CHECK(std::abs(restored[i] - back[i]) <= 0.5001F * scales[i / 64]);

        std::vector<float> once(back), twice(back), plus(elements), minus(elements);
        const std::vector<Move> pending{{4, 0, 0.5, 1.0}, {4, 1, 0.25, 0.5}};
        parallel_zeroth_order({address(once), Dtype::fp32, 0, 0, Dtype::fp32, 3, n}, 1, 2, pending, std::nullopt, 1);
        parallel_zeroth_order({address(twice), Dtype::fp32, address(plus), address(minus), Dtype::fp32, 3, n}, 1, 2,
                              pending, Move{5, 0, 0.25, 1.0}, 3);
        CHECK(same(once, twice) && !same(once, back) && !same(plus, minus));

        std::vector<std::uint32_t> words(elements * 64);
        for (std::size_t i = 0; i < words.size(); ++i) words[i] = static_cast<std::uint32_t>(i * i);
        const auto nbytes = static_cast<std::int64_t>(words.size() * 4);
        CHECK(parallel_checksum(address(words), nbytes, 1) == parallel_checksum(address(words), nbytes, 3));

        CHECK(parallel_is_finite(address(back), n, Dtype::fp32, 3));
        back[elements - 1] = -std::numeric_limits<float>::infinity();
        CHECK(!parallel_is_finite(address(back), n, Dtype::fp32, 3));
        alone.gradient[elements / 2] = std::numeric_limits<float>::quiet_NaN();
        CHECK(!alone.update(3) && !alone.update_statistics(3).finite && !alone.statistics(3).finite);
    }
    State state(16);
    CHECK_THROWS(std::invalid_argument, state.update(0));
    CHECK_THROWS(std::invalid_argument, parallel_copy(0, address(state.master), 4, 1));
    CHECK_THROWS(std::invalid_argument, parallel_copy(address(state.master), address(state.master) + 4, 8, 1));
    CHECK_THROWS(std::invalid_argument, parallel_is_finite(address(state.master), -1, Dtype::fp32, 1));
    parallel_copy(0, 0, 0, 1);
    return 0;
}
