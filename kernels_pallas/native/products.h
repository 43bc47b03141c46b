// Small matrix products in registers or tiles.
//
// Every sum runs in one order, that of its index, in one accumulator: how many rows a call has, and which thread works
// on what, changes no bit of a row's result. The instructions do (a processor's bfloat16 product rounds in its own
// way), and so which of them are used is settled when this is compiled for the processor at hand.

#pragma once

#include <type_traits>

#include "vectors.h"

#if defined(__AMX_BF16__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#define PRECAST_TILES
#endif

namespace precast {

// A step of a sum: the products of one input, or of two where a matrix keeps pairs of bfloat16 together.
struct Single {
  using Input = float;
  using Weight = float;
  static constexpr int kStep = 1;
  static Floats Weights(const float* from) { return Load(from); }
  static Floats Add(const float* x, Floats weights, Floats sum) {
    return MultiplyAdd(Spread(*x), weights, sum);
  }
};

struct Pair {
  using Weight = bfloat16;
  static constexpr int kStep = 2;
  static Floats Weights(const bfloat16* from) { return Load(reinterpret_cast<const float*>(from)); }
#ifdef __AVX512BF16__
  using Input = bfloat16;
  static Floats Add(const bfloat16* x, Floats weights, Floats sum) {
    uint32_t pair;
    std::memcpy(&pair, x, sizeof(pair));
    return _mm512_dpbf16_ps(sum, (__m512bh)weights, (__m512bh)_mm512_set1_epi32(pair));
  }
#else
  // Without such an instruction what is rounded to bfloat16 is widened again before, each number once.
  using Input = float;
  static Floats Add(const float* x, Floats weights, Floats sum) {
    return MultiplyAdd(Spread(x[1]), HighHalves(weights), MultiplyAdd(Spread(x[0]), LowHalves(weights), sum));
  }
#endif
};

template <typename T>
using StepOf = std::conditional_t<std::is_same_v<T, float>, Single, Pair>;

// What a product takes as its inputs; kRounds makes them bfloat16 numbers where the weights are.
template <typename Step, bool kRounds>
inline void Take(const float* from, int64_t count, typename Step::Input* to) {
  if constexpr (std::is_same_v<typename Step::Input, bfloat16>)
    Narrow(from, count, to);
  else if constexpr (kRounds && std::is_same_v<typename Step::Weight, bfloat16>)
    std::transform(from, from + count, to, [](float x) { return Widened(Narrowed(x)); });
  else
    std::copy_n(from, count, to);
}

inline int64_t RoundedUp(int64_t size, int64_t to) { return (size + to - 1) / to * to; }

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
        sums[i][j] = Step::Add(x + i * product.x_stride + k, weights[j], sums[i][j]);
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

#ifdef PRECAST_TILES
// Intel's AMX: a tile has up to 16 rows of 64 bytes. 0 to 3 hold sums (upper rows in 0 and 1, lower ones in 2 and 3),
// 4 and 5 the rows of x, 6 and 7 the weights of 16 outputs each.
constexpr int kTile = 16, kTileInputs = 32;

struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};

// Linux lets a process use tiles once it has asked.
inline bool MayUseTiles() {
  constexpr int kAskForPermission = 0x1023, kTileData = 18;
  static const bool may = syscall(SYS_arch_prctl, kAskForPermission, kTileData) == 0;
  return may;
}

// A thread's tiles, for as long as this lives.
class Tiles {
 public:
  ~Tiles() {
    if (rows_) _tile_release();
  }

  // As precast::Multiply; reads whole tiles: kTileInputs inputs of x and the matrix by 2 * kTile outputs.
  template <bool kAdds>
  void Multiply(const Product<Pair>& product, int64_t rows, int64_t columns) {
    for (int64_t row = 0; row < rows; row += 2 * kTile) {
      int block = static_cast<int>(std::min<int64_t>(2 * kTile, rows - row));
      Configure(block);
      for (int64_t column = 0; column < columns; column += 2 * kTile)
        (block > kTile ? Block<kAdds, true> : Block<kAdds, false>)(product, block, row, column, columns - column);
    }
  }

