#include "engine.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <limits>
#include <stdexcept>
#include <system_error>

#include "system_text.hpp"

namespace ssdplan {
namespace {

constexpr std::uint64_t kAlignment = 4096;  // of offsets, addresses and lengths: enough for every drive
constexpr std::uint64_t kSector = 512;      // what a transfer cut short is still a multiple of
constexpr std::uint32_t kMaxRetries = 64;   // of one block that the kernel interrupts or turns away

std::string number(std::int64_t value) {
    return std::to_string(value);
}

Descriptor open_retrying(const std::string& path, int flags, mode_t mode) {
    for (;;) {
        const int fd = ::open(path.c_str(), flags, mode);
        if (fd >= 0 || errno != EINTR) return Descriptor(fd);
    }
}

// The name under which an open file can be opened again, whatever its path names meanwhile.
std::string name_of(int descriptor) {
    return "/proc/self/fd/" + number(descriptor);
}

// Makes a new file of the given size, its owner's alone, its space allocated, and leaves nothing behind when that
// fails. Through a descriptor without O_DIRECT: where the file system cannot allocate, the C library does it by writing
// single bytes.
Descriptor create_file(const std::string& path, std::int64_t nbytes) {
    const auto length = static_cast<std::uint64_t>(nbytes);
    Descriptor descriptor = open_retrying(path, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    if (!descriptor.valid()) throw IoFailure(errno, path, "create", 0, length);
    int error = 0;
    do {
        error = ::posix_fallocate(descriptor.get(), 0, nbytes);
    } while (error == EINTR);
    if (error != 0) {
        (void)::unlink(path.c_str());
        throw IoFailure(error, path, "allocate", 0, length);
    }
    return descriptor;
}

bool is_block_device(const std::string& path) {
    struct stat status{};
    return ::stat(path.c_str(), &status) == 0 && S_ISBLK(status.st_mode);
}

// `name` is what is opened, `path` what messages call it.
Descriptor open_direct(const std::string& name, const std::string& path, bool read_only) {
    // A device that is to be written is claimed: one that is mounted, or claimed by another program, is refused. For
    // anything else the flag has no meaning without O_CREAT.
    const int access = read_only ? O_RDONLY : (is_block_device(name) ? O_RDWR | O_EXCL : O_RDWR);
    // O_NONBLOCK only keeps the opening of something that is no file from hanging; on a file it means nothing.
    Descriptor descriptor = open_retrying(name, access | O_DIRECT | O_CLOEXEC | O_NONBLOCK, 0);
    if (!descriptor.valid()) {
        const int error = errno;
        const char* detail = "";
        if (error == EINVAL) detail = "no direct I/O on this file system";
        if (error == EBUSY) detail = "the device is mounted, or in use by another program";
        throw IoFailure(error, path, "open", 0, 0, detail);
    }
    struct stat status{};
    if (::fstat(descriptor.get(), &status) != 0) throw IoFailure(errno, path, "stat", 0, 0);
    if (!S_ISREG(status.st_mode) && !S_ISBLK(status.st_mode)) {
        throw IoFailure(EINVAL, path, "open", 0, 0, "neither a file nor a block device");
    }
    return descriptor;
}

// Whether the drive under an open file has queues that are polled. A partition's are its whole drive's.
bool has_poll_queues(int fd) {
    struct stat status{};
    if (::fstat(fd, &status) != 0) return false;
    const dev_t device = S_ISBLK(status.st_mode) ? status.st_rdev : status.st_dev;
    const std::string folder =
        "/sys/dev/block/" + std::to_string(major(device)) + ":" + std::to_string(minor(device)) + "/";
    for (const char* const place : {"queue/io_poll", "../queue/io_poll"}) {
        const std::string offered = system_text(folder + place);
        if (!offered.empty()) return offered == "1\n";
    }
    return false;
}

std::string choose_kind(const std::string& asked) {
    const auto known = [](const std::string& kind) {
        return kind == "auto" || kind == "io_uring" || kind == "threads";
    };
    if (!known(asked)) {
        throw std::invalid_argument("engine kind must be 'auto', 'io_uring' or 'threads', not '" + asked + "'");
    }
    if (asked != "auto") return asked;
    const char* const variable = std::getenv("SSDPLAN_IO_ENGINE");
    if (variable == nullptr || *variable == '\0') return asked;
    if (!known(variable)) {
        throw std::invalid_argument("SSDPLAN_IO_ENGINE must be 'auto', 'io_uring' or 'threads', not '" +
                                    std::string(variable) + "'");
    }
    return variable;
}

// A use of an open file by a call, for as long as it lives. Throws std::invalid_argument when the file is being closed.
class Use {
  public:
    Use(std::shared_ptr<File> file, std::int64_t id) : file_(std::move(file)) {
        if (!file_->begin_use()) throw std::invalid_argument("no open file has the id " + number(id));
    }
    Use(const Use&) = delete;
    Use& operator=(const Use&) = delete;
    ~Use() { file_->end_use(); }
    File* operator->() const noexcept { return file_.get(); }

  private:
    std::shared_ptr<File> file_;
};

std::int64_t checked(const char* name, std::int64_t value, std::int64_t low, std::int64_t high) {
    if (value < low || value > high) {
        throw std::invalid_argument(std::string(name) + " must be from " + number(low) + " to " + number(high) +
                                    ", not " + number(value));
    }
    return value;
}

}  // namespace

IoFailure::IoFailure(int code_, std::string path_, std::string action, std::uint64_t offset_, std::uint64_t nbytes_,
                     std::string detail)
    : code(code_), path(std::move(path_)), message_(std::move(action)), offset(offset_), nbytes(nbytes_) {
    if (nbytes > 0) message_ += " of " + std::to_string(nbytes) + " bytes at offset " + std::to_string(offset);
    message_ += ": " + std::generic_category().message(code);
    if (!detail.empty()) message_ += " (" + detail + ")";
}

std::uint64_t Request::wait() {
    std::unique_lock lock(mutex_);
    finished_.wait(lock, [this] { return remaining_ == 0; });
    if (failure_) throw IoFailure(*failure_);
    return nbytes_;
}

bool Request::done() const {
    const std::lock_guard lock(mutex_);
    return remaining_ == 0;
}

void Request::fail(IoFailure failure) {
    const std::lock_guard lock(mutex_);
    if (!failure_) failure_ = std::move(failure);
    failed_.store(true, std::memory_order_relaxed);
}

void Request::take_ended(std::size_t count, std::vector<std::uint32_t>& blocks) {
    blocks.clear();
    std::unique_lock lock(mutex_);
    wanted_ = count;
    finished_.wait(lock, [&] { return remaining_ == 0 || ended_.size() >= count; });
    wanted_ = 0;
    blocks.insert(blocks.end(), ended_.begin(), ended_.end());
    ended_.clear();
}

void Request::finish_block(std::uint32_t number) {
    bool wake = false;
    {
        const std::lock_guard lock(mutex_);
        if (told_) ended_.push_back(number);
        wake = --remaining_ == 0 || (wanted_ != 0 && ended_.size() == wanted_);
    }
    if (wake) finished_.notify_all();  // who wakes finds the mutex free
}

bool File::begin_use() {
    const std::lock_guard lock(mutex);
    if (closing) return false;
    ++active;
    return true;
}

void File::end_use() {
    const std::lock_guard lock(mutex);
    if (--active == 0) idle.notify_all();
}

void Block::finish() {
    request->finish_block(number);
    file->end_use();  // last: who waited for the file finds the request done
}

void Block::abandon(int error, const char* detail) {
    request->fail(
        IoFailure(error, file->path, direction == Direction::read ? "read" : "write", offset, nbytes, detail));
    finish();
}

bool Block::absorb(long result) {
    if (result == -EINTR || result == -EAGAIN || result == -ECANCELED) {
        if (++retries <= kMaxRetries) return false;
    }
    if (result == -ENODATA) {  // the kernel's word for a medium error; here it means the end of a file
        abandon(EIO, "the drive reports a medium error");
        return true;
    }
    if (result < 0) {
        abandon(static_cast<int>(-result), "");
        return true;
    }
    const auto moved = static_cast<std::uint64_t>(result);
    if (moved >= nbytes) {
        finish();
        return true;
    }
    // Direct I/O goes on at a sector; less than one, or an odd end of a read, is the end of the file.
    const std::uint64_t whole = moved / kSector * kSector;
    if (direction == Direction::read && (moved == 0 || whole != moved)) {
        abandon(ENODATA, "end of file");
        return true;
    }
    if (whole == 0) {
        abandon(EIO, "nothing was written");
        return true;
    }
    offset += whole;
    memory += whole;
    nbytes -= static_cast<std::uint32_t>(whole);
    retries = 0;
    return false;
}

Engine::Engine(const std::string& kind, std::int64_t queue_depth, std::int64_t block_bytes, std::int64_t threads,
               const std::string& polling, const std::vector<std::pair<std::int64_t, std::string>>& faults)
    : polling_(polling),
      queue_depth_(static_cast<unsigned>(checked("queue_depth", queue_depth, 1, 4096))),
      faults_(faults) {
    if (polling != "auto" && polling != "off" && polling != "try" && polling != "pretend") {
        throw std::invalid_argument("polling must be 'auto', 'off', 'try' or 'pretend', not '" + polling + "'");
    }
    const auto workers = static_cast<unsigned>(checked("threads", threads, 1, 256));
    block_bytes_ = static_cast<std::uint32_t>(checked("block_bytes", block_bytes, kAlignment, std::int64_t{1} << 30));
    if (block_bytes_ % kAlignment != 0) {
        throw std::invalid_argument("block_bytes must be a multiple of 4096, not " + number(block_bytes));
    }
    kind_ = choose_kind(kind);
    if (kind_ != "threads") {
        try {
            backend_.reset(make_uring_backend(queue_depth_, faults_).release());
            kind_ = "io_uring";
            return;
        } catch (const std::system_error& error) {
            if (kind_ == "io_uring") throw IoFailure(error.code().value(), "io_uring", "set up", 0, 0);
            turned_down_ = error.code().message();
        }
    }
    backend_.reset(make_thread_backend(queue_depth_, workers, faults_).release());
    kind_ = "threads";
}

Engine::~Engine() {
    close();
}

std::string Engine::description() const {
    const std::shared_lock alive(backend_mutex_);
    if (!backend_) return kind_ + ", closed";
    std::string text = backend_->description();
    const std::lock_guard lock(polled_mutex_);
    if (polled_) text += polling_ == "pretend" ? ", polling pretended" : ", polling where the drive can";
    return turned_down_.empty() ? text : text + " (io_uring: " + turned_down_ + ")";
}

std::string Engine::register_memory(std::uintptr_t address, std::int64_t nbytes) {
    if (address == 0) throw std::invalid_argument("the address is null");
    if (nbytes <= 0 || address > std::numeric_limits<std::uintptr_t>::max() - static_cast<std::uint64_t>(nbytes)) {
        throw std::invalid_argument("nbytes must be positive and not overflow, not " + number(nbytes));
    }
    const std::shared_lock alive(backend_mutex_);
    if (!backend_) throw std::runtime_error("the engine is closed");
    const std::lock_guard lock(polled_mutex_);
    std::string reason = backend_->register_memory(address, static_cast<std::size_t>(nbytes));
    if (!reason.empty()) return reason;
    registered_.emplace(address, nbytes);
    if (polled_) (void)polled_->register_memory(address, static_cast<std::size_t>(nbytes));
    return reason;
}

void Engine::unregister_memory(std::uintptr_t address) {
    const std::shared_lock alive(backend_mutex_);
    if (!backend_) return;
    const std::lock_guard lock(polled_mutex_);
    backend_->unregister_memory(address);
    if (polled_) polled_->unregister_memory(address);
    registered_.erase(address);
}

Backend& Engine::choose_backend(int fd) {
    if (kind_ != "io_uring" || polling_ == "off") return *backend_;
    if (polling_ == "auto" && !has_poll_queues(fd)) return *backend_;
    const bool pretend = polling_ == "pretend";
    if (!pretend && try_polled_read(fd) != 0) return *backend_;
    const std::lock_guard lock(polled_mutex_);
    if (!polled_) {
        try {
            polled_.reset(make_polled_backend(queue_depth_, faults_, *backend_, pretend).release());
        } catch (const std::system_error&) {
            return *backend_;  // polling is faster, not needed
        }
        for (const auto& [address, nbytes] : registered_) (void)polled_->register_memory(address, nbytes);
    }
    return *polled_;
}

std::int64_t Engine::open(const std::string& path, std::optional<std::int64_t> create_bytes, bool read_only,
                          std::optional<int> descriptor) {
    if (create_bytes) {
        if (*create_bytes <= 0) {
            throw std::invalid_argument("create_bytes must be positive, not " + number(*create_bytes));
        }
        if (read_only) throw std::invalid_argument("a file cannot be created read-only");
        if (descriptor) throw std::invalid_argument("a file that is open cannot be created");
    }
    const std::shared_lock alive(backend_mutex_);
    if (!backend_) throw std::runtime_error("the engine is closed");
    Descriptor created;
    if (create_bytes) {
        created = create_file(path, *create_bytes);
        descriptor = created.get();
    }
    const std::string name = descriptor ? name_of(*descriptor) : path;
    auto file = std::make_shared<File>();
    try {
        file->descriptor = open_direct(name, path, read_only);
        if (const int error = created.close()) throw IoFailure(error, path, "close", 0, 0);
    } catch (const IoFailure&) {
        if (create_bytes) (void)::unlink(path.c_str());
        throw;
    }
    file->path = path;
    file->read_only = read_only;
    file->backend = &choose_backend(file->descriptor.get());
    // A kernel before 6.10 lets go of a registered file some time after it was told to; a claimed device would stay so.
    if (read_only || !is_block_device(name)) {
        file->registrar = file->backend;
        file->place = file->registrar->register_file(file->descriptor.get());
    }
    const std::unique_lock lock(files_mutex_);
    files_.emplace(next_file_, std::move(file));
    return next_file_++;
}

std::shared_ptr<File> Engine::find(std::int64_t file) const {
    const std::shared_lock lock(files_mutex_);
    const auto found = files_.find(file);
    if (found == files_.end()) throw std::invalid_argument("no open file has the id " + number(file));
    return found->second;
}

std::uint64_t Engine::size(std::int64_t file) const {
    const Use use(find(file), file);
    const off_t end = ::lseek(use->descriptor.get(), 0, SEEK_END);  // right for block devices, too
    if (end < 0) throw IoFailure(errno, use->path, "size", 0, 0);
    return static_cast<std::uint64_t>(end);
}

void Engine::split(Direction direction, const Segment& segment, std::vector<Block>& blocks) const {
    auto file = find(segment.file);
    if (segment.offset < 0 || segment.nbytes < 0 ||
        segment.nbytes > std::numeric_limits<std::int64_t>::max() - segment.offset) {
        throw std::invalid_argument("offset and nbytes must not be negative or overflow: offset " +
                                    number(segment.offset) + ", nbytes " + number(segment.nbytes));
    }
    const auto offset = static_cast<std::uint64_t>(segment.offset);
    const auto nbytes = static_cast<std::uint64_t>(segment.nbytes);
    if (offset % kAlignment != 0 || nbytes % kAlignment != 0 || segment.address % kAlignment != 0) {
        throw std::invalid_argument("direct I/O needs offset, address and nbytes in multiples of 4096: offset " +
                                    std::to_string(offset) + ", address " + std::to_string(segment.address) +
                                    ", nbytes " + std::to_string(nbytes));
    }
    if (nbytes > 0 && segment.address == 0) throw std::invalid_argument("the address is null");
    if (direction == Direction::write && file->read_only) {
        throw std::invalid_argument("'" + file->path + "' was opened read-only");
    }
    auto* const memory = reinterpret_cast<std::byte*>(segment.address);
    for (std::uint64_t begin = 0; begin < nbytes; begin += block_bytes_) {
        Block block;
        block.file = file;
        block.direction = direction;
        block.offset = offset + begin;
        block.memory = memory + begin;
        block.nbytes = static_cast<std::uint32_t>(std::min<std::uint64_t>(block_bytes_, nbytes - begin));
        blocks.push_back(std::move(block));
    }
}

std::shared_ptr<Request> Engine::submit(Direction direction, const std::vector<Segment>& segments, bool urgent,
                                        bool told) {
    std::vector<Block> blocks;
    std::uint64_t nbytes = 0;
    for (const Segment& segment : segments) {
        split(direction, segment, blocks);
        nbytes += static_cast<std::uint64_t>(segment.nbytes);
    }
    auto request = std::make_shared<Request>(blocks.size(), nbytes, told);
    const std::shared_lock alive(backend_mutex_);
    if (!backend_) throw std::runtime_error("the engine is closed");
    for (auto block = blocks.begin(); block != blocks.end(); ++block) {
        if (!block->file->begin_use()) {
            for (auto counted = blocks.begin(); counted != block; ++counted) counted->file->end_use();
            throw std::invalid_argument("'" + block->file->path + "' is being closed");
        }
        block->request = request;
        block->number = static_cast<std::uint32_t>(block - blocks.begin());
        block->urgent = urgent;
    }
    // Segments of one request may lie on drives that are polled and on others.
    const auto others = std::stable_partition(
        blocks.begin(), blocks.end(), [this](const Block& block) { return block.file->backend == backend_.get(); });
    std::vector<Block> polled(std::make_move_iterator(others), std::make_move_iterator(blocks.end()));
    blocks.erase(others, blocks.end());
    if (!polled.empty()) {
        const std::lock_guard lock(polled_mutex_);
        polled_->submit(std::move(polled));
    }
    if (!blocks.empty()) backend_->submit(std::move(blocks));
    return request;
}

void Engine::flush(std::int64_t file) {
    const Use handle(find(file), file);
    // The kernel reports a lost write once; another flush, later or at the same time, would succeed and hide it.
    const std::lock_guard lock(handle->flushing);
    if (handle->flush_failure) throw IoFailure(*handle->flush_failure);
    int error = faults_.start_flush();
    if (error == 0 && ::fdatasync(handle->descriptor.get()) != 0) error = errno;
    if (error == 0) return;
    handle->flush_failure.emplace(error, handle->path, "flush", 0, 0);
    throw IoFailure(*handle->flush_failure);
}

void Engine::close_file(std::int64_t file) {
    const std::shared_lock alive(backend_mutex_);
    std::shared_ptr<File> handle;
    {
        const std::unique_lock lock(files_mutex_);
        const auto found = files_.find(file);
        if (found == files_.end()) throw std::invalid_argument("no open file has the id " + number(file));
        handle = std::move(found->second);
        files_.erase(found);
    }
    std::unique_lock lock(handle->mutex);
    handle->closing = true;
    handle->idle.wait(lock, [&handle] { return handle->active == 0; });
    if (handle->place >= 0) handle->registrar->unregister_file(handle->place);
    const int error = handle->descriptor.close();
    if (error != 0) throw IoFailure(error, handle->path, "close", 0, 0);
}

void Engine::close() {
    {
        const std::unique_lock lock(backend_mutex_);
        const std::lock_guard polled(polled_mutex_);
        polled_.reset();  // first, since it hands on what refuses to be polled
        backend_.reset();
    }
    const std::unique_lock lock(files_mutex_);
    files_.clear();
}

}  // namespace ssdplan
