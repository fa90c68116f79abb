// A BERT encoder and its pooling as one function: token numbers of some texts in, a vector of each text out.
//
// Why it exists: for a text of twelve tokens a general runtime waits for 42 MB of float weights, and multiplies floats.
// Here they are 16 MB, which a third-level cache may hold.
//
// Numbers: weights are integers of 12 bits, the rows that they are multiplied with of 16. A row of activations has one
// scale, by which its largest value becomes ACTIVATION_MAX; a column of weights has one, chosen by who packs it so that
//   ACTIVATION_MAX * (sum of the column's |weights|) < 2^31:
// sums of products are therefore exact in 32 bits, in any order. All else is float. A row of activations depends on
// nothing but its own text, so a vector is bitwise the same alone and in any company.
//
// Layouts
//   matrix  [panel][in / 4][6 * PANEL bytes]: panels of PANEL output columns, packed; see `multiply`
//   panel   [in / 2][PANEL][2], unpacked: a kernel reads one stream
//   rows    of all texts one after the other, without padding; every width is a multiple of PANEL, filled up with zeros
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <immintrin.h>

namespace {

// ---------------------------------------------------------------- vectors: the only part that knows the instructions

#if defined(__AVX512F__) && defined(__AVX512BW__)
constexpr int LANES = 16;
#if defined(__AVX512VNNI__)
constexpr int ROW_TILE = 14;  // rows of a matrix product that share the weights in registers: 28 accumulators
#else
constexpr int ROW_TILE = 12;
#endif
using Pairs = __m512i;
inline Pairs load_pairs(const void* p) { return _mm512_load_si512(p); }
inline void store_pairs(int16_t* p, Pairs pairs) { _mm512_store_si512(p, pairs); }
inline Pairs broadcast(int32_t pair) { return _mm512_set1_epi32(pair); }
inline Pairs join(const int8_t* high, Pairs low) {
  const Pairs wide = _mm512_cvtepi8_epi16(_mm256_load_si256((const __m256i*)high));
  return _mm512_or_si512(_mm512_slli_epi16(wide, 4), _mm512_and_si512(low, _mm512_set1_epi16(15)));
}
inline Pairs next_low(Pairs low) { return _mm512_srli_epi16(low, 4); }
#if defined(__AVX512VNNI__)
inline Pairs add_products(Pairs total, Pairs weights, Pairs pair) {
  // The intrinsic is the same, but GCC 12 then moves half of the totals to memory and back for each product.
  asm("vpdpwssd %2, %1, %0" : "+v"(total) : "v"(weights), "v"(pair));
  return total;
}
#else
inline Pairs add_products(Pairs total, Pairs weights, Pairs pair) {
  return _mm512_add_epi32(total, _mm512_madd_epi16(weights, pair));
}
#endif
#elif defined(__AVX2__) && defined(__FMA__)
constexpr int LANES = 8;
constexpr int ROW_TILE = 6;
using Pairs = __m256i;
inline Pairs load_pairs(const void* p) { return _mm256_load_si256((const __m256i*)p); }
inline void store_pairs(int16_t* p, Pairs pairs) { _mm256_store_si256((__m256i*)p, pairs); }
inline Pairs broadcast(int32_t pair) { return _mm256_set1_epi32(pair); }
inline Pairs join(const int8_t* high, Pairs low) {
  const Pairs wide = _mm256_cvtepi8_epi16(_mm_load_si128((const __m128i*)high));
  return _mm256_or_si256(_mm256_slli_epi16(wide, 4), _mm256_and_si256(low, _mm256_set1_epi16(15)));
}
inline Pairs next_low(Pairs low) { return _mm256_srli_epi16(low, 4); }
inline Pairs add_products(Pairs total, Pairs weights, Pairs pair) {
  return _mm256_add_epi32(total, _mm256_madd_epi16(weights, pair));
}
#else
#error "needs AVX-512 F and BW, or AVX2 with FMA"
#endif

typedef float Vector __attribute__((vector_size(LANES * sizeof(float))));
typedef float AnyVector __attribute__((vector_size(LANES * sizeof(float)), aligned(sizeof(float)), may_alias));
typedef int32_t Integers __attribute__((vector_size(LANES * sizeof(int32_t))));
typedef int16_t Shorts __attribute__((vector_size(LANES * sizeof(int16_t)), aligned(sizeof(int16_t)), may_alias));

inline Vector load(const float* p) { return *(const AnyVector*)p; }
inline void store(float* p, Vector v) { *(AnyVector*)p = v; }
inline Vector larger(Vector a, Vector b) { return a > b ? a : b; }
inline Vector magnitude(Vector v) { return (Vector)((Integers)v & 0x7fffffff); }

// Half of a vector's sums, or maxima, with the other half, until one is left.
template <class Join>
inline float fold(Vector v, Join join) {
  alignas(64) float lane[LANES];
  std::memcpy(lane, &v, sizeof lane);
  for (int half = LANES / 2; half; half /= 2)
    for (int i = 0; i < half; i++) lane[i] = join(lane[i], lane[i + half]);
  return lane[0];
}
inline float sum(Vector v) {
  return fold(v, [](float a, float b) { return a + b; });
}
inline float largest(Vector v) {
  return fold(v, [](float a, float b) { return a > b ? a : b; });
}

constexpr int PANEL = 2 * LANES;
constexpr float ACTIVATION_MAX = 8191.f;
constexpr int QUERY_TILE = 4;  // query vectors that share keys and values in registers
constexpr int FETCH = 4096;    // bytes from a weight to the one that is asked for: so long does memory take

// 1.5 * 2^23: a float below 2^22 added to it is rounded to an integer, which its low bits then are.
constexpr float ROUNDER = 12582912.f;

// 2^x for x <= 0: exponent and a polynomial (Taylor of 2^f on [-1/2, 1/2], error below 2e-7).
inline Vector exp2(Vector x) {
  x = larger(x, Vector{} - 126.f);
  const Vector shifted = x + ROUNDER, f = x - (shifted - ROUNDER);
  Vector p = Vector{} + 1.5403530e-4f;
  for (float c : {1.3333558e-3f, 9.6181291e-3f, 5.5504109e-2f, 2.4022651e-1f, 6.9314718e-1f, 1.f}) p = p * f + c;
  return (Vector)((Integers)p + ((Integers)shifted << 23));
}

// x * (1 + erf(x / sqrt 2)) / 2, as relu(x) - |x| * erfc(|x| / sqrt 2) / 2: no difference of like numbers.
// erfc by Abramowitz and Stegun, Handbook of Mathematical Functions, 7.1.26, error below 1.5e-7.
inline Vector gelu(Vector x) {
  const Vector size = magnitude(x), t = 1.f / (1.f + 0.23164189f * size);  // .3275911 / sqrt 2
  Vector p = Vector{} + 1.061405429f;
  for (float c : {-1.453152027f, 1.421413741f, -0.284496736f, 0.254829592f}) p = p * t + c;
  const Vector complement = p * t * exp2(x * x * -0.72134752f);  // exp(-x * x / 2)
  return larger(x, Vector{}) - 0.5f * size * complement;
}

// ---------------------------------------------------------------- the model and the work space

extern "C" {

struct BertShape {
  int32_t layers, hidden, heads, inner, vocabulary, longest, type_vocabulary, pools_first;
  float eps;
};
}

inline long padded(long width) { return (width + PANEL - 1) / PANEL * PANEL; }
inline long in_lanes(long width) { return (width + LANES - 1) / LANES * LANES; }

// Memory from which parts are cut, one after the other; each starts at a multiple of 64 bytes, as the memory does.
struct Memory {
  char* end;

