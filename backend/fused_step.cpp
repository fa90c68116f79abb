// One step of a llama-family decoder on a CPU, as one function: rows of tokens in, logits out, over paged KV memory.
//
// Why it exists: a small model's step is hundreds of short operations, and a framework spends longer between them
// than in them. Here the whole step is one OpenMP region; what is shared between threads is separated by the barrier
// at the end of each `omp for`.
//
// Numbers: weights and KV are half floats in memory (11 bits of mantissa, half the traffic of float), activations and
// every sum are float. Each sum runs in an order that depends on nothing but its own row's position, so a row's
// result is bitwise the same alone, in any batch, in any chunk of a prefill and with any number of threads.
//
// Layouts
//   weights     [panel][in][PANEL]: PANEL output columns side by side, so that a kernel reads one stream
//   gate and up one matrix whose panels hold LANES gate columns, then the LANES up columns that belong to them
//   KV          [layer][block][kv head]{ keys [head_dim][BLOCK], values [BLOCK][head_dim] }
//               keys are transposed so that one vector holds one dimension of BLOCK tokens
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <immintrin.h>
#include <vector>

namespace {

using half = uint16_t;

// ---------------------------------------------------------------- vectors: the only part that knows the instructions

#if defined(__AVX512F__)
constexpr int LANES = 16;
constexpr int ROW_TILE = 12;      // rows of a matrix product that share the weights in registers: 24 accumulators
constexpr int QUERY_TILE = 6;     // query vectors that share keys and values in registers
constexpr int VALUE_VECTORS = 4;  // vectors of a value row per pass
using Vector = __m512;
inline Vector load(const float* p) { return _mm512_loadu_ps(p); }
inline void store(float* p, Vector v) { _mm512_storeu_ps(p, v); }
inline Vector broadcast(float x) { return _mm512_set1_ps(x); }
inline Vector load_half(const half* p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }
inline Vector fma(Vector a, Vector b, Vector c) { return _mm512_fmadd_ps(a, b, c); }
inline Vector maximum(Vector a, Vector b) { return _mm512_max_ps(a, b); }
inline float sum(Vector v) { return _mm512_reduce_add_ps(v); }
inline float largest(Vector v) { return _mm512_reduce_max_ps(v); }
inline Vector nearest(Vector v) { return _mm512_roundscale_ps(v, 8); }
inline Vector times_power_of_two(Vector v, Vector n) { return _mm512_scalef_ps(v, n); }
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
constexpr int LANES = 8;
constexpr int ROW_TILE = 6;
constexpr int QUERY_TILE = 4;
constexpr int VALUE_VECTORS = 2;
using Vector = __m256;
inline Vector load(const float* p) { return _mm256_loadu_ps(p); }
inline void store(float* p, Vector v) { _mm256_storeu_ps(p, v); }
inline Vector broadcast(float x) { return _mm256_set1_ps(x); }
inline Vector load_half(const half* p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)); }
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
#else
#error "needs AVX-512, or AVX2 with FMA and F16C"
#endif

constexpr int PANEL = 2 * LANES;
constexpr int BLOCK = 16;  // tokens of a KV block
constexpr int BLOCK_VECTORS = BLOCK / LANES;
constexpr float HALF_MAX = 65504.f;

inline half to_half(float x) { return _cvtss_sh(std::min(std::max(x, -HALF_MAX), HALF_MAX), 0); }
inline float from_half(half x) { return _cvtsh_ss(x); }

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

struct Linear {
  const half* panels = nullptr;
  const float* bias = nullptr;  // in the order of the panels' columns, padded like them; or null
  int in = 0;
  int out = 0;  // columns that mean something; the last panel may be padded
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
  half* kv;
  // Work space of a step, by rows.
  int capacity = 0;
  std::vector<float> residual, normed, qkv, mixed, activated;
  std::vector<std::vector<float>> scores;  // one for each thread

  int qkv_width() const { return (heads + 2 * kv_heads) * head_dim; }
  int padded_intermediate() const { return (intermediate + LANES - 1) / LANES * LANES; }
  half* block(int layer_index, int block_index, int kv_head) const {
    return kv + ((layer_index * blocks + block_index) * kv_heads + kv_head) * 2L * BLOCK * head_dim;
  }
  void reserve(int rows, int threads) {
    if (rows > capacity) {
      capacity = rows;
      residual.resize((size_t)rows * hidden);
      normed.resize((size_t)rows * hidden);
      qkv.resize((size_t)rows * qkv_width());
      mixed.resize((size_t)rows * heads * head_dim);
      activated.resize((size_t)rows * padded_intermediate());
    }
    if ((int)scores.size() < threads) scores.resize(threads);
    for (auto& buffer : scores) buffer.resize((size_t)QUERY_TILE * (max_context + BLOCK));
  }
};

