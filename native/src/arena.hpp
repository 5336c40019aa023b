// One block of anonymous memory of exactly the size asked for (to one page), huge-page backed and page-locked where the
// system allows it, and touched at creation so that nothing is allocated later. It counts the views that were handed
// out, and never unmaps memory that a view still shows.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <new>
#include <string>

#include "owner.hpp"

namespace ssdplan {

class OutOfMemory : public std::bad_alloc {
  public:
    explicit OutOfMemory(std::string message) : message_(std::move(message)) {}
    const char* what() const noexcept override { return message_.c_str(); }

  private:
    std::string message_;
};

// The mapping itself. It is held by shared_ptr, from the arena and from every view.
class Mapping {
  public:
    Mapping(std::size_t nbytes, bool lock);  // throws OutOfMemory
    Mapping(const Mapping&) = delete;
    Mapping& operator=(const Mapping&) = delete;
    ~Mapping();

    std::byte* data() const noexcept { return data_; }
    std::size_t nbytes() const noexcept { return nbytes_; }
    const std::string& lock_error() const noexcept { return lock_error_; }
    std::size_t huge_bytes() const;  // what of it transparent huge pages back just now

    std::atomic<std::int64_t> exports{0};

  private:
    std::byte* data_ = nullptr;
    std::size_t nbytes_ = 0;
    std::size_t mapped_bytes_ = 0;
    std::string lock_error_;
    Owner owner_;
};

class Arena {
  public:
    Arena(std::int64_t nbytes, bool lock);  // throws std::invalid_argument, OutOfMemory

    std::size_t nbytes() const noexcept { return nbytes_; }
    std::uintptr_t address() const;
    bool locked() const;
    std::string lock_error() const;
    std::size_t huge_bytes() const;
    std::int64_t exports() const;
    std::shared_ptr<Mapping> share() const;  // throws std::runtime_error when closed
    void close();                            // throws std::runtime_error while views are alive

  private:
    mutable std::mutex mutex_;
    std::size_t nbytes_;
    std::shared_ptr<Mapping> mapping_;
};

}  // namespace ssdplan
