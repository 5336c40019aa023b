// The io_uring backend. One thread owns a ring: it submits all that waits, waits in io_uring_enter and drains all that
// has completed, so the ring needs no lock, and no request dies with the thread of a caller (the kernel cancels what a
// thread submitted when that thread exits). Callers leave blocks and commands and ring an eventfd that the ring itself
// reads. A polled ring asks the drive for completions instead of waiting for its interrupts; it can read no eventfd, so
// its thread sleeps on a condition variable while nothing is in flight, and only then.
#include "block_queue.hpp"
#include "engine.hpp"
#include "faults.hpp"
#include "ring.hpp"

#ifdef SSDPLAN_HAS_IO_URING

#include <sys/eventfd.h>
#include <sys/resource.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <functional>
#include <future>
#include <map>
#include <system_error>
#include <thread>

namespace ssdplan {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::size_t kLargestEntry = std::size_t{1} << 30;  // of a registered buffer: the kernel takes no more
// The kernel merges neighbours among what is submitted together. Small transfers gain by that; large ones lose, since
// the drive is then given fewer to work on at once.
constexpr std::uint32_t kLarge = 128 << 10;
constexpr unsigned kBufferPlaces = 4096;
constexpr unsigned kFilePlaces = 1024;

Descriptor make_eventfd() {
    const int fd = ::eventfd(0, EFD_CLOEXEC);
    if (fd < 0) fail_system(errno, "eventfd");
    return Descriptor(fd);
}

io_uring_sqe operation(unsigned char opcode, int fd, std::uint64_t offset, const void* memory, std::uint32_t nbytes,
                       std::uint64_t user_data) {
    io_uring_sqe entry{};
    entry.opcode = opcode;
    entry.fd = fd;
    entry.off = offset;
    entry.addr = reinterpret_cast<std::uintptr_t>(memory);
    entry.len = nbytes;
    entry.user_data = user_data;
    return entry;
}

std::string why_not_registered(int error) {
    std::string reason = std::generic_category().message(error);
    if (error == EINVAL) reason += " (the kernel has no table of buffers that can change)";
    rlimit limit{};
    if (error == ENOMEM && ::getrlimit(RLIMIT_MEMLOCK, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY) {
        reason += " (RLIMIT_MEMLOCK is " + std::to_string(limit.rlim_cur) + " bytes)";
    }
    return reason;
}

class UringBackend final : public Backend {
  public:
    // A polled one has `others`, which move what refuses to be polled. `flags` are the ring's.
    UringBackend(unsigned queue_depth, Faults& faults, Backend* others, unsigned flags)
        : queue_depth_(queue_depth),
          polled_(others != nullptr),
          others_(others),
          flags_(flags),
          faults_(faults),
          slots_(queue_depth),
          wake_(make_eventfd()) {
        free_.reserve(queue_depth);
        for (unsigned slot = queue_depth; slot > 0; --slot) free_.push_back(slot - 1);
        std::promise<void> ready;
        std::future<void> is_ready = ready.get_future();
        thread_ = std::thread([this, &ready] { serve(ready); });
        try {
            is_ready.get();
        } catch (...) {
            thread_.join();
            throw;
        }
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
                for (Block& block : blocks) pending_.push(std::move(block));
            }
        }
        if (broken == 0) {
            ring_bell();
        } else {
            for (Block& block : blocks) block.abandon(broken, "the io_uring stopped");
        }
    }

    std::string description() const override {
        std::string text = "io_uring, queue depth " + std::to_string(queue_depth_);
        if (buffers_in_use_.load() && files_in_use_.load()) return text + ", registered buffers and files";
        if (buffers_in_use_.load()) return text + ", registered buffers";
        return files_in_use_.load() ? text + ", registered files" : text;
    }

    std::string register_memory(std::uintptr_t address, std::size_t nbytes) override {
        std::string reason = "the io_uring stopped";
        run([&] { reason = add_buffers(address, nbytes); });
        return reason;
    }

    void unregister_memory(std::uintptr_t address) override {
        run([&] { remove_buffers(address); });
    }

    int register_file(int fd) override {
        int place = -1;
        run([&] {
            place = files_->add(&fd);
            if (place >= 0) files_in_use_ = true;
        });
        return std::max(place, -1);
    }

    void unregister_file(int place) override {
        run([&] { remove_file(place); });
    }

