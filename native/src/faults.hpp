// Counts the block transfers and the flushes that an engine starts, and says which of them are to suffer: faults for
// tests, put under everything that has to bear them. An engine without faults only counts.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

namespace ssdplan {

// What is to befall one transfer.
struct Fault {
    enum class Kind { none, error, cut, delay };

    Kind kind = Kind::none;
    int code = 0;  // the errno of an error, which is returned without a transfer
};

class Faults {
  public:
    // How long a delayed transfer waits before it starts.
    static constexpr std::chrono::milliseconds kDelay{20};

    // Pairs of an index, counted from 0, and a kind: "short", "delay", "flush", or an errno of kErrors in faults.cpp by
    // name. "flush" counts flushes; all others count transfers. Throws std::invalid_argument.
    explicit Faults(const std::vector<std::pair<std::int64_t, std::string>>& faults = {});

    // Counts one transfer and returns its fault. What is left of a short transfer is a transfer of its own.
    Fault start_transfer() noexcept {
        const std::uint64_t index = transfers_.fetch_add(1, std::memory_order_relaxed);
        return transfer_faults_.empty() ? Fault{} : find(index);
    }

    // Counts one flush and returns the errno that it is to fail with, or 0.
    int start_flush() noexcept;

    std::uint64_t transfers() const noexcept { return transfers_.load(std::memory_order_relaxed); }

    // How much of `nbytes` a cut transfer moves: half of its pages, or one sector of a single page.
    static std::uint32_t cut(std::uint32_t nbytes) noexcept;

  private:
    Fault find(std::uint64_t index) const noexcept;

    std::map<std::uint64_t, Fault> transfer_faults_;
    std::map<std::uint64_t, Fault> flush_faults_;
    std::atomic<std::uint64_t> transfers_{0};
    std::atomic<std::uint64_t> flushes_{0};
};

}  // namespace ssdplan