  template <class Number>
  void cut(Number*& part, long numbers) {
    part = (Number*)end;
    end += (numbers * sizeof(Number) + 63) / 64 * 64;
  }
};

struct Linear {
  const int8_t* panels;
  const float *scales, *bias;  // of the columns
  long in, out;                // padded

  Linear(Memory& block, long inputs, long outputs) : in(padded(inputs)), out(padded(outputs)) {
    block.cut(panels, in * out / 2 * 3), block.cut(scales, out), block.cut(bias, out);
  }
};

struct Norm {
  const float *weight, *bias;

  Norm(Memory& block, long hidden) { block.cut(weight, padded(hidden)), block.cut(bias, padded(hidden)); }
};

struct Layer {
  Linear qkv, output;
  Norm attention_norm;
  Linear up, down;
  Norm output_norm;

  Layer(Memory& block, const BertShape& m)
      : qkv(block, m.hidden, 3L * m.hidden), output(block, m.hidden, m.hidden), attention_norm(block, m.hidden),
        up(block, m.hidden, m.inner), down(block, m.inner, m.hidden), output_norm(block, m.hidden) {}
};

struct Embeddings {
  const float *words, *positions, *types;  // [.][padded hidden]
  Norm norm;

  Embeddings(Memory& block, const BertShape& m)
      : words(rows(block, m, m.vocabulary)), positions(rows(block, m, m.longest)),
        types(rows(block, m, m.type_vocabulary)), norm(block, m.hidden) {}

