// Software prefetching of what will soon be read or written.

#pragma once

#include <unistd.h>

#include <cstdint>

namespace disagg {

constexpr int64_t LINE = 64;

// Whether what is read once (weights and KV) is prefetched into the second-level cache, because the first one is small: data
// that it would evict there is needed sooner, and the first level can wait for few lines at a time. With 32 KiB (Zen 4) this
// takes a fifth to a third off products and attention; processors with more (Zen 5 has 48 KiB) prefetch into the first level.
// docs/benchmarks/kernels.md
constexpr int64_t SMALL_CACHE = 32 << 10;
inline const bool PREFETCH_INTO_L2 = [] {
#ifdef _SC_LEVEL1_DCACHE_SIZE
    const int64_t size = sysconf(_SC_LEVEL1_DCACHE_SIZE);
    return size > 0 && size <= SMALL_CACHE;
#else
    return false;
#endif
}();

// Always inlined, as what calls it and does nothing else has to be: to gcc such a function has no effect, and it drops calls.
template <int LEVEL>
[[gnu::always_inline]] inline void prefetch(const void* at) {
    __builtin_prefetch(at, 0, 4 - LEVEL);
}

// The same for a line that will be written.
[[gnu::always_inline]] inline void prefetch_for_write(const void* at) {
    __builtin_prefetch(at, 1);
}

[[gnu::always_inline]] inline void prefetch_range(const void* start, int64_t bytes) {
    const char* first = static_cast<const char*>(start);
    if (PREFETCH_INTO_L2)
        for (int64_t at = 0; at < bytes; at += LINE) prefetch<2>(first + at);
    else
        for (int64_t at = 0; at < bytes; at += LINE) prefetch<1>(first + at);
}

}  // namespace disagg
