// Dense products on packed weights, and the packing.
//
// A weight [outputs, inputs] lies in panels of kPanel outputs; in a panel, one input's kPanel weights are side by
// side: float32 as [panels, inputs, kPanel], bfloat16 as [panels, inputs / 2, kPanel, 2], pairs of inputs together,
// which is what the processors' own bfloat16 instructions take. Outputs are filled up with zeros to whole panels, and
// the inputs of bfloat16 to a multiple of kInputs.

#include <vector>

#include "crew.h"
#include "products.h"

namespace precast {
namespace {

constexpr int kPanel = 32;
constexpr int kInputs = 32;
// Rows that are rounded at a time.
constexpr int64_t kRowsTaken = 64;
// Bytes. A processor fetches a stream ahead by itself, but not beyond the end of a page of memory.
constexpr int64_t kAhead = 8192;
// Products smaller than this are not worth a second thread.
constexpr int64_t kLeastShared = 1 << 17;

template <typename T>
inline int64_t PaddedInputs(int64_t inputs) {
  return std::is_same_v<T, float> ? inputs : RoundedUp(inputs, kInputs);
}

struct Shape {
  int64_t rows, inputs, outputs;
  bool IsShared() const { return inputs * outputs * std::max<int64_t>(rows, 4) >= kLeastShared; }
  int64_t Panels() const { return (outputs + kPanel - 1) / kPanel; }
};

template <typename T>
void Run(ffi::ThreadPool& pool, const float* x, const T* weight, float* out, Shape shape) {
  using Step = StepOf<T>;
  using Input = typename Step::Input;
  const int64_t inputs = PaddedInputs<T>(shape.inputs);
  const Input* rows;
  if constexpr (std::is_same_v<T, float>) {
    rows = x;
  } else {
    static thread_local std::vector<Input> taken;
    taken.resize(shape.rows * inputs);
    rows = taken.data();
    Share(pool, (shape.rows + kRowsTaken - 1) / kRowsTaken, true, [=, to = taken.data()](int64_t block) {
      for (int64_t row = block * kRowsTaken; row < std::min(shape.rows, (block + 1) * kRowsTaken); ++row) {
        Take<Step, true>(x + row * shape.inputs, shape.inputs, to + row * inputs);
        std::fill(to + row * inputs + shape.inputs, to + (row + 1) * inputs, Input{0});
      }
    });
  }
  Share(pool, shape.Panels(), shape.IsShared(), [=](int64_t panel) {
    const T* matrix = weight + panel * kPanel * inputs;
    Product<Step> product{rows, inputs, inputs, matrix, matrix + kAhead / sizeof(T), kPanel * Step::kStep,
                          out + panel * kPanel, shape.outputs};
    int64_t columns = std::min<int64_t>(kPanel, shape.outputs - panel * kPanel);
    Multiplier<Step>().template Multiply<false>(product, shape.rows, columns);
  });
}

template <typename T, ffi::DataType kWeight>
ffi::Error Dense(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::Buffer<kWeight> weight,
                 ffi::Result<ffi::Buffer<ffi::F32>> out) {
  auto in = x.dimensions(), packed = weight.dimensions(), result = out->dimensions();
  constexpr int kStep = StepOf<T>::kStep;
  if (in.size() != 2 || result.size() != 2 || packed.size() != 2 + kStep || result[0] != in[0])
    return ffi::Error::InvalidArgument("dense product: x and out must be matrices of as many rows, weight packed");
  Shape shape{in[0], in[1], result[1]};
  if (packed[0] != shape.Panels() || packed[1] * kStep != PaddedInputs<T>(shape.inputs))
    return ffi::Error::InvalidArgument("dense product: weight is packed for other numbers of inputs or outputs");
  Run<T>(pool, x.typed_data(), reinterpret_cast<const T*>(weight.typed_data()), out->typed_data(), shape);
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

XLA_FFI_DEFINE_HANDLER_SYMBOL(precast_dense_f32, (precast::Dense<float, ffi::F32>),
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(precast_dense_bf16, (precast::Dense<precast::bfloat16, ffi::U16>),
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
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
