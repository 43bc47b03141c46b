// What the kernels share: vectors of the processor at hand, small matrix products in registers, and work for a pool.
//
// Every sum runs in one order, that of its index, in one accumulator: how many rows a call has, and which thread works
// on what, changes no bit of a row's result. The instructions do (a processor's bfloat16 product rounds in its own
// way), and so which of them are used is settled when this is compiled for the processor at hand.

#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <thread>
#include <type_traits>
#include <vector>

#ifdef __x86_64__
#include <immintrin.h>
#endif

#include "xla/ffi/api/ffi.h"

namespace precast {

namespace ffi = xla::ffi;
using bfloat16 = uint16_t;

// While waiting for another thread.
inline void Pause() {
#ifdef __x86_64__
  _mm_pause();
#endif
  std::this_thread::yield();
}

template <typename To, typename From>
inline To Bits(const From& from) {
  To to;
  static_assert(sizeof(To) == sizeof(From));
  std::memcpy(&to, &from, sizeof(To));
  return to;
}

inline float Widened(bfloat16 x) { return Bits<float>(static_cast<uint32_t>(x) << 16); }
inline float Widened(float x) { return x; }

// What one instruction works on, kVector numbers; one pass takes kVectors of them by kMostRows rows, so that the sums
// stay in registers.
#if defined(__AVX512F__)
constexpr int kVector = 16, kVectors = 2, kMostRows = 12;
using Floats = __m512;
inline Floats Load(const float* from) { return _mm512_loadu_ps(from); }
inline Floats Load(const bfloat16* from) {
  __m512i words = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
  return _mm512_castsi512_ps(_mm512_slli_epi32(words, 16));
}
inline void Store(float* to, Floats x) { _mm512_storeu_ps(to, x); }
inline Floats Spread(float x) { return _mm512_set1_ps(x); }
inline Floats MultiplyAdd(Floats x, Floats y, Floats sum) { return _mm512_fmadd_ps(x, y, sum); }
inline Floats Larger(Floats x, Floats y) { return _mm512_max_ps(x, y); }
inline Floats Rounded(Floats x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline Floats TimesPowerOf2(Floats x, Floats power) { return _mm512_scalef_ps(x, power); }
inline float Largest(Floats x) { return _mm512_reduce_max_ps(x); }
inline float Sum(Floats x) { return _mm512_reduce_add_ps(x); }
inline Floats LowHalves(Floats pairs) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_castps_si512(pairs), 16)); }
inline Floats HighHalves(Floats pairs) {
  return _mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(pairs), _mm512_set1_epi32(0xffff0000)));
}
#elif defined(__AVX2__) && defined(__FMA__)
constexpr int kVector = 8, kVectors = 2, kMostRows = 6;
using Floats = __m256;
inline Floats Load(const float* from) { return _mm256_loadu_ps(from); }
inline Floats Load(const bfloat16* from) {
  __m256i words = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
  return _mm256_castsi256_ps(_mm256_slli_epi32(words, 16));
}
inline void Store(float* to, Floats x) { _mm256_storeu_ps(to, x); }
inline Floats Spread(float x) { return _mm256_set1_ps(x); }
inline Floats MultiplyAdd(Floats x, Floats y, Floats sum) { return _mm256_fmadd_ps(x, y, sum); }
inline Floats Larger(Floats x, Floats y) { return _mm256_max_ps(x, y); }
inline Floats Rounded(Floats x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline Floats TimesPowerOf2(Floats x, Floats power) {
  __m256i exponent = _mm256_add_epi32(_mm256_cvtps_epi32(power), _mm256_set1_epi32(127));
  return x * _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23));
}
inline float Largest(Floats x) {
  __m128 four = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  four = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(four, _mm_shuffle_ps(four, four, 1)));
}
inline float Sum(Floats x) {
  __m128 four = _mm256_castps256_ps128(x) + _mm256_extractf128_ps(x, 1);
  four = four + _mm_movehl_ps(four, four);
  return _mm_cvtss_f32(_mm_add_ss(four, _mm_shuffle_ps(four, four, 1)));
}
inline Floats LowHalves(Floats pairs) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_castps_si256(pairs), 16)); }
inline Floats HighHalves(Floats pairs) {
  return _mm256_castsi256_ps(_mm256_and_si256(_mm256_castps_si256(pairs), _mm256_set1_epi32(0xffff0000)));
}
#else
constexpr int kVector = 4, kVectors = 2, kMostRows = 4;
using Floats = float __attribute__((vector_size(4 * kVector)));
using Words = uint32_t __attribute__((vector_size(4 * kVector)));
inline Floats Load(const float* from) { return Floats{from[0], from[1], from[2], from[3]}; }
inline Floats Load(const bfloat16* from) {
  return Floats{Widened(from[0]), Widened(from[1]), Widened(from[2]), Widened(from[3])};
}
inline void Store(float* to, Floats x) { std::memcpy(to, &x, sizeof(x)); }
inline Floats Spread(float x) { return Floats{x, x, x, x}; }
inline Floats MultiplyAdd(Floats x, Floats y, Floats sum) { return sum + x * y; }
template <typename F>
inline Floats Each(F f) { return Floats{f(0), f(1), f(2), f(3)}; }
inline Floats Larger(Floats x, Floats y) { return Each([&](int i) { return x[i] > y[i] ? x[i] : y[i]; }); }
inline Floats Rounded(Floats x) { return Each([&](int i) { return std::nearbyint(x[i]); }); }
inline Floats TimesPowerOf2(Floats x, Floats n) { return Each([&](int i) { return std::ldexp(x[i], int(n[i])); }); }
inline float Largest(Floats x) { return std::max(std::max(x[0], x[1]), std::max(x[2], x[3])); }
inline float Sum(Floats x) { return (x[0] + x[1]) + (x[2] + x[3]); }
inline Floats LowHalves(Floats pairs) { return reinterpret_cast<Floats>(reinterpret_cast<Words>(pairs) << 16); }
inline Floats HighHalves(Floats pairs) { return reinterpret_cast<Floats>(reinterpret_cast<Words>(pairs) & 0xffff0000u); }
#endif

