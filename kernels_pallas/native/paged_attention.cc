// Attention over a paged cache, and writing to it. Pages are k [pages, kv_heads, head_dim, page_size] and v [pages,
// kv_heads, page_size, value_dim] in float32; the bits of bfloat16 lie as pairs of what a product sums over, k [pages,
// kv_heads, head_dim / 2, page_size, 2] and v [pages, kv_heads, page_size / 2, value_dim, 2].
//
// A row and KV head is one item of work: its query heads and queries stand together, query by query, and go over the
// row's pages in order with a running softmax (FlashAttention, arXiv:2205.14135), a page a block. What lies in a page
// beyond the context, a page in which a query sees nothing and finite numbers that it does not see change no bit of its
// result, but the sign of a zero.

#include "crew.h"
#include "products.h"

namespace precast {
namespace {

constexpr float kMasked = -1e30f;
// Tokens that one thread writes to the cache at a time.
constexpr int64_t kTokensWritten = 16;

struct Sizes {
  int64_t rows, queries, heads, kv_heads, head_dim, value_dim, page_size, width;
  int64_t group() const { return heads / kv_heads; }
};

struct Options {
  float scale, soft_cap;  // no cap is 0
  int64_t window;         // none is 0
  const float* sinks;     // [heads] or null
};

inline float Lane(Floats x) {
  float lanes[kVector];
  Store(lanes, x);
  return lanes[0];
}

inline void Put(Floats x, float* to) { Store(to, x); }
#ifdef __AVX512BF16__
inline void Put(Floats x, bfloat16* to) { StoreNarrowed(to, x); }
#endif

// The numbers of x from low to high, and ``otherwise`` in place of the others.
inline Floats Seen(Floats x, int64_t low, int64_t high, float otherwise) {
  if (low <= 0 && high >= kVector) return x;
  float lanes[kVector];
  Store(lanes, x);
  for (int64_t i = 0; i < kVector; ++i)
    if (i < low || i >= high) lanes[i] = otherwise;
  return Load(lanes);
}

// The running softmax of one item's queries, ``stacked`` of them, with what its products take and give.
template <typename Step>
struct Running {
  using Input = typename Step::Input;
  using Products = Multiplier<Step>;
  Lines<Input> queries, weights;
  Lines<float> top, total, mixed, scores, scaled;
  Lines<typename Step::Weight> key_copy, value_copy;
  // Queries are filled up to ``query_stride`` inputs, a page's tokens to ``tokens``.
  int64_t query_stride, tokens, score_stride, mixed_stride;

  void Start(const Sizes& sizes, int64_t stacked, const float* sinks) {
    query_stride = RoundedUp(sizes.head_dim, Products::kInputs);
    tokens = RoundedUp(sizes.page_size, Products::kInputs);
    score_stride = RoundedUp(sizes.page_size, std::max(Products::kInputs, Products::kOutputs));
    mixed_stride = RoundedUp(sizes.value_dim, Products::kOutputs);
    queries.assign(stacked * query_stride, Input{0});
    weights.resize(stacked * score_stride);
    scores.resize(stacked * score_stride);
    mixed.assign(stacked * mixed_stride, 0.f);
    top.assign(stacked, kMasked), total.assign(stacked, sinks ? 1.f : 0.f);
    for (int64_t s = 0; sinks && s < stacked; ++s) top[s] = sinks[s % sizes.group()];
  }

  void TakeQuery(const float* query, int64_t head_dim, float scale, int64_t s) {
    scaled.resize(head_dim);
    std::transform(query, query + head_dim, scaled.begin(), [scale](float x) { return x * scale; });
    Take<Step, false>(scaled.data(), head_dim, &queries[s * query_stride]);
  }

