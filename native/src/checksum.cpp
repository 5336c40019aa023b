#include "checksum.hpp"

#include <algorithm>
#include <array>
#include <cstring>
#include <vector>

#include "dispatch.hpp"

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "words are read as they lie");

namespace ssdplan {
namespace {

constexpr std::size_t kWords = 8;  // a vector's
typedef std::uint64_t Words __attribute__((vector_size(kWords * sizeof(std::uint64_t))));
constexpr std::size_t kVectors = kChecksumUnit / sizeof(Words);

constexpr std::size_t kPrefetch = 1024;  // bytes ahead: of 256 to 4096 the best for what is in no cache

template <typename Word>
SSDPLAN_INLINE void step(Word& x) {
    x ^= x << 11;
    x ^= x >> 17;
    x ^= x << 5;
}

SSDPLAN_DISPATCHED void sums_of(const unsigned char* data, std::size_t nbytes, std::uint64_t* sums) {
    static_assert(kVectors == 4);
    Words all[kVectors];
    std::memcpy(all, sums, sizeof all);
    Words a = all[0], b = all[1], c = all[2], d = all[3];
    for (std::size_t at = 0; at < nbytes; at += kChecksumUnit) {
        for (std::size_t line = 0; line < kChecksumUnit; line += 64) __builtin_prefetch(data + at + kPrefetch + line);
        Words words[kVectors];
        std::memcpy(words, data + at, sizeof words);
        step(a);
        step(b);
        step(c);
        step(d);
        a ^= words[0];
        b ^= words[1];
        c ^= words[2];
        d ^= words[3];
    }
    all[0] = a;
    all[1] = b;
    all[2] = c;
    all[3] = d;
    std::memcpy(sums, all, sizeof all);
}

// A linear map of 64-bit words, as the images of the unit vectors.
using Matrix = std::array<std::uint64_t, 64>;

std::uint64_t image(const Matrix& matrix, std::uint64_t word) {
    std::uint64_t sum = 0;
    for (const std::uint64_t column : matrix) {
        sum ^= column & (0 - (word & 1U));
        word >>= 1;
    }
    return sum;
}

void square(Matrix& matrix, int times) {
    for (int i = 0; i < times; ++i) {
        Matrix squared;
        for (std::size_t bit = 0; bit < squared.size(); ++bit) squared[bit] = image(matrix, matrix[bit]);
        matrix = squared;
    }
}

// The same map by its images of the 16 values of each four bits: an image is 16 look-ups.
class Table {
  public:
    Table() = default;
    explicit Table(const Matrix& matrix) {
        for (std::size_t part = 0; part < parts_.size(); ++part) {
            for (std::uint64_t bits = 0; bits < 16; ++bits) parts_[part][bits] = image(matrix, bits << (4 * part));
        }
    }

    std::uint64_t operator()(std::uint64_t word) const {
        std::uint64_t sum = 0;
        for (std::size_t part = 0; part < parts_.size(); ++part) sum ^= parts_[part][(word >> (4 * part)) & 15U];
        return sum;
    }

  private:
    std::array<std::array<std::uint64_t, 16>, 16> parts_{};
};

struct Powers {
    Powers() {
        Matrix matrix;
        for (std::size_t bit = 0; bit < matrix.size(); ++bit) {
            matrix[bit] = std::uint64_t{1} << bit;
            step(matrix[bit]);
        }
        const Matrix t = matrix;
        square(matrix, 59);
        word = Table(matrix);
        units.reserve(kDoublings);
        matrix = t;
        for (std::size_t doubling = 0; doubling < kDoublings; ++doubling) {
            units.emplace_back(matrix);
            square(matrix, 1);
        }
    }

    // Of units: more than any length has.
    static constexpr std::size_t kDoublings = 8 * sizeof(std::size_t) - 8;

    Table word;                // S
    std::vector<Table> units;  // S^(words of 2^i units), which is T^(2^i)
};

const Powers& powers() {
    static const Powers made;
    return made;
}

}  // namespace

void RunningSum::add(const void* data, std::size_t nbytes) {
    sums_of(static_cast<const unsigned char*>(data), nbytes, sums_);
}

std::uint64_t RunningSum::sum() const {
    const Table& s = powers().word;
    std::uint64_t h = 0;
    for (const std::uint64_t sum : sums_) h = s(h) ^ sum;
    return h;
}

std::uint64_t checksum_sum(const void* data, std::size_t nbytes) {
    RunningSum sum;
    sum.add(data, nbytes);
    return sum.sum();
}

ExtentSums::ExtentSums(const std::vector<std::size_t>& ends, std::size_t position, std::atomic<std::uint64_t>* sums)
    : ends_(ends),
      sums_(sums),
      position_(position),
      extent_(static_cast<std::size_t>(std::upper_bound(ends.begin(), ends.end(), position) - ends.begin())) {}

void ExtentSums::add(const void* data, std::size_t nbytes) {
    const auto* bytes = static_cast<const std::byte*>(data);
    while (nbytes > 0) {
        const std::size_t part = std::min(nbytes, ends_[extent_] - position_);
        running_.add(bytes, part);
        bytes += part;
        nbytes -= part;
        position_ += part;
        if (position_ == ends_[extent_]) {
            flush();
            ++extent_;
        }
    }
}

void ExtentSums::flush() {
    const std::uint64_t sum = running_.sum();
    if (sum == 0) return;  // nothing, or zeros: either adds nothing
    sums_[extent_].fetch_xor(checksum_carry(sum, ends_[extent_] - position_), std::memory_order_relaxed);
    running_ = RunningSum{};
}

std::uint64_t checksum_carry(std::uint64_t sum, std::size_t nbytes) {
    const std::vector<Table>& tables = powers().units;
    std::size_t units = nbytes / kChecksumUnit;
    for (std::size_t doubling = 0; units != 0; ++doubling, units >>= 1) {
        if ((units & 1U) != 0) sum = tables[doubling](sum);
    }
    return sum;
}

std::uint64_t checksum_finish(std::uint64_t sum, std::size_t nbytes) {
    std::uint64_t h = sum ^ (std::uint64_t{nbytes} * 0x9e3779b97f4a7c15U);
    h = (h ^ (h >> 33)) * 0xff51afd7ed558ccdU;
    h = (h ^ (h >> 33)) * 0xc4ceb9fe1a85ec53U;
    return h ^ (h >> 33);
}

}  // namespace ssdplan
