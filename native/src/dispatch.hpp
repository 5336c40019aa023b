// How a kernel is compiled for several instruction sets. SSDPLAN_TARGET_CLONES is set where the compiler can build a
// function several times and the loader choose among them; what such a function calls must be SSDPLAN_INLINE.
#pragma once

#ifdef SSDPLAN_TARGET_CLONES
#define SSDPLAN_DISPATCHED __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define SSDPLAN_DISPATCHED
#endif
#define SSDPLAN_INLINE inline __attribute__((always_inline))