  static const float* rows(Memory& block, const BertShape& m, long count) {
    const float* table;
    block.cut(table, count * padded(m.hidden));
    return table;
  }
};

struct Work {
  float *x, *wide, *mixed, *keys, *scores, *scales;
  int32_t* pairs;
  int16_t* panel;

  Work(Memory& memory, const BertShape& m, long rows, long longest) {
    const long hidden = padded(m.hidden), up = padded(m.inner);
    const long length = in_lanes(longest);
    memory.cut(x, rows * hidden), memory.cut(wide, rows * std::max(padded(3L * m.hidden), up));
    memory.cut(mixed, rows * hidden), memory.cut(keys, m.hidden / m.heads * length);
    memory.cut(scores, QUERY_TILE * length), memory.cut(scales, rows);
    memory.cut(pairs, rows * std::max(hidden, up) / 2), memory.cut(panel, PANEL * std::max(hidden, up));
  }
};

// ---------------------------------------------------------------- matrix products

// Rows pass a panel in tiles that are all about as high. Numbers of a tile lie as [in / 2][row][2]: those that meet the
// same weights are side by side.
struct Tiles {
  int rows, count;
  explicit Tiles(int rows) : rows(rows), count((rows + ROW_TILE - 1) / ROW_TILE) {}
  long first(int tile) const { return (long)rows * tile / count; }
};

void round_rows(const float* x, long width, int rows, Work& to) {
  const Tiles tiles(rows);
  for (int tile = 0; tile < tiles.count; tile++) {
    const long first = tiles.first(tile), height = tiles.first(tile + 1) - first;
    for (long row = first; row < first + height; row++, x += width) {
      Vector top = Vector{};
      for (long i = 0; i < width; i += LANES) top = larger(top, magnitude(load(x + i)));
      const float most = largest(top), factor = most > 0.f ? ACTIVATION_MAX / most : 0.f;
      to.scales[row] = most / ACTIVATION_MAX;
      int32_t* pair = to.pairs + first * width / 2 + (row - first);
      for (long i = 0; i < width; i += LANES) {
        const Shorts rounded = __builtin_convertvector((Integers)(load(x + i) * factor + ROUNDER), Shorts);
        int32_t numbers[LANES / 2];
        std::memcpy(numbers, &rounded, sizeof numbers);
        for (int32_t number : numbers) *pair = number, pair += height;
      }
    }
  }
}

// ROWS rows with one panel: out[r][c] = the scaled sum over k of x[r][k] * weight[k][c], plus bias, plus what was there.
// The first rows that pass a panel find it packed and leave it unpacked for the others.
//
// Packed, four inputs are 4 * PANEL bytes, the upper eight bits of the weights in the order of the unpacked panel, and
// 2 * PANEL bytes with the lower four: number i of 16 bits has, from its lowest bits upwards, those of weight i of each
// of the four vectors.
using Kernel = void (*)(const Linear&, const int8_t* packed, int16_t* panel, const int32_t* pairs,
                        const float* scales, long first, float* out);

template <int ROWS, bool ADDS, bool UNPACKS>
__attribute__((noinline)) void multiply(
    const Linear& w, const int8_t* packed, int16_t* panel, const int32_t* pairs, const float* scales, long first,
    float* out) {
  Pairs acc[ROWS][2];
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; r++) acc[r][0] = acc[r][1] = Pairs{};
  for (long k = w.in / 4; k; k--, packed += 6 * PANEL) {
    Pairs low{};
    if (UNPACKS) {
      for (int i = 0; i < 6 * PANEL; i += 64) _mm_prefetch((const char*)packed + FETCH + i, _MM_HINT_T0);
      low = load_pairs(packed + 4 * PANEL);
    }
#pragma GCC unroll 2
    for (int i = 0; i < 4; i += 2, panel += 2 * PANEL, pairs += ROWS) {
      Pairs w0, w1;
      if (UNPACKS) {
        w0 = join(packed + i * PANEL, low), low = next_low(low);
        w1 = join(packed + i * PANEL + PANEL, low), low = next_low(low);
        store_pairs(panel, w0), store_pairs(panel + PANEL, w1);
      } else {
        w0 = load_pairs(panel), w1 = load_pairs(panel + PANEL);
      }
#pragma GCC unroll 16
      for (int r = 0; r < ROWS; r++) {
        const Pairs pair = broadcast(pairs[r]);
        acc[r][0] = add_products(acc[r][0], w0, pair);
        acc[r][1] = add_products(acc[r][1], w1, pair);
      }
    }
  }
  auto finish = [&](Pairs total, int row, long column) {
    float* to = out + row * (long)w.out + column;
    const Vector scale = load(w.scales + column) * scales[row];
    const Vector product = __builtin_convertvector((Integers)total, Vector) * scale + load(w.bias + column);
    store(to, ADDS ? load(to) + product : product);
  };
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; r++) {
    finish(acc[r][0], r, first);
    finish(acc[r][1], r, first + LANES);
  }
}

