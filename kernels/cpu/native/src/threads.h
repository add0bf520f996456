// Threads that share the chunks of one operation after another.
//
// Nobody waits for a thread that has nothing: whoever runs takes the next chunk, and an operation is over when its
// chunks are done, not when all threads have met. So a core that another program keeps busy costs its own share only.
// A worker without chunks spins for some microseconds, since the next operation of a step comes at once, then sleeps.
#pragma once
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "kernels.h"

namespace chatkv {

class Threads {
  public:
    explicit Threads(int num_threads); // the caller of `run` is one of them
    ~Threads();
    Threads(const Threads&) = delete;
    Threads& operator=(const Threads&) = delete;

    int count() const { return static_cast<int>(scratches_.size()); }
    int num_awake_workers() const { return static_cast<int>(workers_.size()) - num_sleeping_.load(); }
    Scratch& scratch(int thread) { return *scratches_[thread]; }
    Scratch& shared_scratch() { return shared_scratch_; }

    // work(chunk, thread) for each chunk in 0 .. num_chunks - 1, on any thread; returns when all are done. From one
    // thread at a time.
    template <class Work> void run(int num_chunks, Work&& work) {
        if (num_chunks <= 1 || workers_.empty()) {
            for (int chunk = 0; chunk < num_chunks; chunk++) work(chunk, 0);
            return;
        }
        using Type = std::remove_reference_t<Work>;
        run_shared(
            num_chunks, [](void* context, int chunk, int thread) { (*static_cast<Type*>(context))(chunk, thread); },
            const_cast<void*>(static_cast<const void*>(&work)));
    }

  private:
    using Call = void (*)(void* context, int chunk, int thread);

    void run_shared(int num_chunks, Call call, void* context);
    bool take_chunk(int thread);
    void work(int thread);
    uint64_t wait_for_news(uint64_t seen);

    // Upper half: number of the operation. Lower half: chunks not yet taken. A chunk is taken by exchanging the whole,
    // so what was read of an operation before is of the one the chunk belongs to.
    alignas(64) std::atomic<uint64_t> tickets_{0};
    std::atomic<Call> call_{nullptr};
    std::atomic<void*> context_{nullptr};
    std::atomic<int> num_chunks_{0};
    alignas(64) std::atomic<int> num_unfinished_{0};
    alignas(64) std::atomic<int> num_sleeping_{0};
    std::atomic<bool> is_closing_{false};
    std::mutex mutex_;
    std::condition_variable news_;
    std::vector<std::unique_ptr<Scratch>> scratches_;
    Scratch shared_scratch_;
    std::vector<std::thread> workers_;
};

} // namespace chatkv