  // Makes weights of the scores of query s, of which it sees those from low to high.
  void Weigh(int64_t s, int64_t low, int64_t high, float soft_cap) {
    float* row = &scores[s * score_stride];
    if (soft_cap > 0) Cap(row, soft_cap);
    Floats most = Spread(top[s]), sum = Spread(0.f);
    for (int64_t t = 0; t < score_stride; t += kVector)
      most = Larger(Seen(Load(row + t), low - t, high - t, kMasked), most);
    float new_top = Largest(most);
    for (int64_t t = 0; t < score_stride; t += kVector) {
      Floats weight = Seen(Exp(Load(row + t) - Spread(new_top)), low - t, high - t, 0.f);
      sum = sum + weight;
      Put(weight, &weights[s * score_stride + t]);
    }
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
  using Step = StepOf<T>;
  using Products = Multiplier<Step>;
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
    static thread_local Running<Step> running;
    int64_t row = item / sizes.kv_heads, head = item % sizes.kv_heads, group = sizes.group();
    int64_t context = context_lens[row], start = starts[row];
    int64_t live = std::clamp<int64_t>(context - start, 0, sizes.queries);
    auto place = [&](int64_t query, int64_t width) {
      return ((row * sizes.queries + query) * sizes.heads + head * group) * width;
    };
    for (int64_t i = live; i < sizes.queries; ++i)
      std::fill_n(out + place(i, sizes.value_dim), group * sizes.value_dim, 0.f);
    if (live == 0) return;
    running.Start(sizes, live * group, options.sinks ? options.sinks + head * group : nullptr);
    for (int64_t i = 0; i < live; ++i)
      for (int64_t g = 0; g < group; ++g)
        running.TakeQuery(queries + place(i, sizes.head_dim) + g * sizes.head_dim, sizes.head_dim, options.scale,
                          i * group + g);
    Products products;
    int64_t first = options.window ? std::max<int64_t>(0, start - options.window + 1) : 0;
    auto id = [&](int64_t page) { return table[row * sizes.width + page] * sizes.kv_heads + head; };
    for (int64_t page = first / sizes.page_size; page * sizes.page_size < context; ++page)
      TakePage(products, running, live, start, page * sizes.page_size, context, id(page),
               (page + 1) * sizes.page_size < context ? id(page + 1) : id(page));
    for (int64_t i = 0; i < live; ++i)
      for (int64_t g = 0; g < group; ++g) {
        int64_t s = i * group + g;
        float* to = out + place(i, sizes.value_dim) + g * sizes.value_dim;
        for (int64_t d = 0; d < sizes.value_dim; ++d)
          to[d] = running.mixed[s * running.mixed_stride + d] / (running.total[s] > 0 ? running.total[s] : 1.f);
      }
  }

  // The page that begins at position ``begin``, for the queries that see some of it; ``next`` is wanted after it.
  void TakePage(Products& products, Running<Step>& running, int64_t live, int64_t start, int64_t begin,
                int64_t context, int64_t page, int64_t next) const {
    int64_t size = std::min(sizes.page_size, context - begin), group = sizes.group();
    int64_t from = std::clamp<int64_t>(begin - start, 0, live), to = live;
    if (options.window) to = std::clamp<int64_t>(begin + size - 1 + options.window - start, from, live);
    if (from == to) return;
    int64_t rows = (to - from) * group, first = from * group;
    int64_t key_size = RoundedUp(sizes.head_dim, Step::kStep) * sizes.page_size;
    int64_t value_size = RoundedUp(sizes.page_size, Step::kStep) * sizes.value_dim;
    auto [key, next_key] = Whole(keys + page * key_size, keys + next * key_size, sizes.head_dim, running.query_stride,
                                 sizes.page_size, running.score_stride, running.key_copy);
    products.template Multiply<false>({&running.queries[first * running.query_stride], running.query_stride,
                                       running.query_stride, key, next_key, running.score_stride * Step::kStep,
                                       &running.scores[first * running.score_stride], running.score_stride},
                                      rows, running.score_stride);
    for (int64_t s = first; s < first + rows; ++s) {
      int64_t position = start + s / group;
      int64_t low = options.window ? std::max<int64_t>(0, position - options.window + 1 - begin) : 0;
      running.Weigh(s, low, std::min(size, position + 1 - begin), options.soft_cap);
    }
    auto [value, next_value] = Whole(values + page * value_size, values + next * value_size, size, running.tokens,
                                     sizes.value_dim, running.mixed_stride, running.value_copy);
    products.template Multiply<true>({&running.weights[first * running.score_stride], running.score_stride,
                                      running.tokens, value, next_value, running.mixed_stride * Step::kStep,
                                      &running.mixed[first * running.mixed_stride], running.mixed_stride},
                                     rows, running.mixed_stride);
  }

