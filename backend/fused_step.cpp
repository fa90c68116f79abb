// One step of a llama-family decoder on a CPU, as one function: rows of tokens in, logits out, over paged KV memory.
//
// Why it exists: a small model's step is hundreds of short operations, and a framework spends longer between them
// than in them. Here the whole step is one OpenMP region; what is shared between threads is separated by the barrier
// at the end of each `omp for`.
//
// Numbers: weights are half floats (11 bits of mantissa, half the traffic of float) or what quantisation made of them;
// KV are half floats, or bytes with a scale for each token and head; activations and every sum are float. Where weights
// are integers or levels, a row of activations is rounded in groups of GROUP with a scale each, to int8 for weights of
// four bits and to int16 for bytes, and products within a group are summed as integers. Each sum runs in an order that
// depends on nothing but its own row's position, so a row's result is bitwise the same alone, in any batch, in any chunk
// of a prefill and with any number of threads.
//
// Layouts of a weight matrix: panels of PANEL output columns, so that a kernel reads one stream. A group is as many
// inputs as share a scale, a multiple of GROUP; "words" are [group / GROUP][2][4][LANES][4] bytes, of which byte i of a
// vector holds word i of GROUP inputs in its low half and word i + 4 in its high half
//   half floats   [panel][in][PANEL]
//   bytes         [panel][in / 2][PANEL][2], weight = scale of the column * byte; or, where a group shares a scale,
//                 [panel][in / group]{ bytes [group / 2][PANEL][2], scales [PANEL] }, weight = scale * byte / 128
//   nibbles       [panel][in / group]{ words, scales [PANEL], minima [PANEL] }, weight = scale * nibble + minimum
//   small floats  [panel][in / 2][PANEL]{ second, first }, weight = scale of the column * E4M3 (arXiv 2209.05433) / 256
//   levels        [panel][in / group]{ words, scales [PANEL] }, weight = scale * LEVELS[nibble] / 127
// A panel of gate columns is followed by the panel of up columns that belong to them, which may be of another format.
// Other layouts
//   KV          [layer][block][kv head]{ keys [head_dim][BLOCK], values [BLOCK][head_dim] } and, where they are bytes,
//               { scales of the keys [BLOCK], scales of the values [BLOCK] }; keys are transposed so that one vector
//               holds one dimension of BLOCK tokens
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <immintrin.h>
#include <new>
#include <vector>

