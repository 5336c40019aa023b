// Owns how text of the kernel's (/proc, /sys) is read: whole, by system calls.
//
// Not by streams: on a machine whose compiler was not the system's, beside PyTorch's libraries, which export parts of a
// C++ library of their own, a stream of <fstream> read nonsense and crashed. The cause was not established.
#pragma once

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <string>
#include <string_view>

#include "descriptor.hpp"

namespace ssdplan {

// A file's text; empty where it cannot be opened or read.
inline std::string system_text(const std::string& path) {
    const Descriptor file(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
    std::string text;
    char part[4096];
    while (file.valid()) {
        const ssize_t count = ::read(file.get(), part, sizeof part);
        if (count < 0 && errno == EINTR) continue;
        if (count <= 0) return count == 0 ? text : std::string();
        text.append(part, static_cast<std::size_t>(count));
    }
    return text;
}

// Takes the next line off the front of `text`, without its end; false when none is left.
inline bool next_line(std::string_view& text, std::string_view& line) {
    if (text.empty()) return false;
    const std::size_t end = text.find('\n');
    line = text.substr(0, end);
    text.remove_prefix(end == std::string_view::npos ? text.size() : end + 1);
    return true;
}

// Takes a line's next word off its front; empty when none is left.
inline std::string_view next_word(std::string_view& line) {
    constexpr std::string_view kBlanks = " \t";
    line.remove_prefix(std::min(line.find_first_not_of(kBlanks), line.size()));
    const std::string_view word = line.substr(0, line.find_first_of(kBlanks));
    line.remove_prefix(word.size());
    return word;
}

}  // namespace ssdplan
