#include "parallel.hpp"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <mutex>
#include <stdexcept>
#include <vector>

#include "adamw.hpp"
#include "checksum.hpp"
#include "kernels.hpp"
#include "quantize.hpp"
#include "squares.hpp"
#include "workers.hpp"
#include "zeroth_order.hpp"

namespace ssdplan {
namespace {

constexpr std::size_t kPiece = 32 * kBlock;      // elements that one thread takes at a time
constexpr std::size_t kCopyPiece = 1024 * 1024;  // bytes, likewise
constexpr std::size_t kChecksumPiece = 256 * 1024;

std::size_t pieces(std::size_t length, std::size_t piece) {
    return (length + piece - 1) / piece;
}

unsigned checked_threads(std::int64_t threads) {
    if (threads < 1 || threads > 1024) {
        throw std::invalid_argument("threads must be from 1 to 1024, not " + std::to_string(threads));
    }
    return static_cast<unsigned>(threads);
}

std::size_t checked_size(const char* name, std::int64_t size) {
    if (size < 0 || size > (std::int64_t{1} << 56)) {
        throw std::invalid_argument(std::string(name) + " must not be negative, not " + std::to_string(size));
    }
    return static_cast<std::size_t>(size);
}

std::size_t checked_summed(const char* name, std::int64_t nbytes) {
    const std::size_t length = checked_size(name, nbytes);
    if (length % kChecksumUnit != 0) {
        throw std::invalid_argument(std::string(name) + " must be a multiple of " + std::to_string(kChecksumUnit) +
                                    ", not " + std::to_string(length));
    }
    return length;
}

// So many bytes up to a whole unit of the checksum.
std::size_t whole_units(std::size_t nbytes) {
    return (nbytes + kChecksumUnit - 1) / kChecksumUnit * kChecksumUnit;
}

void check_pointer(const char* name, std::uintptr_t pointer, std::size_t elements, std::size_t alignment) {
    if (elements == 0) return;
    if (pointer == 0) throw std::invalid_argument(std::string(name) + " is a null pointer");
    if (pointer % alignment != 0) {
        throw std::invalid_argument(std::string(name) + " must be aligned to " + std::to_string(alignment) +
                                    " bytes: " + std::to_string(pointer));
    }
}

void check_disjoint(std::uintptr_t destination, std::size_t destination_bytes, std::uintptr_t source,
                    std::size_t source_bytes) {
    if (destination < source + source_bytes && source < destination + destination_bytes) {
        throw std::invalid_argument("destination and source overlap");
    }
}

std::size_t checked_group(std::int64_t group) {
    const auto least = static_cast<std::int64_t>(kLeastQuantizedGroup);
    const auto most = static_cast<std::int64_t>(kMostQuantizedGroup);
    if (group < least || group > most || (group & (group - 1)) != 0) {
        throw std::invalid_argument("group must be a power of two from 32 to 4096, not " + std::to_string(group));
    }
    return static_cast<std::size_t>(group);
}

std::uint32_t checked_word(const char* name, std::int64_t value) {
    if (value < 0 || value > 0xffffffff) {
        throw std::invalid_argument(std::string(name) + " must be from 0 to 4294967295, not " + std::to_string(value));
    }
    return static_cast<std::uint32_t>(value);
}

void check_number(const char* name, double value, bool valid) {
    if (!valid) throw std::invalid_argument(std::string(name) + " is out of range: " + std::to_string(value));
}

template <typename T>
T* at(std::uintptr_t address) {
    return reinterpret_cast<T*>(address);
}

AdamwStreams checked_streams(const AdamwArrays& a) {
    const std::size_t elements = checked_size("elements", a.elements);
    check_pointer("exp_avg", a.exp_avg, elements, item_bytes(a.moments));
    check_pointer("exp_avg_sq", a.exp_avg_sq, elements, item_bytes(a.moments));
    check_pointer("gradient", a.gradient, elements, sizeof(float));
    check_pointer("parameter", a.parameter, elements, item_bytes(a.parameter_dtype));
    if (a.master != 0) {
        if (a.residual != 0) throw std::invalid_argument("master and residual exclude each other");
        check_pointer("master", a.master, elements, sizeof(float));
    } else {
        const char* const what = a.residual != 0 ? "a residual needs" : "without a master there must be";
        if (a.parameter_dtype != Dtype::bf16 && (a.residual != 0 || elements > 0)) {
            throw std::invalid_argument(std::string(what) + " a parameter of 'bf16'");
        }
        if (a.residual != 0) check_pointer("residual", a.residual, elements, sizeof(std::uint16_t));
    }
    if (a.moments == Moments::int8) {
        if (elements % kScaled != 0) {
            throw std::invalid_argument("with moments in int8 elements must be a multiple of " +
                                        std::to_string(kScaled) + ", not " + std::to_string(elements));
        }
        check_pointer("exp_avg_scales", a.exp_avg_scales, elements, sizeof(float));
        check_pointer("exp_avg_sq_scales", a.exp_avg_sq_scales, elements, sizeof(float));
    } else if (a.exp_avg_scales != 0 || a.exp_avg_sq_scales != 0) {
        throw std::invalid_argument("only moments in int8 have scales");
    }
    return {at<float>(a.master),         at<std::uint16_t>(a.residual), at<void>(a.exp_avg), at<void>(a.exp_avg_sq),
            at<const float>(a.gradient), at<void>(a.parameter),         a.moments,           a.parameter_dtype,
            at<float>(a.exp_avg_scales), at<float>(a.exp_avg_sq_scales)};
}

// Rising multiples of the checksum's unit.
std::vector<std::size_t> checked_ends(const std::vector<std::int64_t>& ends) {
    std::vector<std::size_t> checked;
    for (const std::int64_t end : ends) {
        const std::size_t value = checked_summed("ends", end);
        if (value <= (checked.empty() ? 0 : checked.back())) throw std::invalid_argument("ends must rise from above 0");
        checked.push_back(value);
    }
    return checked;
}

AdamwScalars checked_scalars(const AdamwSettings& a) {
    check_number("lr", a.lr, std::isfinite(a.lr) && a.lr >= 0.0);
    check_number("beta1", a.beta1, a.beta1 >= 0.0 && a.beta1 < 1.0);
    check_number("beta2", a.beta2, a.beta2 >= 0.0 && a.beta2 < 1.0);
    check_number("eps", a.eps, std::isfinite(a.eps) && a.eps >= 0.0);
    check_number("weight_decay", a.weight_decay, std::isfinite(a.weight_decay) && a.weight_decay >= 0.0);
    check_number("step", static_cast<double>(a.step), a.step >= 1);
    check_number("gradient_scale", a.gradient_scale, std::isfinite(a.gradient_scale));
    const auto step = static_cast<double>(a.step);
    return {
        static_cast<float>(1.0 - a.lr * a.weight_decay),
        static_cast<float>(1.0 - a.beta1),
        static_cast<float>(a.beta2),
        static_cast<float>(1.0 - a.beta2),
        static_cast<float>(1.0 / std::sqrt(1.0 - std::pow(a.beta2, step))),
        static_cast<float>(a.eps),
        static_cast<float>(a.lr / (1.0 - std::pow(a.beta1, step))),
        static_cast<float>(a.gradient_scale),
    };
}

// `part(begin, count, squares)` gives the sum of squares of each block of a piece, and returns whether the piece is
// finite.
template <typename Part>
GradientStatistics statistics_by_pieces(std::size_t length, unsigned workers, const Part& part) {
    GradientStatistics total{true, {}};
    std::mutex mutex;
    Workers::shared().run(pieces(length, kPiece), workers, [&](std::size_t piece) {
        const FloatEnvironment environment;
        const std::size_t begin = piece * kPiece;
        const std::size_t count = std::min(kPiece, length - begin);
        double squares[kPiece / kBlock];
        const bool finite = part(begin, count, squares);
        ExactSum sum;
        for (std::size_t block = 0; block < pieces(count, kBlock); ++block) {
            if (std::isfinite(squares[block])) sum.add(squares[block]);
        }
        const std::lock_guard lock(mutex);
        total.finite = total.finite && finite;
        total.sum_of_squares.add(sum);
    });
    return total;
}

// `block(begin, count)` gives the sum of squares of the block that begins there.
template <typename Block>
GradientStatistics statistics_by_blocks(std::size_t length, unsigned workers, const Block& block) {
    return statistics_by_pieces(length, workers, [&](std::size_t piece, std::size_t length_of_piece, double* squares) {
        bool finite = true;
        for (std::size_t begin = 0; begin < length_of_piece; begin += kBlock, ++squares) {
            *squares = block(piece + begin, std::min(kBlock, length_of_piece - begin));
            finite = finite && std::isfinite(*squares);
        }
        return finite;
    });
}

}  // namespace

Dtype parse_dtype(const std::string& name) {
    if (name == "fp32") return Dtype::fp32;
    if (name == "bf16") return Dtype::bf16;
    if (name == "fp16") return Dtype::fp16;
    throw std::invalid_argument("dtype must be 'fp32', 'bf16' or 'fp16', not '" + name + "'");
}

Moments parse_moments(const std::string& name) {
    if (name == "fp32") return Moments::fp32;
    if (name == "bf16") return Moments::bf16;
    if (name == "int8") return Moments::int8;
    throw std::invalid_argument("moment_dtype must be 'fp32', 'bf16' or 'int8', not '" + name + "'");
}

bool parallel_adamw(const AdamwArrays& arrays, const AdamwSettings& settings, std::int64_t threads) {
    const unsigned workers = checked_threads(threads);
    const AdamwStreams streams = checked_streams(arrays);
    const auto elements = static_cast<std::size_t>(arrays.elements);
    const AdamwScalars scalars = checked_scalars(settings);
    std::atomic<bool> finite{true};
    Workers::shared().run(pieces(elements, kPiece), workers, [&](std::size_t piece) {
        const FloatEnvironment environment;
        const std::size_t begin = piece * kPiece;
        if (!adamw(streams.from(begin), std::min(kPiece, elements - begin), scalars)) {
            finite.store(false, std::memory_order_relaxed);
        }
    });
    return finite.load();
}

GradientStatistics parallel_adamw_statistics(const AdamwArrays& arrays, const AdamwSettings& settings,
                                             std::int64_t threads) {
    const unsigned workers = checked_threads(threads);
    const AdamwStreams streams = checked_streams(arrays);
    const AdamwScalars scalars = checked_scalars(settings);
    return statistics_by_pieces(static_cast<std::size_t>(arrays.elements), workers,
                                [&](std::size_t begin, std::size_t count, double* squares) {
                                    return adamw(streams.from(begin), count, scalars, squares);
                                });
}

AdamwSummed parallel_adamw_summed(const AdamwArrays& arrays, const AdamwSettings& settings, const AdamwPlaces& places,
                                  std::int64_t threads) {
    const unsigned workers = checked_threads(threads);
    const AdamwStreams streams = checked_streams(arrays);
    const AdamwScalars scalars = checked_scalars(settings);
    const auto elements = static_cast<std::size_t>(arrays.elements);
    const std::vector<std::size_t> ends = checked_ends(places.ends);
    const bool scaled = streams.moments == Moments::int8;
    if (places.positions.size() != (scaled ? 5 : 3)) {
        throw std::invalid_argument("positions must be one for each stream of states");
    }
    const std::size_t moment = item_bytes(streams.moments);
    const std::size_t master = streams.master != nullptr ? 4 : streams.residual != nullptr ? 2 : 0;
    const std::array<std::size_t, 5> bytes{elements * master, elements * moment, elements * moment,
                                           whole_units(elements / kScaled * sizeof(float)),
                                           whole_units(elements / kScaled * sizeof(float))};
    std::array<std::size_t, 5> positions{};
    for (std::size_t stream = 0; stream < places.positions.size(); ++stream) {
        if (bytes[stream] == 0) continue;
        positions[stream] = checked_summed("positions", places.positions[stream]);
        const std::size_t nbytes = checked_summed("the bytes of a stream", static_cast<std::int64_t>(bytes[stream]));
        if (ends.empty() || positions[stream] + nbytes > ends.back()) {
            throw std::invalid_argument("states lie beyond the end of all extents");
        }
    }
    std::vector<std::atomic<std::uint64_t>> before(ends.size());
    std::vector<std::atomic<std::uint64_t>> after(ends.size());
    const auto add_scales = [&](std::vector<std::atomic<std::uint64_t>>& sums) {
        if (!scaled || elements == 0) return;
        ExtentSums(ends, positions[3], sums.data()).add(streams.exp_avg_scales, bytes[3]);
        ExtentSums(ends, positions[4], sums.data()).add(streams.exp_avg_sq_scales, bytes[4]);
    };
    add_scales(before);
    const GradientStatistics statistics =
        statistics_by_pieces(elements, workers, [&](std::size_t begin, std::size_t count, double* squares) {
            const auto from = [&](std::size_t stream, std::vector<std::atomic<std::uint64_t>>& sums) {
                const std::size_t item = stream == 0 ? master : moment;
                return ExtentSums(ends, positions[stream] + begin * item, sums.data());
            };
            AdamwSums sums{{from(0, before), from(1, before), from(2, before)},
                           {from(0, after), from(1, after), from(2, after)}};
            return adamw(streams.from(begin), count, scalars, squares, &sums);
        });
    add_scales(after);
    return {statistics, {before.begin(), before.end()}, {after.begin(), after.end()}};
}

void parallel_stream_mix(const AdamwArrays& arrays, std::int64_t threads) {
    const unsigned workers = checked_threads(threads);
    const AdamwStreams streams = checked_streams(arrays);
    if (streams.master == nullptr || streams.moments == Moments::int8 || item_bytes(streams.parameter_dtype) != 2) {
        throw std::invalid_argument("the mix is that of fp32 masters and a parameter of 2 bytes");
    }
    const auto elements = static_cast<std::size_t>(arrays.elements);
    Workers::shared().run(pieces(elements, kPiece), workers, [&](std::size_t piece) {
        const std::size_t begin = piece * kPiece;
        stream_mix(streams.from(begin), std::min(kPiece, elements - begin));
    });
}

GradientStatistics parallel_statistics(std::uintptr_t gradient, std::int64_t elements, std::int64_t threads) {
    const unsigned workers = checked_threads(threads);
    const std::size_t length = checked_size("elements", elements);
    check_pointer("gradient", gradient, length, sizeof(float));
    return statistics_by_blocks(length, workers, [=](std::size_t begin, std::size_t count) {
        return sum_of_squares(at<const float>(gradient) + begin, count);
    });
}

GradientStatistics parallel_copy_statistics(std::uintptr_t destination, std::uintptr_t source, std::int64_t elements,
                                            std::int64_t threads) {
    const unsigned workers = checked_threads(threads);
    const std::size_t length = checked_size("elements", elements);
    check_pointer("destination", destination, length, sizeof(float));
    check_pointer("source", source, length, sizeof(float));
    check_disjoint(destination, length * sizeof(float), source, length * sizeof(float));
    return statistics_by_blocks(length, workers, [=](std::size_t begin, std::size_t count) {
        const float* const block = at<const float>(source) + begin;
        const double squares = sum_of_squares(block, count);
        std::memcpy(at<float>(destination) + begin, block, count * sizeof(float));  // from the first-level cache
        return squares;
    });
}

void parallel_copy(std::uintptr_t destination, std::uintptr_t source, std::int64_t nbytes, std::int64_t threads) {
    const unsigned workers = checked_threads(threads);
    const std::size_t length = checked_size("nbytes", nbytes);
    check_pointer("destination", destination, length, 1);
    check_pointer("source", source, length, 1);
    check_disjoint(destination, length, source, length);
    Workers::shared().run(pieces(length, kCopyPiece), workers, [&](std::size_t piece) {
        const std::size_t begin = piece * kCopyPiece;
        std::memcpy(at<std::byte>(destination) + begin, at<const std::byte>(source) + begin,
                    std::min(kCopyPiece, length - begin));
    });
}

void parallel_accumulate(std::uintptr_t target, std::uintptr_t source, Dtype source_dtype, std::int64_t elements,
                         bool begin, std::int64_t threads) {
    const unsigned workers = checked_threads(threads);
    const std::size_t length = checked_size("elements", elements);
    const std::size_t from = item_bytes(source_dtype);
    check_pointer("target", target, length, sizeof(float));
    check_pointer("source", source, length, from);
    check_disjoint(target, length * sizeof(float), source, length * from);
    Workers::shared().run(pieces(length, kPiece), workers, [&](std::size_t piece) {
        const FloatEnvironment environment;
        const std::size_t first = piece * kPiece;
        accumulate(at<float>(target) + first, at<const std::byte>(source) + first * from, source_dtype,
                   std::min(kPiece, length - first), begin);
    });
}

void parallel_convert(std::uintptr_t destination, Dtype destination_dtype, std::uintptr_t source, Dtype source_dtype,
                      std::int64_t elements, std::int64_t threads) {
    const unsigned workers = checked_threads(threads);
    const std::size_t length = checked_size("elements", elements);
    const std::size_t to = item_bytes(destination_dtype);
    const std::size_t from = item_bytes(source_dtype);
    check_pointer("destination", destination, length, to);
    check_pointer("source", source, length, from);
    check_disjoint(destination, length * to, source, length * from);
    Workers::shared().run(pieces(length, kPiece), workers, [&](std::size_t piece) {
        const FloatEnvironment environment;
        const std::size_t begin = piece * kPiece;
        convert(at<std::byte>(destination) + begin * to, destination_dtype, at<const std::byte>(source) + begin * from,
                source_dtype, std::min(kPiece, length - begin));
    });
}

bool parallel_is_finite(std::uintptr_t data, std::int64_t elements, Dtype dtype, std::int64_t threads) {
    const unsigned workers = checked_threads(threads);
    const std::size_t length = checked_size("elements", elements);
    const std::size_t item = item_bytes(dtype);
    check_pointer("address", data, length, item);
    std::atomic<bool> finite{true};
    Workers::shared().run(pieces(length, kPiece), workers, [&](std::size_t piece) {
        if (!finite.load(std::memory_order_relaxed)) return;
        const std::size_t begin = piece * kPiece;
        if (!is_finite(at<const std::byte>(data) + begin * item, dtype, std::min(kPiece, length - begin))) {
            finite.store(false, std::memory_order_relaxed);
        }
    });
    return finite.load();
}

bool parallel_quantize(std::uintptr_t values, std::uintptr_t scales, std::uintptr_t source, Dtype dtype,
                       std::int64_t elements, std::int64_t group, std::int64_t threads) {
    const unsigned workers = checked_threads(threads);
    const std::size_t length = checked_size("elements", elements);
    const std::size_t each = checked_group(group);
    const std::size_t item = item_bytes(dtype);
    check_pointer("values", values, length, 1);
    check_pointer("scales", scales, length, sizeof(float));
    check_pointer("source", source, length, item);
    const std::size_t scale_bytes = pieces(length, each) * sizeof(float);
    check_disjoint(values, length, source, length * item);
    check_disjoint(scales, scale_bytes, source, length * item);
    check_disjoint(values, length, scales, scale_bytes);
    std::atomic<bool> finite{true};
    Workers::shared().run(pieces(length, kPiece), workers, [&](std::size_t piece) {
        const FloatEnvironment environment;
        const std::size_t begin = piece * kPiece;
        if (!quantize(at<std::int8_t>(values) + begin, at<float>(scales) + begin / each,
                      at<const std::byte>(source) + begin * item, dtype, std::min(kPiece, length - begin), each)) {
            finite.store(false, std::memory_order_relaxed);
        }
    });
    return finite.load();
}

void parallel_dequantize(std::uintptr_t destination, Dtype dtype, std::uintptr_t values, std::uintptr_t scales,
                         std::int64_t elements, std::int64_t group, std::int64_t threads) {
    const unsigned workers = checked_threads(threads);
    const std::size_t length = checked_size("elements", elements);
    const std::size_t each = checked_group(group);
    const std::size_t item = item_bytes(dtype);
    check_pointer("destination", destination, length, item);
    check_pointer("values", values, length, 1);
    check_pointer("scales", scales, length, sizeof(float));
    check_disjoint(destination, length * item, values, length);
    check_disjoint(destination, length * item, scales, pieces(length, each) * sizeof(float));
    Workers::shared().run(pieces(length, kPiece), workers, [&](std::size_t piece) {
        const FloatEnvironment environment;
        const std::size_t begin = piece * kPiece;
        dequantize(at<std::byte>(destination) + begin * item, dtype, at<const std::int8_t>(values) + begin,
                   at<const float>(scales) + begin / each, std::min(kPiece, length - begin), each);
    });
}

RandomDirection checked_direction(const Move& move) {
    const std::uint32_t direction = checked_word("direction", move.direction);
    if (direction >= kMostDirections) throw std::invalid_argument("direction must be below 65536");
    return {checked_word("step", move.step), direction};
}

void parallel_zeroth_order(const ZerothOrderArrays& arrays, std::uint64_t seed, std::int64_t tensor,
                           const std::vector<Move>& pending, const std::optional<Move>& next, std::int64_t threads) {
    const unsigned workers = checked_threads(threads);
    const std::size_t length = checked_size("elements", arrays.elements);
    const std::size_t first = checked_size("first", arrays.first);
    if (first > kMostElements || length > kMostElements - first) {
        throw std::invalid_argument("first and elements must stay below 2^50");
    }
    if (arrays.parameters_dtype != Dtype::fp32 && arrays.parameters_dtype != arrays.dtype) {
        throw std::invalid_argument("parameters must be fp32, or of the dtype of plus and minus");
    }
    const std::size_t own = item_bytes(arrays.parameters_dtype);
    const std::size_t item = item_bytes(arrays.dtype);
    check_pointer("parameters", arrays.parameters, length, own);
    std::vector<ZerothOrderUpdate> updates;
    updates.reserve(pending.size());
    for (const Move& move : pending) {
        const ZerothOrderUpdate update{checked_direction(move), static_cast<float>(move.scale),
                                       static_cast<float>(move.keep)};
        check_number("scale", move.scale, std::isfinite(update.scale));
        check_number("keep", move.keep, std::isfinite(update.keep) && update.keep >= 0.0F);
        updates.push_back(update);
    }
    ZerothOrderPass pass{seed, checked_word("tensor", tensor), updates.data(), updates.size(), {0, 0}, 0.0F};
    if (next) {
        if (arrays.plus == 0 && arrays.minus == 0) check_pointer("plus", arrays.plus, length, item);
        for (const auto& [name, place] : {std::pair{"plus", arrays.plus}, std::pair{"minus", arrays.minus}}) {
            if (place == 0) continue;
            check_pointer(name, place, length, item);
            check_disjoint(place, length * item, arrays.parameters, length * own);
        }
        if (arrays.plus != 0 && arrays.minus != 0)
            check_disjoint(arrays.plus, length * item, arrays.minus, length * item);
        pass.next = checked_direction(*next);
        pass.eps = static_cast<float>(next->scale);
        check_number("eps", next->scale, std::isfinite(pass.eps) && pass.eps > 0.0F);
    }
    Workers::shared().run(pieces(length, kPiece), workers, [&](std::size_t piece) {
        const FloatEnvironment environment;
        const std::size_t begin = piece * kPiece;
        const auto part = [&](std::uintptr_t array) -> void* {
            return next && array != 0 ? at<std::byte>(array) + begin * item : nullptr;
        };
        zeroth_order({at<std::byte>(arrays.parameters) + begin * own, arrays.parameters_dtype, part(arrays.plus),
                      part(arrays.minus), arrays.dtype, first + begin, std::min(kPiece, length - begin)},
                     pass);
    });
}

std::uint64_t parallel_checksum(std::uintptr_t data, std::int64_t nbytes, std::int64_t threads) {
    const unsigned workers = checked_threads(threads);
    const std::size_t length = checked_summed("nbytes", nbytes);
    check_pointer("address", data, length, 1);
    std::atomic<std::uint64_t> sum{0};
    Workers::shared().run(pieces(length, kChecksumPiece), workers, [&](std::size_t piece) {
        const std::size_t begin = piece * kChecksumPiece;
        const std::size_t nbytes = std::min(kChecksumPiece, length - begin);
        sum ^= checksum_carry(checksum_sum(at<const std::byte>(data) + begin, nbytes), length - begin - nbytes);
    });
    return checksum_finish(sum, length);
}

std::uint64_t parallel_checksum_of(std::uint64_t sum, std::int64_t nbytes) {
    return checksum_finish(sum, checked_summed("nbytes", nbytes));
}

}  // namespace ssdplan
