// Attention over a paged cache, and writing to it. Pages are k [pages, kv_heads, head_dim, page_size] and v [pages,
// kv_heads, page_size, value_dim], float32 or the bits of bfloat16.
//
// A row and KV head is one item of work: its query heads and queries stand together, query by query, and go over the
// row's pages in order with a running softmax (FlashAttention, arXiv:2205.14135), a page a block. What a query does
// not see, a page in which it sees nothing and what lies in a page beyond the context change no bit of its result.

#include "vectors.h"

namespace precast {
namespace {

constexpr float kMasked = -1e30f;

struct Sizes {
  int64_t rows, queries, heads, kv_heads, head_dim, value_dim, page_size, width;
  int64_t group() const { return heads / kv_heads; }
};

struct Options {
  float scale, soft_cap;  // no cap is 0
  int64_t window;         // none is 0
  const float* sinks;     // [heads] or null
};

inline int64_t Padded(int64_t size) { return (size + kVector - 1) / kVector * kVector; }

// A matrix of a page in rows of whole vectors of To: where it lies, or a copy.
template <typename To, typename T>
inline const To* WholeVectors(const T* from, int64_t rows, int64_t columns, std::vector<To>& copy) {
  if constexpr (std::is_same_v<To, T>)
    if (columns == Padded(columns)) return from;
  copy.resize(rows * Padded(columns));
  for (int64_t i = 0; i < rows; ++i) {
    int64_t j = 0;
    if constexpr (std::is_same_v<To, float>)
      for (; j + kVector <= columns; j += kVector) Store(&copy[i * Padded(columns) + j], Load(from + i * columns + j));
    for (; j < columns; ++j) {
      if constexpr (std::is_same_v<To, T>)
        copy[i * Padded(columns) + j] = from[i * columns + j];
      else
        copy[i * Padded(columns) + j] = Widened(from[i * columns + j]);
    }
  }
  return copy.data();
}

inline float Lane(Floats x) {
  float lanes[kVector];
  Store(lanes, x);
  return lanes[0];
}

// The running softmax of one item's queries, ``stacked`` of them.
struct Running {
  std::vector<float> top, total, mixed, scores;
  int64_t score_stride, mixed_stride;

  void Start(const Sizes& sizes, int64_t stacked, const float* sinks) {
    score_stride = Padded(sizes.page_size), mixed_stride = Padded(sizes.value_dim);
    scores.resize(stacked * score_stride);
    mixed.assign(stacked * mixed_stride, 0.f);
    top.assign(stacked, kMasked), total.assign(stacked, sinks ? 1.f : 0.f);
    for (int64_t s = 0; sinks && s < stacked; ++s) top[s] = sinks[s % sizes.group()];
  }

  // Takes in the scores of query s, of which it sees those from low to high: they become its weights.
  void Take(int64_t s, int64_t low, int64_t high, float soft_cap) {
    float* row = &scores[s * score_stride];
    if (soft_cap > 0) Cap(row, soft_cap);
    std::fill(row, row + low, kMasked), std::fill(row + high, row + score_stride, kMasked);
    Floats most = Spread(top[s]);
    for (int64_t t = 0; t < score_stride; t += kVector) most = Larger(Load(row + t), most);
    float new_top = Largest(most);
    for (int64_t t = 0; t < score_stride; t += kVector) Store(row + t, Exp(Load(row + t) - Spread(new_top)));
    std::fill(row, row + low, 0.f), std::fill(row + high, row + score_stride, 0.f);
    Floats sum = Spread(0.f);
    for (int64_t t = 0; t < score_stride; t += kVector) sum = sum + Load(row + t);
    if (new_top != top[s]) Shrink(s, Exp(Spread(top[s] - new_top)));
    top[s] = new_top, total[s] += Sum(sum);
  }

  void Shrink(int64_t s, Floats factor) {
    total[s] *= Lane(factor);
    float* sums = &mixed[s * mixed_stride];
    for (int64_t d = 0; d < mixed_stride; d += kVector) Store(sums + d, Load(sums + d) * factor);
  }