namespace {

using half = uint16_t;

// ---------------------------------------------------------------- vectors: the only part that knows the instructions

// NormalFloat's levels (QLoRA, arXiv 2305.14314) in 127ths, rounded.
alignas(16) constexpr int8_t LEVELS[16] = {-127, -88, -67, -50, -36, -23, -12, 0, 10, 20, 31, 43, 56, 71, 92, 127};
inline __m128i levels() { return _mm_load_si128((const __m128i*)LEVELS); }
inline __m128i shifted_levels() { return _mm_xor_si128(levels(), _mm_set1_epi8(-128)); }

#if defined(__AVX512F__) && defined(__AVX512BW__)
#define WIDE
constexpr int LANES = 16;
constexpr int ROW_TILE = 12;         // rows of a matrix product that share the weights in registers: 24 accumulators
constexpr int INTEGER_ROW_TILE = 6;  // the same where sums of integers need registers beside the float ones
constexpr int BYTE_ROW_TILE = 6;     // and where the float ones are seldom needed
constexpr int QUERY_TILE = 6;     // query vectors that share keys and values in registers
constexpr int VALUE_VECTORS = 4;  // vectors of a value row per pass
using Vector = __m512;
inline Vector load(const float* p) { return _mm512_loadu_ps(p); }
inline void store(float* p, Vector v) { _mm512_storeu_ps(p, v); }
inline Vector broadcast(float x) { return _mm512_set1_ps(x); }
inline Vector load_half(const half* p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }
inline Vector load_int8(const int8_t* p) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
}
inline Vector fma(Vector a, Vector b, Vector c) { return _mm512_fmadd_ps(a, b, c); }
inline Vector maximum(Vector a, Vector b) { return _mm512_max_ps(a, b); }
inline float sum(Vector v) { return _mm512_reduce_add_ps(v); }
inline float largest(Vector v) { return _mm512_reduce_max_ps(v); }
inline Vector nearest(Vector v) { return _mm512_roundscale_ps(v, 8); }
inline Vector times_power_of_two(Vector v, Vector n) { return _mm512_scalef_ps(v, n); }
using Integers = __m512i;
inline Integers load_bytes(const uint8_t* p) { return _mm512_loadu_si512(p); }
inline Integers broadcast_word(int32_t x) { return _mm512_set1_epi32(x); }
inline Vector to_float(Integers v) { return _mm512_cvtepi32_ps(v); }
inline void store_int8(int8_t* p, Vector v) {
  _mm_storeu_si128((__m128i*)p, _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(v)));
}
inline Integers low_nibbles(Integers v) { return _mm512_and_si512(v, _mm512_set1_epi8(15)); }
inline Integers high_nibbles(Integers v) { return _mm512_and_si512(_mm512_srli_epi16(v, 4), _mm512_set1_epi8(15)); }
inline Integers add(Integers a, Integers b) { return _mm512_add_epi32(a, b); }
inline Integers first_halves(Integers v) {
  return _mm512_and_si512(_mm512_srai_epi16(v, 1), _mm512_set1_epi16((short)0xbf80));
}
inline Integers second_halves(Integers v) { return first_halves(_mm512_slli_epi16(v, 8)); }
inline Vector low_floats(Integers halves) { return _mm512_cvtph_ps(_mm512_castsi512_si256(halves)); }
inline Vector high_floats(Integers halves) { return _mm512_cvtph_ps(_mm512_extracti64x4_epi64(halves, 1)); }
inline Integers load_widened(const uint8_t* p) { return _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i*)p)); }
inline void store_int16(int16_t* p, Vector v) {
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtsepi32_epi16(_mm512_cvtps_epi32(v)));
}
using Factors = Integers;  // unsigned bytes, 128 above what they stand for
inline Factors of_levels(Integers nibbles) {
  return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(shifted_levels()), nibbles);
}
inline Integers begin_dot(int32_t shift) { return broadcast_word(shift); }
#if defined(__AVX512VNNI__)
inline Integers dot2(Integers total, Integers shorts, Integers word) { return _mm512_dpwssd_epi32(total, shorts, word); }
inline Integers dot4(Integers total, Factors bytes, Integers word) { return _mm512_dpbusd_epi32(total, bytes, word); }
inline Integers dot4_small(Integers total, Integers nibbles, Integers word) { return dot4(total, nibbles, word); }
inline Integers total_of_small(Integers total) { return total; }
#else
inline Integers dot2(Integers total, Integers shorts, Integers word) {
  return add(total, _mm512_madd_epi16(shorts, word));
}
inline Integers even(Integers s) { return _mm512_srai_epi16(_mm512_slli_epi16(s, 8), 8); }
inline Integers dot4(Integers total, Factors bytes, Integers word) {
  const Integers evens = _mm512_madd_epi16(_mm512_and_si512(bytes, _mm512_set1_epi16(255)), even(word));
  const Integers odds = _mm512_madd_epi16(_mm512_srli_epi16(bytes, 8), _mm512_srai_epi16(word, 8));
  return add(total, add(evens, odds));
}
inline Integers dot4_small(Integers total, Integers nibbles, Integers word) {
  return _mm512_add_epi16(total, _mm512_maddubs_epi16(nibbles, word));
}
inline Integers total_of_small(Integers total) { return _mm512_madd_epi16(total, _mm512_set1_epi16(1)); }
#endif
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
constexpr int LANES = 8;
constexpr int ROW_TILE = 6;
constexpr int INTEGER_ROW_TILE = 3;
constexpr int BYTE_ROW_TILE = 4;
constexpr int QUERY_TILE = 4;
constexpr int VALUE_VECTORS = 2;
using Vector = __m256;
inline Vector load(const float* p) { return _mm256_loadu_ps(p); }
inline void store(float* p, Vector v) { _mm256_storeu_ps(p, v); }
inline Vector broadcast(float x) { return _mm256_set1_ps(x); }
inline Vector load_half(const half* p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)); }
inline Vector load_int8(const int8_t* p) {
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)));
}
inline Vector fma(Vector a, Vector b, Vector c) { return _mm256_fmadd_ps(a, b, c); }
inline Vector maximum(Vector a, Vector b) { return _mm256_max_ps(a, b); }
inline float sum(Vector v) {
  __m128 x = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  x = _mm_add_ps(x, _mm_movehl_ps(x, x));
  return _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)));
}
inline float largest(Vector v) {
  __m128 x = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  x = _mm_max_ps(x, _mm_movehl_ps(x, x));
  return _mm_cvtss_f32(_mm_max_ss(x, _mm_movehdup_ps(x)));
}
inline Vector nearest(Vector v) { return _mm256_round_ps(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline Vector times_power_of_two(Vector v, Vector n) {
  __m256i exponent = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
  return _mm256_mul_ps(v, _mm256_castsi256_ps(exponent));
}
using Integers = __m256i;
inline Integers load_bytes(const uint8_t* p) { return _mm256_loadu_si256((const __m256i*)p); }
inline Integers broadcast_word(int32_t x) { return _mm256_set1_epi32(x); }
inline Vector to_float(Integers v) { return _mm256_cvtepi32_ps(v); }
inline void store_int8(int8_t* p, Vector v) {
  const __m256i words = _mm256_cvtps_epi32(v);
  const __m128i shorts = _mm_packs_epi32(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
  _mm_storel_epi64((__m128i*)p, _mm_packs_epi16(shorts, shorts));
}
inline Integers load_widened(const uint8_t* p) { return _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)p)); }
inline void store_int16(int16_t* p, Vector v) {
  const __m256i words = _mm256_cvtps_epi32(v);
  _mm_storeu_si128((__m128i*)p, _mm_packs_epi32(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1)));
}
inline Integers low_nibbles(Integers v) { return _mm256_and_si256(v, _mm256_set1_epi8(15)); }
inline Integers high_nibbles(Integers v) { return _mm256_and_si256(_mm256_srli_epi16(v, 4), _mm256_set1_epi8(15)); }
inline Integers add(Integers a, Integers b) { return _mm256_add_epi32(a, b); }
inline Integers first_halves(Integers v) {
  return _mm256_and_si256(_mm256_srai_epi16(v, 1), _mm256_set1_epi16((short)0xbf80));
}
inline Integers second_halves(Integers v) { return first_halves(_mm256_slli_epi16(v, 8)); }
inline Vector low_floats(Integers halves) { return _mm256_cvtph_ps(_mm256_castsi256_si128(halves)); }
inline Vector high_floats(Integers halves) { return _mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1)); }
inline Integers shuffle(__m128i table, Integers v) {
  return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(table), v);
}
#if defined(__AVXVNNI__)
using Factors = Integers;  // unsigned bytes, 128 above what they stand for
inline Factors of_levels(Integers nibbles) { return shuffle(shifted_levels(), nibbles); }
inline Integers dot2(Integers total, Integers shorts, Integers word) {
  return _mm256_dpwssd_avx_epi32(total, shorts, word);
}
inline Integers begin_dot(int32_t shift) { return broadcast_word(shift); }
inline Integers dot4(Integers total, Factors bytes, Integers word) {
  return _mm256_dpbusd_avx_epi32(total, bytes, word);
}
inline Integers dot4_small(Integers total, Integers nibbles, Integers word) { return dot4(total, nibbles, word); }
inline Integers total_of_small(Integers total) { return total; }
#else
// The instruction multiplies an unsigned byte with a signed one: the levels' signs move over to the word, which never
// has a -128 that would stay what it is. Two products of 127 * 127 fit 16 bits.
struct Factors {
  Integers levels, magnitudes;
};
inline Factors of_levels(Integers nibbles) {
  const Integers signed_levels = shuffle(levels(), nibbles);
  return {signed_levels, _mm256_abs_epi8(signed_levels)};
}
inline Integers dot2(Integers total, Integers shorts, Integers word) {
  return add(total, _mm256_madd_epi16(shorts, word));
}
inline Integers begin_dot(int32_t) { return _mm256_setzero_si256(); }
inline Integers dot4(Integers total, Factors f, Integers word) {
  const Integers pairs = _mm256_maddubs_epi16(f.magnitudes, _mm256_sign_epi8(word, f.levels));
  return add(total, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}
inline Integers dot4_small(Integers total, Integers nibbles, Integers word) {
  return _mm256_add_epi16(total, _mm256_maddubs_epi16(nibbles, word));
}
inline Integers total_of_small(Integers total) { return _mm256_madd_epi16(total, _mm256_set1_epi16(1)); }
#endif
#else
#error "needs AVX-512 F and BW, or AVX2 with FMA and F16C"
#endif
// first_halves, second_halves: E4M3 in the high or the low byte of 16 bits to half floats 256 times smaller, subnormal
// ones included; junk in the other byte is nothing.
// load_widened: signed bytes as 16 bits each. dot2: total + the sum of two products of 16 bits, in every 32-bit lane.
// begin_dot, dot4: what was begun + the sum of four products of a level with a signed byte, in every 32-bit lane,
// exactly. `shift` is -128 times the sum of all signed bytes that will follow, none of which is -128.
// dot4_small: total + the sum of four products of a nibble with a signed byte, for the words of one GROUP;
// total_of_small gives their total. Without VNNI the products of a group fit 16 bits, which saves a widening a word.

constexpr int PANEL = 2 * LANES;
constexpr int GROUP = 32;  // inputs that share a scale where weights are integers
static_assert(ROW_TILE <= 12 && INTEGER_ROW_TILE <= 6 && BYTE_ROW_TILE <= ROW_TILE && QUERY_TILE <= 6, "the tables of kernels end there");
static_assert(GROUP / 2 * 15 * 127 <= 32767, "dot4_small adds up GROUP / 2 products in 16 bits");
static_assert(GROUP * 128L * 32768 <= 2147483647, "dot2 adds up the products of a group in 32 bits");
constexpr int BLOCK = 16;  // tokens of a KV block
constexpr int BLOCK_VECTORS = BLOCK / LANES;
constexpr float HALF_MAX = 65504.f;

inline half to_half(float x) { return _cvtss_sh(std::min(std::max(x, -HALF_MAX), HALF_MAX), 0); }
inline float from_half(half x) { return _cvtsh_ss(x); }
inline Vector load_number(const half* p) { return load_half(p); }
inline Vector load_number(const int8_t* p) { return load_int8(p); }

// 2^x for x <= 0: exponent and a polynomial (Taylor of 2^f on [-1/2, 1/2], error below 2e-7).
inline Vector exp2(Vector x) {
  x = maximum(x, broadcast(-126.f));
  const Vector whole = nearest(x), f = x - whole;
  Vector p = broadcast(1.5403530e-4f);
  for (float c : {1.3333558e-3f, 9.6181291e-3f, 5.5504109e-2f, 2.4022651e-1f, 6.9314718e-1f, 1.f})
    p = fma(p, f, broadcast(c));
  return times_power_of_two(p, whole);
}

inline Vector silu(Vector x) {
  const Vector one = broadcast(1.f), magnitude = maximum(x, broadcast(0.f) - x);
  const Vector e = exp2(magnitude * broadcast(-1.44269504f));  // exp(-|x|), which cannot overflow
  const Vector sigmoid_of_magnitude = one / (one + e);
  const Vector positive = maximum(x, broadcast(0.f)) * sigmoid_of_magnitude;
  const Vector negative = (x - maximum(x, broadcast(0.f))) * (e * sigmoid_of_magnitude);
  return positive + negative;
}

// ---------------------------------------------------------------- the model

enum Format { HALVES, BYTES, NIBBLES, SMALL_FLOATS, LEVEL_NIBBLES };

// Some outputs of a matrix, in panels of one format.
struct Part {
  const uint8_t* panels;
  const float* scales;  // of the columns, for BYTES and SMALL_FLOATS
  const float* bias;    // padded like the columns; or null
  int out;              // columns that mean something; the last panel may be padded
  Format format;
  int group;    // inputs that share a scale in the panel; 0 where none do
  long stride;  // bytes from one panel to the next

  int count() const { return (out + PANEL - 1) / PANEL; }
  bool wants_int8() const { return format == NIBBLES || format == LEVEL_NIBBLES; }
  bool wants_int16() const { return format == BYTES; }
};

// A matrix of one to three parts that multiply the same rows: query, key and value, or gate and up. Only the last panel
// of the last part may be padded where their outputs follow each other.
struct Linear {
  Part parts[3];
  int count;
  int in;
  const int32_t* order;  // input order[i] comes i-th where rows are rounded; null: they keep their order

  bool wants_int8() const {
    return std::any_of(parts, parts + count, [](const Part& part) { return part.wants_int8(); });
  }
  bool wants_int16() const {
    return std::any_of(parts, parts + count, [](const Part& part) { return part.wants_int16(); });
  }
};

// Rows that a matrix is multiplied with: floats and, for integer weights, their rounded forms in the matrix's order.
struct Rows {
  std::vector<float> floats;
  std::vector<int16_t> shorts;      // [row][in]
  std::vector<float> short_scales;  // [row][in / GROUP]
  std::vector<int8_t> rounded;      // [row][in], and so the next three
  std::vector<float> scales;        // [row][in / GROUP]
  std::vector<float> sums;      // [row][in / GROUP], of the rounded ones times their scale
  std::vector<int32_t> shifts;  // [row][in / GROUP], minus what the 128 in every byte adds to a group's product

  void reserve(int rows, int width) {
    if (floats.size() >= (size_t)rows * width) return;
    shorts.resize((size_t)rows * width);
    short_scales.resize((size_t)rows * width / GROUP);
    rounded.resize((size_t)rows * width);
    scales.resize((size_t)rows * width / GROUP);
    sums.resize((size_t)rows * width / GROUP);
    shifts.resize((size_t)rows * width / GROUP);
    floats.resize((size_t)rows * width);  // last, for it says that the others are there
  }
};

struct Layer {
  const float *input_norm, *post_attention_norm;
  const float *query_norm, *key_norm;  // per head, or null
  Linear qkv, output, gate_up, down;
};

struct Model {
  int layers, hidden, heads, kv_heads, head_dim, intermediate, vocab, max_context;
  float eps;
  long blocks;
  std::vector<Layer> layer;
  Linear head;
  const half* embedding;  // [vocab][hidden]
  const float* norm;
  const float* rope;  // [max_context][head_dim]: cosines, then sines
  uint8_t* kv;
  bool kv_is_bytes;
  // Work space of a step, by rows.
  int capacity = 0;
  std::vector<float> residual, qkv, mixed, activated;
  Rows shared;            // of all rows, for the next matrix
  std::vector<Rows> own;  // of one row, for each thread: cheaper to make twice than to wait for
  std::vector<std::vector<float>> scores;        // one for each thread
  std::vector<std::vector<const void*>> values;  // the same: where the values of each block of a sequence are

  int qkv_width() const { return (heads + 2 * kv_heads) * head_dim; }
  int widest() const { return std::max({hidden, heads * head_dim, padded_intermediate()}); }
  int padded_intermediate() const { return (intermediate + PANEL - 1) / PANEL * PANEL; }
  size_t head_bytes() const {  // of one block and kv head
    const size_t numbers = 2UL * BLOCK * head_dim;
    return kv_is_bytes ? numbers + 2 * BLOCK * sizeof(float) : numbers * sizeof(half);
  }
  uint8_t* block(int layer_index, int block_index, int kv_head) const {
    return kv + ((layer_index * blocks + block_index) * kv_heads + kv_head) * head_bytes();
  }
  float* block_scales(uint8_t* block) const { return (float*)(block + 2L * BLOCK * head_dim); }
  // All memory that a step needs, or std::bad_alloc, and then the next step may ask again.
  void reserve(int rows, int threads) {
    if (rows > capacity) {
      residual.resize((size_t)rows * hidden);
      shared.reserve(rows, widest());
      qkv.resize((size_t)rows * qkv_width());
      mixed.resize((size_t)rows * heads * head_dim);
      activated.resize((size_t)rows * padded_intermediate());
      capacity = rows;
    }
    scores.resize(std::max<size_t>(scores.size(), threads));
    values.resize(std::max<size_t>(values.size(), threads));
    own.resize(std::max<size_t>(own.size(), threads));
    for (auto& rows_of_one : own) rows_of_one.reserve(1, widest());
    for (auto& buffer : scores) buffer.resize((size_t)QUERY_TILE * (max_context + BLOCK));
    for (auto& buffer : values) buffer.resize(max_context / BLOCK + 1);
  }
};

// One step's rows; see backend/runner.py.
struct Step {
  int rows;
  const int32_t *tokens, *positions;
  const int64_t* slots;
  std::vector<int32_t> row_sequence;  // which block table a row's keys are found by
  const int32_t* block_tables;
  int table_width;
};

// ---------------------------------------------------------------- matrix products

// A kernel multiplies ROWS rows with one panel: out[r][c] = sum over k of x[r][k] * weight[k][c], k ascending.
// Separate functions with a plain buffer as their only output keep the accumulators in registers; the pragmas unroll
// the loops that index them.
struct Columns {
  const uint8_t* panel;
  const float* scales;
  int in, group;
};
struct Operand {
  const float* x;
  long stride;
  const int8_t* rounded;
  const float *scales, *sums;
  const int32_t* shifts;
  const int16_t* shorts;
  const float* short_scales;
};
using PanelKernel = void (*)(const Columns& columns, const Operand& rows, float* out);

template <int ROWS>
__attribute__((noinline)) void multiply_halves(const Columns& columns, const Operand& rows, float* out) {
  const half* panel = (const half*)columns.panel;
  const int in = columns.in;
  const float* x = rows.x;
  const long stride = rows.stride;
  Vector acc[ROWS][2];
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; r++) acc[r][0] = acc[r][1] = broadcast(0.f);
  for (int k = 0; k < in; k++, panel += PANEL, x++) {
    const Vector w0 = load_half(panel), w1 = load_half(panel + LANES);
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; r++) {
      const Vector v = broadcast(x[r * stride]);
      acc[r][0] = fma(v, w0, acc[r][0]);
      acc[r][1] = fma(v, w1, acc[r][1]);
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; r++) {
    store(out + r * PANEL, acc[r][0]);
    store(out + r * PANEL + LANES, acc[r][1]);
  }
}