// One step's rows; see backend/runner.py.
struct Step {
  int rows;
  const int32_t *tokens, *positions;
  const int64_t* slots;
  const int32_t *row_sequence, *block_tables;
  int table_width;
};

// ---------------------------------------------------------------- matrix products

// out[r][c] = sum over k of x[r][k] * panel[k][c], k ascending. Separate functions with a plain buffer as their only
// output keep the accumulators in registers; the pragmas unroll the loops that index them.
template <int ROWS>
__attribute__((noinline)) void multiply_panel(const half* panel, int in, const float* x, long stride, float* out) {
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

using PanelKernel = void (*)(const half*, int, const float*, long, float*);
constexpr PanelKernel PANEL_KERNELS[] = {
    nullptr, multiply_panel<1>, multiply_panel<2>, multiply_panel<3>, multiply_panel<4>, multiply_panel<5>,
    multiply_panel<6>,
#if defined(__AVX512F__)
    multiply_panel<7>, multiply_panel<8>, multiply_panel<9>, multiply_panel<10>, multiply_panel<11>, multiply_panel<12>,
#endif
};

enum class Then { store, add, silu_times };

// y = x · weights + bias, added to y or gated where asked for. Work is shared out by panels; ends with a barrier.
template <Then THEN>
void linear(const Linear& weights, const float* x, long x_stride, int rows, float* y, long y_stride) {
  const int panels = (weights.out + PANEL - 1) / PANEL;
  const int tiles = (rows + ROW_TILE - 1) / ROW_TILE;
#pragma omp for schedule(dynamic, 2)
  for (int p = 0; p < panels; p++) {
    const half* panel = weights.panels + (size_t)p * weights.in * PANEL;
    const int columns = std::min(PANEL, weights.out - p * PANEL);
    for (int t = 0; t < tiles; t++) {
      const int first = (long)rows * t / tiles, count = (long)rows * (t + 1) / tiles - first;
      alignas(64) float out[ROW_TILE * PANEL];
      PANEL_KERNELS[count](panel, weights.in, x + first * x_stride, x_stride, out);
      for (int r = 0; r < count; r++) {
        Vector low = load(out + r * PANEL), high = load(out + r * PANEL + LANES);
        if (weights.bias) {
          low = low + load(weights.bias + p * PANEL);
          high = high + load(weights.bias + p * PANEL + LANES);
        }
        float* target = y + (first + r) * y_stride;
        if constexpr (THEN == Then::silu_times) {
          store(target + p * LANES, silu(low) * high);
        } else {
          target += p * PANEL;
          if (columns < PANEL) {  // the padded panel at the end
            alignas(64) float tail[PANEL];
            store(tail, low);
            store(tail + LANES, high);
            for (int c = 0; c < columns; c++) target[c] = THEN == Then::add ? target[c] + tail[c] : tail[c];
            continue;
          }
          if constexpr (THEN == Then::add) {
            low = load(target) + low;
            high = load(target + LANES) + high;
          }
          store(target, low);
          store(target + LANES, high);
        }
      }
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
    half* keys = m.block(layer_index, block, h);
    half* values = keys + BLOCK * m.head_dim + offset * m.head_dim;
    for (int d = 0; d < m.head_dim; d++) {
      keys[d * BLOCK + offset] = to_half(key[d]);
      values[d] = to_half(value[d]);
    }
  }
}

// scores[q][t] = queries[q] · keys[t] for the tokens of one block; even and odd dimensions are summed apart.
template <int QUERIES>
__attribute__((noinline)) void score_block(
    const half* keys, int head_dim, const float* const* queries, float* scores, long stride) {
  for (int part = 0; part < BLOCK_VECTORS; part++) {
    Vector even[QUERIES], odd[QUERIES];
#pragma GCC unroll 8
    for (int q = 0; q < QUERIES; q++) even[q] = odd[q] = broadcast(0.f);
    const half* at = keys + part * LANES;
    for (int d = 0; d < head_dim; d += 2, at += 2 * BLOCK) {
      const Vector k0 = load_half(at), k1 = load_half(at + BLOCK);
#pragma GCC unroll 8
      for (int q = 0; q < QUERIES; q++) {
        even[q] = fma(broadcast(queries[q][d]), k0, even[q]);
        odd[q] = fma(broadcast(queries[q][d + 1]), k1, odd[q]);
      }
    }
#pragma GCC unroll 8
    for (int q = 0; q < QUERIES; q++) store(scores + q * stride + part * LANES, even[q] + odd[q]);
  }
}

// out[q] = sum over the first `length` tokens of weights[q][t] * values[t], one slice of the head's dimensions.
template <int QUERIES>
__attribute__((noinline)) void mix_values(
    const half* const* value_blocks, int length, int head_dim, const float* weights, long stride, float* out) {
  Vector acc[QUERIES][VALUE_VECTORS];
#pragma GCC unroll 8
  for (int q = 0; q < QUERIES; q++)
#pragma GCC unroll 4
    for (int v = 0; v < VALUE_VECTORS; v++) acc[q][v] = broadcast(0.f);
  for (int b = 0; b * BLOCK < length; b++) {
    const half* value = value_blocks[b];
    const int tokens = std::min(BLOCK, length - b * BLOCK);
    for (int t = 0; t < tokens; t++, value += head_dim) {
      Vector w[VALUE_VECTORS];
#pragma GCC unroll 4
      for (int v = 0; v < VALUE_VECTORS; v++) w[v] = load_half(value + v * LANES);
#pragma GCC unroll 8
      for (int q = 0; q < QUERIES; q++) {
        const Vector p = broadcast(weights[q * stride + b * BLOCK + t]);
#pragma GCC unroll 4
        for (int v = 0; v < VALUE_VECTORS; v++) acc[q][v] = fma(p, w[v], acc[q][v]);
      }
    }
  }
#pragma GCC unroll 8
  for (int q = 0; q < QUERIES; q++)
#pragma GCC unroll 4
    for (int v = 0; v < VALUE_VECTORS; v++) store(out + (q * VALUE_VECTORS + v) * LANES, acc[q][v]);
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

template <int QUERIES>
void attend(const Model& m, int layer_index, const int32_t* table, int kv_head, const Queries& q, float* scores) {
  const long stride = m.max_context + BLOCK;
  const int length = *std::max_element(q.length, q.length + QUERIES);
  const int blocks = (length + BLOCK - 1) / BLOCK;
  thread_local std::vector<const half*> values;
  values.resize(blocks);
  for (int b = 0; b < blocks; b++) {
    const half* keys = m.block(layer_index, table[b], kv_head);
    score_block<QUERIES>(keys, m.head_dim, q.vector, scores + b * BLOCK, stride);
    values[b] = keys + BLOCK * m.head_dim;
  }
  float inverse[QUERIES];
  const float scale = 1.f / std::sqrt((float)m.head_dim);
  for (int i = 0; i < QUERIES; i++)
    inverse[i] = 1.f / soften(scores + i * stride, q.length[i], blocks * BLOCK, scale);
  for (int d = 0; d < m.head_dim; d += VALUE_VECTORS * LANES) {
    alignas(64) float out[QUERIES * VALUE_VECTORS * LANES];
    mix_values<QUERIES>(values.data(), length, m.head_dim, scores, stride, out);
    for (int i = 0; i < QUERIES; i++)
      for (int v = 0; v < VALUE_VECTORS; v++)
        store(q.out[i] + d + v * LANES, load(out + (i * VALUE_VECTORS + v) * LANES) * broadcast(inverse[i]));
    for (auto& value : values) value += VALUE_VECTORS * LANES;
  }
}

using AttentionKernel = void (*)(const Model&, int, const int32_t*, int, const Queries&, float*);
constexpr AttentionKernel ATTENTION_KERNELS[] = {
    nullptr, attend<1>, attend<2>, attend<3>, attend<4>,
#if defined(__AVX512F__)
    attend<5>, attend<6>,
#endif
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

void attention(Model& m, int layer_index, const Step& step, const std::vector<RowGroup>& groups, float* scores) {
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
      ATTENTION_KERNELS[q.count](m, layer_index, table, kv_head, q, scores);
    }
  }
}

// ---------------------------------------------------------------- the step

void norm_rows(const Model& m, const float* x, const float* weight, int rows, const int32_t* which, float* y) {
#pragma omp for schedule(static)
  for (int row = 0; row < rows; row++)
    rms_norm(x + (long)(which ? which[row] : row) * m.hidden, weight, m.hidden, m.eps, y + (long)row * m.hidden);
}

void run_layer(Model& m, int index, const Step& step, const std::vector<RowGroup>& groups, float* scores) {
  const Layer& layer = m.layer[index];
  const int rows = step.rows, width = m.qkv_width(), mixed_width = m.heads * m.head_dim;
  float *x = m.residual.data(), *normed = m.normed.data();
  norm_rows(m, x, layer.input_norm, rows, nullptr, normed);
  linear<Then::store>(layer.qkv, normed, m.hidden, rows, m.qkv.data(), width);
#pragma omp for schedule(static)
  for (int row = 0; row < rows; row++) write_kv(m, index, step, row, &m.qkv[(long)row * width]);
  attention(m, index, step, groups, scores);
  linear<Then::add>(layer.output, m.mixed.data(), mixed_width, rows, x, m.hidden);
  norm_rows(m, x, layer.post_attention_norm, rows, nullptr, normed);
  const int padded = m.padded_intermediate();
  linear<Then::silu_times>(layer.gate_up, normed, m.hidden, rows, m.activated.data(), padded);
  linear<Then::add>(layer.down, m.activated.data(), padded, rows, x, m.hidden);
}

}  // namespace

#include <omp.h>

extern "C" {

int fused_lanes() { return LANES; }

struct FusedShape {
  int32_t layers, hidden, heads, kv_heads, head_dim, intermediate, vocab, max_context;
  int64_t blocks;
  float eps;
};

struct FusedLinear {
  const half* panels;
  const float* bias;
  int32_t in, out;
};

struct FusedLayer {
  const float *input_norm, *post_attention_norm, *query_norm, *key_norm;
  FusedLinear qkv, output, gate_up, down;
};

// All pointers stay the caller's and must outlive the model.
void* fused_create(const FusedShape* shape, const FusedLayer* layers, const FusedLinear* head, const half* embedding,
                   const float* norm, const float* rope, half* kv) {
  auto convert = [](const FusedLinear& l) { return Linear{l.panels, l.bias, l.in, l.out}; };
  Model* m = new Model{};
  m->layers = shape->layers, m->hidden = shape->hidden, m->heads = shape->heads, m->kv_heads = shape->kv_heads;
  m->head_dim = shape->head_dim, m->intermediate = shape->intermediate, m->vocab = shape->vocab;
  m->max_context = shape->max_context, m->blocks = shape->blocks, m->eps = shape->eps;
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

// Arrays as in backend/runner.py; row_sequence [rows] is the index of each row's block table.
// logits: [wanted][vocab]; hidden: [wanted_hidden][hidden].
void fused_step(void* model, int rows, const int32_t* tokens, const int32_t* positions, const int64_t* slots,
                const int32_t* row_sequence, const int32_t* block_tables, int table_width, int wanted,
                const int32_t* logits_rows, float* logits, int wanted_hidden, const int32_t* hidden_rows, float* hidden,
                int threads) {
  Model& m = *static_cast<Model*>(model);
  const Step step{rows, tokens, positions, slots, row_sequence, block_tables, table_width};
  m.reserve(rows, threads);
  const std::vector<RowGroup> groups = group_rows(m, step);
#pragma omp parallel num_threads(threads)
  {
    float* scores = m.scores[omp_get_thread_num()].data();
#pragma omp for schedule(static)
    for (int row = 0; row < rows; row++)
      for (int i = 0; i < m.hidden; i++)
        m.residual[(long)row * m.hidden + i] = from_half(m.embedding[(long)tokens[row] * m.hidden + i]);
    for (int index = 0; index < m.layers; index++) run_layer(m, index, step, groups, scores);
    if (wanted) {
      norm_rows(m, m.residual.data(), m.norm, wanted, logits_rows, m.normed.data());
      linear<Then::store>(m.head, m.normed.data(), m.hidden, wanted, logits, m.vocab);
    }
    if (wanted_hidden) norm_rows(m, m.residual.data(), m.norm, wanted_hidden, hidden_rows, hidden);
  }
}
}
