// Dense products on packed weights for XLA's CPU backend, and the packing.
//
// A weight [outputs, inputs] lies in panels of kPanel outputs; in a panel, one input's kPanel weights are side by
// side: float32 as [panels, inputs, kPanel], bfloat16 as [panels, inputs / 2, kPanel, 2], pairs of inputs together,
// which is what the processors' own bfloat16 instructions take. Outputs are filled up with zeros to whole panels, and
// the inputs of bfloat16 to a multiple of kInputs.
//
// Every output is one running sum over the inputs in order, in float32: how many rows a call has, and which thread
// works on which panel, changes no bit of it. The instructions do (a processor's bfloat16 product rounds in its own
// way), and so which of them are used is settled when this file is compiled for the processor at hand.

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <memory>
#include <thread>
#include <type_traits>
#include <vector>

#ifdef __x86_64__
#include <immintrin.h>
#endif
#if defined(__AMX_BF16__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#define PRECAST_TILES
#endif

#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace {

constexpr int kPanel = 32;
constexpr int kInputs = 32;
// Products smaller than this are not worth a second thread.
constexpr int64_t kLeastShared = 1 << 17;

using bfloat16 = uint16_t;

template <typename T>
constexpr bool kIsPaired = std::is_same_v<T, bfloat16>;
// Inputs that lie together.
template <typename T>
constexpr int kStep = kIsPaired<T> ? 2 : 1;

template <typename To, typename From>
inline To Bits(const From& from) {
  To to;
  static_assert(sizeof(To) == sizeof(From));
  std::memcpy(&to, &from, sizeof(To));
  return to;
}

template <typename T>
inline int64_t PaddedInputs(int64_t inputs) {
  return kIsPaired<T> ? (inputs + kInputs - 1) / kInputs * kInputs : inputs;
}

// What one instruction works on, kVector numbers; one pass takes kVectors of them by kMostRows rows, so that the sums
// stay in registers.
#if defined(__AVX512F__)
constexpr int kVector = 16, kVectors = 2, kMostRows = 12;
using Floats = __m512;
inline Floats Load(const float* from) { return _mm512_loadu_ps(from); }
inline void Store(float* to, Floats x) { _mm512_storeu_ps(to, x); }
inline Floats Spread(float x) { return _mm512_set1_ps(x); }
inline Floats MultiplyAdd(Floats x, Floats y, Floats sum) { return _mm512_fmadd_ps(x, y, sum); }
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
inline Floats LowHalves(Floats pairs) { return reinterpret_cast<Floats>(reinterpret_cast<Words>(pairs) << 16); }
inline Floats HighHalves(Floats pairs) { return reinterpret_cast<Floats>(reinterpret_cast<Words>(pairs) & 0xffff0000u); }
#endif

// Adds one input's products, or those of two where inputs lie in pairs; ``left`` says whether there is a second.
inline Floats Accumulate(const float* x, int64_t, Floats weights, Floats sum, float) {
  return MultiplyAdd(Spread(*x), weights, sum);
}

inline Floats Accumulate(const float* x, int64_t left, Floats weights, Floats sum, bfloat16) {
  sum = MultiplyAdd(Spread(x[0]), LowHalves(weights), sum);
  return left > 1 ? MultiplyAdd(Spread(x[1]), HighHalves(weights), sum) : sum;
}

#ifdef __AVX512BF16__
inline Floats Accumulate(const bfloat16* x, int64_t left, Floats weights, Floats sum, bfloat16) {
  uint32_t pair = left > 1 ? x[0] | static_cast<uint32_t>(x[1]) << 16 : x[0];
  return _mm512_dpbf16_ps(sum, (__m512bh)weights, (__m512bh)_mm512_set1_epi32(pair));
}
template <typename T>
using Input = T;
#else
// Without such an instruction the numbers are made float32 before, each once.
template <typename T>
using Input = float;
#endif

// A product as it is worked on: by panels, by whoever takes the next one.
template <typename T>
struct Job {
  const Input<T>* x;
  const T* weight;
  float* out;
  int64_t rows, inputs, outputs, panels;
  std::vector<float> widened;
  std::atomic<int64_t> next{0}, done{0};
};

// kRows rows from x on by kVectors vectors of outputs from out on, of which ``columns`` are real.
template <typename T, int kRows>
inline void Block(const Job<T>& job, const Input<T>* x, const T* weight, float* out, int64_t columns) {
  Floats sums[kRows][kVectors] = {};
  for (int64_t k = 0; k < job.inputs; k += kStep<T>) {
    Floats weights[kVectors];
#pragma GCC unroll 16
    for (int j = 0; j < kVectors; ++j)
      weights[j] = Load(reinterpret_cast<const float*>(weight + k * kPanel + j * kVector * kStep<T>));
#pragma GCC unroll 16
    for (int i = 0; i < kRows; ++i)
#pragma GCC unroll 16
      for (int j = 0; j < kVectors; ++j)
        sums[i][j] = Accumulate(x + i * job.inputs + k, job.inputs - k, weights[j], sums[i][j], T{});
  }
#pragma GCC unroll 16
  for (int i = 0; i < kRows; ++i) {
    float row[kVectors * kVector];
#pragma GCC unroll 16
    for (int j = 0; j < kVectors; ++j) Store(row + j * kVector, sums[i][j]);
    std::memcpy(out + i * job.outputs, row, std::min<int64_t>(columns, kVectors * kVector) * sizeof(float));
  }
}

