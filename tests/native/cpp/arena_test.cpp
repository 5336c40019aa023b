// Arenas: contents, the life of shared mappings, closing while others share.
#include "arena.hpp"

#include <stdexcept>
#include <thread>
#include <vector>

#include "check.hpp"

using namespace ssdplan;

int main() {
    for (const std::int64_t nbytes : {1, 4096, 4097, (2 << 20) - 1, 2 << 20, (6 << 20) + 12345}) {
        Arena arena(nbytes, false);
        const auto mapping = arena.share();
        CHECK(mapping->nbytes() == static_cast<std::size_t>(nbytes));
        CHECK(arena.address() % (nbytes >= (2 << 20) ? 2 << 20 : 4096) == 0);
        for (std::int64_t i = 0; i < nbytes; ++i) CHECK(mapping->data()[i] == std::byte{0});
        mapping->data()[nbytes - 1] = std::byte{1};
        mapping->exports.fetch_add(1);
        CHECK_THROWS(std::runtime_error, arena.close());
        mapping->exports.fetch_sub(1);
        arena.close();
        arena.close();
        CHECK(mapping->data()[nbytes - 1] == std::byte{1});  // who shares it still has it
        CHECK_THROWS(std::runtime_error, arena.address());
    }
    CHECK_THROWS(std::invalid_argument, Arena(0, false));
    CHECK_THROWS(std::invalid_argument, Arena(-1, false));
    CHECK_THROWS(OutOfMemory, Arena(std::int64_t{1} << 50, false));

    for (int round = 0; round < 50; ++round) {
        Arena arena(1 << 16, false);
        std::vector<std::thread> threads;
        for (int t = 0; t < 4; ++t) {
            threads.emplace_back([&arena] {
                try {
                    const auto mapping = arena.share();
                    (void)mapping->data()[0];
                    arena.close();
                } catch (const std::runtime_error&) {
                    CHECK(arena.exports() == 0);  // another thread was first
                }
            });
        }
        for (std::thread& thread : threads) thread.join();
    }
    return 0;
}
