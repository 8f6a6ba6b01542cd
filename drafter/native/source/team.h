// Threads that share a loop. One of them runs the program; the others help with its loops as long as it runs.
#pragma once

#include <immintrin.h>
#include <omp.h>
#include <sched.h>

#include <atomic>
#include <cstdint>

namespace drafter {

// Waits without sleeping, because loops follow one another within microseconds. After a while the processor is handed
// to whoever else wants it: on a busy machine the thread that is waited for may be one of those.
class Wait {
  public:
    void once() {
        if (++count_ < kSpins)
            _mm_pause();
        else
            sched_yield();
    }

  private:
    static constexpr int kSpins = 1000;
    int count_ = 0;
};

// Chunks of a loop go to whichever thread asks next. So a thread that the system has stopped delays the others by the
// chunk that it holds at most, and not by its share of the loop.
class Team {
  public:
    // Run `program(team)` on this thread, with `threads - 1` others to help.
    template <class Program>
    static void run(int threads, Program program) {
        Team team;
        if (threads == 1) {
            program(team);
            return;
        }
        team.size_ = threads;
#pragma omp parallel num_threads(threads)
        {
            if (omp_get_thread_num() == 0) {
                program(team);
                team.over_.store(true, std::memory_order_release);
            } else {
                team.help();
            }
        }
    }

    // Threads that share a loop.
    int size() const { return size_; }

    // Call `work(chunk)` for every chunk below `count`; return when all are done.
    template <class Work>
    void loop(int count, const Work& work) {
        if (size_ == 1 || count <= 1) {
            for (int chunk = 0; chunk < count; ++chunk) work(chunk);
            return;
        }
        work_ = &work;
        call_ = [](const void* what, int chunk) { (*static_cast<const Work*>(what))(chunk); };
        done_.store(0, std::memory_order_relaxed);
        ++epoch_;
        const uint64_t first = (static_cast<uint64_t>(epoch_ & 0xffffff) << 40) | (static_cast<uint64_t>(count) << 20);
        ticket_.store(first, std::memory_order_release);
        while (take()) {
        }
        for (Wait wait; done_.load(std::memory_order_acquire) < count;) wait.once();
    }

  private:
    // Do the next chunk of the loop, if there is one.
    bool take() {
        uint64_t ticket = ticket_.load(std::memory_order_acquire);
        do {
            if ((ticket & 0xfffff) >= ((ticket >> 20) & 0xfffff)) return false;
            // The ticket names the loop, too. So a thread that comes late cannot take a chunk of the next loop for one
            // of this one.
        } while (!ticket_.compare_exchange_weak(ticket, ticket + 1, std::memory_order_acq_rel));
        call_(work_, static_cast<int>(ticket & 0xfffff));
        done_.fetch_add(1, std::memory_order_release);
        return true;
    }

    void help() {
        for (Wait wait; !over_.load(std::memory_order_acquire);) {
            if (take())
                wait = Wait();
            else
                wait.once();
        }
    }

    const void* work_ = nullptr;
    void (*call_)(const void*, int) = nullptr;
    uint32_t epoch_ = 0;
    int size_ = 1;
    alignas(64) std::atomic<uint64_t> ticket_{0};  // epoch (24 bits), chunks (20 bits), next chunk (20 bits)
    alignas(64) std::atomic<int> done_{0};
    alignas(64) std::atomic<bool> over_{false};
};

}  // namespace drafter
