// The backend for systems that forbid io_uring: a few threads that each move one block at a time with pread and pwrite.
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <deque>
#include <thread>

#include "engine.hpp"

namespace ssdplan {
namespace {

class ThreadBackend final : public Backend {
  public:
    ThreadBackend(unsigned queue_depth, unsigned threads) {
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
            for (Block& block : blocks) pending_.push_back(std::move(block));
        }
        if (blocks.size() == 1) {
            wake_.notify_one();
        } else {
            wake_.notify_all();
        }
    }

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
            Block block = std::move(pending_.front());
            pending_.pop_front();
            lock.unlock();
            transfer(block);
        }
    }

    static void transfer(Block& block) {
        if (block.request->failed()) {
            block.abandon(ECANCELED, "an earlier block of the request failed");
            return;
        }
        for (;;) {
            const int fd = block.file->descriptor.get();
            const auto offset = static_cast<off_t>(block.offset);
            const ssize_t moved = block.direction == Direction::read ? ::pread(fd, block.memory, block.nbytes, offset)
                                                                     : ::pwrite(fd, block.memory, block.nbytes, offset);
            if (block.absorb(moved < 0 ? -static_cast<long>(errno) : static_cast<long>(moved))) return;
        }
    }

    std::mutex mutex_;
    std::condition_variable wake_;
    std::deque<Block> pending_;
    bool stopping_ = false;
    std::vector<std::thread> workers_;
};

}  // namespace

std::unique_ptr<Backend> make_thread_backend(unsigned queue_depth, unsigned threads) {
    return std::make_unique<ThreadBackend>(queue_depth, threads);
}

}  // namespace ssdplan