template <int ROWS>
__attribute__((noinline)) void multiply_small_floats(const Columns& columns, const Operand& rows, float* out) {
  const uint8_t* panel = columns.panel;
  const int in = columns.in;
  const float* x = rows.x;
  const long stride = rows.stride;
  Vector acc[ROWS][2];
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; r++) acc[r][0] = acc[r][1] = broadcast(0.f);
  for (int k = 0; k < in; k += 2, panel += 2 * PANEL, x += 2) {
    const Integers both = load_bytes(panel);
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++) {
      const Integers halves = i == 0 ? first_halves(both) : second_halves(both);
      const Vector w0 = low_floats(halves), w1 = high_floats(halves);
#pragma GCC unroll 16
      for (int r = 0; r < ROWS; r++) {
        const Vector v = broadcast(x[r * stride + i]);
        acc[r][0] = fma(v, w0, acc[r][0]);
        acc[r][1] = fma(v, w1, acc[r][1]);
      }
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; r++) {
    store(out + r * PANEL, acc[r][0] * load(columns.scales));
    store(out + r * PANEL + LANES, acc[r][1] * load(columns.scales + LANES));
  }
}

inline Integers word_of(const void* p) {
  int32_t word;
  std::memcpy(&word, p, sizeof word);
  return broadcast_word(word);
}

