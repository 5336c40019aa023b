// A pool of threads for the kernels: made at the first use, grown when more are asked for, kept until the process ends.
// It is our own so that the process needs no second OpenMP runtime beside torch's.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace ssdplan {

class Workers {
  public:
    Workers() = default;
    Workers(const Workers&) = delete;
    Workers& operator=(const Workers&) = delete;
    ~Workers();

    // Calls work(i) once for every i below count, on up to `threads` threads of which the caller is one, and returns
    // when all calls have returned. `work` must not throw. Several threads may call this at once.
    void run(std::size_t count, unsigned threads, const std::function<void(std::size_t)>& work);

    // The one pool of the process.
    static Workers& shared();

  private:
    struct Job;

    void grow(unsigned helpers);
    void serve() noexcept;

    std::mutex mutex_;
    std::condition_variable wake_;
    std::deque<std::shared_ptr<Job>> queue_;
    bool stopping_ = false;
    std::vector<std::thread> threads_;
};

}  // namespace ssdplan
