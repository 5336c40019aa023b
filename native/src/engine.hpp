// Asynchronous direct I/O on files and block devices. The engine owns the open files, splits requests into blocks and
// accounts for their results; a backend (io_uring, or a pool of threads) moves the blocks. The engine never owns the
// memory that a transfer targets.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <shared_mutex>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "descriptor.hpp"
#include "faults.hpp"
#include "owner.hpp"

namespace ssdplan {

// An I/O error, with everything that a message must name.
class IoFailure : public std::exception {
  public:
    IoFailure(int code, std::string path, std::string action, std::uint64_t offset, std::uint64_t nbytes,
              std::string detail = "");
    const char* what() const noexcept override { return message_.c_str(); }

    int code;  // an errno
    std::string path;
    std::string message_;
    std::uint64_t offset;
    std::uint64_t nbytes;
};

class Backend;

// One open file. `active` counts its blocks that are queued or in flight, and the calls that use its descriptor: it is
// closed when there are none, so that no use meets another file under the same number.
struct File {
    // Counts one use. False when the file is being closed.
    bool begin_use();
    void end_use();

    std::string path;
    Descriptor descriptor;
    bool read_only = false;
    std::atomic<Backend*> backend{nullptr};  // who moves its blocks
    Backend* registrar = nullptr;            // in whose table of registered files it has this place, or -1
    int place = -1;
    std::mutex mutex;
    std::condition_variable idle;
    std::size_t active = 0;
    bool closing = false;
    std::mutex flushing;
    std::optional<IoFailure> flush_failure;  // of a file that is `flushing`
};

// The shared state of a request: it lives as long as a block or a handle refers to it.
class Request {
  public:
    // One that is `told` remembers which of its blocks have ended, for take_ended().
    Request(std::size_t blocks, std::uint64_t nbytes, bool told = false)
        : remaining_(blocks), nbytes_(nbytes), told_(told) {
        if (told) ended_.reserve(blocks);
    }

    std::uint64_t wait();  // throws the IoFailure of the first block that failed
    bool done() const;
    bool failed() const noexcept { return failed_.load(std::memory_order_relaxed); }
    std::uint64_t nbytes() const noexcept { return nbytes_; }

    // Waits until `count` blocks have ended that were not taken yet, or else all have, and puts the numbers of those
    // that have into `blocks`, whose content goes. None: all were taken.
    void take_ended(std::size_t count, std::vector<std::uint32_t>& blocks);

    void fail(IoFailure failure);
    void finish_block(std::uint32_t number);

  private:
    mutable std::mutex mutex_;
    std::condition_variable finished_;
    std::size_t remaining_;
    std::uint64_t nbytes_;
    const bool told_;
    std::vector<std::uint32_t> ended_;  // and not taken; with room for all
    std::size_t wanted_ = 0;            // how many of them are waited for; 0 when nobody waits for them
    std::atomic<bool> failed_{false};
    std::optional<IoFailure> failure_;
};

enum class Direction { read, write };

// A contiguous transfer of at most block_bytes; what is left of it after a short one.
struct Block {
    std::shared_ptr<File> file;
    std::shared_ptr<Request> request;
    Direction direction = Direction::read;
    std::uint64_t offset = 0;
    std::byte* memory = nullptr;
    std::uint32_t nbytes = 0;
    std::uint32_t retries = 0;
    std::uint32_t number = 0;  // of the request's blocks, in order of its segments
    bool urgent = false;

    // Takes the result of one transfer (bytes, or a negative errno). True: the block ended, well or not, and has been
    // accounted for. False: transfer what is left of it.
    bool absorb(long result);
    // Ends the block without a transfer.
    void abandon(int error, const char* detail);

  private:
    void finish();
};

// Moves blocks. All of it may be called from any thread.
class Backend {
  public:
    virtual ~Backend() = default;  // waits for all blocks
    virtual void submit(std::vector<Block> blocks) = 0;
    virtual std::string description() const = 0;  // one line, for people

    // Has the kernel keep memory, or a file, at hand. An optimisation: what is not registered is transferred as well,
    // and both may change while transfers are in flight. For memory, returns "" or why not; for a file, its place or
    // -1. What is not registered can be unregistered: that is nothing.
    virtual std::string register_memory(std::uintptr_t address, std::size_t nbytes) = 0;
    virtual void unregister_memory(std::uintptr_t address) = 0;
    virtual int register_file(int fd) = 0;
    virtual void unregister_file(int place) = 0;
};

// Throws std::system_error when io_uring is not to be had here.
std::unique_ptr<Backend> make_uring_backend(unsigned queue_depth, Faults& faults);
// An io_uring that asks the drive for completions, for files on which try_polled_read() succeeds; or, with `pretend`,
// the same thread on an io_uring that waits for them, for any file. A file that refuses to be polled goes to `others`.
std::unique_ptr<Backend> make_polled_backend(unsigned queue_depth, Faults& faults, Backend& others, bool pretend);
// Reads a file's first page through a polled io_uring. Returns 0, or an errno where that is not to be had. A page that
// was never written shows nothing, since no drive is asked for it.
int try_polled_read(int fd);
std::unique_ptr<Backend> make_thread_backend(unsigned queue_depth, unsigned threads, Faults& faults);

// A contiguous part of a request, before it is split.
struct Segment {
    std::int64_t file;
    std::int64_t offset;
    std::uintptr_t address;
    std::int64_t nbytes;
};

class Engine {
  public:
    // Throws std::invalid_argument, and IoFailure when the kind asked for is not to be had.
    Engine(const std::string& kind, std::int64_t queue_depth, std::int64_t block_bytes, std::int64_t threads,
           const std::string& polling = "auto", const std::vector<std::pair<std::int64_t, std::string>>& faults = {});
    ~Engine();
    Engine(const Engine&) = delete;
    Engine& operator=(const Engine&) = delete;

    const std::string& kind() const noexcept { return kind_; }
    std::string description() const;
    std::uint64_t transfers() const noexcept { return faults_.transfers(); }
    std::int64_t open(const std::string& path, std::optional<std::int64_t> create_bytes, bool read_only,
                      std::optional<int> descriptor = std::nullopt);
    std::uint64_t size(std::int64_t file) const;
    std::shared_ptr<Request> submit(Direction direction, const std::vector<Segment>& segments, bool urgent,
                                    bool told = false);
    std::uint32_t block_bytes() const noexcept { return block_bytes_; }  // a segment is split into from its start
    std::string register_memory(std::uintptr_t address, std::int64_t nbytes);
    void unregister_memory(std::uintptr_t address);
    void flush(std::int64_t file);
    void close_file(std::int64_t file);
    void close();

  private:
    Backend& choose_backend(int fd);  // for a file; the caller holds backend_mutex_
    std::shared_ptr<File> find(std::int64_t file) const;
    void split(Direction direction, const Segment& segment, std::vector<Block>& blocks) const;

    std::string kind_;
    std::string turned_down_;  // why io_uring was, when it was tried
    std::string polling_;
    unsigned queue_depth_;
    std::uint32_t block_bytes_;
    Faults faults_;
    mutable std::shared_mutex files_mutex_;
    std::unordered_map<std::int64_t, std::shared_ptr<File>> files_;
    std::int64_t next_file_ = 0;
    mutable std::shared_mutex backend_mutex_;  // shared to submit, exclusive to close
    OwnedPtr<Backend> backend_;
    mutable std::mutex polled_mutex_;  // of the next two
    OwnedPtr<Backend> polled_;         // made for the first file that is polled
    std::map<std::uintptr_t, std::size_t> registered_;
};

}  // namespace ssdplan