template <int ROWS>
__attribute__((noinline)) void multiply_bytes(const Columns& columns, const Operand& rows, float* out) {
  const uint8_t* panel = columns.panel;
  const int in = columns.in, groups = in / GROUP, together = columns.group ? columns.group / GROUP : groups;
  Vector total[ROWS][2];
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; r++) total[r][0] = total[r][1] = broadcast(0.f);
  for (int end = together; end <= groups; end += together) {
    const half* numbers = (const half*)(panel + together * GROUP * PANEL);
    Vector scale[2];
#pragma GCC unroll 2
    for (int part = 0; part < 2; part++)
      scale[part] = columns.group ? load_half(numbers + part * LANES) * broadcast(1 / 128.f)
                                  : load(columns.scales + part * LANES);
    for (int g = end - together; g < end; g++) {
      const int16_t* x = rows.shorts + g * GROUP;
      Integers acc[ROWS][2];
#pragma GCC unroll 8
      for (int r = 0; r < ROWS; r++) acc[r][0] = acc[r][1] = broadcast_word(0);
#pragma GCC unroll 2  // with more GCC does all products first, and keeps them on the stack
      for (int i = 0; i < GROUP / 2; i++, panel += 2 * PANEL) {
        const Integers w0 = load_widened(panel), w1 = load_widened(panel + 2 * LANES);
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++) {
          const Integers v = word_of(x + (long)r * in + 2 * i);
          acc[r][0] = dot2(acc[r][0], w0, v);
          acc[r][1] = dot2(acc[r][1], w1, v);
        }
      }
#pragma GCC unroll 8
      for (int r = 0; r < ROWS; r++) {
        const Vector row_scale = broadcast(rows.short_scales[r * groups + g]);
#pragma GCC unroll 2
        for (int part = 0; part < 2; part++)
          total[r][part] = fma(to_float(acc[r][part]), scale[part] * row_scale, total[r][part]);
      }
    }
    if (columns.group) panel += PANEL * sizeof(half);
  }
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; r++) {
    store(out + r * PANEL, total[r][0]);
    store(out + r * PANEL + LANES, total[r][1]);
  }
}

// Rows follow each other within a group, whose weights stay in registers: a word of a row is read once for both halves
// of the panel, and the weights are unpacked once for all rows.
template <int ROWS>
__attribute__((noinline)) void multiply_nibbles(const Columns& columns, const Operand& rows, float* out) {
  constexpr int WORDS = GROUP / 4;
  const uint8_t* panel = columns.panel;
  const int in = columns.in, groups = in / GROUP, together = columns.group / GROUP;
  Vector total[ROWS][2];
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; r++) total[r][0] = total[r][1] = broadcast(0.f);
  for (int end = together; end <= groups; end += together) {
    const half* numbers = (const half*)(panel + together * (GROUP / 2) * PANEL);
    const Vector scale[2] = {load_half(numbers), load_half(numbers + LANES)};
    const Vector minimum[2] = {load_half(numbers + PANEL), load_half(numbers + PANEL + LANES)};
    for (int g = end - together; g < end; g++, panel += (GROUP / 2) * PANEL) {
      Integers w[2][WORDS];
#pragma GCC unroll 2
      for (int part = 0; part < 2; part++)
#pragma GCC unroll 4
        for (int i = 0; i < WORDS / 2; i++) {
          const Integers both = load_bytes(panel + (part * (GROUP / 2) + i * 4) * LANES);
          w[part][i] = low_nibbles(both);
          w[part][i + WORDS / 2] = high_nibbles(both);
        }
#pragma GCC unroll 8
      for (int r = 0; r < ROWS; r++) {
        const int8_t* x = rows.rounded + (long)r * in + g * GROUP;
        Integers acc[2] = {broadcast_word(0), broadcast_word(0)};
#pragma GCC unroll 8
        for (int i = 0; i < WORDS; i++) {
          const Integers v = word_of(x + 4 * i);
          acc[0] = dot4_small(acc[0], w[0][i], v);
          acc[1] = dot4_small(acc[1], w[1][i], v);
        }
        const Vector row_scale = broadcast(rows.scales[r * groups + g]), sum = broadcast(rows.sums[r * groups + g]);
#pragma GCC unroll 2
        for (int part = 0; part < 2; part++) {
          total[r][part] = fma(scale[part] * row_scale, to_float(total_of_small(acc[part])), total[r][part]);
          total[r][part] = fma(minimum[part], sum, total[r][part]);
        }
      }
    }
    panel += 2 * PANEL * sizeof(half);
  }
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; r++) {
    store(out + r * PANEL, total[r][0]);
    store(out + r * PANEL + LANES, total[r][1]);
  }
}