  private:
    static constexpr std::uint64_t kBell = ~std::uint64_t{0};

    // A part of registered memory that is one entry of the kernel's table.
    struct Buffer {
        std::uintptr_t end;
        std::uintptr_t range;  // the address by which all parts of it were registered
        int place;
    };

    struct Slot {
        Block block;
        bool delayed = false;
        __kernel_timespec delay{};
    };

    // --- What callers' threads run.

    void ring_bell() {
        if (polled_) {
            woken_.notify_one();
            return;
        }
        if (rung_.exchange(true)) return;  // the thread has yet to look
        const std::uint64_t one = 1;
        // The counter blocks at 2^64 - 2 rings without a read: never. Nothing else can fail but an interruption.
        while (::write(wake_.get(), &one, sizeof one) < 0 && errno == EINTR) {
        }
    }

    // Has the ring's thread run a command between two submissions, and waits for it. Left out when the ring stopped.
    void run(const std::function<void()>& command) {
        std::promise<void> done;
        {
            const std::lock_guard lock(mutex_);
            if (broken_ != 0) return;
            commands_.push_back({&command, &done});
        }
        ring_bell();
        done.get_future().wait();
    }

    // --- What the ring's thread runs.

    void serve(std::promise<void>& ready) noexcept {
        try {
            ring_ = std::make_unique<Ring>(queue_depth_ + 1, flags_);
            if (!polled_) probe();
            buffers_ =
                std::make_unique<RingTable>(ring_->fd(), IORING_REGISTER_BUFFERS2, IORING_REGISTER_BUFFERS_UPDATE,
                                            IORING_UNREGISTER_BUFFERS, kBufferPlaces);
            files_ = std::make_unique<RingTable>(ring_->fd(), IORING_REGISTER_FILES2, IORING_REGISTER_FILES_UPDATE2,
                                                 IORING_UNREGISTER_FILES, kFilePlaces);
        } catch (...) {
            ready.set_exception(std::current_exception());
            return;
        }
        ready.set_value();
        work();
        buffers_.reset();
        files_.reset();
        ring_.reset();
    }

    void listen() {
        ring_->push(operation(IORING_OP_READ, wake_.get(), 0, &bell_, sizeof bell_, kBell));
        listening_ = true;
    }

    // A system may offer io_uring and still forbid its use: one real read shows it.
    void probe() {
        ring_bell();
        listen();
        if (const int error = ring_->submit_and_wait(); error != 0) fail_system(error, "io_uring_enter");
        int result = 0;
        ring_->drain([&result](std::uint64_t, int got) { result = got; });
        listening_ = false;
        rung_ = false;
        if (result != static_cast<int>(sizeof bell_))
            fail_system(result < 0 ? -result : EIO, "a read through io_uring");
    }

    std::string add_buffers(std::uintptr_t address, std::size_t nbytes) {
        const std::uintptr_t end = address + nbytes;
        const auto after = ranges_.lower_bound(end);
        if (after != ranges_.begin() && std::prev(after)->second.end > address) return "registered already";
        for (std::uintptr_t begin = address; begin < end; begin += kLargestEntry) {
            const std::size_t part = std::min<std::size_t>(kLargestEntry, end - begin);
            const iovec entry{reinterpret_cast<void*>(begin), part};
            const int place = buffers_->add(&entry);
            if (place < 0) {
                remove_buffers(address);
                return why_not_registered(-place);
            }
            ranges_.emplace(begin, Buffer{begin + part, address, place});
        }
        buffers_in_use_ = true;
        return "";
    }

    void remove_buffers(std::uintptr_t range) {
        const iovec nothing{};
        for (auto at = ranges_.begin(); at != ranges_.end();) {
            if (at->second.range == range) {
                buffers_->remove(at->second.place, &nothing);
                at = ranges_.erase(at);
            } else {
                ++at;
            }
        }
        buffers_in_use_ = !ranges_.empty();
    }

    void remove_file(int place) {
        const int nothing = -1;
        files_->remove(place, &nothing);
    }

    // The place of the registered memory that all of the block lies in, or -1.
    int place_of(const Block& block) const {
        if (ranges_.empty()) return -1;
        const auto begin = reinterpret_cast<std::uintptr_t>(block.memory);
        const auto after = ranges_.upper_bound(begin);
        if (after == ranges_.begin()) return -1;
        const Buffer& buffer = std::prev(after)->second;
        return begin + block.nbytes <= buffer.end ? buffer.place : -1;
    }

