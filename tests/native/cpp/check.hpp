// The least that a test program needs: a check that says where it failed.
#pragma once

#include <cstdio>
#include <cstdlib>

#define CHECK(condition)                                                                 \
    do {                                                                                 \
        if (!(condition)) {                                                              \
            std::fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #condition); \
            std::exit(1);                                                                \
        }                                                                                \
    } while (false)

// The statement throws this exception; the block after it sees it as `error`.
#define CHECK_THROWS(exception, statement)                                                       \
    do {                                                                                         \
        bool thrown = false;                                                                     \
        try {                                                                                    \
            statement;                                                                           \
        } catch (const exception&) {                                                             \
            thrown = true;                                                                       \
        }                                                                                        \
        if (!thrown) {                                                                           \
            std::fprintf(stderr, "%s:%d: does not throw: %s\n", __FILE__, __LINE__, #statement); \
            std::exit(1);                                                                        \
        }                                                                                        \
    } while (false)