// e^x for x up to 88, within 2 units in the last place, by the polynomial of Cephes' expf; at least e^-87. What is no
// number stays none: Larger gives its second argument then.
inline Floats Exp(Floats x) {
  x = Larger(Spread(-87.f), x);
  Floats n = Rounded(x * Spread(1.44269504088896341f));
  x = MultiplyAdd(n, Spread(-0.693359375f), x);
  x = MultiplyAdd(n, Spread(2.12194440e-4f), x);
  Floats y = Spread(1.9875691500e-4f);
  for (float factor : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f})
    y = MultiplyAdd(y, x, Spread(factor));
  return TimesPowerOf2(MultiplyAdd(y, x * x, x) + Spread(1.f), n);
}

// A step of a sum: the products of one input, or of two where a matrix keeps pairs of bfloat16 together; ``left``
// says whether there is a second one.
template <typename T>
struct Single {
  using Input = float;
  using Weight = T;
  static constexpr int kStep = 1;
  static Floats Weights(const T* from) { return Load(from); }
  static Floats Add(const float* x, int64_t, Floats weights, Floats sum) {
    return MultiplyAdd(Spread(*x), weights, sum);
  }
};

struct Pair {
  using Weight = bfloat16;
  static constexpr int kStep = 2;
  static Floats Weights(const bfloat16* from) { return Load(reinterpret_cast<const float*>(from)); }
#ifdef __AVX512BF16__
  using Input = bfloat16;
  static Floats Add(const bfloat16* x, int64_t left, Floats weights, Floats sum) {
    uint32_t pair = left > 1 ? x[0] | static_cast<uint32_t>(x[1]) << 16 : x[0];
    return _mm512_dpbf16_ps(sum, (__m512bh)weights, (__m512bh)_mm512_set1_epi32(pair));
  }
#else
  // Without such an instruction the inputs are made float32 before, each once.
  using Input = float;
  static Floats Add(const float* x, int64_t left, Floats weights, Floats sum) {
    sum = MultiplyAdd(Spread(x[0]), LowHalves(weights), sum);
    return left > 1 ? MultiplyAdd(Spread(x[1]), HighHalves(weights), sum) : sum;
  }
#endif
};