template <bool ADDS, bool UNPACKS>
constexpr Kernel KERNELS[ROW_TILE + 1] = {
    nullptr, multiply<1, ADDS, UNPACKS>, multiply<2, ADDS, UNPACKS>, multiply<3, ADDS, UNPACKS>,
    multiply<4, ADDS, UNPACKS>, multiply<5, ADDS, UNPACKS>, multiply<6, ADDS, UNPACKS>,
#if defined(__AVX512F__)
    multiply<7, ADDS, UNPACKS>, multiply<8, ADDS, UNPACKS>, multiply<9, ADDS, UNPACKS>,
    multiply<10, ADDS, UNPACKS>, multiply<11, ADDS, UNPACKS>, multiply<12, ADDS, UNPACKS>,
#endif
#if defined(__AVX512VNNI__)
    multiply<13, ADDS, UNPACKS>, multiply<14, ADDS, UNPACKS>,
#endif
};

// Rows that round_rows made, times a matrix.
template <bool ADDS>
void linear(const Linear& w, Work& work, int rows, float* out) {
  const Tiles tiles(rows);
  for (long column = 0; column < w.out; column += PANEL)
    for (int tile = 0; tile < tiles.count; tile++) {
      const long first = tiles.first(tile), height = tiles.first(tile + 1) - first;
      const Kernel kernel = tile ? KERNELS<ADDS, false>[height] : KERNELS<ADDS, true>[height];
      kernel(w, w.panels + column * w.in / 2 * 3, work.panel, work.pairs + first * w.in / 2, work.scales + first, column,
             out + first * w.out);
    }
}

// ---------------------------------------------------------------- the rest of a layer

void normalise(float* x, const Norm& norm, int hidden, float eps) {
  const long width = padded(hidden);
  Vector total = Vector{}, squares = Vector{};
  for (long i = 0; i < width; i += LANES) total += load(x + i);
  const float mean = sum(total) / hidden;
  for (long i = 0; i < width; i += LANES) {
    const Vector centred = load(x + i) - mean;
    squares += centred * centred;
  }
  // Zeros beyond the last column are as far from the mean as the mean is from zero.
  const float variance = (sum(squares) - (width - hidden) * mean * mean) / hidden;
  const float inverse = 1.f / std::sqrt(variance + eps);
  for (long i = 0; i < width; i += LANES)
    store(x + i, (load(x + i) - mean) * inverse * load(norm.weight + i) + load(norm.bias + i));
}