  // One side of a page as a matrix of ``whole_rows`` by ``whole_columns``, and where the next one's may be: the page
  // itself if it is as large as that and all of its rows count, else a copy filled up with zeros.
  std::pair<const T*, const T*> Whole(const T* from, const T* next, int64_t rows, int64_t whole_rows, int64_t columns,
                                      int64_t whole_columns, Lines<T>& copy) const {
    if (rows == whole_rows && columns == whole_columns) return {from, next};
    copy.assign(whole_rows * whole_columns, T{0});
    for (int64_t row = 0; row < rows; row += Step::kStep)
      std::copy_n(from + row * columns, columns * Step::kStep, &copy[row * whole_columns]);
    if constexpr (Step::kStep == 2)
      for (int64_t j = 0; rows % 2 && j < columns; ++j) copy[(rows - 1) * whole_columns + 2 * j + 1] = 0;
    return {copy.data(), copy.data()};
  }
};

template <typename Buffer>
inline int64_t Count(const Buffer& buffer) {
  return static_cast<int64_t>(buffer.element_count());
}

// Of a sum over so many.
template <typename T>
inline int64_t Steps(int64_t count) {
  return RoundedUp(count, StepOf<T>::kStep) / StepOf<T>::kStep;
}

template <typename T, ffi::DataType kPages>
ffi::Error Attend(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> queries, ffi::Buffer<kPages> keys,
                  ffi::Buffer<kPages> values, ffi::Buffer<ffi::S32> table, ffi::Buffer<ffi::S32> context_lens,
                  ffi::Buffer<ffi::S32> starts, ffi::Buffer<ffi::F32> sinks, ffi::Result<ffi::Buffer<ffi::F32>> out,
                  float scale, float soft_cap, int64_t window) {
  auto q = queries.dimensions(), k = keys.dimensions(), v = values.dimensions(), t = table.dimensions();
  constexpr int kRank = 3 + StepOf<T>::kStep;
  if (q.size() != 4 || k.size() != kRank || v.size() != kRank || t.size() != 2 || k[0] != v[0] || k[1] != v[1] ||
      k[1] == 0 || k[3] == 0 || k[2] != Steps<T>(q[3]) || v[2] != Steps<T>(k[3]) || t[0] != q[0] || q[2] % k[1] != 0)
    return ffi::Error::InvalidArgument("paged attention: shapes of queries, pages and page table do not agree");
  if (Count(context_lens) != q[0] || Count(starts) != q[0] || (Count(sinks) != 0 && Count(sinks) != q[2]))
    return ffi::Error::InvalidArgument("paged attention: not a context and a start for each row, or a sink for each head");
  Sizes sizes{q[0], q[1], q[2], k[1], q[3], v[3], k[3], t[1]};
  Options options{scale, soft_cap, window, Count(sinks) ? sinks.typed_data() : nullptr};
  Attention<T> attention{sizes, options, queries.typed_data(), reinterpret_cast<const T*>(keys.typed_data()),
                         reinterpret_cast<const T*>(values.typed_data()), table.typed_data(),
                         context_lens.typed_data(), starts.typed_data(), out->typed_data()};
  Share(pool, sizes.rows * sizes.kv_heads, true, attention);
  return ffi::Error::Success();
}

// Where a number of a page's side lies, whose rows are [columns] numbers or pairs of such rows.
template <typename T>
inline int64_t Place(int64_t row, int64_t column, int64_t columns) {
  constexpr int kStep = StepOf<T>::kStep;
  return (row / kStep * columns + column) * kStep + row % kStep;
}

inline void Stored(const float* from, int64_t count, float* to) { std::copy_n(from, count, to); }
inline void Stored(const float* from, int64_t count, bfloat16* to) { Narrow(from, count, to); }

// keys [tokens, kv_heads, head_dim] and values [tokens, kv_heads, value_dim] go to pages [tokens] at offsets [tokens].
template <typename T, ffi::DataType kPages>
ffi::Error Write(ffi::ThreadPool pool, ffi::Buffer<kPages> key_pages, ffi::Buffer<kPages> value_pages,
                 ffi::Buffer<ffi::F32> keys, ffi::Buffer<ffi::F32> values, ffi::Buffer<ffi::S32> pages,
                 ffi::Buffer<ffi::S32> offsets, ffi::Result<ffi::Buffer<kPages>> key_out, ffi::Result<ffi::Buffer<kPages>> value_out) {
  constexpr int kStep = StepOf<T>::kStep, kRank = 3 + kStep;
  auto k = key_pages.dimensions(), v = value_pages.dimensions(), new_k = keys.dimensions(), new_v = values.dimensions();
  if (k.size() != kRank || v.size() != kRank || new_k.size() != 3 || new_v.size() != 3 || k[0] != v[0] ||
      k[1] != v[1] || v[2] != Steps<T>(k[3]) || k[2] != Steps<T>(new_k[2]) || v[3] != new_v[2] || k[1] != new_k[1] ||
      k[1] != new_v[1])
    return ffi::Error::InvalidArgument("cache write: shapes of keys, values and pages do not agree");
  int64_t tokens = Count(pages), heads = k[1], head_dim = new_k[2], page_size = k[3], value_dim = v[3];
  int64_t key_size = k[2] * kStep * page_size, value_size = v[2] * kStep * value_dim;
  if (new_k[0] != tokens || new_v[0] != tokens || Count(offsets) != tokens)
    return ffi::Error::InvalidArgument("cache write: not a key, a value, a page and an offset for each token");
  if (key_pages.untyped_data() != key_out->untyped_data() || value_pages.untyped_data() != value_out->untyped_data())
    return ffi::Error::Internal("cache write: the pages are not updated in place");
  T* key_to = reinterpret_cast<T*>(key_out->typed_data());
  T* value_to = reinterpret_cast<T*>(value_out->typed_data());
  const float* new_keys = keys.typed_data();
  const float* new_values = values.typed_data();
  const int32_t* ids = pages.typed_data();
  const int32_t* places = offsets.typed_data();
  Share(pool, (tokens + kTokensWritten - 1) / kTokensWritten, true, [=](int64_t block) {
    static thread_local Lines<T> stored;
    stored.resize(head_dim + value_dim);
    T* key = stored.data();
    T* value = key + head_dim;
    for (int64_t token = block * kTokensWritten; token < std::min(tokens, (block + 1) * kTokensWritten); ++token)
      for (int64_t head = 0; head < heads; ++head) {
        int64_t id = ids[token] * heads + head, offset = places[token];
        Stored(new_keys + (token * heads + head) * head_dim, head_dim, key);
        Stored(new_values + (token * heads + head) * value_dim, value_dim, value);
        for (int64_t d = 0; d < head_dim; ++d) key_to[id * key_size + Place<T>(d, offset, page_size)] = key[d];
        for (int64_t d = 0; d < value_dim; ++d) value_to[id * value_size + Place<T>(offset, d, value_dim)] = value[d];
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