  // cap * tanh(x / cap), by tanh y = 1 - 2 / (e^2y + 1).
  void Cap(float* row, float cap) const {
    for (int64_t t = 0; t < score_stride; t += kVector) {
      Floats limited = Larger(Spread(-40.f), Spread(0.f) - Larger(Spread(-40.f), Load(row + t) * Spread(-1 / cap)));
      Store(row + t, Spread(cap) * (Spread(1.f) - Spread(2.f) / (Exp(limited * Spread(2.f)) + Spread(1.f))));
    }
  }
};

template <typename T>
struct Attention {
  Sizes sizes;
  Options options;
  const float* queries;
  const T* keys;
  const T* values;
  const int32_t* table;
  const int32_t* context_lens;
  const int32_t* starts;
  float* out;

  void operator()(int64_t item) const {
    static thread_local std::vector<float> stacked;
    static thread_local Running running;
    int64_t row = item / sizes.kv_heads, head = item % sizes.kv_heads, group = sizes.group();
    int64_t context = context_lens[row], start = starts[row];
    int64_t live = std::clamp<int64_t>(context - start, 0, sizes.queries);
    auto place = [&](int64_t query, int64_t width) {
      return ((row * sizes.queries + query) * sizes.heads + head * group) * width;
    };
    for (int64_t i = live; i < sizes.queries; ++i)
      std::fill_n(out + place(i, sizes.value_dim), group * sizes.value_dim, 0.f);
    if (live == 0) return;
    stacked.resize(live * group * sizes.head_dim);
    for (int64_t i = 0; i < live; ++i)
      std::transform(queries + place(i, sizes.head_dim), queries + place(i, sizes.head_dim) + group * sizes.head_dim,
                     &stacked[i * group * sizes.head_dim], [this](float x) { return x * options.scale; });
    running.Start(sizes, live * group, options.sinks ? options.sinks + head * group : nullptr);
    int64_t first = options.window ? std::max<int64_t>(0, start - options.window + 1) : 0;
    auto id = [&](int64_t page) { return table[row * sizes.width + page] * sizes.kv_heads + head; };
    for (int64_t page = first / sizes.page_size; page * sizes.page_size < context; ++page)
      TakePage(running, stacked.data(), live, start, page * sizes.page_size, context, id(page),
               (page + 1) * sizes.page_size < context ? id(page + 1) : id(page));
    for (int64_t i = 0; i < live; ++i)
      for (int64_t g = 0; g < group; ++g) {
        int64_t s = i * group + g;
        float* to = out + place(i, sizes.value_dim) + g * sizes.value_dim;
        for (int64_t d = 0; d < sizes.value_dim; ++d)
          to[d] = running.mixed[s * running.mixed_stride + d] / (running.total[s] > 0 ? running.total[s] : 1.f);
      }
  }

  int64_t KeySize() const { return sizes.head_dim * sizes.page_size; }
  int64_t ValueSize() const { return sizes.value_dim * sizes.page_size; }

  // The page that begins at position ``begin``, for the queries that see some of it.
  void TakePage(Running& running, const float* stacked, int64_t live, int64_t start, int64_t begin, int64_t context,
                int64_t page, int64_t next) const {
    int64_t size = std::min(sizes.page_size, context - begin);
    int64_t from = std::clamp<int64_t>(begin - start, 0, live), to = live;
    if (options.window) to = std::clamp<int64_t>(begin + size - 1 + options.window - start, from, live);
    if (from == to) return;
    // What many queries read is widened once, for few of them as it is read.
    if ((to - from) * sizes.group() > kMostRows)
      Take<float>(running, stacked, from, to, start, begin, size, page, next);
    else
      Take<T>(running, stacked, from, to, start, begin, size, page, next);
  }