// Keys of one head as [dimension][token], filled up with zeros.
void take_keys(const float* keys, long stride, int tokens, int dimensions, float* to) {
  const long length = in_lanes(tokens);
  for (int d = 0; d < dimensions; d++)
    for (long t = 0; t < length; t++) to[d * length + t] = t < tokens ? keys[t * stride + d] : 0.f;
}

// Softmax of some scores times `factor`, in place, base 2; zeros beyond the last.
void soften(float* scores, int tokens, float factor) {
  const long length = in_lanes(tokens);
  for (long t = tokens; t < length; t++) scores[t] = -INFINITY;
  Vector top = Vector{} - INFINITY, total = Vector{};
  for (long t = 0; t < length; t += LANES) top = larger(top, load(scores + t));
  const float most = largest(top);
  for (long t = 0; t < length; t += LANES) {
    const Vector e = exp2((load(scores + t) - most) * factor);
    store(scores + t, e);
    total += e;
  }
  // exp2 ends at 2^-126: what lies beyond the last token adds nothing that a float could hold.
  const float inverse = 1.f / sum(total);
  for (long t = 0; t < length; t += LANES) store(scores + t, load(scores + t) * inverse);
}

template <int QUERIES>
void attend(const float* queries, const float* values, long stride, int tokens, int dimensions, Work& work, float* out,
            long out_stride) {
  const long length = in_lanes(tokens);
  for (long t = 0; t < length; t += LANES) {
    Vector score[QUERIES] = {};
    for (int d = 0; d < dimensions; d++) {
      const Vector key = load(work.keys + d * length + t);
#pragma GCC unroll 4
      for (int q = 0; q < QUERIES; q++) score[q] += queries[q * stride + d] * key;
    }
    for (int q = 0; q < QUERIES; q++) store(work.scores + q * length + t, score[q]);
  }
  const float factor = 1.44269504f / std::sqrt((float)dimensions);
  for (int q = 0; q < QUERIES; q++) soften(work.scores + q * length, tokens, factor);
  for (long first = 0; first < dimensions; first += LANES) {
    Vector mixed[QUERIES] = {};
    for (int t = 0; t < tokens; t++) {
      // Beyond the head it is another's values, and nobody looks at what becomes of them.
      const Vector value = load(values + t * stride + first);
#pragma GCC unroll 4
      for (int q = 0; q < QUERIES; q++) mixed[q] += work.scores[q * length + t] * value;
    }
    const size_t bytes = std::min<long>(LANES, dimensions - first) * sizeof(float);
    for (int q = 0; q < QUERIES; q++) std::memcpy(out + q * out_stride + first, &mixed[q], bytes);
  }
}

void attention(const BertShape& m, const float* qkv, long stride, int tokens, Work& work, float* out) {
  const int dimensions = m.hidden / m.heads;
  const long out_stride = padded(m.hidden);
  for (int head = 0; head < m.heads; head++) {
    const float* queries = qkv + head * dimensions;
    float* to = out + head * dimensions;
    const float* values = queries + 2 * m.hidden;
    take_keys(queries + m.hidden, stride, tokens, dimensions, work.keys);
    int t = 0;
    for (; t + QUERY_TILE <= tokens; t += QUERY_TILE)
      attend<QUERY_TILE>(queries + t * stride, values, stride, tokens, dimensions, work, to + t * out_stride, out_stride);
    for (; t < tokens; t++)
      attend<1>(queries + t * stride, values, stride, tokens, dimensions, work, to + t * out_stride, out_stride);
  }
}

void embed(const BertShape& m, const Embeddings& table, int32_t token, int32_t type, int position, float* x) {
  const long width = padded(m.hidden);
  const float *word = table.words + token * width, *kind = table.types + type * width;
  const float* place = table.positions + position * width;
  for (long i = 0; i < width; i += LANES) store(x + i, load(word + i) + load(kind + i) + load(place + i));
  normalise(x, table.norm, m.hidden, m.eps);
}