template <int ROWS>
__attribute__((noinline)) void multiply_levels(const Columns& columns, const Operand& rows, float* out) {
  constexpr int WORDS = GROUP / 4;
  const uint8_t* panel = columns.panel;
  const int in = columns.in, groups = in / GROUP, together = columns.group / GROUP;
  Vector total[ROWS][2];
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; r++) total[r][0] = total[r][1] = broadcast(0.f);
  for (int end = together; end <= groups; end += together) {
    const half* numbers = (const half*)(panel + together * (GROUP / 2) * PANEL);
    for (int g = end - together; g < end; g++, panel += (GROUP / 2) * PANEL) {
      Integers acc[ROWS][2];
#pragma GCC unroll 8
      for (int r = 0; r < ROWS; r++) acc[r][0] = acc[r][1] = begin_dot(rows.shifts[r * groups + g]);
#pragma GCC unroll 8
      for (int i = 0; i < WORDS; i++) {
        Factors w[2];
#pragma GCC unroll 2
        for (int part = 0; part < 2; part++) {
          const Integers both = load_bytes(panel + (part * (GROUP / 2) + i % (WORDS / 2) * 4) * LANES);
          w[part] = of_levels(i < WORDS / 2 ? low_nibbles(both) : high_nibbles(both));
        }
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++) {
          const Integers v = word_of(rows.rounded + (long)r * in + g * GROUP + 4 * i);
          acc[r][0] = dot4(acc[r][0], w[0], v);
          acc[r][1] = dot4(acc[r][1], w[1], v);
        }
      }
#pragma GCC unroll 2
      for (int part = 0; part < 2; part++) {
        const Vector scale = load_half(numbers + part * LANES) * broadcast(1 / 127.f);
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++)
          total[r][part] = fma(scale * broadcast(rows.scales[r * groups + g]), to_float(acc[r][part]), total[r][part]);
      }
    }
    panel += PANEL * sizeof(half);
  }
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; r++) {
    store(out + r * PANEL, total[r][0]);
    store(out + r * PANEL + LANES, total[r][1]);
  }
}

struct Kernels {
  int tile;  // rows that one call takes at most
  PanelKernel of[13];
};
#ifdef WIDE
#define TO_SIX(kernel) {nullptr, kernel<1>, kernel<2>, kernel<3>, kernel<4>, kernel<5>, kernel<6>}
#define TO_TWELVE(kernel) \
  {nullptr, kernel<1>, kernel<2>, kernel<3>, kernel<4>, kernel<5>, kernel<6>, \
   kernel<7>, kernel<8>, kernel<9>, kernel<10>, kernel<11>, kernel<12>}
constexpr Kernels KERNELS[] = {  // by format
    {ROW_TILE, TO_TWELVE(multiply_halves)},        {BYTE_ROW_TILE, TO_SIX(multiply_bytes)},
    {INTEGER_ROW_TILE, TO_SIX(multiply_nibbles)},  {ROW_TILE, TO_TWELVE(multiply_small_floats)},
    {INTEGER_ROW_TILE, TO_SIX(multiply_levels)},
};
#else
#define TO_THREE(kernel) {nullptr, kernel<1>, kernel<2>, kernel<3>}
#define TO_FOUR(kernel) {nullptr, kernel<1>, kernel<2>, kernel<3>, kernel<4>}
#define TO_SIX(kernel) {nullptr, kernel<1>, kernel<2>, kernel<3>, kernel<4>, kernel<5>, kernel<6>}
constexpr Kernels KERNELS[] = {  // by format
    {ROW_TILE, TO_SIX(multiply_halves)},            {BYTE_ROW_TILE, TO_FOUR(multiply_bytes)},
    {INTEGER_ROW_TILE, TO_THREE(multiply_nibbles)}, {ROW_TILE, TO_SIX(multiply_small_floats)},
    {INTEGER_ROW_TILE, TO_THREE(multiply_levels)},
};
#endif

enum class Then { store, add, silu_times };

// Some rows times one panel, and its bias: out [rows][PANEL].
inline void multiply_panel(const Part& part, int p, int in, const Operand& rows, int count, float* out) {
  const float* scales = part.scales ? part.scales + p * PANEL : nullptr;
  KERNELS[part.format].of[count]({part.panels + p * part.stride, scales, in, part.group}, rows, out);
  if (!part.bias) return;
  for (int i = 0; i < count * PANEL; i += LANES)
    store(out + i, load(out + i) + load(part.bias + p * PANEL + i % PANEL));
}

// y = x · weights + bias, added to y or the first part gating the second where asked for. Work is shared out by panels;
// ends with a barrier.
template <Then THEN>
void linear(
    const Linear& weights, const Rows& input, const float* x, long x_stride, int rows, float* y, long y_stride) {
  constexpr bool GATES = THEN == Then::silu_times;  // then a piece of work is a panel of each part
  int pieces = 0, tile = ROW_TILE;
  for (int i = 0; i < weights.count; i++) {
    pieces = GATES ? weights.parts[i].count() : pieces + weights.parts[i].count();
    tile = std::min(tile, KERNELS[weights.parts[i].format].tile);
  }
  const int tiles = (rows + tile - 1) / tile;
  const int groups = weights.in / GROUP;
#pragma omp for schedule(dynamic, GATES ? 1 : 2)
  for (int piece = 0; piece < pieces; piece++) {
    const Part* part = weights.parts;
    int p = piece;
    if (!GATES)
      while (p >= part->count()) p -= part++->count();
    const int left = part == weights.parts + weights.count - 1 ? part->out - p * PANEL : PANEL;
    for (int t = 0; t < tiles; t++) {
      const int first = (long)rows * t / tiles, count = (long)rows * (t + 1) / tiles - first;
      const long first_group = (long)first * groups;
      const Operand operand{x + first * x_stride,
                            x_stride,
                            input.rounded.data() + (long)first * weights.in,
                            input.scales.data() + first_group,
                            input.sums.data() + first_group,
                            input.shifts.data() + first_group,
                            input.shorts.data() + (long)first * weights.in,
                            input.short_scales.data() + first_group};
      float* target = y + first * y_stride + piece * PANEL;
      alignas(64) float out[ROW_TILE * PANEL], gated[ROW_TILE * PANEL];
      multiply_panel(*part, p, weights.in, operand, count, out);
      if constexpr (GATES) multiply_panel(part[1], p, weights.in, operand, count, gated);
      for (int r = 0; r < count; r++, target += y_stride) {
        if (!GATES && left < PANEL) {  // the padded panel at the end
          for (int c = 0; c < left; c++) target[c] = (THEN == Then::add ? target[c] : 0.f) + out[r * PANEL + c];
          continue;
        }
        for (int i = 0; i < PANEL; i += LANES) {
          Vector v = load(out + r * PANEL + i);
          if constexpr (THEN == Then::add) v = load(target + i) + v;
          if constexpr (GATES) v = silu(v) * load(gated + r * PANEL + i);
          store(target + i, v);
        }
      }
    }
  }
}

// Does something for every row and ends with a barrier; a single row is done by every thread, each in its own memory.
template <class Do>
void each_row(int rows, Do&& work) {
  if (rows == 1) {
    work(0);
    return;
  }
#pragma omp for schedule(static)
  for (int row = 0; row < rows; row++) work(row);
}

