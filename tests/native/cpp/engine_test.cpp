// Both engines under many threads: data, errors, priorities, registered memory, faults, requests that are dropped, and
// closing with work in flight.
#include "engine.hpp"

#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstring>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "arena.hpp"
#include "block_queue.hpp"
#include "check.hpp"
#include "checksum.hpp"
#include "ring.hpp"
#include "summed.hpp"

using namespace ssdplan;

namespace {

constexpr std::int64_t kPage = 4096;
constexpr int kThreads = 4;
constexpr std::int64_t kRegion = 2 << 20;  // each thread's own part of the file

std::string fresh_path(const std::string& suffix = "") {
    const std::string path = "engine_test." + std::to_string(::getpid()) + suffix;
    (void)::unlink(path.c_str());
    return path;
}

// Writes and reads back random ranges of one region; what the file holds is mirrored in `expected`.
void exercise(Engine& engine, std::int64_t file, int thread) {
    std::mt19937 random(static_cast<unsigned>(thread));
    Arena arena(2 * kRegion, false);
    auto* const source = reinterpret_cast<unsigned char*>(arena.address());
    unsigned char* const target = source + kRegion;
    std::vector<unsigned char> expected(kRegion, 0);
    const std::int64_t base = thread * kRegion;
    CHECK(engine.submit(Direction::write, {{file, base, arena.address(), kRegion}}, false)->wait() == kRegion);
    for (int round = 0; round < 12; ++round) {
        for (std::int64_t i = 0; i < kRegion; ++i) source[i] = static_cast<unsigned char>(random());
        std::vector<std::shared_ptr<Request>> writes;
        std::int64_t begin = 0;
        while (begin < kRegion) {
            const std::int64_t pages = 1 + static_cast<std::int64_t>(random() % 100);
            const std::int64_t nbytes = std::min(pages * kPage, kRegion - begin);
            if (random() % 2 == 0) {
                std::memcpy(expected.data() + begin, source + begin, static_cast<std::size_t>(nbytes));
                writes.push_back(
                    engine.submit(Direction::write,
                                  {{file, base + begin, arena.address() + static_cast<std::uintptr_t>(begin), nbytes}},
                                  random() % 2 == 0));
            }
            begin += nbytes;
        }
        for (const auto& write : writes) (void)write->wait();
        const auto read =
            engine.submit(Direction::read,
                          {{file, base, arena.address() + kRegion, kRegion / 2},
                           {file, base + kRegion / 2, arena.address() + kRegion + kRegion / 2, kRegion / 2}},
                          true);
        CHECK(read->wait() == kRegion);
        CHECK(read->done());
        CHECK(std::memcmp(target, expected.data(), kRegion) == 0);
    }
}

void test(const std::string& kind) {
    const std::string path = fresh_path();
    Engine engine(kind, 8, 64 << 10, 3);
    CHECK(engine.kind() == kind);
    CHECK(engine.description().find(kind) != std::string::npos);
    const std::int64_t nbytes = kThreads * kRegion;
    const std::int64_t file = engine.open(path, nbytes, false);
    CHECK(engine.size(file) == static_cast<std::uint64_t>(nbytes));
    CHECK_THROWS(IoFailure, engine.open(path, nbytes, false));

    std::vector<std::thread> threads;
    for (int t = 0; t < kThreads; ++t) threads.emplace_back([&engine, file, t] { exercise(engine, file, t); });
    // Meanwhile, requests that fail, from their own thread: at the end of the file and beyond.
    threads.emplace_back([&engine, file, nbytes] {
        Arena arena(1 << 20, false);
        for (int round = 0; round < 50; ++round) {
            const auto request =
                engine.submit(Direction::read, {{file, nbytes - kPage, arena.address(), 1 << 20}}, false);
            try {
                (void)request->wait();
                CHECK(false);
            } catch (const IoFailure& failure) {
                CHECK(failure.code == ENODATA);
                CHECK(failure.offset >= static_cast<std::uint64_t>(nbytes - kPage));
            }
        }
    });
    for (std::thread& thread : threads) thread.join();
    engine.flush(file);

    Arena arena(4 << 20, false);
    CHECK_THROWS(std::invalid_argument, engine.submit(Direction::read, {{file, 1, arena.address(), kPage}}, false));
    CHECK_THROWS(std::invalid_argument, engine.submit(Direction::read, {{file, 0, arena.address() + 8, kPage}}, false));
    CHECK_THROWS(std::invalid_argument, engine.submit(Direction::read, {{file, 0, arena.address(), 100}}, false));
    CHECK_THROWS(std::invalid_argument, engine.submit(Direction::read, {{file, 0, 0, kPage}}, false));
    CHECK_THROWS(std::invalid_argument, engine.submit(Direction::read, {{file + 1, 0, arena.address(), kPage}}, false));
    CHECK(engine.submit(Direction::read, {}, true)->wait() == 0);

    // A thread that ends, and drops its handle, while its request is in flight.
    std::thread([&engine, &arena, file] {
        (void)engine.submit(Direction::read, {{file, 0, arena.address(), 4 << 20}}, false);
    }).join();
    engine.close_file(file);  // waits for it
    CHECK_THROWS(std::invalid_argument, engine.size(file));

    // Closing waits for what is in flight, and can race with itself.
    const std::int64_t again = engine.open(path, std::nullopt, true);
    CHECK_THROWS(std::invalid_argument, engine.submit(Direction::write, {{again, 0, arena.address(), kPage}}, false));
    const auto last = engine.submit(Direction::read, {{again, 0, arena.address(), 4 << 20}}, false);
    std::thread other([&engine] { engine.close(); });
    engine.close();
    other.join();
    CHECK(last->done());
    CHECK(last->wait() == 4 << 20);
    CHECK_THROWS(std::invalid_argument, engine.submit(Direction::read, {{again, 0, arena.address(), kPage}}, false));
    CHECK_THROWS(std::runtime_error, engine.open(path, std::nullopt, true));
    CHECK(::unlink(path.c_str()) == 0);
}

// Threads that read and write summed at once, each on its own region, while transfers are cut, delayed and turned away:
// the sums are those of the bytes. What fails is thrown when nothing is in flight any more.
void test_summed(const std::string& kind, const std::string& polling) {
    std::vector<std::pair<std::int64_t, std::string>> faults;
    for (std::int64_t index = 5; index < 400; index += 11) {
        faults.emplace_back(index, index % 3 == 0 ? "EAGAIN" : "short");
    }
    faults.emplace_back(50, "delay");
    Engine engine(kind, 5, 16 << 10, 3, polling, faults);
    const std::string path = fresh_path(".summed");
    constexpr std::int64_t region = 40 * kPage;
    const std::int64_t file = engine.open(path, kThreads * region, false);
    CHECK(::unlink(path.c_str()) == 0);
    std::vector<std::thread> threads;
    for (int t = 0; t < kThreads; ++t) {
        threads.emplace_back([&engine, file, t] {
            std::mt19937 random(static_cast<unsigned>(t));
            Arena arena(2 * region, false);
            auto* const source = reinterpret_cast<unsigned char*>(arena.address());
            for (int round = 0; round < 6; ++round) {
                for (std::int64_t i = 0; i < region; ++i) source[i] = static_cast<unsigned char>(random());
                // Two ranges, the first of two segments that are not neighbours, neither whole blocks.
                const auto ranges = [&](std::uintptr_t memory) {
                    const std::int64_t base = t * region;
                    return std::vector<std::vector<Segment>>{
                        {{file, base + 30 * kPage, memory, 9 * kPage}, {file, base, memory + 9 * kPage, 5 * kPage}},
                        {{file, base + 5 * kPage, memory + 14 * kPage, 25 * kPage}},
                        {}};
                };
                const std::vector<std::uint64_t> expected{
                    checksum_finish(checksum_sum(source, 14 * kPage), 14 * kPage),
                    checksum_finish(checksum_sum(source + 14 * kPage, 25 * kPage), 25 * kPage), checksum_finish(0, 0)};
                CHECK(transfer_summed(engine, Direction::write, ranges(arena.address()), false) == expected);
                CHECK(transfer_summed(engine, Direction::read, ranges(arena.address() + region), true) == expected);
                CHECK(std::memcmp(source, source + region, 39 * kPage) == 0);
            }
        });
    }
    for (std::thread& thread : threads) thread.join();

    Arena arena(region, false);
    for (int round = 0; round < 20; ++round) {
        Arena gone(region, false);  // unmapped at once: a transfer that went on would write to it
        const std::vector<std::vector<Segment>> ranges{
            {{file, 0, gone.address(), 8 * kPage}},
            {{file, kThreads * region - kPage, gone.address() + 8 * kPage, 8 * kPage}}};
        CHECK_THROWS(IoFailure, transfer_summed(engine, Direction::read, ranges, true));
    }
    CHECK_THROWS(std::invalid_argument,
                 transfer_summed(engine, Direction::read, {{{file, 0, arena.address(), -kPage}}}, true));
}

// Urgent blocks first, in order; of a stream of them without end, every 17th block is another.
void test_queue() {
    const auto block = [](std::uint64_t offset, bool urgent) {
        Block made;
        made.offset = offset;
        made.urgent = urgent;
        return made;
    };
    BlockQueue queue;
    for (std::uint64_t i = 0; i < 3; ++i) queue.push(block(i, false));
    for (std::uint64_t i = 10; i < 13; ++i) queue.push(block(i, true));
    for (const std::uint64_t next : {10, 11, 12, 0, 1, 2}) CHECK(queue.pop().offset == next);
    CHECK(queue.empty());
    std::uint64_t others = 0;
    for (std::uint64_t i = 0; i < 5; ++i) queue.push(block(i, false));
    for (unsigned turn = 1; turn <= 5 * (BlockQueue::kUrgentRun + 1); ++turn) {
        queue.push(block(100 + turn, true));
        const Block next = queue.pop();
        if (!next.urgent) CHECK(next.offset == others++);
        CHECK(others == turn / (BlockQueue::kUrgentRun + 1));
    }
    // Urgent blocks that met no others do not count.
    BlockQueue fresh;
    for (std::uint64_t i = 0; i < 30; ++i) fresh.push(block(i, true));
    for (std::uint64_t i = 0; i < 20; ++i) CHECK(fresh.pop().offset == i);
    fresh.push(block(50, false));
    CHECK(fresh.pop().urgent);
}

// Many threads, each opening, using and closing files of its own; memory is registered and unregistered meanwhile, and
// some transfers are cut, delayed or turned away.
void test_many_files(const std::string& kind, const std::string& polling) {
    std::vector<std::pair<std::int64_t, std::string>> faults;
    for (std::int64_t index = 3; index < 600; index += 7) {
        faults.emplace_back(index, index % 5 == 0 ? "EAGAIN" : "short");
    }
    faults.emplace_back(100, "delay");
    Engine engine(kind, 5, 16 << 10, 3, polling, faults);
    std::vector<std::thread> threads;
    for (int t = 0; t < kThreads; ++t) {
        threads.emplace_back([&engine, t] {
            constexpr std::int64_t nbytes = 64 << 10;
            Arena arena(2 * nbytes, false);
            auto* const source = reinterpret_cast<unsigned char*>(arena.address());
            for (int round = 0; round < 8; ++round) {
                const std::string path = fresh_path("." + std::to_string(t));
                const std::int64_t file = engine.open(path, nbytes, false);
                CHECK(::unlink(path.c_str()) == 0);
                if (round % 2 == 0) (void)engine.register_memory(arena.address(), 2 * nbytes);
                std::memset(source, 16 * t + round + 1, nbytes);
                const auto write = engine.submit(Direction::write, {{file, 0, arena.address(), nbytes}}, t % 2 == 0);
                if (round % 4 == 0) engine.unregister_memory(arena.address());
                CHECK(write->wait() == nbytes);
                engine.flush(file);
                const auto read =
                    engine.submit(Direction::read, {{file, 0, arena.address() + nbytes, nbytes}}, t % 2 != 0);
                if (round % 3 == 0) {
                    engine.close_file(file);  // waits for it
                    CHECK(read->done());
                }
                CHECK(read->wait() == nbytes);
                CHECK(std::memcmp(source, source + nbytes, nbytes) == 0);
                if (round % 3 != 0) engine.close_file(file);
                engine.unregister_memory(arena.address());
            }
        });
    }
    for (std::thread& thread : threads) thread.join();
    CHECK(engine.transfers() >= kThreads * 8 * 8);
}

// Of several flushes at once none may pass by another's failure.
void test_flushes_at_once(const std::string& kind) {
    Engine engine(kind, 3, kPage, 3, "auto", {{0, "flush"}});
    const std::string path = fresh_path(".flushed");
    const std::int64_t file = engine.open(path, kPage, false);
    CHECK(::unlink(path.c_str()) == 0);
    std::atomic<int> waiting{2 * kThreads};
    std::vector<std::thread> threads;
    for (int thread = 0; thread < 2 * kThreads; ++thread) {
        threads.emplace_back([&] {
            --waiting;
            while (waiting > 0) std::this_thread::yield();
            CHECK_THROWS(IoFailure, engine.flush(file));
        });
    }
    for (std::thread& thread : threads) thread.join();
}

#ifdef SSDPLAN_HAS_IO_URING

// Waiting ends with a completion and not before, though a signal comes: the memory may be let go then.
void test_ring_waits() {
    int pipe[2];
    CHECK(::pipe(pipe) == 0);
    struct sigaction action{};
    action.sa_handler = [](int) {};
    CHECK(::sigaction(SIGUSR1, &action, nullptr) == 0);
    const pthread_t waiter = ::pthread_self();
    std::atomic<bool> over{false};
    std::thread others([&] {
        for (int turn = 0; turn < 20; ++turn) {
            std::this_thread::sleep_for(std::chrono::milliseconds(5));
            CHECK(::pthread_kill(waiter, SIGUSR1) == 0);
        }
        CHECK(!over);
        CHECK(::write(pipe[1], "late", 4) == 4);
    });
    char target[4] = {};
    Ring ring(1, 0);
    io_uring_sqe read{};
    read.opcode = IORING_OP_READ;
    read.fd = pipe[0];
    read.addr = reinterpret_cast<std::uintptr_t>(target);
    read.len = sizeof target;
    read.off = ~std::uint64_t{0};
    ring.push(read);
    CHECK(ring.submit_and_wait() == 0);
    over = true;
    int completions = 0;
    ring.drain([&](std::uint64_t, int result) {
        CHECK(result == 4);
        ++completions;
    });
    CHECK(completions == 1);
    others.join();
    CHECK(::close(pipe[0]) == 0 && ::close(pipe[1]) == 0);
}

#endif

// Every transfer of a request fails in its turn; then the engine is closed with transfers that wait, and some that
// fail.
void test_faults(const std::string& kind, const std::string& polling) {
    constexpr std::int64_t nbytes = 8 * kPage;
    for (std::int64_t index = 0; index < 8; ++index) {
        Engine engine(kind, 3, kPage, 3, polling, {{index, "EIO"}, {1, "flush"}});
        const std::string path = fresh_path(".faults");
        const std::int64_t file = engine.open(path, nbytes, false);
        CHECK(::unlink(path.c_str()) == 0);
        Arena arena(nbytes, false);
        try {
            (void)engine.submit(Direction::write, {{file, 0, arena.address(), nbytes}}, false)->wait();
            CHECK(false);
        } catch (const IoFailure& failure) {
            CHECK(failure.code == EIO && failure.nbytes == kPage && failure.offset % kPage == 0);
        }
        CHECK(engine.submit(Direction::write, {{file, 0, arena.address(), nbytes}}, false)->wait() == nbytes);
        engine.flush(file);
        CHECK_THROWS(IoFailure, engine.flush(file));
        CHECK_THROWS(IoFailure, engine.flush(file));
    }
    Arena arena(5 * nbytes, false);
    std::vector<std::shared_ptr<Request>> requests;
    {
        Engine engine(kind, 2, kPage, 2, polling, {{0, "delay"}, {1, "delay"}, {2, "short"}, {20, "ENODEV"}});
        (void)engine.register_memory(arena.address(), 5 * nbytes);
        const std::string path = fresh_path(".closed");
        const std::int64_t file = engine.open(path, nbytes, false);
        CHECK(::unlink(path.c_str()) == 0);
        for (int i = 0; i < 5; ++i) {
            const std::uintptr_t target = arena.address() + static_cast<std::uintptr_t>(i * nbytes);
            requests.push_back(engine.submit(Direction::read, {{file, 0, target, nbytes}}, i % 2 == 0));
        }
    }
    int failed = 0;
    for (const auto& request : requests) {
        CHECK(request->done());
        failed += request->failed() ? 1 : 0;
    }
    CHECK(failed == 1);
    using Pairs = std::vector<std::pair<std::int64_t, std::string>>;
    CHECK_THROWS(std::invalid_argument, Faults(Pairs{{0, "smoke"}}));
    CHECK_THROWS(std::invalid_argument, Faults(Pairs{{-1, "EIO"}}));
    CHECK_THROWS(std::invalid_argument, Faults(Pairs{{1, "EIO"}, {1, "short"}}));
    for (const auto& [whole, part] :
         {std::pair{4096, 512}, {8192, 4096}, {4608, 4096}, {512, 512}, {1 << 20, 512 << 10}}) {
        CHECK(Faults::cut(static_cast<std::uint32_t>(whole)) == static_cast<std::uint32_t>(part));
    }
}

// What a drive, a signal or a full kernel may return for a transfer, without one that does.
void test_results() {
    const auto fresh = [](Direction direction) {
        Block block;
        block.file = std::make_shared<File>();
        block.file->path = "drive";
        block.file->active = 1;
        block.request = std::make_shared<Request>(1, 16 * kPage);
        block.direction = direction;
        block.offset = 10 * kPage;
        block.nbytes = 16 * kPage;
        return block;
    };
    const auto code = [](const Block& block) {
        CHECK(block.request->done());
        CHECK(block.file->active == 0);
        try {
            (void)block.request->wait();
        } catch (const IoFailure& failure) {
            CHECK(failure.path == "drive" && failure.offset == block.offset && failure.nbytes == block.nbytes);
            return failure.code;
        }
        return 0;
    };
    for (const Direction direction : {Direction::read, Direction::write}) {
        Block block = fresh(direction);
        CHECK(!block.absorb(3 * kPage));  // short: the rest is to be transferred
        CHECK(block.offset == 13 * kPage && block.nbytes == 13 * kPage);
        CHECK(reinterpret_cast<std::uintptr_t>(block.memory) == 3 * kPage);
        CHECK(!block.absorb(-EINTR) && !block.absorb(-EAGAIN) && !block.absorb(-ECANCELED));
        CHECK(!block.absorb(512));
        CHECK(block.offset == 13 * kPage + 512 && !block.request->done());
        CHECK(block.absorb(13 * kPage - 512));
        CHECK(code(block) == 0 && block.request->wait() == 16 * kPage);

        block = fresh(direction);
        CHECK(block.absorb(-EIO) && code(block) == EIO);
        block = fresh(direction);
        CHECK(block.absorb(-ENODATA) && code(block) == EIO);  // the kernel's medium error is no end of file
        block = fresh(direction);
        CHECK(block.absorb(0) && code(block) == (direction == Direction::read ? ENODATA : EIO));
        block = fresh(direction);
        int turns = 0;
        while (!block.absorb(-EAGAIN)) ++turns;  // for ever is no answer either
        CHECK(turns > 10 && code(block) == EAGAIN);
    }
    Block odd = fresh(Direction::read);
    CHECK(odd.absorb(kPage + 100) && code(odd) == ENODATA);  // the file ends within a sector
    odd = fresh(Direction::write);
    CHECK(!odd.absorb(kPage + 100) && odd.nbytes == 15 * kPage);
}

}  // namespace

int main() {
    test_results();
    test_queue();
    test("threads");
    test_many_files("threads", "auto");
    test_faults("threads", "auto");
    test_flushes_at_once("threads");
    test_summed("threads", "auto");
    try {
        Engine("io_uring", 1, kPage, 1).close();
    } catch (const IoFailure& failure) {
        std::printf("io_uring is not to be had here: %s\n", failure.what());
        return 0;
    }
    test("io_uring");
    test_flushes_at_once("io_uring");
#ifdef SSDPLAN_HAS_IO_URING
    test_ring_waits();
#endif
    for (const char* const polling : {"auto", "try", "pretend"}) {
        test_many_files("io_uring", polling);
        test_faults("io_uring", polling);
        test_summed("io_uring", polling);
    }
    return 0;
}
