#include "arena.hpp"

#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cinttypes>
#include <cstdio>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <string_view>
#include <system_error>

#include "system_text.hpp"

namespace ssdplan {
namespace {

constexpr std::size_t kHugePage = std::size_t{2} << 20;

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

std::size_t page_size() {
    const long size = ::sysconf(_SC_PAGESIZE);
    return size > 0 ? static_cast<std::size_t>(size) : 4096;
}

std::size_t round_up(std::size_t value, std::size_t unit) {
    return (value + unit - 1) / unit * unit;
}

std::string reason(int error) {
    return std::generic_category().message(error);
}

constexpr std::size_t kUnlimited = std::numeric_limits<std::size_t>::max();

// The number after `key` in a file of "key number" lines, or the file's one number when the key is empty; `otherwise`
// when it is not there, or is a word such as "max".
std::size_t number_in(const std::string& path, std::string_view key, std::size_t otherwise) {
    const std::string text = system_text(path);
    std::string_view rest = text;
    std::string_view line;
    while (next_line(rest, line)) {
        if (!key.empty() && next_word(line) != key) continue;
        const std::string_view word = next_word(line);
        std::size_t value = 0;
        return std::from_chars(word.data(), word.data() + word.size(), value).ec == std::errc() ? value : otherwise;
    }
    return otherwise;
}

// Where one version of control groups keeps its figures, and how a line of /proc/self/cgroup names it.
struct ControlGroups {
    const char* mark;
    const char* root;
    const char* limit;
    const char* used;
    const char* cache;
};

constexpr ControlGroups kControlGroups[] = {
    {"0::", "/sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"},
    {":memory:", "/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"},
};

// What the memory limits of this process's control group and those above it leave: the kernel kills who goes beyond.
// The page cache of files yields, so it counts as free.
std::size_t control_group_bytes() {
    std::size_t least = kUnlimited;
    const std::string text = system_text("/proc/self/cgroup");
    std::string_view rest = text;
    std::string_view line;
    while (next_line(rest, line)) {
        for (const ControlGroups& groups : kControlGroups) {
            const std::size_t mark = line.find(groups.mark);
            if (mark == std::string_view::npos) continue;
            std::string group(line.substr(mark + std::strlen(groups.mark)));
            for (;;) {
                const std::string folder = groups.root + group + "/";
                const std::size_t limit = number_in(folder + groups.limit, "", kUnlimited);
                if (limit != kUnlimited) {
                    const std::size_t used = number_in(folder + groups.used, "", 0);
                    const std::size_t cache = number_in(folder + "memory.stat", groups.cache, 0);
                    const std::size_t held = used - std::min(used, cache);
                    least = std::min(least, limit - std::min(limit, held));
                }
                const std::size_t slash = group.rfind('/');
                if (slash == std::string::npos) break;
                group.erase(slash);
            }
        }
    }
    return least;
}

// What can be allocated without swapping, as far as the system says.
std::size_t available_bytes() {
    const std::size_t kib = number_in("/proc/meminfo", "MemAvailable:", kUnlimited / 1024);
    return std::min(kib * 1024, control_group_bytes());
}

OutOfMemory out_of_memory(std::size_t nbytes, const std::string& why) {
    return OutOfMemory("cannot allocate an arena of " + std::to_string(nbytes) + " bytes: " + why);
}

void touch(std::byte* data, std::size_t mapped_bytes, std::size_t nbytes) {
    for (;;) {
        if (::madvise(data, mapped_bytes, MADV_POPULATE_WRITE) == 0) return;
        if (errno == EINTR || errno == EAGAIN) continue;
        if (errno != EINVAL) throw out_of_memory(nbytes, reason(errno));
        break;  // a kernel before 5.14 does not know the advice
    }
    const std::size_t page = page_size();
    for (std::size_t offset = 0; offset < mapped_bytes; offset += page) {
        *reinterpret_cast<volatile char*>(data + offset) = 0;
    }
}

}  // namespace

Mapping::Mapping(std::size_t nbytes, bool lock) : nbytes_(nbytes) {
    const std::size_t page = page_size();
    // Memory handed out untouched is granted by the kernel far beyond what exists, and the process is killed at the
    // first use; asking first turns that into an error at the place that can name its cause. It reads several files of
    // the kernel's, which is not worth it for less than an interpreter takes between two questions.
    if (nbytes >= kHugePage) {
        const std::size_t available = available_bytes();
        if (nbytes > available) throw out_of_memory(nbytes, std::to_string(available) + " bytes are available");
    }
    mapped_bytes_ = round_up(nbytes, page);
    // Address space for the alignment is reserved and given back at once: the mapping keeps exactly its own pages.
    const std::size_t slack = nbytes >= kHugePage ? kHugePage : 0;
    void* const raw =
        ::mmap(nullptr, mapped_bytes_ + slack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (raw == MAP_FAILED) throw out_of_memory(nbytes, reason(errno));
    std::byte* const start = static_cast<std::byte*>(raw);
    data_ = start;
    if (slack > 0) {
        const auto address = reinterpret_cast<std::uintptr_t>(start);
        const std::size_t head = round_up(address, kHugePage) - address;
        const std::size_t tail = slack - head;
        data_ = start + head;
        if ((head > 0 && ::munmap(start, head) != 0) || (tail > 0 && ::munmap(data_ + mapped_bytes_, tail) != 0)) {
            const int error = errno;
            (void)::munmap(start, mapped_bytes_ + slack);
            throw out_of_memory(nbytes, reason(error));
        }
    }
    try {
        // Advice only: a system without transparent huge pages is slower, not wrong.
        (void)::madvise(data_, mapped_bytes_, MADV_HUGEPAGE);
        // A fork must neither double this memory by copy-on-write nor move a page under a transfer in flight.
        if (::madvise(data_, mapped_bytes_, MADV_DONTFORK) != 0) throw out_of_memory(nbytes, reason(errno));
        touch(data_, mapped_bytes_, nbytes);
        if (!lock) {
            lock_error_ = "not asked for";
        } else if (::mlock(data_, mapped_bytes_) != 0) {
            lock_error_ = "mlock of " + std::to_string(mapped_bytes_) + " bytes: " + reason(errno);
            rlimit limit{};
            if (::getrlimit(RLIMIT_MEMLOCK, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY) {
                lock_error_ += " (RLIMIT_MEMLOCK is " + std::to_string(limit.rlim_cur) + " bytes)";
            }
        }
    } catch (...) {
        (void)::munmap(data_, mapped_bytes_);
        throw;
    }
}

Mapping::~Mapping() {
    // In a forked child none of it is there, and what the child mapped itself may lie in its place.
    if (owner_.is_this_process()) (void)::munmap(data_, mapped_bytes_);
}

std::size_t Mapping::huge_bytes() const {
    const auto first = reinterpret_cast<std::uintptr_t>(data_);
    const std::uintptr_t last = first + mapped_bytes_;
    std::size_t huge = 0;
    bool ours = false;
    const std::string text = system_text("/proc/self/smaps");
    std::string_view rest = text;
    std::string_view found;
    while (next_line(rest, found)) {
        const std::string line(found);  // scanf's end at a zero
        std::uintptr_t begin = 0;
        std::uintptr_t end = 0;
        std::size_t kib = 0;
        if (std::sscanf(line.c_str(), "%" SCNxPTR "-%" SCNxPTR " ", &begin, &end) == 2) {
            ours = begin < last && end > first;
        } else if (ours && std::sscanf(line.c_str(), "AnonHugePages: %zu kB", &kib) == 1) {
            huge += kib * 1024;
        }
    }
    // The kernel joins mappings that touch, and then counts them as one: no more of it can be here than fits.
    return std::min(huge, mapped_bytes_ / kHugePage * kHugePage);
}

Arena::Arena(std::int64_t nbytes, bool lock) {
    if (nbytes <= 0) throw std::invalid_argument("nbytes must be positive, not " + std::to_string(nbytes));
    nbytes_ = static_cast<std::size_t>(nbytes);
    mapping_ = std::make_shared<Mapping>(nbytes_, lock);
}

std::shared_ptr<Mapping> Arena::share() const {
    const std::lock_guard guard(mutex_);
    if (!mapping_) throw std::runtime_error("the arena is closed");
    return mapping_;
}

std::uintptr_t Arena::address() const {
    return reinterpret_cast<std::uintptr_t>(share()->data());
}

bool Arena::locked() const {
    return share()->lock_error().empty();
}

std::string Arena::lock_error() const {
    return share()->lock_error();
}

std::size_t Arena::huge_bytes() const {
    return share()->huge_bytes();
}

std::int64_t Arena::exports() const {
    const std::lock_guard guard(mutex_);
    return mapping_ ? mapping_->exports.load() : 0;
}

void Arena::close() {
    const std::lock_guard guard(mutex_);
    if (!mapping_) return;
    const std::int64_t alive = mapping_->exports.load();
    if (alive > 0) {
        throw std::runtime_error("cannot close an arena of " + std::to_string(nbytes_) +
                                 " bytes: " + std::to_string(alive) + " exported view(s) are still alive");
    }
    mapping_.reset();
}

}  // namespace ssdplan
