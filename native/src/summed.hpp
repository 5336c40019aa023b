// Transfers that bring the checksum of what they move. The thread that calls sums while the drive works: of a read each
// block once it has arrived, of a write all of it once the drive has it to do.
#pragma once

#include <cstdint>
#include <vector>

#include "engine.hpp"

namespace ssdplan {

// Moves ranges, each the segments of which it consists in order, and returns the checksum (checksum.hpp) of each when
// nothing is in flight any more, whether it returns or throws. Throws as Engine::submit and Request::wait.
std::vector<std::uint64_t> transfer_summed(Engine& engine, Direction direction,
                                           const std::vector<std::vector<Segment>>& ranges, bool urgent);

}  // namespace ssdplan
