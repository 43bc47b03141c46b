// Dense products on packed weights, and the packing.
//
// A weight [outputs, inputs] lies in panels of kPanel outputs; in a panel, one input's kPanel weights are side by
// side: float32 as [panels, inputs, kPanel], bfloat16 as [panels, inputs / 2, kPanel, 2], pairs of inputs together,
// which is what the processors' own bfloat16 instructions take. Outputs are filled up with zeros to whole panels, and
// the inputs of bfloat16 to a multiple of kInputs.

#include "crew.h"
#include "products.h"

namespace precast {
namespace {

constexpr int kPanel = 32;
constexpr int kInputs = 32;
// Rows that are rounded at a time, and that two products are made of before they are made one.
constexpr int64_t kRowsTaken = 64, kRowsGated = 96;
// As in dense_product.py.
enum Gate : int64_t { kNone, kSilu, kGelu };
// Bytes. A processor fetches a stream ahead by itself, but not beyond the end of a page of memory.
constexpr int64_t kAhead = 8192;
// Items of work for a thread: enough of them that all threads end together.
constexpr int64_t kItems = 16;
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

// Rows of x as a product takes them, filled up with zeros to ``inputs``; they last until this thread's next call.
template <typename T>
const typename StepOf<T>::Input* Taken(ffi::ThreadPool& pool, const float* x, Shape shape, int64_t inputs) {
  if constexpr (std::is_same_v<T, float>) {
    return x;
  } else {
    using Input = typename StepOf<T>::Input;
    static thread_local Lines<Input> taken;
    taken.resize(shape.rows * inputs);
    Share(pool, (shape.rows + kRowsTaken - 1) / kRowsTaken, true, [=, to = taken.data()](int64_t block) {
      for (int64_t row = block * kRowsTaken; row < std::min(shape.rows, (block + 1) * kRowsTaken); ++row) {
        Take<StepOf<T>, true>(x + row * shape.inputs, shape.inputs, to + row * inputs);
        std::fill(to + row * inputs + shape.inputs, to + (row + 1) * inputs, Input{0});
      }
    });
    return taken.data();
  }
}

// Products of one panel: ``rows`` rows of x, written to ``out``.
template <typename T>
void Panel(Multiplier<StepOf<T>>& products, const typename StepOf<T>::Input* x, int64_t rows, int64_t inputs,
           const T* matrix, float* out, int64_t out_stride, int64_t columns) {
  constexpr int kStep = StepOf<T>::kStep;
  products.template Multiply<false>(
      {x, inputs, inputs, matrix, matrix + kAhead / sizeof(T), kPanel * kStep, out, out_stride}, rows, columns);
}

template <typename T>
void Run(ffi::ThreadPool& pool, const float* x, const T* weight, float* out, Shape shape) {
  const int64_t inputs = PaddedInputs<T>(shape.inputs);
  const auto* rows = Taken<T>(pool, x, shape, inputs);
  // Neighbouring panels lie behind one another, and so do their outputs.
  const int64_t together = std::max<int64_t>(1, shape.Panels() / (kItems * pool.num_threads()));
  Share(pool, (shape.Panels() + together - 1) / together, shape.IsShared(), [=](int64_t item) {
    Multiplier<StepOf<T>> products;
    for (int64_t panel = item * together; panel < std::min(shape.Panels(), (item + 1) * together); ++panel) {
      int64_t columns = std::min<int64_t>(kPanel, shape.outputs - panel * kPanel);
      Panel(products, rows, shape.rows, inputs, weight + panel * kPanel * inputs, out + panel * kPanel, shape.outputs,
            columns);
    }
  });
}

// x sigmoid(x), or that of GELU by tanh, 0.5 x (1 + tanh y) = x sigmoid(2 y) with y = sqrt(2 / pi) (x + 0.044715 x^3).
inline Floats Activated(Floats x, bool is_gelu) {
  Floats y = is_gelu ? x * MultiplyAdd(x * x, Spread(0.0713548163f), Spread(1.59576912f)) : x;
  return x * Reciprocal(Spread(1.f) + Exp(Spread(0.f) - Larger(Spread(-87.f), y)));
}

// Two products and activation(first) * second at once, so that what is between is never written to memory: the first
// half of the panels are the first product's.
template <typename T>
void RunGated(ffi::ThreadPool& pool, const float* x, const T* weight, float* out, Shape shape, bool is_gelu) {
  const int64_t inputs = PaddedInputs<T>(shape.inputs), half = shape.Panels() / 2, outputs = shape.outputs / 2;
  const auto* rows = Taken<T>(pool, x, shape, inputs);
  Share(pool, half, shape.IsShared(), [=](int64_t panel) {
    Multiplier<StepOf<T>> products;
    alignas(64) float gate[kRowsGated * kPanel], up[kRowsGated * kPanel];
    for (int64_t row = 0; row < shape.rows; row += kRowsGated) {
      int64_t block = std::min(kRowsGated, shape.rows - row);
      const T* matrix = weight + panel * kPanel * inputs;
      Panel(products, rows + row * inputs, block, inputs, matrix, gate, kPanel, kPanel);
      Panel(products, rows + row * inputs, block, inputs, matrix + half * kPanel * inputs, up, kPanel, kPanel);
      for (int64_t i = 0; i < block; ++i)
        for (int64_t j = 0; j < kPanel; j += kVector)
          Store(out + (row + i) * outputs + panel * kPanel + j,
                Activated(Load(gate + i * kPanel + j), is_gelu) * Load(up + i * kPanel + j));
    }
  });
}

// Rows but those of zeros at the end, which padding is made of: their products are zeros too.
inline int64_t RowsBeforeZeros(const float* x, Shape shape) {
  auto is_zero = [](float one) { return one == 0; };
  int64_t rows = shape.rows;
  while (rows > 0 && std::all_of(x + (rows - 1) * shape.inputs, x + rows * shape.inputs, is_zero)) --rows;
  return rows;
}

template <typename T, ffi::DataType kWeight>
ffi::Error Dense(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::Buffer<kWeight> weight,
                 ffi::Result<ffi::Buffer<ffi::F32>> out, int64_t outputs, int64_t gate) {
  auto in = x.dimensions(), packed = weight.dimensions(), result = out->dimensions();
  constexpr int kStep = StepOf<T>::kStep;
  if (in.size() != 2 || result.size() != 2 || packed.size() != 2 + kStep || result[0] != in[0])
    return ffi::Error::InvalidArgument("dense product: x and out must be matrices of as many rows, weight packed");
  Shape shape{in[0], in[1], outputs};
  if (packed[0] != shape.Panels() || packed[1] * kStep != PaddedInputs<T>(shape.inputs))
    return ffi::Error::InvalidArgument("dense product: weight is packed for other numbers of inputs or outputs");
  if (result[1] != (gate == kNone ? outputs : outputs / 2) || (gate != kNone && outputs % (2 * kPanel) != 0))
    return ffi::Error::InvalidArgument("dense product: out has another number of columns, or halves are no panels");
  const T* matrix = reinterpret_cast<const T*>(weight.typed_data());
  shape.rows = RowsBeforeZeros(x.typed_data(), shape);
  std::fill(out->typed_data() + shape.rows * result[1], out->typed_data() + result[0] * result[1], 0.f);
  if (gate == kNone)
    Run<T>(pool, x.typed_data(), matrix, out->typed_data(), shape);
  else
    RunGated<T>(pool, x.typed_data(), matrix, out->typed_data(), shape, gate == kGelu);
  return ffi::Error::Success();
}

// Rows of a packed matrix: one number, or pair, from each of many places, of which a processor fetches several at once.
template <typename T, ffi::DataType kWeight>
ffi::Error Rows(ffi::ThreadPool pool, ffi::Buffer<kWeight> weight, ffi::Buffer<ffi::S32> indices,
                ffi::Result<ffi::Buffer<ffi::F32>> out) {
  constexpr int kStep = StepOf<T>::kStep;
  auto packed = weight.dimensions(), result = out->dimensions();
  if (packed.size() != 2 + kStep || result.size() != 2 || packed[0] == 0)
    return ffi::Error::InvalidArgument("rows of a packed matrix: out must be a matrix, weight packed and not empty");
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
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Attr<int64_t>("outputs")
                                  .Attr<int64_t>("gate"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(precast_dense_bf16, (precast::Dense<precast::bfloat16, ffi::U16>),
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::U16>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Attr<int64_t>("outputs")
                                  .Attr<int64_t>("gate"));

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