    void issue(unsigned slot, std::uint32_t nbytes) {
        const Block& block = slots_[slot].block;
        const bool read = block.direction == Direction::read;
        io_uring_sqe entry = operation(read ? IORING_OP_READ : IORING_OP_WRITE, block.file->descriptor.get(),
                                       block.offset, block.memory, nbytes, slot);
        if (const int place = place_of(block); place >= 0) {
            entry.opcode = read ? IORING_OP_READ_FIXED : IORING_OP_WRITE_FIXED;
            entry.buf_index = static_cast<std::uint16_t>(place);
        }
        if (block.file->place >= 0 && block.file->registrar == this) {
            entry.fd = block.file->place;
            entry.flags |= IOSQE_FIXED_FILE;
        }
        ring_->push(entry);
        if (nbytes >= kLarge) ring_->submit();
    }

    void postpone(unsigned slot) {
        Slot& late = slots_[slot];
        if (polled_) {
            delayed_.emplace(Clock::now() + Faults::kDelay, slot);
            return;
        }
        late.delayed = true;
        late.delay.tv_sec = 0;
        late.delay.tv_nsec = std::chrono::nanoseconds(Faults::kDelay).count();
        ring_->push(operation(IORING_OP_TIMEOUT, -1, 0, &late.delay, 1, slot));
    }

    // Starts the transfer of a slot's block, or what a fault makes of it.
    void start(unsigned slot) {
        for (;;) {
            const Fault fault = faults_.start_transfer();
            if (fault.kind == Fault::Kind::delay) return postpone(slot);
            const std::uint32_t nbytes = slots_[slot].block.nbytes;
            if (fault.kind != Fault::Kind::error) {
                return issue(slot, fault.kind == Fault::Kind::cut ? Faults::cut(nbytes) : nbytes);
            }
            if (slots_[slot].block.absorb(-fault.code)) return release(slot);
        }
    }

    // Gives a block a slot, of which there must be a free one, and starts it.
    void start_block(Block block) {
        if (block.request->failed()) {
            block.abandon(ECANCELED, "an earlier block of the request failed");
            return;
        }
        const unsigned slot = free_.back();
        free_.pop_back();
        slots_[slot].block = std::move(block);
        start(slot);
    }

    void release(unsigned slot) {
        slots_[slot].block = Block{};
        free_.push_back(slot);
    }

    bool idle() const { return free_.size() == slots_.size(); }

    // Runs commands, moves blocks from the queue into free slots and starts them. False: everything has ended and so
    // must the thread.
    bool gather() {
        std::unique_lock lock(mutex_);
        if (polled_) sleep_until_wanted(lock);
        rung_ = false;
        // Operations that are queued but not submitted name places of the tables: those must not change under them.
        if (ring_->unsubmitted() == 0 && !commands_.empty()) {
            const std::vector<Command> commands = std::move(commands_);
            commands_.clear();
            lock.unlock();
            for (const Command& command : commands) {
                (*command.work)();
                command.done->set_value();
            }
            lock.lock();
        }
        while (!pending_.empty() && !free_.empty()) {
            Block block = pending_.pop();
            lock.unlock();
            start_block(std::move(block));
            lock.lock();
        }
        if (!polled_ && !stopping_ && !listening_) listen();
        return !(stopping_ && !listening_ && pending_.empty() && commands_.empty() && idle());
    }

    // A polled ring must only be waited for while something is in flight in it.
    void sleep_until_wanted(std::unique_lock<std::mutex>& lock) {
        for (;;) {
            while (!delayed_.empty() && delayed_.begin()->first <= Clock::now()) {
                const unsigned slot = delayed_.begin()->second;
                delayed_.erase(delayed_.begin());
                issue(slot, slots_[slot].block.nbytes);
            }
            const bool in_flight = slots_.size() - free_.size() > delayed_.size();
            const bool startable = !pending_.empty() && !free_.empty();
            if (in_flight || startable || !commands_.empty() || (stopping_ && idle())) return;
            if (delayed_.empty()) {
                woken_.wait(lock);
            } else {
                woken_.wait_until(lock, delayed_.begin()->first);
            }
        }
    }