// The last rows, fewer than kMostRows.
template <typename T, int kRows>
void Rest(const Job<T>& job, int64_t rows, const Input<T>* x, const T* weight, float* out, int64_t columns) {
  if constexpr (kRows > 0) {
    if (rows == kRows) return Block<T, kRows>(job, x, weight, out, columns);
    Rest<T, kRows - 1>(job, rows, x, weight, out, columns);
  }
}

template <typename T>
void PanelOfVectors(const Job<T>& job, const T* weight, float* out, int64_t columns) {
  for (int64_t c = 0; c < columns; c += kVectors * kVector) {
    int64_t row = 0;
    for (; row + kMostRows <= job.rows; row += kMostRows)
      Block<T, kMostRows>(job, job.x + row * job.inputs, weight + c * kStep<T>, out + row * job.outputs + c, columns - c);
    Rest<T, kMostRows - 1>(job, job.rows - row, job.x + row * job.inputs, weight + c * kStep<T>,
                           out + row * job.outputs + c, columns - c);
  }
}

#ifdef PRECAST_TILES
// Intel's AMX: a tile has up to 16 rows of 64 bytes. 0 to 3 hold sums (upper rows in 0 and 1, lower ones in 2 and 3),
// 4 and 5 the rows of x, 6 and 7 the weights of 16 outputs each.
constexpr int kTile = 16;

struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};

template <bool kTwo>
inline void TileStep(const bfloat16* upper, const bfloat16* lower, int64_t stride, const bfloat16* weight) {
  _tile_loadd(6, weight, kPanel * 4);
  _tile_loadd(7, weight + 2 * kTile, kPanel * 4);
  if constexpr (kTwo) {
    _tile_loadd(4, upper, stride);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
  }
  _tile_loadd(5, lower, stride);
  _tile_dpbf16ps(2, 5, 6);
  _tile_dpbf16ps(3, 5, 7);
}

template <bool kTwo>
inline void TileStore(float* out, int64_t stride) {
  if constexpr (kTwo) {
    _tile_stored(0, out, stride * 4);
    _tile_stored(1, out + kTile, stride * 4);
    out += kTile * stride;
  }
  _tile_stored(2, out, stride * 4);
  _tile_stored(3, out + kTile, stride * 4);
}

// Up to 16 rows, or with kTwo 17 to 32.
template <bool kTwo>
void TileBlock(const Job<bfloat16>& job, int rows, const bfloat16* x, const bfloat16* weight, float* out,
               int64_t columns) {
  int lower_rows = kTwo ? rows - kTile : rows;
  TileConfig config;
  for (int tile = 0; tile < 8; ++tile) {
    bool is_lower = tile == 2 || tile == 3 || tile == 5;
    config.rows[tile] = is_lower ? lower_rows : kTile;
    config.row_bytes[tile] = 64;
  }
  _tile_loadconfig(&config);  // zeroes all tiles
  const bfloat16* lower = kTwo ? x + kTile * job.inputs : x;
  int64_t k = 0;
  for (; k + kInputs <= job.inputs; k += kInputs)
    TileStep<kTwo>(x + k, lower + k, job.inputs * 2, weight + k * kPanel);
  if (k < job.inputs) {
    alignas(64) bfloat16 last[2 * kTile][kInputs] = {};
    for (int i = 0; i < rows; ++i) std::memcpy(last[i], x + i * job.inputs + k, (job.inputs - k) * 2);
    TileStep<kTwo>(last[0], last[kTwo ? kTile : 0], kInputs * 2, weight + k * kPanel);
  }
  if (columns >= kPanel) return TileStore<kTwo>(out, job.outputs);
  alignas(64) float sums[2 * kTile][kPanel];
  TileStore<kTwo>(sums[0], kPanel);
  for (int i = 0; i < rows; ++i) std::memcpy(out + i * job.outputs, sums[i], columns * sizeof(float));
}

void PanelOfTiles(const Job<bfloat16>& job, const bfloat16* weight, float* out, int64_t columns) {
  for (int64_t row = 0; row < job.rows; row += 2 * kTile) {
    int rows = static_cast<int>(std::min<int64_t>(2 * kTile, job.rows - row));
    auto block = rows > kTile ? TileBlock<true> : TileBlock<false>;
    block(job, rows, job.x + row * job.inputs, weight, out + row * job.outputs, columns);
  }
}

