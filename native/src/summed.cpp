#include "summed.hpp"

#include <algorithm>
#include <cstddef>
#include <memory>

#include "checksum.hpp"

namespace ssdplan {
namespace {

// One block of a request, as the engine splits its segments.
struct Part {
    std::size_t range;
    const std::byte* memory;
    std::size_t nbytes;
    std::size_t after;  // bytes of the range that follow it
};

std::size_t length(const std::vector<Segment>& range) {
    std::size_t nbytes = 0;
    for (const Segment& segment : range) nbytes += static_cast<std::size_t>(segment.nbytes);
    return nbytes;
}

std::vector<Part> parts_of(const std::vector<std::vector<Segment>>& ranges, std::size_t block_bytes) {
    std::vector<Part> parts;
    for (std::size_t range = 0; range < ranges.size(); ++range) {
        std::size_t after = length(ranges[range]);
        for (const Segment& segment : ranges[range]) {
            const auto end = segment.address + static_cast<std::uintptr_t>(segment.nbytes);
            for (std::uintptr_t begin = segment.address; begin < end; begin += block_bytes) {
                const std::size_t nbytes = std::min<std::size_t>(block_bytes, end - begin);
                after -= nbytes;
                parts.push_back({range, reinterpret_cast<const std::byte*>(begin), nbytes, after});
            }
        }
    }
    return parts;
}

// Waits for a request whatever happens: its memory is the caller's, who may let it go.
class Ended {
  public:
    explicit Ended(Request& request) : request_(request) {}
    Ended(const Ended&) = delete;
    Ended& operator=(const Ended&) = delete;
    ~Ended() {
        try {
            (void)request_.wait();
        } catch (const std::exception&) {  // what failed was told where it was waited for
        }
    }

  private:
    Request& request_;
};

}  // namespace

std::vector<std::uint64_t> transfer_summed(Engine& engine, Direction direction,
                                           const std::vector<std::vector<Segment>>& ranges, bool urgent) {
    std::vector<Segment> segments;
    for (const auto& range : ranges) segments.insert(segments.end(), range.begin(), range.end());
    const std::shared_ptr<Request> request = engine.submit(direction, segments, urgent, direction == Direction::read);
    const Ended ended(*request);
    const std::vector<Part> parts = parts_of(ranges, engine.block_bytes());
    std::vector<std::uint64_t> sums(ranges.size(), 0);
    const auto add = [&sums](const Part& part) {
        sums[part.range] ^= checksum_carry(checksum_sum(part.memory, part.nbytes), part.after);
    };
    if (direction == Direction::read) {
        std::vector<std::uint32_t> blocks;
        blocks.reserve(parts.size());
        // Half of what is left at a time: few wake-ups, and yet one block to sum when the last has arrived.
        for (std::size_t left = parts.size(); left > 0; left -= blocks.size()) {
            request->take_ended((left + 1) / 2, blocks);
            for (const std::uint32_t block : blocks) add(parts[block]);
        }
    } else {
        for (const Part& part : parts) add(part);
    }
    (void)request->wait();
    for (std::size_t range = 0; range < ranges.size(); ++range) {
        sums[range] = checksum_finish(sums[range], length(ranges[range]));
    }
    return sums;
}

}  // namespace ssdplan
