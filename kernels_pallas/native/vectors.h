// Vectors of float32, and bfloat16, on the processor at hand.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <new>
#include <vector>

#ifdef __x86_64__
#include <immintrin.h>
#endif

namespace precast {

using bfloat16 = uint16_t;

// Numbers that begin with a cache line, so that no vector or tile row lies on two.
template <typename T>
struct LineAllocator {
  using value_type = T;
  LineAllocator() = default;
  template <typename Other>
  LineAllocator(const LineAllocator<Other>&) {}
  T* allocate(size_t count) { return static_cast<T*>(::operator new(count * sizeof(T), std::align_val_t(64))); }
  void deallocate(T* at, size_t) { ::operator delete(at, std::align_val_t(64)); }
  friend bool operator==(LineAllocator, LineAllocator) { return true; }
  friend bool operator!=(LineAllocator, LineAllocator) { return false; }
};
template <typename T>
using Lines = std::vector<T, LineAllocator<T>>;

template <typename To, typename From>
inline To Bits(const From& from) {
  To to;
  static_assert(sizeof(To) == sizeof(From));
  std::memcpy(&to, &from, sizeof(To));
  return to;
}

// To the nearest, ties to even; what is no number stays none.
inline bfloat16 Narrowed(float x) {
  uint32_t bits = Bits<uint32_t>(x);
  return x != x ? bits >> 16 | 0x40 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
inline float Widened(bfloat16 x) { return Bits<float>(static_cast<uint32_t>(x) << 16); }
inline float Widened(float x) { return x; }

// What one instruction works on, kVector numbers; one pass takes kVectors of them by kMostRows rows, so that the sums
// stay in registers.
#if defined(__AVX512F__)
constexpr int kVector = 16, kVectors = 2, kMostRows = 12;
using Floats = __m512;
inline Floats Load(const float* from) { return _mm512_loadu_ps(from); }
inline void Store(float* to, Floats x) { _mm512_storeu_ps(to, x); }
inline Floats Spread(float x) { return _mm512_set1_ps(x); }
inline Floats MultiplyAdd(Floats x, Floats y, Floats sum) { return _mm512_fmadd_ps(x, y, sum); }
inline Floats Larger(Floats x, Floats y) { return _mm512_max_ps(x, y); }
inline Floats Rounded(Floats x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline Floats TimesPowerOf2(Floats x, Floats power) { return _mm512_scalef_ps(x, power); }
// Within a unit in the last place, by a step of Newton's: a division takes as long as an exponential.
inline Floats Reciprocal(Floats x) {
  Floats y = _mm512_rcp14_ps(x);
  return y * (Spread(2.f) - x * y);
}
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
inline void Store(float* to, Floats x) { _mm256_storeu_ps(to, x); }
inline Floats Spread(float x) { return _mm256_set1_ps(x); }
inline Floats MultiplyAdd(Floats x, Floats y, Floats sum) { return _mm256_fmadd_ps(x, y, sum); }
inline Floats Larger(Floats x, Floats y) { return _mm256_max_ps(x, y); }
inline Floats Rounded(Floats x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline Floats TimesPowerOf2(Floats x, Floats power) {
  __m256i exponent = _mm256_add_epi32(_mm256_cvtps_epi32(power), _mm256_set1_epi32(127));
  return x * _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23));
}
inline Floats Reciprocal(Floats x) { return Spread(1.f) / x; }
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
inline void Store(float* to, Floats x) { std::memcpy(to, &x, sizeof(x)); }
inline Floats Spread(float x) { return Floats{x, x, x, x}; }
inline Floats MultiplyAdd(Floats x, Floats y, Floats sum) { return sum + x * y; }
template <typename F>
inline Floats Each(F f) { return Floats{f(0), f(1), f(2), f(3)}; }
inline Floats Larger(Floats x, Floats y) { return Each([&](int i) { return x[i] > y[i] ? x[i] : y[i]; }); }
inline Floats Rounded(Floats x) { return Each([&](int i) { return std::nearbyint(x[i]); }); }
inline Floats TimesPowerOf2(Floats x, Floats n) { return Each([&](int i) { return std::ldexp(x[i], int(n[i])); }); }
inline Floats Reciprocal(Floats x) { return Spread(1.f) / x; }
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

#ifdef __AVX512BF16__
inline void StoreNarrowed(bfloat16* to, Floats x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), (__m256i)_mm512_cvtneps_pbh(x));
}
#endif

inline void Narrow(const float* from, int64_t count, bfloat16* to) {
  int64_t i = 0;
#ifdef __AVX512BF16__
  for (; i + kVector <= count; i += kVector) StoreNarrowed(to + i, Load(from + i));
#endif
  for (; i < count; ++i) to[i] = Narrowed(from[i]);
}

}  // namespace precast
