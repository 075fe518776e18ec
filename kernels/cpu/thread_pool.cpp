// The threads behind `thread_pool.h`: started when a size above one is set, they run until the process ends.
//
// A call is a round of parts, one for each thread. Each thread begins its own part, and the caller, once it is done with its
// own, those that no thread has begun: a thread whose core is taken by others is not waited for. One that loses its core in
// the middle of a part is. Where that costs more than the threads bring, the caller computes alone for a while (`Pauses`).
//
// An idle thread spins for SPIN_US, which covers the pauses between the layers of a model, then sleeps: an idle worker uses no
// processor time, and one that shares its cores releases them soon.

#include "thread_pool.h"

#include <pthread.h>
#include <time.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>

namespace disagg {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::microseconds;
using std::chrono::milliseconds;

constexpr microseconds SPIN_US{100};
constexpr int LOOKS_PER_CLOCK = 64;
constexpr int MAX_THREADS = 256;

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
    const auto end = Clock::now() + SPIN_US;
    do {
        for (int look = 0; look < LOOKS_PER_CLOCK; ++look) {
            if (done()) return true;
            pause_a_little();
        }
    } while (Clock::now() < end);
    return false;
}

// Processor time of the calling thread.
Clock::duration processor_time() {
    timespec now{};
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return std::chrono::seconds(now.tv_sec) + std::chrono::nanoseconds(now.tv_nsec);
}

// When the caller computes alone, since waiting for the others takes longer than what they do. Where it has waited for more
// than 1 / SUSPECT of a window of rounds, processor times are measured in the next one. Alone all of it would take the caller
// the processor time of all threads, at the rate at which it gets its own core. If that is less, it is alone for PAUSE, for
// twice as long each time that it is again, and for half as long after each time that it is not.
class Pauses {
   public:
    bool is_alone(Clock::time_point now) const { return now < until_; }

    // Whether the processor times of the threads are to be added to `worked`.
    bool is_measuring() const { return is_measuring_.load(std::memory_order_relaxed); }

    // Any thread.
    void worked(Clock::duration time) { others_.fetch_add(time.count(), std::memory_order_relaxed); }

    // The caller only, at the end of a round; `mine`: its processor time.
    void add(Clock::duration total, Clock::duration waited, Clock::duration mine) {
        total_ += total;
        waited_ += waited;
        mine_ += mine;
        if (total_ < WINDOW) return;
        const bool was_measured = is_measuring_.exchange(waited_ * SUSPECT > total_);
        if (was_measured && mine_.count() > 0) judge(Clock::duration(others_.load()));
        total_ = waited_ = mine_ = {};
        others_.store(0);
    }

   private:
    static constexpr milliseconds WINDOW{10}, PAUSE{50}, LONGEST{2000};
    static constexpr int SUSPECT = 5;

    void judge(Clock::duration others) {
        const double share = static_cast<double>((total_ - waited_).count()) / static_cast<double>(mine_.count());
        const double alone = static_cast<double>((mine_ + others).count()) * (share > 1.0 ? share : 1.0);
        const bool is_slower = alone < static_cast<double>(total_.count());
        if (is_slower) until_ = Clock::now() + pause_;
        pause_ = is_slower ? std::min<Clock::duration>(pause_ * 2, LONGEST) : std::max<Clock::duration>(pause_ / 2, PAUSE);
        if (is_slower) is_measuring_.store(true);
    }

    Clock::duration total_{}, waited_{}, mine_{}, pause_ = PAUSE;
    std::atomic<Clock::rep> others_{0};
    std::atomic<bool> is_measuring_{false};
    Clock::time_point until_{};
};

// `size_` and the task are written by the caller only, before it increments `round_`. A thread reads the task after it has
// begun a part of a round, which does not end before that part has.
class ThreadPool {
   public:
    void resize(int size) {
        const std::lock_guard<std::mutex> mine(caller_);
        if (size > MAX_THREADS) size = MAX_THREADS;
        for (; num_started_ < size; ++num_started_)
            std::thread([this, index = num_started_, seen = round_.load()] { worker(index, seen); }).detach();
        for (Begun& begun : begun_) begun.round.store(round_.load());
        size_.store(size);
    }

    void run(PartFunction function, void* context) {
        const std::unique_lock<std::mutex> mine(caller_, std::try_to_lock);
        const int size = size_.load(std::memory_order_relaxed);
        if (!mine.owns_lock() || size == 1) return function(context, 0, 1);
        const auto began = Clock::now();
        if (pauses_.is_alone(began)) return function(context, 0, 1);
        function_ = function;
        context_ = context;
        running_.store(size - 1);
        const uint64_t round = round_.fetch_add(1) + 1;
        if (num_asleep_.load() > 0) {
            const std::lock_guard<std::mutex> lock(sleep_);
            wake_.notify_all();
        }
        const bool is_measuring = pauses_.is_measuring();
        const auto before = is_measuring ? processor_time() : Clock::duration{};
        function(context, 0, size);
        for (int part = 1; part < size; ++part) {
            if (!begin(part, round)) continue;
            function(context, part, size);
            running_.fetch_sub(1);
        }
        const auto my_time = is_measuring ? processor_time() - before : Clock::duration{};
        const auto waits = Clock::now();
        while (!spin_until([this] { return running_.load() == 0; })) std::this_thread::yield();
        const auto ended = Clock::now();
        pauses_.add(ended - began, ended - waits, my_time);
    }

    int size() const { return size_.load(std::memory_order_relaxed); }

    // In a child of `fork` there is only the thread that called it.
    void forget_threads() {
        size_.store(1);
        num_started_ = 1;
        num_asleep_.store(0);
    }

   private:
    struct alignas(64) Begun {
        std::atomic<uint64_t> round{0};
    };

    // Whether nobody has begun this part of the round, which is still going on then.
    bool begin(int part, uint64_t round) {
        uint64_t before = round - 1;
        return begun_[part].round.compare_exchange_strong(before, round);
    }

    void run_part(int part, int size) {
        const bool is_measuring = pauses_.is_measuring();
        const auto before = is_measuring ? processor_time() : Clock::duration{};
        function_(context_, part, size);
        if (is_measuring) pauses_.worked(processor_time() - before);
        running_.fetch_sub(1);
    }

    void worker(int index, uint64_t seen) {
        for (;;) {
            const auto is_new = [&] { return round_.load() != seen; };
            if (!spin_until(is_new)) {
                std::unique_lock<std::mutex> lock(sleep_);
                num_asleep_.fetch_add(1);
                wake_.wait(lock, is_new);
                num_asleep_.fetch_sub(1);
            }
            seen = round_.load();
            const int size = size_.load();
            if (index < size && begin(index, seen)) run_part(index, size);
        }
    }

    std::mutex caller_, sleep_;
    std::condition_variable wake_;
    std::atomic<uint64_t> round_{0};
    std::atomic<int> running_{0}, num_asleep_{0}, size_{1};
    Begun begun_[MAX_THREADS];  // the latest round in which a part was begun
    Pauses pauses_;
    PartFunction function_ = nullptr;
    void* context_ = nullptr;
    int num_started_ = 1;  // the caller is thread 0
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
