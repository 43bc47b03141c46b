// Norms over rows.

#include "crew.h"
#include "vectors.h"

namespace precast {
namespace {

constexpr int64_t kRowsAtOnce = 16;

// The sum of f(0) to f(width - 1), in one order whatever the row: kVector sums side by side, then those.
template <typename F>
inline float RowSum(int64_t width, F f) {
  float lanes[kVector] = {};
  int64_t i = 0;
  for (; i + kVector <= width; i += kVector)
    for (int j = 0; j < kVector; ++j) lanes[j] += f(i + j);
  for (; i < width; ++i) lanes[i % kVector] += f(i);
  return Sum(Load(lanes));
}

// (x - mean) / sqrt(mean of squares + eps) * scale, with the mean taken for 0 unless the norm is centred.
ffi::Error Norm(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::Buffer<ffi::F32> scale,
                ffi::Result<ffi::Buffer<ffi::F32>> out, float eps, bool is_centred) {
  if (x.dimensions().size() != 2 || static_cast<int64_t>(scale.element_count()) != x.dimensions()[1])
    return ffi::Error::InvalidArgument("norm: x must be a matrix, and scale as long as its rows");
  int64_t rows = x.dimensions()[0], width = x.dimensions()[1];
  const float* all = x.typed_data();
  const float* factors = scale.typed_data();
  float* results = out->typed_data();
  Share(pool, (rows + kRowsAtOnce - 1) / kRowsAtOnce, true, [=](int64_t block) {
    for (int64_t row = block * kRowsAtOnce; row < std::min(rows, (block + 1) * kRowsAtOnce); ++row) {
      const float* from = all + row * width;
      float* to = results + row * width;
      float mean = is_centred ? RowSum(width, [=](int64_t i) { return from[i]; }) / width : 0.f;
      float squares = RowSum(width, [=](int64_t i) { return (from[i] - mean) * (from[i] - mean); });
      float factor = 1.f / std::sqrt(squares / width + eps);
      for (int64_t i = 0; i < width; ++i) to[i] = (from[i] - mean) * factor * factors[i];
    }
  });
  return ffi::Error::Success();
}

}  // namespace
}  // namespace precast

namespace ffi = xla::ffi;

XLA_FFI_DEFINE_HANDLER_SYMBOL(precast_norm_f32, precast::Norm,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Attr<float>("eps")
                                  .Attr<bool>("is_centred"));
