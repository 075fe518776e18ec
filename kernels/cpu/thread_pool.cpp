// The threads behind `thread_pool.h`: started when a size above one is set, they run until the process ends.
//
// An idle thread spins for SPIN_US, which covers the pauses between the layers of a model, then sleeps: an idle worker uses no
// processor time, and one that shares its cores releases them soon.

#include "thread_pool.h"

#include <pthread.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>

namespace disagg {
namespace {

constexpr std::chrono::microseconds SPIN_US{100};
constexpr int LOOKS_PER_CLOCK = 64;

inline void pause_a_little() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// Whether `done()` came true within SPIN_US.
template <class Done>
bool spin_until(Done done) {
    const auto end = std::chrono::steady_clock::now() + SPIN_US;
    do {
        for (int look = 0; look < LOOKS_PER_CLOCK; ++look) {
            if (done()) return true;
            pause_a_little();
        }
    } while (std::chrono::steady_clock::now() < end);
    return false;
}

// `size_` and the task are written by the caller only, before it increments `round_`, and read by the other threads after
// they have seen that.
class ThreadPool {
   public:
    void resize(int size) {
        const std::lock_guard<std::mutex> mine(caller_);
        for (; num_started_ < size; ++num_started_)
            std::thread([this, index = num_started_, seen = round_.load()] { worker(index, seen); }).detach();
        size_ = size;
    }

    void run(PartFunction function, void* context) {
        const std::unique_lock<std::mutex> mine(caller_, std::try_to_lock);
        if (!mine.owns_lock() || size_ == 1) return function(context, 0, 1);
        function_ = function;
        context_ = context;
        running_.store(num_started_ - 1);
        round_.fetch_add(1);
        if (num_asleep_.load() > 0) {
            const std::lock_guard<std::mutex> lock(sleep_);
            wake_.notify_all();
        }
        function(context, 0, size_);
        while (!spin_until([this] { return running_.load() == 0; })) std::this_thread::yield();
    }

    int size() const { return size_; }

    // In a child of `fork` there is only the thread that called it.
    void forget_threads() {
        size_ = num_started_ = 1;
        num_asleep_.store(0);
    }

   private:
    void worker(int index, uint64_t seen) {
        for (;; ++seen) {
            const auto is_new = [&] { return round_.load() != seen; };
            if (!spin_until(is_new)) {
                std::unique_lock<std::mutex> lock(sleep_);
                num_asleep_.fetch_add(1);
                wake_.wait(lock, is_new);
                num_asleep_.fetch_sub(1);
            }
            if (index < size_) function_(context_, index, size_);
            running_.fetch_sub(1);
        }
    }

    std::mutex caller_, sleep_;
    std::condition_variable wake_;
    std::atomic<uint64_t> round_{0};
    std::atomic<int> running_{0}, num_asleep_{0};
    PartFunction function_ = nullptr;
    void* context_ = nullptr;
    int size_ = 1, num_started_ = 1;  // the caller is thread 0
};

// Never destroyed: threads may still read it while the process ends.
ThreadPool& thread_pool() {
    static ThreadPool* const only = [] {
        pthread_atfork(nullptr, nullptr, [] { thread_pool().forget_threads(); });
        return new ThreadPool;
    }();
    return *only;
}

}  // namespace

void run_on_each_thread(PartFunction function, void* context) { thread_pool().run(function, context); }

int num_threads() { return thread_pool().size(); }

}  // namespace disagg

// The number of threads that kernels use from now on, at least 1.
extern "C" void disagg_set_num_threads(int64_t num_threads) { disagg::thread_pool().resize(static_cast<int>(num_threads)); }
