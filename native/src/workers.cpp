#include "workers.hpp"

#include <algorithm>
#include <atomic>
#include <system_error>

#include "owner.hpp"

namespace ssdplan {

// A job outlives its caller's interest in it: a helper that comes late finds nothing left to claim. `work` is touched
// only by who has claimed an index, and the caller waits for all of those.
struct Workers::Job {
    Job(std::size_t count_, const std::function<void(std::size_t)>& work_) : count(count_), work(work_) {}

    void take_part() {
        std::size_t finished = 0;
        for (std::size_t i = next.fetch_add(1); i < count; i = next.fetch_add(1)) {
            work(i);
            ++finished;
        }
        if (finished == 0) return;
        const std::lock_guard lock(mutex);
        ended += finished;
        if (ended == count) all_ended.notify_all();
    }

    const std::size_t count;
    const std::function<void(std::size_t)>& work;
    std::atomic<std::size_t> next{0};
    std::mutex mutex;
    std::condition_variable all_ended;
    std::size_t ended = 0;
};

Workers::~Workers() {
    {
        const std::lock_guard lock(mutex_);
        stopping_ = true;
    }
    wake_.notify_all();
    for (std::thread& thread : threads_) thread.join();
}

Workers& Workers::shared() {
    static const OwnedPtr<Workers> workers(new Workers);
    return *workers;
}

void Workers::grow(unsigned helpers) {
    while (threads_.size() < helpers) {
        try {
            threads_.emplace_back([this] { serve(); });
        } catch (const std::system_error&) {
            return;  // fewer helpers are slower, not wrong: the caller does what they do not
        }
    }
}

void Workers::serve() noexcept {
    for (;;) {
        std::unique_lock lock(mutex_);
        wake_.wait(lock, [this] { return stopping_ || !queue_.empty(); });
        if (queue_.empty()) return;
        const std::shared_ptr<Job> job = std::move(queue_.front());
        queue_.pop_front();
        lock.unlock();
        job->take_part();
    }
}

void Workers::run(std::size_t count, unsigned threads, const std::function<void(std::size_t)>& work) {
    const auto helpers = static_cast<unsigned>(std::min<std::size_t>(threads, count)) - (count > 0 ? 1U : 0U);
    if (helpers == 0) {
        for (std::size_t i = 0; i < count; ++i) work(i);
        return;
    }
    const auto job = std::make_shared<Job>(count, work);
    {
        const std::lock_guard lock(mutex_);
        grow(helpers);
        for (unsigned i = 0; i < helpers; ++i) queue_.push_back(job);
    }
    wake_.notify_all();
    job->take_part();
    std::unique_lock lock(job->mutex);
    job->all_ended.wait(lock, [&job] { return job->ended == job->count; });
}

}  // namespace ssdplan