// Linux lets a process use tiles once it has asked.
bool MayUseTiles() {
  constexpr int kAskForPermission = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kAskForPermission, kTileData) == 0;
}
const bool may_use_tiles = MayUseTiles();
#endif

template <typename T>
void Work(Job<T>& job) {
  int64_t mine = 0;
  for (int64_t panel; (panel = job.next.fetch_add(1, std::memory_order_relaxed)) < job.panels; ++mine) {
    const T* weight = job.weight + panel * kPanel * PaddedInputs<T>(job.inputs);
    float* out = job.out + panel * kPanel;
    int64_t columns = std::min<int64_t>(kPanel, job.outputs - panel * kPanel);
#ifdef PRECAST_TILES
    if constexpr (kIsPaired<T>) {
      if (may_use_tiles) {
        PanelOfTiles(job, weight, out, columns);
        continue;
      }
    }
#endif
    PanelOfVectors(job, weight, out, columns);
  }
#ifdef PRECAST_TILES
  if (kIsPaired<T> && may_use_tiles && mine) _tile_release();
#endif
  job.done.fetch_add(mine, std::memory_order_release);
}

template <typename T>
void Product(ffi::ThreadPool& pool, const T* x, const T* weight, float* out, int64_t rows, int64_t inputs,
             int64_t outputs) {
  auto job = std::make_shared<Job<T>>();
  job->weight = weight, job->out = out;
  if constexpr (std::is_same_v<T, Input<T>>) {
    job->x = x;
  } else {
    job->widened.resize(rows * inputs);
    for (int64_t i = 0; i < rows * inputs; ++i) job->widened[i] = Bits<float>(static_cast<uint32_t>(x[i]) << 16);
    job->x = job->widened.data();
  }
  job->rows = rows, job->inputs = inputs, job->outputs = outputs, job->panels = (outputs + kPanel - 1) / kPanel;
  bool is_shared = inputs * outputs * std::max<int64_t>(rows, 4) >= kLeastShared;
  int64_t helpers = is_shared ? std::min<int64_t>(pool.num_threads(), job->panels) - 1 : 0;
  for (int64_t i = 0; i < helpers; ++i) pool.Schedule([job] { Work(*job); });
  Work(*job);
  // Only for panels that a helper is at: one that has not begun finds none left.
  for (int64_t spins = 0; job->done.load(std::memory_order_acquire) < job->panels; ++spins)
    if (spins > 256) std::this_thread::yield();
}

template <typename T, ffi::DataType kX, ffi::DataType kWeight>
ffi::Error Dense(ffi::ThreadPool pool, ffi::Buffer<kX> x, ffi::Buffer<kWeight> weight,
                 ffi::Result<ffi::Buffer<ffi::F32>> out) {
  auto in = x.dimensions(), packed = weight.dimensions(), result = out->dimensions();
  if (in.size() != 2 || result.size() != 2 || packed.size() != (kIsPaired<T> ? 4 : 3) || result[0] != in[0])
    return ffi::Error::InvalidArgument("dense product: x and out must be matrices of as many rows, weight packed");
  if (packed[0] != (result[1] + kPanel - 1) / kPanel || packed[1] * kStep<T> != PaddedInputs<T>(in[1]))
    return ffi::Error::InvalidArgument("dense product: weight is packed for other numbers of inputs or outputs");
  Product<T>(pool, reinterpret_cast<const T*>(x.typed_data()), reinterpret_cast<const T*>(weight.typed_data()),
             out->typed_data(), in[0], in[1], result[1]);
  return ffi::Error::Success();
}

// A panel at a time: kPanel rows of the matrix are read side by side, the panel is written in order.
template <typename T>
void Pack(const T* matrix, T* packed, int64_t outputs, int64_t inputs) {
  int64_t padded = PaddedInputs<T>(inputs);
  for (int64_t first = 0; first < outputs; first += kPanel)
    for (int64_t k = 0; k < padded; k += kStep<T>)
      for (int i = 0; i < kPanel; ++i)
        for (int s = 0; s < kStep<T>; ++s)
          *packed++ = first + i < outputs && k + s < inputs ? matrix[(first + i) * inputs + k + s] : T{0};
}

}  // namespace

extern "C" void precast_pack_f32(const float* matrix, float* packed, int64_t outputs, int64_t inputs) {
  Pack(matrix, packed, outputs, inputs);
}

extern "C" void precast_pack_bf16(const bfloat16* matrix, bfloat16* packed, int64_t outputs, int64_t inputs) {
  Pack(matrix, packed, outputs, inputs);
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(precast_dense_f32, (Dense<float, ffi::F32, ffi::F32>),
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(precast_dense_bf16, (Dense<bfloat16, ffi::BF16, ffi::U16>),
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::BF16>>()
                                  .Arg<ffi::Buffer<ffi::U16>>()
                                  .Ret<ffi::Buffer<ffi::F32>>());
