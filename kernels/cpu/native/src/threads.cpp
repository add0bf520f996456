#include "threads.h"

#include <cstdlib>
#include <sched.h>
#include <system_error>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace chatkv {

namespace {

constexpr int NUM_SPINS_OF_WORKER = 4000; // 50 to 150 us; a step's operations follow within a few
constexpr int NUM_SPINS_OF_CALLER = 2000; // then the thread that has the last chunk may need this core
constexpr uint64_t CHUNKS_MASK = 0xffffffffu;

void pause() {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

} // namespace

float* Scratch::floats(int64_t count) {
    if (count > capacity_) {
        std::free(data_);
        capacity_ = (count + 1023) / 1024 * 1024;
        data_ = static_cast<float*>(std::aligned_alloc(64, capacity_ * sizeof(float)));
        if (data_ == nullptr) std::abort(); // a few hundred kilobytes: the process is lost anyway
    }
    return data_;
}

Scratch::~Scratch() { std::free(data_); }

Threads::Threads(int num_threads) {
    for (int thread = 0; thread < num_threads; thread++) scratches_.push_back(std::make_unique<Scratch>());
    try {
        for (int thread = 1; thread < num_threads; thread++) workers_.emplace_back([this, thread] { work(thread); });
    } catch (const std::system_error&) { // the system's limit: those that are there do the work
    }
}

Threads::~Threads() {
    {
        std::lock_guard<std::mutex> lock(mutex_);
        is_closing_.store(true);
    }
    news_.notify_all();
    for (std::thread& worker : workers_) worker.join();
}

void Threads::run_shared(int num_chunks, Call call, void* context) {
    call_.store(call, std::memory_order_relaxed);
    context_.store(context, std::memory_order_relaxed);
    num_chunks_.store(num_chunks, std::memory_order_relaxed);
    num_unfinished_.store(num_chunks, std::memory_order_relaxed);
    uint64_t number = (tickets_.load(std::memory_order_relaxed) >> 32) + 1;
    tickets_.store(number << 32 | static_cast<uint64_t>(num_chunks)); // in one order with num_sleeping_, as in `work`
    if (num_sleeping_.load() > 0) {
        { std::lock_guard<std::mutex> lock(mutex_); }
        news_.notify_all();
    }
    while (take_chunk(0)) {
    }
    for (int spin = 0; num_unfinished_.load(std::memory_order_acquire) != 0; spin++) {
        if (spin < NUM_SPINS_OF_CALLER) pause();
        else sched_yield();
    }
}

bool Threads::take_chunk(int thread) {
    uint64_t tickets = tickets_.load(std::memory_order_acquire);
    while ((tickets & CHUNKS_MASK) != 0) {
        Call call = call_.load(std::memory_order_relaxed);
        void* context = context_.load(std::memory_order_relaxed);
        int num_chunks = num_chunks_.load(std::memory_order_relaxed);
        if (tickets_.compare_exchange_weak(tickets, tickets - 1, std::memory_order_acq_rel, std::memory_order_acquire)) {
            call(context, num_chunks - static_cast<int>(tickets & CHUNKS_MASK), thread);
            num_unfinished_.fetch_sub(1, std::memory_order_release);
            return true;
        }
    }
    return false;
}

void Threads::work(int thread) {
    uint64_t seen = 0;
    while (!is_closing_.load()) {
        while (take_chunk(thread)) {
        }
        seen = wait_for_news(seen);
    }
}

// Returns the number of the latest operation, as soon as it is another one than `seen` or the pool closes.
uint64_t Threads::wait_for_news(uint64_t seen) {
    for (int spin = 0; spin < NUM_SPINS_OF_WORKER; spin++) {
        uint64_t number = tickets_.load(std::memory_order_acquire) >> 32;
        if (number != seen) return number;
        pause();
    }
    std::unique_lock<std::mutex> lock(mutex_);
    num_sleeping_.fetch_add(1);
    news_.wait(lock, [&] { return is_closing_.load() || tickets_.load() >> 32 != seen; });
    num_sleeping_.fetch_sub(1);
    return tickets_.load() >> 32;
}

} // namespace chatkv
