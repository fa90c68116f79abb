// One step of a llama-family decoder on a CPU, as one function: rows of tokens in, logits out, over paged KV memory.
//
// Why it exists: the step of a small model is hundreds of short operations, and a framework spends more time between
// them than in them. Here the whole step is one OpenMP region; threads synchronise at the barrier at the end of each
// `omp for`.
//
// Number formats: weights are float16 (11 bits of mantissa, half the traffic of float), bfloat16 where the processor
// multiplies that, or quantised; KV is float16, or int8 with a scale for each token and head; activations and every sum
// are float. Where weights are int8, int4 or nf4, a row of activations is quantised in groups of GROUP with a scale
// each (activations.h), and products within a group are summed as integers. Each sum runs in an order that
// depends on nothing but its own row's position, so a row's result is bitwise the same alone, in any batch, in any
// chunk of a prefill and with any number of threads.
#include <omp.h>

#include <cstdint>
#include <new>
#include <vector>

#include "activations.h"
#include "attention.h"
#include "gemm.h"
#include "interface.h"
#include "model.h"
#include "simd.h"

namespace {

void run_layer(Model& m, int index, const Step& step, const std::vector<RowGroup>& groups, int thread) {
  const Layer& layer = m.layer[index];
  const int rows = step.rows, width = m.qkv_width(), attention_width = m.heads * m.head_dim;
  float* x = m.residual.data();
  Activations& input = rows == 1 ? m.per_thread[thread] : m.activations;
  norm_and_quantize_rows(m, x, layer.input_norm, rows, nullptr, layer.qkv, input);
  linear<Epilogue::store>(layer.qkv, input, input.floats.data(), m.hidden, rows, m.qkv.data(), width);
#pragma omp for schedule(static)
  for (int row = 0; row < rows; row++) write_kv(m, index, step, row, &m.qkv[(long)row * width]);
  attention(m, index, step, groups, thread);
  quantize_rows(m.attention_output.data(), attention_width, rows, layer.output, input);
  linear<Epilogue::add>(layer.output, input, m.attention_output.data(), attention_width, rows, x, m.hidden);
  norm_and_quantize_rows(m, x, layer.post_attention_norm, rows, nullptr, layer.gate_up, input);
  const int padded = m.padded_intermediate();
  linear<Epilogue::silu_mul>(layer.gate_up, input, input.floats.data(), m.hidden, rows, m.activated.data(), padded);
  quantize_rows(m.activated.data(), padded, rows, layer.down, input);
  linear<Epilogue::add>(layer.down, input, m.activated.data(), padded, rows, x, m.hidden);
}

}  // namespace

extern "C" {

const char* fused_instructions() {
#ifdef BFLOAT16_TILES
  if (HAS_TILES) return INSTRUCTIONS_WITH_TILES;
#endif
  return INSTRUCTIONS;
}
int fused_lanes() { return LANES; }
int fused_byte_dots() {
#ifdef BYTE_DOTS
  return 1;
#else
  return 0;
#endif
}
int fused_bfloat16_dots() {
#ifdef BFLOAT16_DOTS
  return 1;
#else
  return 0;
#endif
}

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

// Arrays as in backend/engine/model_runner.py.
// logits: [wanted][vocab]; hidden: [wanted_hidden][hidden].
// Returns 0, or 1 if there is no memory for a step of so many rows; then nothing has been written.
int fused_step(void* model, int rows, const int32_t* tokens, const int32_t* positions, const int64_t* slots,
                int sequences, const int32_t* query_starts, const int32_t* block_tables, int table_width,
                const int32_t* seen, const int64_t* masks, int wanted,
                const int32_t* logits_rows, float* logits, int wanted_hidden, const int32_t* hidden_rows, float* hidden,
                int threads) {
  Model& m = *static_cast<Model*>(model);
  Step step{rows, tokens, positions, slots, {}, block_tables, table_width, seen, masks};
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
      Activations& input = wanted == 1 ? m.per_thread[thread] : m.activations;
      norm_and_quantize_rows(m, m.residual.data(), m.norm, wanted, logits_rows, m.head, input);
      linear<Epilogue::store>(m.head, input, input.floats.data(), m.hidden, wanted, logits, m.vocab);
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
