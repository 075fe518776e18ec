// The thread pool of the kernels: its threads run one function in parts. The split never changes a result: every output is
// computed whole, by one part, in the same order.

#pragma once

#include <atomic>
#include <cstdint>

namespace disagg {

using PartFunction = void (*)(void* context, int part, int num_parts);

// Runs `function` for parts 0 .. num_parts - 1 and returns when all have ended. num_parts is the size of the pool, or 1 where
// the pool has one thread or is busy with another caller's work.
void run_on_each_thread(PartFunction function, void* context);

// `body(part, num_parts)` on every thread of the pool.
template <class Body>
void on_each_thread(Body body) {
    run_on_each_thread([](void* context, int part, int num_parts) { (*static_cast<Body*>(context))(part, num_parts); }, &body);
}

// `body(item)` for each item; each thread has an equal share of them, in order.
template <class Body>
void parallel_for(int64_t num_items, Body body) {
    on_each_thread([&](int part, int num_parts) {
        const int64_t end = (part + 1) * num_items / num_parts;
        for (int64_t item = part * num_items / num_parts; item < end; ++item) body(item);
    });
}

// How many threads `on_each_thread` has at most.
int num_threads();

// `body(first, end)` on runs of items: each thread begins with a share of its own, in order, and then steals from the shares of
// slower threads. On a machine whose cores are shared one of them is often slower than the others.
template <class Body>
void parallel_for_dynamic(int64_t num_items, int64_t items_a_run, Body body) {
    constexpr int MAX_SHARES = 64;
    struct alignas(64) Share {
        std::atomic<int64_t> next;
        int64_t end;
    };
    const int num_shares = num_threads() < MAX_SHARES ? num_threads() : MAX_SHARES;
    if (num_shares == 1) return body(static_cast<int64_t>(0), num_items);
    Share shares[MAX_SHARES];
    for (int s = 0; s < num_shares; ++s) {
        shares[s].next.store(s * num_items / num_shares, std::memory_order_relaxed);
        shares[s].end = (s + 1) * num_items / num_shares;
    }
    on_each_thread([&](int part, int) {
        for (int s = 0; s < num_shares; ++s) {
            Share& share = shares[(part + s) % num_shares];
            for (int64_t first; (first = share.next.fetch_add(items_a_run, std::memory_order_relaxed)) < share.end;)
                body(first, first + items_a_run < share.end ? first + items_a_run : share.end);
        }
    });
}

}  // namespace disagg
