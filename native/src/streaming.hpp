// Stores that go past the caches: nothing is read to be overwritten, and nothing that is still wanted makes room.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "dispatch.hpp"

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace ssdplan {

constexpr std::size_t kLine = 64;  // bytes of a cache line

// Copies a line's bytes; past the caches where they fill a line. stream_fence() makes them visible to other threads.
SSDPLAN_INLINE void stream_line(void* destination, const void* bytes) {
#if defined(__SSE2__)
    if (reinterpret_cast<std::uintptr_t>(destination) % kLine == 0) {
        __m128i parts[kLine / sizeof(__m128i)];
        std::memcpy(parts, bytes, sizeof parts);
        auto* const line = static_cast<__m128i*>(destination);
        for (std::size_t part = 0; part < kLine / sizeof(__m128i); ++part) _mm_stream_si128(line + part, parts[part]);
        return;
    }
#endif
    std::memcpy(destination, bytes, kLine);
}

SSDPLAN_INLINE void stream_fence() {
#if defined(__SSE2__)
    _mm_sfence();
#endif
}

}  // namespace ssdplan
