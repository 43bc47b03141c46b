// Dense products on packed weights, and the packing.
//
// A weight [outputs, inputs] lies in panels of kPanel outputs; in a panel, one input's kPanel weights are side by
// side: float32 as [panels, inputs, kPanel], bfloat16 as [panels, inputs / 2, kPanel, 2], pairs of inputs together,
// which is what the processors' own bfloat16 instructions take. Outputs are filled up with zeros to whole panels, and
// the inputs of bfloat16 to a multiple of kInputs.

#include "vectors.h"

#if defined(__AMX_BF16__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#define PRECAST_TILES
#endif

namespace precast {
namespace {

constexpr int kPanel = 32;
constexpr int kInputs = 32;
// Bytes. A processor fetches a stream ahead by itself, but not beyond the end of a page of memory.
constexpr int64_t kAhead = 8192;
// Products smaller than this are not worth a second thread.
constexpr int64_t kLeastShared = 1 << 17;

template <typename T>
using StepOf = std::conditional_t<std::is_same_v<T, float>, Single<float>, Pair>;

template <typename T>
inline int64_t PaddedInputs(int64_t inputs) {
  return std::is_same_v<T, float> ? inputs : (inputs + kInputs - 1) / kInputs * kInputs;
}

struct Shape {
  int64_t rows, inputs, outputs;
  bool IsShared() const { return inputs * outputs * std::max<int64_t>(rows, 4) >= kLeastShared; }
  int64_t Panels() const { return (outputs + kPanel - 1) / kPanel; }
};

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
void TileBlock(const bfloat16* x, Shape shape, int rows, const bfloat16* weight, float* out, int64_t columns) {
  int lower_rows = kTwo ? rows - kTile : rows;
  TileConfig config;
  for (int tile = 0; tile < 8; ++tile) {
    bool is_lower = tile == 2 || tile == 3 || tile == 5;
    config.rows[tile] = is_lower ? lower_rows : kTile;
    config.row_bytes[tile] = 64;
  }
  _tile_loadconfig(&config);  // zeroes all tiles
  const bfloat16* lower = kTwo ? x + kTile * shape.inputs : x;
  int64_t k = 0;
  for (; k + kInputs <= shape.inputs; k += kInputs)
    TileStep<kTwo>(x + k, lower + k, shape.inputs * 2, weight + k * kPanel);
  if (k < shape.inputs) {
    alignas(64) bfloat16 last[2 * kTile][kInputs] = {};
    for (int i = 0; i < rows; ++i) std::memcpy(last[i], x + i * shape.inputs + k, (shape.inputs - k) * 2);
    TileStep<kTwo>(last[0], last[kTwo ? kTile : 0], kInputs * 2, weight + k * kPanel);
  }
  if (columns >= kPanel) return TileStore<kTwo>(out, shape.outputs);
  alignas(64) float sums[2 * kTile][kPanel];
  TileStore<kTwo>(sums[0], kPanel);
  for (int i = 0; i < rows; ++i) std::memcpy(out + i * shape.outputs, sums[i], columns * sizeof(float));
}

void TilePanel(const bfloat16* x, Shape shape, const bfloat16* weight, float* out, int64_t columns) {
  for (int64_t row = 0; row < shape.rows; row += 2 * kTile) {
    int rows = static_cast<int>(std::min<int64_t>(2 * kTile, shape.rows - row));
    auto block = rows > kTile ? TileBlock<true> : TileBlock<false>;
    block(x + row * shape.inputs, shape, rows, weight, out + row * shape.outputs, columns);
  }
  _tile_release();
}

// Linux lets a process use tiles once it has asked.
bool MayUseTiles() {
  constexpr int kAskForPermission = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kAskForPermission, kTileData) == 0;
}
const bool may_use_tiles = MayUseTiles();
#endif

template <typename T>
void Run(ffi::ThreadPool& pool, const T* x, const T* weight, float* out, Shape shape) {
  auto columns = [shape](int64_t panel) { return std::min<int64_t>(kPanel, shape.outputs - panel * kPanel); };
  int64_t panel_size = kPanel * PaddedInputs<T>(shape.inputs);
#ifdef PRECAST_TILES
  if constexpr (std::is_same_v<T, bfloat16>) {
    if (may_use_tiles)
      return Share(pool, shape.Panels(), shape.IsShared(), [=](int64_t panel) {
        TilePanel(x, shape, weight + panel * panel_size, out + panel * kPanel, columns(panel));
      });
  }
#endif
  using Step = StepOf<T>;
  std::vector<float> widened;
  const typename Step::Input* inputs;
  if constexpr (std::is_same_v<T, typename Step::Input>) {
    inputs = x;
  } else {
    widened.resize(shape.rows * shape.inputs);
    std::transform(x, x + widened.size(), widened.begin(), [](bfloat16 one) { return Widened(one); });
    inputs = widened.data();
  }
  Share(pool, shape.Panels(), shape.IsShared(), [=](int64_t panel) {
    const T* matrix = weight + panel * panel_size;
    Product<Step> product{inputs, shape.inputs, shape.inputs, matrix, matrix + kAhead / sizeof(T),
                          kPanel * Step::kStep, out + panel * kPanel, shape.outputs};
    Multiply<Step, false>(product, shape.rows, columns(panel));
  });
}

template <typename T, ffi::DataType kX, ffi::DataType kWeight>
ffi::Error Dense(ffi::ThreadPool pool, ffi::Buffer<kX> x, ffi::Buffer<kWeight> weight,
                 ffi::Result<ffi::Buffer<ffi::F32>> out) {
  auto in = x.dimensions(), packed = weight.dimensions(), result = out->dimensions();
  constexpr int kStep = StepOf<T>::kStep;
  if (in.size() != 2 || result.size() != 2 || packed.size() != 2 + kStep || result[0] != in[0])
    return ffi::Error::InvalidArgument("dense product: x and out must be matrices of as many rows, weight packed");
  Shape shape{in[0], in[1], result[1]};
  if (packed[0] != shape.Panels() || packed[1] * kStep != PaddedInputs<T>(shape.inputs))
    return ffi::Error::InvalidArgument("dense product: weight is packed for other numbers of inputs or outputs");
  Run<T>(pool, reinterpret_cast<const T*>(x.typed_data()), reinterpret_cast<const T*>(weight.typed_data()),
         out->typed_data(), shape);
  return ffi::Error::Success();
}

// Rows of a packed matrix: one number, or pair, from each of many places, of which a processor fetches several at once.
template <typename T, ffi::DataType kWeight>
ffi::Error Rows(ffi::ThreadPool pool, ffi::Buffer<kWeight> weight, ffi::Buffer<ffi::S32> indices,
                ffi::Result<ffi::Buffer<ffi::F32>> out) {
  constexpr int kStep = StepOf<T>::kStep;
  auto packed = weight.dimensions(), result = out->dimensions();
  if (packed.size() != 2 + kStep || result.size() != 2)
    return ffi::Error::InvalidArgument("rows of a packed matrix: out must be a matrix, weight packed");
  int64_t panel_inputs = packed[1] * kStep, inputs = result[1];
  if (result[0] != static_cast<int64_t>(indices.element_count()) ||
      PaddedInputs<T>(inputs) != panel_inputs)
    return ffi::Error::InvalidArgument("rows of a packed matrix: out has other numbers of rows or inputs");
  const T* from = reinterpret_cast<const T*>(weight.typed_data());
  const int32_t* ids = indices.typed_data();
  float* to = out->typed_data();
  int64_t last = packed[0] * kPanel - 1;
  Share(pool, result[0], result[0] > 4, [=](int64_t row) {
    int64_t id = std::clamp<int64_t>(ids[row], 0, last);
    const T* place = from + id / kPanel * kPanel * panel_inputs + id % kPanel * kStep;
    for (int64_t k = 0; k < inputs; ++k)
      to[row * inputs + k] = Widened(place[k / kStep * kStep * kPanel + k % kStep]);
  });
  return ffi::Error::Success();
}

// A panel at a time: kPanel rows of the matrix are read side by side, the panel is written in order.
template <typename T>
void Pack(const T* matrix, T* packed, int64_t outputs, int64_t inputs) {
  constexpr int kStep = StepOf<T>::kStep;
  int64_t padded = PaddedInputs<T>(inputs);
  for (int64_t first = 0; first < outputs; first += kPanel)
    for (int64_t k = 0; k < padded; k += kStep)
      for (int i = 0; i < kPanel; ++i)
        for (int s = 0; s < kStep; ++s)
          *packed++ = first + i < outputs && k + s < inputs ? matrix[(first + i) * inputs + k + s] : T{0};
}

}  // namespace
}  // namespace precast

extern "C" void precast_pack_f32(const float* matrix, float* packed, int64_t outputs, int64_t inputs) {
  precast::Pack(matrix, packed, outputs, inputs);
}

extern "C" void precast_pack_bf16(const uint16_t* matrix, uint16_t* packed, int64_t outputs, int64_t inputs) {
  precast::Pack(matrix, packed, outputs, inputs);
}

namespace ffi = xla::ffi;

XLA_FFI_DEFINE_HANDLER_SYMBOL(precast_dense_f32, (precast::Dense<float, ffi::F32, ffi::F32>),
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(precast_dense_bf16, (precast::Dense<precast::bfloat16, ffi::BF16, ffi::U16>),
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::BF16>>()
                                  .Arg<ffi::Buffer<ffi::U16>>()
                                  .Ret<ffi::Buffer<ffi::F32>>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(precast_rows_f32, (precast::Rows<float, ffi::F32>),
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(precast_rows_bf16, (precast::Rows<precast::bfloat16, ffi::U16>),
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::U16>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>());
