#include "faults.hpp"

#include <algorithm>
#include <cerrno>
#include <stdexcept>

namespace ssdplan {
namespace {

constexpr std::uint32_t kPage = 4096;
constexpr std::uint32_t kSector = 512;

// What a drive, a file system or a kernel short of memory may answer.
constexpr std::pair<const char*, int> kErrors[] = {
    {"EIO", EIO}, {"ENOSPC", ENOSPC}, {"EINVAL", EINVAL}, {"ENODEV", ENODEV}, {"EAGAIN", EAGAIN}, {"EINTR", EINTR},
};

Fault parse(const std::string& kind) {
    if (kind == "short") return {Fault::Kind::cut, 0};
    if (kind == "delay") return {Fault::Kind::delay, 0};
    if (kind == "flush") return {Fault::Kind::error, EIO};
    std::string known = "'short', 'delay', 'flush'";
    for (const auto& [name, code] : kErrors) {
        if (kind == name) return {Fault::Kind::error, code};
        known += std::string(", '") + name + "'";
    }
    throw std::invalid_argument("a fault must be one of " + known + ", not '" + kind + "'");
}

}  // namespace

Faults::Faults(const std::vector<std::pair<std::int64_t, std::string>>& faults) {
    for (const auto& [index, kind] : faults) {
        if (index < 0) {
            throw std::invalid_argument("the index of a fault must not be negative: " + std::to_string(index));
        }
        auto& table = kind == "flush" ? flush_faults_ : transfer_faults_;
        if (!table.emplace(static_cast<std::uint64_t>(index), parse(kind)).second) {
            throw std::invalid_argument("two faults have the index " + std::to_string(index));
        }
    }
}

Fault Faults::find(std::uint64_t index) const noexcept {
    const auto found = transfer_faults_.find(index);
    return found == transfer_faults_.end() ? Fault{} : found->second;
}

int Faults::start_flush() noexcept {
    const std::uint64_t index = flushes_.fetch_add(1, std::memory_order_relaxed);
    const auto found = flush_faults_.find(index);
    return found == flush_faults_.end() ? 0 : found->second.code;
}

std::uint32_t Faults::cut(std::uint32_t nbytes) noexcept {
    if (nbytes > kPage) return std::max(kPage, nbytes / 2 / kPage * kPage);
    return std::min(kSector, nbytes);
}

}  // namespace ssdplan
