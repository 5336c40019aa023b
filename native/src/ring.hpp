// One io_uring on raw system calls: its two queues and its tables of registered buffers and files. It knows nothing of
// blocks. All of it is used from the thread that makes it. Where the system has no io_uring, neither is there a Ring.
#pragma once

#if defined(__linux__) && __has_include(<linux/io_uring.h>)
#define SSDPLAN_HAS_IO_URING

#include <linux/io_uring.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <system_error>
#include <thread>
#include <vector>

#include "descriptor.hpp"

namespace ssdplan {

[[noreturn]] inline void fail_system(int error, const char* what) {
    throw std::system_error(error, std::generic_category(), what);
}

// A shared mapping of a part of the ring.
class RingMemory {
  public:
    RingMemory(int fd, std::size_t nbytes, std::uint64_t offset) : nbytes_(nbytes) {
        void* const memory =
            ::mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, static_cast<off_t>(offset));
        if (memory == MAP_FAILED) fail_system(errno, "mmap of an io_uring");
        memory_ = static_cast<std::byte*>(memory);
    }
    RingMemory(const RingMemory&) = delete;
    RingMemory& operator=(const RingMemory&) = delete;
    ~RingMemory() { (void)::munmap(memory_, nbytes_); }

    template <typename T>
    T* at(std::size_t offset) const {
        return reinterpret_cast<T*>(memory_ + offset);
    }

  private:
    std::byte* memory_ = nullptr;
    std::size_t nbytes_;
};

// The places of a table that the kernel keeps, sparse: empty from the start, each filled and emptied on its own while
// transfers are in flight.
class RingTable {
  public:
    // `create`, `update` and `destroy` are io_uring_register's operations. Where a kernel or a rule forbids it,
    // every add() says so.
    RingTable(int ring, unsigned create, unsigned update, unsigned destroy, unsigned places)
        : ring_(ring), update_(update), destroy_(destroy) {
        io_uring_rsrc_register request{};
        request.nr = places;
        request.flags = IORING_RSRC_REGISTER_SPARSE;
        if (::syscall(__NR_io_uring_register, ring_, create, &request, sizeof request) < 0) {
            error_ = errno;
            return;
        }
        free_.reserve(places);
        for (unsigned place = places; place > 0; --place) free_.push_back(place - 1);
    }

    RingTable(const RingTable&) = delete;
    RingTable& operator=(const RingTable&) = delete;
    // The kernel takes a closed ring apart some time later; what the table holds is to be free at once.
    ~RingTable() {
        if (error_ == 0) (void)::syscall(__NR_io_uring_register, ring_, destroy_, nullptr, 0U);
    }

    // Puts an entry (an iovec or a descriptor) into a free place. Returns the place, or a negative errno.
    int add(const void* entry) {
        if (error_ != 0) return -error_;
        if (free_.empty()) return -ENFILE;
        const unsigned place = free_.back();
        if (const int error = set(place, entry); error != 0) return -error;
        free_.pop_back();
        return static_cast<int>(place);
    }

    // Empties a place with an entry that says so. What is in flight keeps what it uses.
    void remove(int place, const void* nothing) {
        if (set(static_cast<unsigned>(place), nothing) == 0) free_.push_back(static_cast<unsigned>(place));
    }

  private:
    int set(unsigned place, const void* entry) const {
        io_uring_rsrc_update2 request{};
        request.offset = place;
        request.data = reinterpret_cast<std::uintptr_t>(entry);
        request.nr = 1;
        return ::syscall(__NR_io_uring_register, ring_, update_, &request, sizeof request) < 0 ? errno : 0;
    }

    int ring_;
    unsigned update_;
    unsigned destroy_;
    int error_ = 0;
    std::vector<unsigned> free_;
};