  // For queries ``from`` to ``to``, with the page's numbers as To; the page has ``size`` tokens.
  template <typename To>
  void Take(Running& running, const float* stacked, int64_t from, int64_t to, int64_t start, int64_t begin,
            int64_t size, int64_t page, int64_t next) const {
    static thread_local std::vector<To> key_copy, value_copy;
    int64_t group = sizes.group(), rows = (to - from) * group;
    const T* key_page = keys + page * KeySize();
    const T* value_page = values + page * ValueSize();
    const To* key = WholeVectors(key_page, sizes.head_dim, sizes.page_size, key_copy);
    const To* value = WholeVectors(value_page, size, sizes.value_dim, value_copy);
    const To* next_key = key;
    const To* next_value = value;
    if constexpr (std::is_same_v<To, T>) {
      if (key == key_page) next_key = keys + next * KeySize();
      if (value == value_page) next_value = values + next * ValueSize();
    }
    float* scores = &running.scores[from * group * running.score_stride];
    float* mixed = &running.mixed[from * group * running.mixed_stride];
    Multiply<Single<To>, false>({stacked + from * group * sizes.head_dim, sizes.head_dim, sizes.head_dim, key, next_key,
                                 running.score_stride, scores, running.score_stride},
                                rows, sizes.page_size);
    for (int64_t s = from * group; s < to * group; ++s) {
      int64_t position = start + s / group;
      int64_t low = options.window ? std::max<int64_t>(0, position - options.window + 1 - begin) : 0;
      running.Take(s, low, std::min(size, position + 1 - begin), options.soft_cap);
    }
    Multiply<Single<To>, true>(
        {scores, running.score_stride, size, value, next_value, running.mixed_stride, mixed, running.mixed_stride}, rows,
        running.mixed_stride);
  }
};

template <typename T, ffi::DataType kPages>
ffi::Error Attend(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> queries, ffi::Buffer<kPages> keys,
                  ffi::Buffer<kPages> values, ffi::Buffer<ffi::S32> table, ffi::Buffer<ffi::S32> context_lens,
                  ffi::Buffer<ffi::S32> starts, ffi::Buffer<ffi::F32> sinks, ffi::Result<ffi::Buffer<ffi::F32>> out,
                  float scale, float soft_cap, int64_t window) {
  auto q = queries.dimensions(), k = keys.dimensions(), v = values.dimensions(), t = table.dimensions();
  if (q.size() != 4 || k.size() != 4 || v.size() != 4 || t.size() != 2 || k[0] != v[0] || k[1] != v[1] ||
      k[2] != q[3] || k[3] != v[2] || t[0] != q[0] || q[2] % k[1] != 0)
    return ffi::Error::InvalidArgument("paged attention: shapes of queries, pages and page table do not agree");
  Sizes sizes{q[0], q[1], q[2], k[1], q[3], v[3], k[3], t[1]};
  Options options{scale, soft_cap, window, sinks.element_count() ? sinks.typed_data() : nullptr};
  Attention<T> attention{sizes, options, queries.typed_data(), reinterpret_cast<const T*>(keys.typed_data()),
                         reinterpret_cast<const T*>(values.typed_data()), table.typed_data(),
                         context_lens.typed_data(), starts.typed_data(), out->typed_data()};
  Share(pool, sizes.rows * sizes.kv_heads, true, attention);
  return ffi::Error::Success();
}

inline void Encode(float x, float& to) { to = x; }

// To the nearest, ties to even; what is no number stays none.
inline void Encode(float x, bfloat16& to) {
  uint32_t bits = Bits<uint32_t>(x);
  to = x != x ? bits >> 16 | 0x40 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

// keys [tokens, kv_heads, head_dim] and values [tokens, kv_heads, value_dim] go to pages [tokens] at offsets [tokens].
template <typename T, ffi::DataType kPages>
ffi::Error Write(ffi::ThreadPool pool, ffi::Buffer<kPages> key_pages, ffi::Buffer<kPages> value_pages,
                 ffi::Buffer<ffi::F32> keys, ffi::Buffer<ffi::F32> values, ffi::Buffer<ffi::S32> pages,
                 ffi::Buffer<ffi::S32> offsets, ffi::Result<ffi::Buffer<kPages>> key_out, ffi::Result<ffi::Buffer<kPages>> value_out) {
  auto k = key_pages.dimensions(), v = value_pages.dimensions();
  int64_t tokens = pages.element_count(), heads = k[1], head_dim = k[2], page_size = k[3], value_dim = v[3];
  if (static_cast<int64_t>(keys.element_count()) != tokens * heads * head_dim ||
      static_cast<int64_t>(values.element_count()) != tokens * heads * value_dim)
    return ffi::Error::InvalidArgument("cache write: keys and values are of other shapes than the pages");
  if (key_pages.untyped_data() != key_out->untyped_data() || value_pages.untyped_data() != value_out->untyped_data())
    return ffi::Error::Internal("cache write: the pages are not updated in place");
  T* key_to = reinterpret_cast<T*>(key_out->typed_data());
  T* value_to = reinterpret_cast<T*>(value_out->typed_data());
  const float* new_keys = keys.typed_data();
  const float* new_values = values.typed_data();
  const int32_t* ids = pages.typed_data();
  const int32_t* places = offsets.typed_data();
  Share(pool, heads, tokens > 4, [=](int64_t head) {
    for (int64_t token = 0; token < tokens; ++token) {
      int64_t id = ids[token] * heads + head, offset = places[token];
      const float* key = new_keys + (token * heads + head) * head_dim;
      const float* value = new_values + (token * heads + head) * value_dim;
      for (int64_t d = 0; d < head_dim; ++d) Encode(key[d], key_to[(id * head_dim + d) * page_size + offset]);
      for (int64_t d = 0; d < value_dim; ++d) Encode(value[d], value_to[(id * page_size + offset) * value_dim + d]);
    }
  });
  return ffi::Error::Success();
}

}  // namespace
}  // namespace precast

namespace ffi = xla::ffi;

#define PRECAST_ATTENTION(name, T, kPages)                                       \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(name, (precast::Attend<T, kPages>),              \
                                ffi::Ffi::Bind()                                 \
                                    .Ctx<ffi::ThreadPool>()                      \
                                    .Arg<ffi::Buffer<ffi::F32>>()                \
                                    .Arg<ffi::Buffer<kPages>>()                  \
                                    .Arg<ffi::Buffer<kPages>>()                  \
                                    .Arg<ffi::Buffer<ffi::S32>>()                \
                                    .Arg<ffi::Buffer<ffi::S32>>()                \
                                    .Arg<ffi::Buffer<ffi::S32>>()                \
                                    .Arg<ffi::Buffer<ffi::F32>>()                \
                                    .Ret<ffi::Buffer<ffi::F32>>()                \
                                    .Attr<float>("scale")                        \
                                    .Attr<float>("soft_cap")                     \
                                    .Attr<int64_t>("window"))

#define PRECAST_WRITE(name, T, kPages)                                           \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(name, (precast::Write<T, kPages>),               \
                                ffi::Ffi::Bind()                                 \
                                    .Ctx<ffi::ThreadPool>()                      \
                                    .Arg<ffi::Buffer<kPages>>()                  \
                                    .Arg<ffi::Buffer<kPages>>()                  \
                                    .Arg<ffi::Buffer<ffi::F32>>()                \
                                    .Arg<ffi::Buffer<ffi::F32>>()                \
                                    .Arg<ffi::Buffer<ffi::S32>>()                \
                                    .Arg<ffi::Buffer<ffi::S32>>()                \
                                    .Ret<ffi::Buffer<kPages>>()                  \
                                    .Ret<ffi::Buffer<kPages>>())

PRECAST_ATTENTION(precast_cpu_attention_f32, float, ffi::F32);
PRECAST_ATTENTION(precast_cpu_attention_bf16, precast::bfloat16, ffi::U16);
PRECAST_WRITE(precast_cpu_write_f32, float, ffi::F32);
PRECAST_WRITE(precast_cpu_write_bf16, precast::bfloat16, ffi::U16);