// x [rows, inputs] times a matrix whose row of one step starts ``matrix_stride`` numbers after the one before. What is
// at ``soon``, which lies like the matrix, is fetched meanwhile; it need not be there.
template <typename Step>
struct Product {
  const typename Step::Input* x;
  int64_t x_stride, inputs;
  const typename Step::Weight* matrix;
  const typename Step::Weight* soon;
  int64_t matrix_stride;
  float* out;
  int64_t out_stride;
};

// kRows rows by kColumns vectors of outputs, of which ``columns`` are written; kAdds adds to what is there.
template <typename Step, bool kAdds, int kRows, int kColumns>
inline void Block(const Product<Step>& product, int64_t row, int64_t column, int64_t columns) {
  const auto* x = product.x + row * product.x_stride;
  const auto* matrix = product.matrix + column * Step::kStep;
  const int64_t soon = product.soon - product.matrix;
  float* out = product.out + row * product.out_stride + column;
  Floats sums[kRows][kColumns] = {};
  if constexpr (kAdds) {
#pragma GCC unroll 16
    for (int i = 0; i < kRows; ++i)
#pragma GCC unroll 16
      for (int j = 0; j < kColumns; ++j) sums[i][j] = Load(out + i * product.out_stride + j * kVector);
  }
  for (int64_t k = 0; k < product.inputs; k += Step::kStep, matrix += product.matrix_stride) {
    Floats weights[kColumns];
#pragma GCC unroll 16
    for (int j = 0; j < kColumns; ++j) {
      weights[j] = Step::Weights(matrix + j * kVector * Step::kStep);
      __builtin_prefetch(matrix + soon + j * kVector * Step::kStep);
    }
#pragma GCC unroll 16
    for (int i = 0; i < kRows; ++i)
#pragma GCC unroll 16
      for (int j = 0; j < kColumns; ++j)
        sums[i][j] = Step::Add(x + i * product.x_stride + k, product.inputs - k, weights[j], sums[i][j]);
  }
#pragma GCC unroll 16
  for (int i = 0; i < kRows; ++i) {
    float lanes[kColumns * kVector];
#pragma GCC unroll 16
    for (int j = 0; j < kColumns; ++j) Store(lanes + j * kVector, sums[i][j]);
    std::memcpy(out + i * product.out_stride, lanes, std::min<int64_t>(columns, kColumns * kVector) * sizeof(float));
  }
}

template <typename Step, bool kAdds, int kColumns, int kRows = kMostRows - 1>
inline void LastRows(const Product<Step>& product, int64_t row, int64_t rows, int64_t column, int64_t columns) {
  if constexpr (kRows > 0) {
    if (rows - row == kRows) return Block<Step, kAdds, kRows, kColumns>(product, row, column, columns);
    LastRows<Step, kAdds, kColumns, kRows - 1>(product, row, rows, column, columns);
  }
}

template <typename Step, bool kAdds, int kColumns>
inline void Columns(const Product<Step>& product, int64_t rows, int64_t column, int64_t columns) {
  int64_t row = 0;
  for (; row + kMostRows <= rows; row += kMostRows)
    Block<Step, kAdds, kMostRows, kColumns>(product, row, column, columns);
  LastRows<Step, kAdds, kColumns>(product, row, rows, column, columns);
}

// All of a product; reads whole vectors of the matrix, and with kAdds of out.
template <typename Step, bool kAdds>
void Multiply(const Product<Step>& product, int64_t rows, int64_t columns) {
  int64_t column = 0;
  // Few rows leave registers for more columns, which keeps more sums going at a time.
  for (; rows <= kMostRows / 2 && columns - column > (2 * kVectors - 1) * kVector; column += 2 * kVectors * kVector)
    LastRows<Step, kAdds, 2 * kVectors, kMostRows / 2>(product, 0, rows, column, columns - column);
  for (; columns - column > (kVectors - 1) * kVector; column += kVectors * kVector)
    Columns<Step, kAdds, kVectors>(product, rows, column, columns - column);
  for (; column < columns; column += kVector) Columns<Step, kAdds, 1>(product, rows, column, columns - column);
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
    {
      std::lock_guard<std::mutex> lock(mutex_);
      job_ = std::move(job);
      calls_.fetch_add(1, std::memory_order_release);
      for (; present_ < helpers; ++present_) pool.Schedule([this] { Wait(); });
    }
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