void run_layer(const BertShape& m, const Layer& layer, int texts, const int32_t* starts, Work& work) {
  const int rows = starts[texts];
  const long hidden = padded(m.hidden), qkv_width = layer.qkv.out, up_width = layer.up.out;
  round_rows(work.x, hidden, rows, work);
  linear<false>(layer.qkv, work, rows, work.wide);
  for (int i = 0; i < texts; i++)
    attention(m, work.wide + starts[i] * qkv_width, qkv_width, starts[i + 1] - starts[i], work,
              work.mixed + starts[i] * hidden);
  round_rows(work.mixed, hidden, rows, work);
  linear<true>(layer.output, work, rows, work.x);
  for (int row = 0; row < rows; row++) normalise(work.x + row * hidden, layer.attention_norm, m.hidden, m.eps);
  round_rows(work.x, hidden, rows, work);
  linear<false>(layer.up, work, rows, work.wide);
  for (long i = 0; i < rows * up_width; i += LANES) store(work.wide + i, gelu(load(work.wide + i)));
  round_rows(work.wide, up_width, rows, work);
  linear<true>(layer.down, work, rows, work.x);
  for (int row = 0; row < rows; row++) normalise(work.x + row * hidden, layer.output_norm, m.hidden, m.eps);
}

void pool(const BertShape& m, const float* rows, int tokens, float* out) {
  const int counted = m.pools_first ? std::min(1, tokens) : tokens;
  for (int i = 0; i < m.hidden; i++) {
    float total = 0.f;
    for (int t = 0; t < counted; t++) total += rows[t * padded(m.hidden) + i];
    out[i] = total / counted;
  }
}

}  // namespace

inline int longest_text(int texts, const int32_t* starts) {
  int longest = 0;
  for (int i = 0; i < texts; i++) longest = std::max(longest, starts[i + 1] - starts[i]);
  return longest;
}

extern "C" {

int bert_lanes() { return LANES; }
int bert_activation_max() { return ACTIVATION_MAX; }

// Bytes of memory that bert_encode needs for these texts.
int64_t bert_work_bytes(const BertShape* m, int texts, const int32_t* starts) {
  Memory memory{nullptr};
  Work(memory, *m, starts[texts], longest_text(texts, starts));
  return memory.end - (char*)nullptr;
}

// vectors[i] = the pooled vector, [hidden], not yet of length 1, of text i: its tokens are those from starts[i] to
// starts[i + 1]; NaN if there is none. `weights` has the parts of Embeddings and of each Layer, in their order.
// Returns 0, or 1 where a number is not in the model's tables; then nothing was written.
int bert_encode(const BertShape* shape, char* weights, int texts, const int32_t* starts, const int32_t* tokens,
                const int32_t* types, char* memory, float* vectors) {
  const BertShape& m = *shape;
  const int rows = starts[texts], longest = longest_text(texts, starts);
  auto within = [&](const int32_t* numbers, int end) {
    return std::all_of(numbers, numbers + rows, [&](int32_t n) { return n >= 0 && n < end; });
  };
  if (longest > m.longest || !within(tokens, m.vocabulary) || !within(types, m.type_vocabulary)) return 1;
  Memory block{weights}, space{memory};
  const Embeddings table(block, m);
  Work work(space, m, rows, longest);
  const long hidden = padded(m.hidden);
  std::memset(work.mixed, 0, rows * hidden * sizeof(float));
  for (int i = 0; i < texts; i++)
    for (int row = starts[i]; row < starts[i + 1]; row++)
      embed(m, table, tokens[row], types[row], row - starts[i], work.x + row * hidden);
  for (int i = 0; i < m.layers; i++) run_layer(m, Layer(block, m), texts, starts, work);
  for (int i = 0; i < texts; i++)
    pool(m, work.x + starts[i] * hidden, starts[i + 1] - starts[i], vectors + (long)i * m.hidden);
  return 0;
}
}