class Ring {
  public:
    // Of `entries` operations. `flags` are IORING_SETUP_*. Throws std::system_error.
    Ring(unsigned entries, unsigned flags) {
        io_uring_params params{};
        params.flags = flags;
        const long fd = ::syscall(__NR_io_uring_setup, entries, &params);
        if (fd < 0) fail_system(errno, "io_uring_setup");
        fd_ = Descriptor(static_cast<int>(fd));
        const std::size_t sq_bytes = params.sq_off.array + params.sq_entries * sizeof(unsigned);
        const std::size_t cq_bytes = params.cq_off.cqes + params.cq_entries * sizeof(io_uring_cqe);
        sq_memory_ = std::make_unique<RingMemory>(fd_.get(), sq_bytes, IORING_OFF_SQ_RING);
        cq_memory_ = std::make_unique<RingMemory>(fd_.get(), cq_bytes, IORING_OFF_CQ_RING);
        sqe_memory_ =
            std::make_unique<RingMemory>(fd_.get(), params.sq_entries * sizeof(io_uring_sqe), IORING_OFF_SQES);
        sq_tail_ = sq_memory_->at<unsigned>(params.sq_off.tail);
        sq_mask_ = *sq_memory_->at<unsigned>(params.sq_off.ring_mask);
        sq_array_ = sq_memory_->at<unsigned>(params.sq_off.array);
        cq_head_ = cq_memory_->at<unsigned>(params.cq_off.head);
        cq_tail_ = cq_memory_->at<unsigned>(params.cq_off.tail);
        cq_mask_ = *cq_memory_->at<unsigned>(params.cq_off.ring_mask);
        cqes_ = cq_memory_->at<io_uring_cqe>(params.cq_off.cqes);
        sqes_ = sqe_memory_->at<io_uring_sqe>(0);
    }

    int fd() const noexcept { return fd_.get(); }
    unsigned unsubmitted() const noexcept { return unsubmitted_; }

    // Queues one operation. The caller keeps at most `entries` of them queued or in flight, so there is always room.
    void push(const io_uring_sqe& operation) {
        const unsigned tail = *sq_tail_;  // written by this thread alone
        const unsigned index = tail & sq_mask_;
        sqes_[index] = operation;
        sq_array_[index] = index;
        __atomic_store_n(sq_tail_, tail + 1, __ATOMIC_RELEASE);
        ++unsubmitted_;
    }

    // Submits what is queued without waiting. What the kernel does not take stays queued.
    void submit() {
        const long submitted = ::syscall(__NR_io_uring_enter, fd_.get(), unsubmitted_, 0U, 0U, nullptr, std::size_t{0});
        if (submitted > 0) unsubmitted_ -= static_cast<unsigned>(submitted);
    }

    // Submits what is queued and waits for at least one completion, in one system call. Returns 0 or an errno.
    int submit_and_wait() {
        for (;;) {
            const long submitted = ::syscall(__NR_io_uring_enter, fd_.get(), unsubmitted_, 1U,
                                             static_cast<unsigned>(IORING_ENTER_GETEVENTS), nullptr, std::size_t{0});
            if (submitted >= 0) {
                unsubmitted_ -= static_cast<unsigned>(submitted);
                // A signal, or the end of a polling thread's turn, ends the wait without any.
                if (has_completion()) return 0;
            } else if (errno == EAGAIN || errno == EBUSY) {
                if (has_completion()) return 0;
                std::this_thread::sleep_for(std::chrono::milliseconds(1));  // the kernel is short of memory
            } else if (errno != EINTR) {
                return errno;
            }
        }
    }

    // Calls handle(user_data, result) for every completion that has arrived, then gives their places back at once.
    template <typename Handle>
    void drain(Handle handle) {
        unsigned head = *cq_head_;  // written by this thread alone
        const unsigned tail = __atomic_load_n(cq_tail_, __ATOMIC_ACQUIRE);
        for (; head != tail; ++head) {
            const io_uring_cqe& completion = cqes_[head & cq_mask_];
            handle(completion.user_data, completion.res);
        }
        __atomic_store_n(cq_head_, head, __ATOMIC_RELEASE);
    }

  private:
    bool has_completion() const { return *cq_head_ != __atomic_load_n(cq_tail_, __ATOMIC_ACQUIRE); }

    Descriptor fd_;
    std::unique_ptr<RingMemory> sq_memory_;
    std::unique_ptr<RingMemory> cq_memory_;
    std::unique_ptr<RingMemory> sqe_memory_;
    unsigned* sq_tail_ = nullptr;
    unsigned* sq_array_ = nullptr;
    unsigned sq_mask_ = 0;
    io_uring_sqe* sqes_ = nullptr;
    unsigned* cq_head_ = nullptr;
    unsigned* cq_tail_ = nullptr;
    unsigned cq_mask_ = 0;
    io_uring_cqe* cqes_ = nullptr;
    unsigned unsubmitted_ = 0;
};

}  // namespace ssdplan

#endif
