// The io_uring backend, on raw system calls. One thread owns the ring: it submits, waits in io_uring_enter and drains
// what has completed, so the ring needs no lock, and no request dies with the thread of a caller (the kernel cancels
// what a thread submitted when that thread exits). Callers put blocks into a queue and ring an eventfd that the ring
// itself reads.
#include "engine.hpp"

#if defined(__linux__) && __has_include(<linux/io_uring.h>)

#include <linux/io_uring.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <deque>
#include <system_error>
#include <thread>

namespace ssdplan {
namespace {

[[noreturn]] void fail(int error, const char* what) {
    throw std::system_error(error, std::generic_category(), what);
}

// A shared mapping of a part of the ring.
class RingMemory {
  public:
    RingMemory(int fd, std::size_t nbytes, std::uint64_t offset) : nbytes_(nbytes) {
        void* const memory =
            ::mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, static_cast<off_t>(offset));
        if (memory == MAP_FAILED) fail(errno, "mmap of an io_uring");
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

// The two queues of one io_uring, used from one thread.
class Ring {
  public:
    explicit Ring(unsigned entries) {
        io_uring_params params{};
        const long fd = ::syscall(__NR_io_uring_setup, entries, &params);
        if (fd < 0) fail(errno, "io_uring_setup");
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

    // Queues one operation. The caller keeps at most `entries` of them queued or in flight, so there is always room.
    void push(const io_uring_sqe& operation) {
        const unsigned tail = *sq_tail_;  // written by this thread alone
        const unsigned index = tail & sq_mask_;
        sqes_[index] = operation;
        sq_array_[index] = index;
        __atomic_store_n(sq_tail_, tail + 1, __ATOMIC_RELEASE);
        ++unsubmitted_;
    }

    // Submits what is queued and waits for at least one completion. Returns 0 or an errno.
    int submit_and_wait() {
        for (;;) {
            const long submitted = ::syscall(__NR_io_uring_enter, fd_.get(), unsubmitted_, 1U,
                                             static_cast<unsigned>(IORING_ENTER_GETEVENTS), nullptr, std::size_t{0});
            if (submitted >= 0) {
                unsubmitted_ -= static_cast<unsigned>(submitted);
                if (unsubmitted_ == 0 || has_completion()) return 0;
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

Descriptor make_eventfd() {
    const int fd = ::eventfd(0, EFD_CLOEXEC);
    if (fd < 0) fail(errno, "eventfd");
    return Descriptor(fd);
}

io_uring_sqe transfer(unsigned char opcode, int fd, std::uint64_t offset, void* memory, std::uint32_t nbytes,
                      std::uint64_t user_data) {
    io_uring_sqe operation{};
    operation.opcode = opcode;
    operation.fd = fd;
    operation.off = offset;
    operation.addr = reinterpret_cast<std::uintptr_t>(memory);
    operation.len = nbytes;
    operation.user_data = user_data;
    return operation;
}

class UringBackend final : public Backend {
  public:
    explicit UringBackend(unsigned queue_depth) : ring_(queue_depth + 1), slots_(queue_depth), wake_(make_eventfd()) {
        probe();
        free_.reserve(queue_depth);
        for (unsigned slot = queue_depth; slot > 0; --slot) free_.push_back(slot - 1);
        thread_ = std::thread([this] { work(); });
    }

    ~UringBackend() override {
        {
            const std::lock_guard lock(mutex_);
            stopping_ = true;
        }
        ring_bell();
        thread_.join();
    }

    void submit(std::vector<Block> blocks) override {
        int broken = 0;
        {
            const std::lock_guard lock(mutex_);
            broken = broken_;
            if (broken == 0) {
                for (Block& block : blocks) pending_.push_back(std::move(block));
            }
        }
        if (broken == 0) {
            ring_bell();
        } else {
            for (Block& block : blocks) block.abandon(broken, "the io_uring stopped");
        }
    }

  private:
    static constexpr std::uint64_t kBell = ~std::uint64_t{0};

    void ring_bell() {
        const std::uint64_t one = 1;
        // The counter blocks at 2^64 - 2 rings without a read: never. Nothing else can fail but an interruption.
        while (::write(wake_.get(), &one, sizeof one) < 0 && errno == EINTR) {
        }
    }

    void listen() {
        ring_.push(transfer(IORING_OP_READ, wake_.get(), 0, &bell_, sizeof bell_, kBell));
        listening_ = true;
    }

    // A system may offer io_uring and still forbid its use: one real read shows it.
    void probe() {
        ring_bell();
        listen();
        if (const int error = ring_.submit_and_wait(); error != 0) fail(error, "io_uring_enter");
        int result = 0;
        ring_.drain([&result](std::uint64_t, int got) { result = got; });
        listening_ = false;
        if (result != static_cast<int>(sizeof bell_)) fail(result < 0 ? -result : EIO, "a read through io_uring");
    }

    void start(unsigned slot) {
        const Block& block = slots_[slot];
        const bool read = block.direction == Direction::read;
        ring_.push(transfer(read ? IORING_OP_READ : IORING_OP_WRITE, block.file->descriptor.get(), block.offset,
                            block.memory, block.nbytes, slot));
    }

    // Moves blocks from the queue into free slots and starts them. False: everything has ended and so must the thread.
    bool fill() {
        const std::lock_guard lock(mutex_);
        while (!pending_.empty() && !free_.empty()) {
            Block block = std::move(pending_.front());
            pending_.pop_front();
            if (block.request->failed()) {
                block.abandon(ECANCELED, "an earlier block of the request failed");
                continue;
            }
            const unsigned slot = free_.back();
            free_.pop_back();
            slots_[slot] = std::move(block);
            start(slot);
        }
        if (!stopping_ && !listening_) listen();
        return !(stopping_ && !listening_ && pending_.empty() && free_.size() == slots_.size());
    }

    void complete(std::uint64_t user_data, int result) {
        if (user_data == kBell) {
            listening_ = false;
            return;
        }
        const auto slot = static_cast<unsigned>(user_data);
        if (!slots_[slot].absorb(result)) {
            start(slot);
            return;
        }
        slots_[slot] = Block{};
        free_.push_back(slot);
    }

    void work() noexcept {
        while (fill()) {
            if (const int error = ring_.submit_and_wait(); error != 0) {
                give_up(error);
                return;
            }
            ring_.drain([this](std::uint64_t user_data, int result) { complete(user_data, result); });
        }
    }

    // The ring is unusable, which no running kernel should do: nobody may wait for ever.
    void give_up(int error) {
        const std::lock_guard lock(mutex_);
        broken_ = error;
        for (Block& block : slots_) {
            if (block.request) block.abandon(error, "the io_uring stopped");
        }
        for (Block& block : pending_) block.abandon(error, "the io_uring stopped");
        pending_.clear();
    }

    // The ring's thread alone uses these.
    Ring ring_;
    std::vector<Block> slots_;
    std::vector<unsigned> free_;
    std::uint64_t bell_ = 0;
    bool listening_ = false;
    // Callers share these with it.
    Descriptor wake_;
    std::mutex mutex_;
    std::deque<Block> pending_;
    bool stopping_ = false;
    int broken_ = 0;
    std::thread thread_;
};

}  // namespace

std::unique_ptr<Backend> make_uring_backend(unsigned queue_depth) {
    return std::make_unique<UringBackend>(queue_depth);
}

}  // namespace ssdplan

#else

#include <system_error>

namespace ssdplan {

std::unique_ptr<Backend> make_uring_backend(unsigned) {
    throw std::system_error(ENOSYS, std::generic_category(), "this build has no io_uring");
}

}  // namespace ssdplan

#endif