 private:
  // For blocks of up to 16 rows, or 17 to 32.
  void Configure(int rows) {
    if (rows == rows_) return;
    TileConfig config;
    for (int tile = 0; tile < 8; ++tile) {
      bool is_lower = tile == 2 || tile == 3 || tile == 5;
      config.rows[tile] = is_lower && rows > kTile ? rows - kTile : is_lower ? rows : kTile;
      config.row_bytes[tile] = 64;
    }
    _tile_loadconfig(&config);
    rows_ = rows;
  }

  template <bool kAdds, bool kTwo>
  static void Block(const Product<Pair>& product, int rows, int64_t row, int64_t column, int64_t columns) {
    const bfloat16* x = product.x + row * product.x_stride;
    const bfloat16* lower = kTwo ? x + kTile * product.x_stride : x;
    const bfloat16* matrix = product.matrix + column * 2;
    const int64_t step = kTileInputs / 2 * product.matrix_stride, soon = row ? 0 : product.soon - product.matrix;
    float* out = product.out + row * product.out_stride + column;
    Begin<kAdds, kTwo>(out, product.out_stride);
    for (int64_t k = 0; k < product.inputs; k += kTileInputs, matrix += step)
      Step<kTwo>(x + k, lower + k, product.x_stride, matrix, product.matrix_stride, soon);
    if (columns >= 2 * kTile) return End<kTwo>(out, product.out_stride);
    alignas(64) float sums[2 * kTile][2 * kTile];
    End<kTwo>(sums[0], 2 * kTile);
    for (int i = 0; i < rows; ++i) std::memcpy(out + i * product.out_stride, sums[i], columns * sizeof(float));
  }

  template <bool kAdds, bool kTwo>
  static void Begin(const float* out, int64_t stride) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    if constexpr (!kAdds) return;
    if constexpr (kTwo) {
      _tile_loadd(0, out, stride * 4);
      _tile_loadd(1, out + kTile, stride * 4);
      out += kTile * stride;
    }
    _tile_loadd(2, out, stride * 4);
    _tile_loadd(3, out + kTile, stride * 4);
  }

  template <bool kTwo>
  static void Step(const bfloat16* upper, const bfloat16* lower, int64_t x_stride, const bfloat16* matrix,
                   int64_t stride, int64_t soon) {
    if (soon)
      for (int i = 0; i < kTile; ++i) {
        __builtin_prefetch(matrix + soon + i * stride);
        __builtin_prefetch(matrix + soon + i * stride + 2 * kTile);
      }
    _tile_loadd(6, matrix, stride * 2);
    _tile_loadd(7, matrix + 2 * kTile, stride * 2);
    if constexpr (kTwo) {
      _tile_loadd(4, upper, x_stride * 2);
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(1, 4, 7);
    }
    _tile_loadd(5, lower, x_stride * 2);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }

  template <bool kTwo>
  static void End(float* out, int64_t stride) {
    if constexpr (kTwo) {
      _tile_stored(0, out, stride * 4);
      _tile_stored(1, out + kTile, stride * 4);
      out += kTile * stride;
    }
    _tile_stored(2, out, stride * 4);
    _tile_stored(3, out + kTile, stride * 4);
  }

  int rows_ = 0;
};
#endif

// Products of one thread, with what its processor has for them.
template <typename Step>
class Multiplier {
 public:
  // Of how many inputs and outputs whole blocks are read, of x and out as well.
  static constexpr int kInputs = Step::kStep, kOutputs = kVector;

  template <bool kAdds>
  void Multiply(const Product<Step>& product, int64_t rows, int64_t columns) {
    precast::Multiply<Step, kAdds>(product, rows, columns);
  }
};

#ifdef PRECAST_TILES
template <>
class Multiplier<Pair> {
 public:
  static constexpr int kInputs = kTileInputs, kOutputs = 2 * kTile;

  template <bool kAdds>
  void Multiply(const Product<Pair>& product, int64_t rows, int64_t columns) {
    if (MayUseTiles())
      tiles_.Multiply<kAdds>(product, rows, columns);
    else
      precast::Multiply<Pair, kAdds>(product, rows, columns);
  }

 private:
  Tiles tiles_;
};
#endif

}  // namespace precast