    void complete(std::uint64_t user_data, int result) {
        if (user_data == kBell) {
            listening_ = false;
            return;
        }
        const auto slot = static_cast<unsigned>(user_data);
        if (slots_[slot].delayed) {
            slots_[slot].delayed = false;
            issue(slot, slots_[slot].block.nbytes);
        } else if (polled_ && (result == -EOPNOTSUPP || result == -EINVAL)) {
            // If it was not for the polling, the others will say so.
            slots_[slot].block.file->backend = others_;
            std::vector<Block> refused;
            refused.push_back(std::move(slots_[slot].block));
            release(slot);
            others_->submit(std::move(refused));
        } else if (slots_[slot].block.absorb(result)) {
            release(slot);
        } else {
            start(slot);
        }
    }

    void work() noexcept {
        while (gather()) {
            if (polled_ && slots_.size() - free_.size() == delayed_.size()) continue;  // nothing is in flight
            if (const int error = ring_->submit_and_wait(); error != 0) {
                give_up(error);
                return;
            }
            ring_->drain([this](std::uint64_t user_data, int result) { complete(user_data, result); });
        }
    }

    // The ring is unusable, which no running kernel should do: nobody may wait for ever.
    void give_up(int error) {
        const std::lock_guard lock(mutex_);
        broken_ = error;
        for (Slot& slot : slots_) {
            if (slot.block.request) slot.block.abandon(error, "the io_uring stopped");
        }
        while (!pending_.empty()) pending_.pop().abandon(error, "the io_uring stopped");
        for (const Command& command : commands_) command.done->set_value();
        commands_.clear();
    }

    struct Command {
        const std::function<void()>* work;
        std::promise<void>* done;
    };

    const unsigned queue_depth_;
    const bool polled_;
    Backend* const others_;
    const unsigned flags_;
    Faults& faults_;
    // The ring's thread alone uses these.
    std::unique_ptr<Ring> ring_;
    std::unique_ptr<RingTable> buffers_;
    std::unique_ptr<RingTable> files_;
    std::map<std::uintptr_t, Buffer> ranges_;  // by the address of their first byte
    std::vector<Slot> slots_;
    std::vector<unsigned> free_;
    std::multimap<Clock::time_point, unsigned> delayed_;  // of a polled ring, which has no timeouts
    std::uint64_t bell_ = 0;
    bool listening_ = false;
    // Callers share these with it.
    Descriptor wake_;
    std::atomic<bool> rung_{false};
    std::atomic<bool> buffers_in_use_{false};
    std::atomic<bool> files_in_use_{false};
    std::mutex mutex_;
    std::condition_variable woken_;
    BlockQueue pending_;
    std::vector<Command> commands_;
    bool stopping_ = false;
    int broken_ = 0;
    std::thread thread_;
};

}  // namespace

std::unique_ptr<Backend> make_uring_backend(unsigned queue_depth, Faults& faults) {
    return std::make_unique<UringBackend>(queue_depth, faults, nullptr, 0U);
}

std::unique_ptr<Backend> make_polled_backend(unsigned queue_depth, Faults& faults, Backend& others, bool pretend) {
    return std::make_unique<UringBackend>(queue_depth, faults, &others, pretend ? 0U : IORING_SETUP_IOPOLL);
}

int try_polled_read(int fd) {
    constexpr std::size_t kPage = 4096;
    std::unique_ptr<void, void (*)(void*)> page(std::aligned_alloc(kPage, kPage), std::free);
    if (!page) return ENOMEM;
    try {
        Ring ring(1, IORING_SETUP_IOPOLL);
        ring.push(operation(IORING_OP_READ, fd, 0, page.get(), kPage, 0));
        if (const int error = ring.submit_and_wait(); error != 0) {
            if (ring.unsubmitted() == 0) (void)page.release();  // the drive may still write to it
            return error;
        }
        int result = -EIO;
        ring.drain([&result](std::uint64_t, int got) { result = got; });
        return result < 0 ? -result : 0;
    } catch (const std::system_error& error) {
        return error.code().value();
    }
}

}  // namespace ssdplan

#else

namespace ssdplan {

std::unique_ptr<Backend> make_uring_backend(unsigned, Faults&) {
    throw std::system_error(ENOSYS, std::generic_category(), "this build has no io_uring");
}

std::unique_ptr<Backend> make_polled_backend(unsigned queue_depth, Faults& faults, Backend&, bool) {
    return make_uring_backend(queue_depth, faults);
}

int try_polled_read(int) {
    return ENOSYS;
}

}  // namespace ssdplan

#endif
