// The checksum of what lies on disk: 64 bits, a plain function of the bytes, written so that any processor can run it
// at the speed of memory. It guards against failing hardware and software, not against an adversary.
//
// Definition. The bytes are little-endian 64-bit words w[0], w[1], ..., w[n-1]; n is a multiple of 32, n = nbytes / 8.
// Let T be the map of 64-bit words
//
//     T(x):  x ^= x << 11;  x ^= x >> 17;  x ^= x << 5
//
// It is linear over GF(2) and a permutation of the nonzero words in one cycle of 2^64 - 1 (Marsaglia, Xorshift RNGs,
// 2003), so T^(2^64) = T, and S := T^(2^59), that is T squared 59 times, is a 32nd root of T: S^32 = T. Then
//
//     h = 0;  for each word:  h = S(h) ^ w        (that is: h = sum over i of S^(n-1-i) w[i])
//     h = h ^ (nbytes * 0x9e3779b97f4a7c15 mod 2^64)
//     h = h ^ (h >> 33);  h = h * 0xff51afd7ed558ccd mod 2^64;  h = h ^ (h >> 33)
//     h = h * 0xc4ceb9fe1a85ec53 mod 2^64;  h = h ^ (h >> 33)                      the checksum
//
// Why this: S^32 = T lets 32 sums run side by side, each a step of T (three shifts, four exclusive ors) a word, in
// vectors of any width and without a processor's own CRC or multiplication; they are joined by S at the end. It is a
// cyclic code in other coordinates, and detects as one. With the length given, the last lines are a bijection, so two
// blocks of one length collide only where the sums h do, and those where the sum of their difference is 0. Hence every
// change inside one aligned word is detected, because S^k is invertible; every burst of up to 60 bits (bit 0 of a byte
// first), because S maps no such difference in one word to one in the next (a matter of ranks, tested); every two
// flipped bits up to 16 MiB apart (no S^d with d <= 2^21 maps a unit vector to another: all were tried). Any other
// change passes with a chance of 2^-64. The length enters, so zeros before or after the data are detected too, and a
// block of zeros, such as a lost write leaves, has a checksum like any other.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace ssdplan {

constexpr std::size_t kChecksumUnit = 256;  // nbytes is a multiple of it

// h before the length is mixed in. It is linear: the sum of a range is the exclusive or, in any order, of the sums of
// its parts, each carried past the bytes of the range that follow the part.
std::uint64_t checksum_sum(const void* data, std::size_t nbytes);
std::uint64_t checksum_carry(std::uint64_t sum, std::size_t nbytes);

// The sum of a range that is read front to back, in pieces that are multiples of kChecksumUnit bytes.
class RunningSum {
  public:
    void add(const void* data, std::size_t nbytes);
    std::uint64_t sum() const;

  private:
    std::uint64_t sums_[kChecksumUnit / sizeof(std::uint64_t)] = {};  // those that run side by side
};

// The sums of extents, into which a range is cut, of which some consecutive bytes pass by: from byte `position` of the
// range on, extents ending at `ends`, in multiples of kChecksumUnit. What it finds goes to `sums`, one an extent, to
// which others may add at the same time.
class ExtentSums {
  public:
    ExtentSums(const std::vector<std::size_t>& ends, std::size_t position, std::atomic<std::uint64_t>* sums);
    ExtentSums(const ExtentSums&) = delete;
    ExtentSums& operator=(const ExtentSums&) = delete;
    ~ExtentSums() { flush(); }
    void add(const void* data, std::size_t nbytes);

  private:
    void flush();

    const std::vector<std::size_t>& ends_;
    std::atomic<std::uint64_t>* sums_;
    std::size_t position_;
    std::size_t extent_;
    RunningSum running_;
};

// The checksum of nbytes whose sum is `sum`.
std::uint64_t checksum_finish(std::uint64_t sum, std::size_t nbytes);

}  // namespace ssdplan