// Rounds a row to what the weights that it will be multiplied with want, in their order, with a scale for each group.
void round_row(const float* all, const Linear& weights, int row, Rows& to) {
  const int in = weights.in;
  const bool bytes = weights.wants_int8(), shorts = weights.wants_int16();
  if (!bytes && !shorts) return;
  for (int g = 0; g < in / GROUP; g++) {
    const long group = (long)row * (in / GROUP) + g;
    alignas(64) float gathered[GROUP];
    if (weights.order)
      for (int i = 0; i < GROUP; i++) gathered[i] = all[weights.order[g * GROUP + i]];
    const float* x = weights.order ? gathered : all + g * GROUP;
    Vector top = broadcast(0.f), zeros = broadcast(0.f);
    for (int i = 0; i < GROUP; i += LANES) {
      const Vector v = load(x + i);
      top = maximum(top, maximum(v, broadcast(0.f) - v));
      zeros = fma(v, broadcast(0.f), zeros);  // NaN where a value is none, which the maximum may overlook
    }
    const float most = largest(top), nothing = sum(zeros);
    if (shorts) {
      const Vector inverse = broadcast(most > 0.f ? 32767.f / most : 0.f);
      for (int i = 0; i < GROUP; i += LANES) store_int16(&to.shorts[group * GROUP + i], nearest(load(x + i) * inverse));
      to.short_scales[group] = most / 32767.f + nothing;
    }
    if (bytes) {
      const Vector inverse = broadcast(most > 0.f ? 127.f / most : 0.f);
      Vector total = broadcast(0.f);
      for (int i = 0; i < GROUP; i += LANES) {
        const Vector whole = nearest(load(x + i) * inverse);
        store_int8(&to.rounded[group * GROUP + i], whole);
        total = total + whole;
      }
      const float whole = sum(total);
      to.scales[group] = most / 127.f + nothing;
      to.sums[group] = to.scales[group] * whole;
      to.shifts[group] = -128 * (int32_t)whole;
    }
  }
}

// RMSNorm (arXiv 1910.07467) of `size` values.
void rms_norm(const float* x, const float* weight, int size, float eps, float* y) {
  Vector squares = broadcast(0.f);
  for (int i = 0; i < size; i += LANES) squares = fma(load(x + i), load(x + i), squares);
  const Vector scale = broadcast(1.f / std::sqrt(sum(squares) / size + eps));
  for (int i = 0; i < size; i += LANES) store(y + i, load(x + i) * scale * load(weight + i));
}

// ---------------------------------------------------------------- attention

void rotate(float* head, const float* rope, int head_dim) {
  const int half_dim = head_dim / 2;
  for (int i = 0; i < half_dim; i++) {
    const float a = head[i], b = head[i + half_dim], c = rope[i], s = rope[half_dim + i];
    head[i] = a * c - b * s;
    head[i + half_dim] = b * c + a * s;
  }
}

// Rounds a head to int8, its numbers `stride` apart; returns the scale, which is NaN if one of them is none.
float round_head(const float* x, int head_dim, int8_t* to, int stride) {
  float most = 0.f, nothing = 0.f;
  for (int d = 0; d < head_dim; d++) most = std::max(most, std::fabs(x[d])), nothing += x[d] * 0.f;
  const float inverse = most > 0.f ? 127.f / most : 0.f;
  for (int d = 0; d < head_dim; d++)
    to[d * stride] = (int8_t)std::lrint(std::min(std::max(x[d] * inverse, -127.f), 127.f));
  return most / 127.f + nothing;
}

// Norms and rotates one row's queries and keys, and writes its keys and values where its slot says.
void write_kv(const Model& m, int layer_index, const Step& step, int row, float* qkv) {
  const Layer& layer = m.layer[layer_index];
  const float* rope = m.rope + (long)step.positions[row] * m.head_dim;
  for (int h = 0; h < m.heads + m.kv_heads; h++) {
    float* head = qkv + h * m.head_dim;
    if (const float* norm = h < m.heads ? layer.query_norm : layer.key_norm)
      rms_norm(head, norm, m.head_dim, m.eps, head);
    rotate(head, rope, m.head_dim);
  }
  const int block = step.slots[row] / BLOCK, offset = step.slots[row] % BLOCK;
  for (int h = 0; h < m.kv_heads; h++) {
    const float* key = qkv + (m.heads + h) * m.head_dim;
    const float* value = key + m.kv_heads * m.head_dim;
    uint8_t* numbers = m.block(layer_index, block, h);
    if (m.kv_is_bytes) {
      int8_t *keys = (int8_t*)numbers, *values = keys + (BLOCK + offset) * m.head_dim;
      float* scales = m.block_scales(numbers) + offset;
      scales[0] = round_head(key, m.head_dim, keys + offset, BLOCK);
      scales[BLOCK] = round_head(value, m.head_dim, values, 1);
      continue;
    }
    half *keys = (half*)numbers, *values = keys + (BLOCK + offset) * m.head_dim;
    for (int d = 0; d < m.head_dim; d++) {
      keys[d * BLOCK + offset] = to_half(key[d]);
      values[d] = to_half(value[d]);
    }
  }
}

// scores[q][t] = queries[q] · keys[t] for the tokens of one block; even and odd dimensions are summed apart.
template <class Number, int QUERIES>
__attribute__((noinline)) void score_block(
    const Number* keys, const float* scales, int head_dim, const float* const* queries, float* scores, long stride) {
  for (int part = 0; part < BLOCK_VECTORS; part++) {
    Vector even[QUERIES], odd[QUERIES];
#pragma GCC unroll 8
    for (int q = 0; q < QUERIES; q++) even[q] = odd[q] = broadcast(0.f);
    const Number* at = keys + part * LANES;
    for (int d = 0; d < head_dim; d += 2, at += 2 * BLOCK) {
      const Vector k0 = load_number(at), k1 = load_number(at + BLOCK);
#pragma GCC unroll 8
      for (int q = 0; q < QUERIES; q++) {
        even[q] = fma(broadcast(queries[q][d]), k0, even[q]);
        odd[q] = fma(broadcast(queries[q][d + 1]), k1, odd[q]);
      }
    }
#pragma GCC unroll 8
    for (int q = 0; q < QUERIES; q++) {
      Vector score = even[q] + odd[q];
      if (scales) score = score * load(scales + part * LANES);
      store(scores + q * stride + part * LANES, score);
    }
  }
}

