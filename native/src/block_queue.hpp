// The blocks that wait to be started: urgent ones first, first come first served within each class. A stream of urgent
// blocks without end holds the others up, but never stops them. Not synchronised: its backend's mutex guards it.
#pragma once

#include <deque>
#include <utility>

#include "engine.hpp"

namespace ssdplan {

class BlockQueue {
  public:
    // After so many urgent blocks in a row, one that is not urgent goes, if any waits.
    static constexpr unsigned kUrgentRun = 16;

    bool empty() const { return urgent_.empty() && others_.empty(); }

    void push(Block block) { (block.urgent ? urgent_ : others_).push_back(std::move(block)); }

    // Takes the next block; there must be one.
    Block pop() {
        const bool other = urgent_.empty() || (run_ >= kUrgentRun && !others_.empty());
        run_ = other || others_.empty() ? 0 : run_ + 1;
        std::deque<Block>& queue = other ? others_ : urgent_;
        Block block = std::move(queue.front());
        queue.pop_front();
        return block;
    }

  private:
    std::deque<Block> urgent_;
    std::deque<Block> others_;
    unsigned run_ = 0;
};

}  // namespace ssdplan
