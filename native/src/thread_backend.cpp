// The backend for systems that forbid io_uring: a few threads that each move one block at a time with pread and pwrite.
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <thread>

#include "block_queue.hpp"
#include "engine.hpp"
#include "faults.hpp"

namespace ssdplan {
namespace {

class ThreadBackend final : public Backend {
  public:
    ThreadBackend(unsigned queue_depth, unsigned threads, Faults& faults) : faults_(faults) {
        const unsigned count = std::min(queue_depth, threads);
        workers_.reserve(count);
        try {
            for (unsigned i = 0; i < count; ++i) workers_.emplace_back([this] { work(); });
        } catch (...) {
            stop();
            throw;
        }
    }

    ~ThreadBackend() override { stop(); }

    void submit(std::vector<Block> blocks) override {
        {
            const std::lock_guard lock(mutex_);
            for (Block& block : blocks) pending_.push(std::move(block));
        }
        if (blocks.size() == 1) {
            wake_.notify_one();
        } else {
            wake_.notify_all();
        }
    }

    std::string description() const override {
        return std::to_string(workers_.size()) + (workers_.size() == 1 ? " thread" : " threads");
    }

    std::string register_memory(std::uintptr_t, std::size_t) override { return "threads have no use for it"; }
    void unregister_memory(std::uintptr_t) override {}
    int register_file(int) override { return -1; }
    void unregister_file(int) override {}

  private:
    void stop() {
        {
            const std::lock_guard lock(mutex_);
            stopping_ = true;
        }
        wake_.notify_all();
        for (std::thread& worker : workers_) worker.join();
    }

    void work() noexcept {
        for (;;) {
            std::unique_lock lock(mutex_);
            wake_.wait(lock, [this] { return stopping_ || !pending_.empty(); });
            if (pending_.empty()) return;
            Block block = pending_.pop();
            lock.unlock();
            if (block.request->failed()) {
                block.abandon(ECANCELED, "an earlier block of the request failed");
                continue;
            }
            while (!block.absorb(transfer(block))) {
            }
        }
    }

    // Moves what it can of a block. Returns the bytes, or a negative errno.
    long transfer(const Block& block) {
        const Fault fault = faults_.start_transfer();
        if (fault.kind == Fault::Kind::error) return -fault.code;
        if (fault.kind == Fault::Kind::delay) std::this_thread::sleep_for(Faults::kDelay);
        const std::uint32_t nbytes = fault.kind == Fault::Kind::cut ? Faults::cut(block.nbytes) : block.nbytes;
        const int fd = block.file->descriptor.get();
        const auto offset = static_cast<off_t>(block.offset);
        const ssize_t moved = block.direction == Direction::read ? ::pread(fd, block.memory, nbytes, offset)
                                                                 : ::pwrite(fd, block.memory, nbytes, offset);
        return moved < 0 ? -static_cast<long>(errno) : static_cast<long>(moved);
    }

    Faults& faults_;
    std::mutex mutex_;
    std::condition_variable wake_;
    BlockQueue pending_;
    bool stopping_ = false;
    std::vector<std::thread> workers_;
};

}  // namespace

std::unique_ptr<Backend> make_thread_backend(unsigned queue_depth, unsigned threads, Faults& faults) {
    return std::make_unique<ThreadBackend>(queue_depth, threads, faults);
}

}  // namespace ssdplan