// out[q] = sum over the first lengths[q] tokens of weights[q][t] * values[t], the head's dimensions from first_dim on.
template <class Number, int QUERIES>
__attribute__((noinline)) void mix_values(
    const void* const* value_blocks, int first_dim, const int* lengths, int head_dim, const float* weights, long stride,
    float* out) {
  Vector acc[QUERIES][VALUE_VECTORS];
#pragma GCC unroll 8
  for (int q = 0; q < QUERIES; q++)
#pragma GCC unroll 4
    for (int v = 0; v < VALUE_VECTORS; v++) acc[q][v] = broadcast(0.f);
  const int shared = *std::min_element(lengths, lengths + QUERIES);
  for (int b = 0; b * BLOCK < shared; b++) {
    const Number* value = (const Number*)value_blocks[b] + first_dim;
    const int tokens = std::min(BLOCK, shared - b * BLOCK);
    for (int t = 0; t < tokens; t++, value += head_dim) {
      Vector w[VALUE_VECTORS];
#pragma GCC unroll 4
      for (int v = 0; v < VALUE_VECTORS; v++) w[v] = load_number(value + v * LANES);
#pragma GCC unroll 8
      for (int q = 0; q < QUERIES; q++) {
        const Vector p = broadcast(weights[q * stride + b * BLOCK + t]);
#pragma GCC unroll 4
        for (int v = 0; v < VALUE_VECTORS; v++) acc[q][v] = fma(p, w[v], acc[q][v]);
      }
    }
  }
  // Later rows see a few tokens more. To the others these are not even nothing times a number, which may be none.
#pragma GCC unroll 8
  for (int q = 0; q < QUERIES; q++) {
    for (int t = shared; t < lengths[q]; t++) {
      const Number* value = (const Number*)value_blocks[t / BLOCK] + (t % BLOCK) * head_dim + first_dim;
      const Vector p = broadcast(weights[q * stride + t]);
#pragma GCC unroll 4
      for (int v = 0; v < VALUE_VECTORS; v++) acc[q][v] = fma(p, load_number(value + v * LANES), acc[q][v]);
    }
#pragma GCC unroll 4
    for (int v = 0; v < VALUE_VECTORS; v++) store(out + (q * VALUE_VECTORS + v) * LANES, acc[q][v]);
  }
}

// Softmax over the first `length` scores, in place, without the division; zeroes up to `padded`. Returns the sum.
float soften(float* scores, int length, int padded, float scale) {
  const int whole = (length + BLOCK - 1) / BLOCK * BLOCK;
  for (int i = length; i < padded; i++) scores[i] = -INFINITY;
  Vector top = broadcast(-INFINITY);
  for (int i = 0; i < whole; i += LANES) top = maximum(top, load(scores + i));
  const Vector offset = broadcast(largest(top)), factor = broadcast(scale * 1.44269504f);
  for (int i = 0; i < whole; i += LANES) store(scores + i, exp2((load(scores + i) - offset) * factor));
  for (int i = length; i < padded; i++) scores[i] = 0.f;
  Vector total = broadcast(0.f);
  for (int i = 0; i < whole; i += LANES) total = total + load(scores + i);
  return sum(total);
}

// Some query vectors of one sequence and one kv head: neighbouring rows, or heads of one group.
struct Queries {
  int count;
  const float* vector[QUERY_TILE];
  int length[QUERY_TILE];  // tokens each of them sees
  float* out[QUERY_TILE];
};

// Asks for memory that is needed soon. A block is a page or less, and a processor's own guesses end with the page.
inline void fetch(const void* p, size_t bytes) {
  for (size_t i = 0; i < bytes; i += 64) _mm_prefetch((const char*)p + i, _MM_HINT_T1);
}

template <class Number, int QUERIES>
void attend(
    const Model& m, int layer_index, const int32_t* table, int kv_head, const Queries& q, float* scores,
    const void** values) {
  const long stride = m.max_context + BLOCK;
  const int length = *std::max_element(q.length, q.length + QUERIES);
  const int blocks = (length + BLOCK - 1) / BLOCK;
  for (int b = 0; b < blocks; b++) {
    uint8_t* numbers = m.block(layer_index, table[b], kv_head);
    const Number* keys = (const Number*)numbers;
    const float* scales = m.kv_is_bytes ? m.block_scales(numbers) : nullptr;
    const size_t half_block = BLOCK * m.head_dim * sizeof(Number);
    if (b + 1 < blocks) fetch(m.block(layer_index, table[b + 1], kv_head), half_block);
    fetch(keys + BLOCK * m.head_dim, half_block);
    score_block<Number, QUERIES>(keys, scales, m.head_dim, q.vector, scores + b * BLOCK, stride);
    values[b] = keys + BLOCK * m.head_dim;
  }
  float inverse[QUERIES];
  const float scale = 1.f / std::sqrt((float)m.head_dim);
  for (int i = 0; i < QUERIES; i++)
    inverse[i] = 1.f / soften(scores + i * stride, q.length[i], blocks * BLOCK, scale);
  for (int b = 0; m.kv_is_bytes && b < blocks; b++) {
    const float* value_scales = m.block_scales(m.block(layer_index, table[b], kv_head)) + BLOCK;
    // Tokens beyond a query's own have weight 0 and, in a block that is not full, scales that mean nothing.
    for (int i = 0; i < QUERIES; i++)
      for (int t = b * BLOCK; t < std::min(q.length[i], (b + 1) * BLOCK); t++)
        scores[i * stride + t] *= value_scales[t - b * BLOCK];
  }
  for (int d = 0; d < m.head_dim; d += VALUE_VECTORS * LANES) {
    alignas(64) float out[QUERIES * VALUE_VECTORS * LANES];
    mix_values<Number, QUERIES>(values, d, q.length, m.head_dim, scores, stride, out);
    for (int i = 0; i < QUERIES; i++)
      for (int v = 0; v < VALUE_VECTORS; v++)
        store(q.out[i] + d + v * LANES, load(out + (i * VALUE_VECTORS + v) * LANES) * broadcast(inverse[i]));
  }
}

using AttentionKernel = void (*)(const Model&, int, const int32_t*, int, const Queries&, float*, const void**);
constexpr AttentionKernel ATTENTION_KERNELS[2][7] = {
    {nullptr, attend<half, 1>, attend<half, 2>, attend<half, 3>, attend<half, 4>,
#ifdef WIDE
     attend<half, 5>, attend<half, 6>
#endif
    },
    {nullptr, attend<int8_t, 1>, attend<int8_t, 2>, attend<int8_t, 3>, attend<int8_t, 4>,
#ifdef WIDE
     attend<int8_t, 5>, attend<int8_t, 6>
#endif
    },
};

// Neighbouring rows of one sequence, as many as fill a query tile with the heads of a group.
struct RowGroup {
  int first, count;
};

std::vector<RowGroup> group_rows(const Model& m, const Step& step) {
  const int most = std::max(1, QUERY_TILE / (m.heads / m.kv_heads));
  std::vector<RowGroup> groups;
  for (int row = 0; row < step.rows; row++) {
    const bool joins = row && step.row_sequence[row] == step.row_sequence[row - 1] && groups.back().count < most;
    if (joins)
      groups.back().count++;
    else
      groups.push_back({row, 1});
  }
  return groups;
}

