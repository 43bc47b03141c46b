// Work of a call, shared with the threads of XLA's pool.

#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>

#ifdef __x86_64__
#include <immintrin.h>
#endif

#include "xla/ffi/api/ffi.h"

namespace precast {

namespace ffi = xla::ffi;

// While waiting for another thread.
inline void Pause() {
#ifdef __x86_64__
  _mm_pause();
#endif
  std::this_thread::yield();
}

// Work of a call: items that threads take one after another.
class Job {
 public:
  explicit Job(int64_t items) : items_(items) {}
  virtual ~Job() = default;

  void Run() {
    int64_t mine = 0;
    for (int64_t item; (item = next_.fetch_add(1, std::memory_order_relaxed)) < items_; ++mine) Do(item);
    done_.fetch_add(mine, std::memory_order_release);
  }

  bool IsDone() const { return done_.load(std::memory_order_acquire) >= items_; }

 private:
  virtual void Do(int64_t item) = 0;

  const int64_t items_;
  std::atomic<int64_t> next_{0}, done_{0};
};

// The pool's threads that help. One that is done stays awake for a while: a step is hundreds of calls in a row, and to
// wake a thread takes as long as some of them. A helper that leaves too early or comes too late costs time alone: who
// calls takes every item that nobody else has taken.
class Crew {
 public:
  static Crew& OfProcess() {
    static Crew& crew = *new Crew;  // never destroyed: threads may wait in it until the process ends
    return crew;
  }

  void Help(ffi::ThreadPool& pool, std::shared_ptr<Job> job, int64_t helpers) {
    int64_t missing;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      job_ = std::move(job);
      calls_.fetch_add(1, std::memory_order_release);
      missing = std::max<int64_t>(0, helpers - present_);
      present_ += missing;
    }
    // Without the lock: a pool that is full runs what it is given at once.
    for (int64_t i = 0; i < missing; ++i) pool.Schedule([this] { Wait(); });
  }

 private:
  // Takes part in what is called, until nothing was for kPatience.
  void Wait() {
    constexpr auto kPatience = std::chrono::microseconds(200);
    int64_t seen = -1;
    for (auto until = std::chrono::steady_clock::now();;) {
      if (calls_.load(std::memory_order_acquire) != seen) {
        std::shared_ptr<Job> job;
        {
          std::lock_guard<std::mutex> lock(mutex_);
          job = job_, seen = calls_.load(std::memory_order_relaxed);
        }
        job->Run();
        until = std::chrono::steady_clock::now() + kPatience;
      } else if (std::chrono::steady_clock::now() > until) {
        std::lock_guard<std::mutex> lock(mutex_);
        if (calls_.load(std::memory_order_relaxed) != seen) continue;
        --present_;
        return;
      }
      Pause();
    }
  }

  std::mutex mutex_;
  std::shared_ptr<Job> job_;
  std::atomic<int64_t> calls_{0};
  int64_t present_ = 0;
};

// Runs work(0) to work(items - 1) on this thread and, if that is worth it, on those of the pool that are free.
template <typename Work>
void Share(ffi::ThreadPool& pool, int64_t items, bool is_worth_it, Work work) {
  struct Shared final : Job {
    Work work;
    Shared(Work work, int64_t items) : Job(items), work(std::move(work)) {}
    void Do(int64_t item) override { work(item); }
  };
  int64_t helpers = is_worth_it ? std::min<int64_t>(pool.num_threads(), items) - 1 : 0;
  auto job = std::make_shared<Shared>(std::move(work), items);
  if (helpers > 0) Crew::OfProcess().Help(pool, job, helpers);
  job->Run();
  for (int64_t spins = 0; !job->IsDone(); ++spins) spins < 256 ? Pause() : std::this_thread::yield();
}

}  // namespace precast