void attention(Model& m, int layer_index, const Step& step, const std::vector<RowGroup>& groups, int thread) {
  const int tasks = (int)groups.size() * m.kv_heads, group_heads = m.heads / m.kv_heads;
#pragma omp for schedule(dynamic, 1)
  for (int task = 0; task < tasks; task++) {
    // Long contexts come last in a prefill; start with them, so that the threads end together.
    const RowGroup& group = groups[groups.size() - 1 - task / m.kv_heads];
    const int kv_head = task % m.kv_heads;
    const int32_t* table = step.block_tables + (long)step.row_sequence[group.first] * step.table_width;
    const int vectors = group.count * group_heads;
    for (int start = 0; start < vectors; start += QUERY_TILE) {
      Queries q;
      q.count = std::min(QUERY_TILE, vectors - start);
      for (int i = 0; i < q.count; i++) {
        const long row = group.first + (start + i) / group_heads;
        const int head = kv_head * group_heads + (start + i) % group_heads;
        q.vector[i] = &m.qkv[row * m.qkv_width() + head * m.head_dim];
        q.length[i] = step.positions[row] + 1;
        q.out[i] = &m.mixed[(row * m.heads + head) * m.head_dim];
      }
      ATTENTION_KERNELS[m.kv_is_bytes][q.count](
          m, layer_index, table, kv_head, q, m.scores[thread].data(), m.values[thread].data());
    }
  }
}

// ---------------------------------------------------------------- the step

// The norm of some rows, ready for a product with `weights`.
void norm_rows(const Model& m, const float* x, const float* norm, int rows, const int32_t* which, const Linear& weights,
               Rows& to) {
  each_row(rows, [&](int row) {
    float* normed = to.floats.data() + (long)row * m.hidden;
    rms_norm(x + (long)(which ? which[row] : row) * m.hidden, norm, m.hidden, m.eps, normed);
    round_row(normed, weights, row, to);
  });
}

// Rows that are floats already, ready for a product with `weights`.
void round_rows(const float* x, long stride, int rows, const Linear& weights, Rows& to) {
  if (!weights.wants_int8() && !weights.wants_int16()) return;
  each_row(rows, [&](int row) { round_row(x + row * stride, weights, row, to); });
}

void run_layer(Model& m, int index, const Step& step, const std::vector<RowGroup>& groups, int thread) {
  const Layer& layer = m.layer[index];
  const int rows = step.rows, width = m.qkv_width(), mixed_width = m.heads * m.head_dim;
  float* x = m.residual.data();
  Rows& input = rows == 1 ? m.own[thread] : m.shared;
  norm_rows(m, x, layer.input_norm, rows, nullptr, layer.qkv, input);
  linear<Then::store>(layer.qkv, input, input.floats.data(), m.hidden, rows, m.qkv.data(), width);
#pragma omp for schedule(static)
  for (int row = 0; row < rows; row++) write_kv(m, index, step, row, &m.qkv[(long)row * width]);
  attention(m, index, step, groups, thread);
  round_rows(m.mixed.data(), mixed_width, rows, layer.output, input);
  linear<Then::add>(layer.output, input, m.mixed.data(), mixed_width, rows, x, m.hidden);
  norm_rows(m, x, layer.post_attention_norm, rows, nullptr, layer.gate_up, input);
  const int padded = m.padded_intermediate();
  linear<Then::silu_times>(layer.gate_up, input, input.floats.data(), m.hidden, rows, m.activated.data(), padded);
  round_rows(m.activated.data(), padded, rows, layer.down, input);
  linear<Then::add>(layer.down, input, m.activated.data(), padded, rows, x, m.hidden);
}

}  // namespace

#include <omp.h>

extern "C" {

int fused_lanes() { return LANES; }

struct FusedShape {
  int32_t layers, hidden, heads, kv_heads, head_dim, intermediate, vocab, max_context;
  int64_t blocks;
  float eps;
  int32_t kv_is_bytes;
};

struct FusedPart {
  const uint8_t* panels;
  const float *scales, *bias;
  int32_t out, format, group, stride;
};

struct FusedLinear {
  FusedPart parts[3];
  const int32_t* order;
  int32_t count, in;
};

struct FusedLayer {
  const float *input_norm, *post_attention_norm, *query_norm, *key_norm;
  FusedLinear qkv, output, gate_up, down;
};

// All pointers stay the caller's and must outlive the model.
void* fused_create(const FusedShape* shape, const FusedLayer* layers, const FusedLinear* head, const half* embedding,
                   const float* norm, const float* rope, uint8_t* kv) {
  auto convert = [](const FusedLinear& l) {
    Linear linear{{}, l.count, l.in, l.order};
    for (int i = 0; i < l.count; i++) {
      const FusedPart& part = l.parts[i];
      linear.parts[i] = {part.panels, part.scales,  part.bias, part.out, static_cast<Format>(part.format),
                         part.group,  part.stride};
    }
    return linear;
  };
  Model* m = new Model{};
  m->layers = shape->layers, m->hidden = shape->hidden, m->heads = shape->heads, m->kv_heads = shape->kv_heads;
  m->head_dim = shape->head_dim, m->intermediate = shape->intermediate, m->vocab = shape->vocab;
  m->max_context = shape->max_context, m->blocks = shape->blocks, m->eps = shape->eps;
  m->kv_is_bytes = shape->kv_is_bytes;
  for (int i = 0; i < shape->layers; i++) {
    const FusedLayer& l = layers[i];
    m->layer.push_back({l.input_norm, l.post_attention_norm, l.query_norm, l.key_norm, convert(l.qkv),
                        convert(l.output), convert(l.gate_up), convert(l.down)});
  }
  m->head = convert(*head);
  m->embedding = embedding, m->norm = norm, m->rope = rope, m->kv = kv;
  return m;
}

void fused_destroy(void* model) { delete static_cast<Model*>(model); }

// Arrays as in backend/runner.py.
// logits: [wanted][vocab]; hidden: [wanted_hidden][hidden].
// Returns 0, or 1 if there is no memory for a step of so many rows; then nothing has been written.
int fused_step(void* model, int rows, const int32_t* tokens, const int32_t* positions, const int64_t* slots,
                int sequences, const int32_t* query_starts, const int32_t* block_tables, int table_width, int wanted,
                const int32_t* logits_rows, float* logits, int wanted_hidden, const int32_t* hidden_rows, float* hidden,
                int threads) {
  Model& m = *static_cast<Model*>(model);
  Step step{rows, tokens, positions, slots, {}, block_tables, table_width};
  std::vector<RowGroup> groups;
  try {
    m.reserve(rows, threads);
    for (int s = 0; s < sequences; s++) step.row_sequence.resize(query_starts[s + 1], s);
    groups = group_rows(m, step);
  } catch (const std::bad_alloc&) {
    return 1;
  }
#pragma omp parallel num_threads(threads)
  {
    const int thread = omp_get_thread_num();
#pragma omp for schedule(static)
    for (int row = 0; row < rows; row++)
      for (int i = 0; i < m.hidden; i++)
        m.residual[(long)row * m.hidden + i] = from_half(m.embedding[(long)tokens[row] * m.hidden + i]);
    for (int index = 0; index < m.layers; index++) run_layer(m, index, step, groups, thread);
    if (wanted) {
      Rows& input = wanted == 1 ? m.own[thread] : m.shared;
      norm_rows(m, m.residual.data(), m.norm, wanted, logits_rows, m.head, input);
      linear<Then::store>(m.head, input, input.floats.data(), m.hidden, wanted, logits, m.vocab);
    }
#pragma omp for schedule(static)
    for (int row = 0; row < wanted_hidden; row++) {
      const float* x = m.residual.data() + (long)hidden_rows[row] * m.hidden;
      rms_norm(x, m.norm, m.hidden, m.eps, hidden + (long)row * m.hidden);
    }
  }
  return 0;
}
}
