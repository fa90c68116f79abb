// Attention over paged keys and values, and how these are written.
//
// KV memory: [layer][block][kv head]{ keys [head_dim][BLOCK], values [BLOCK][head_dim] } and, where they are bytes,
// { scales of the keys [BLOCK], scales of the values [BLOCK] }; keys are transposed so that one vector holds one
// dimension of BLOCK tokens.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "activations.h"
#include "model.h"
#include "simd.h"

namespace {

void rotate(float* head, const float* rope, int head_dim) {
  const int half_dim = head_dim / 2;
  for (int i = 0; i < half_dim; i++) {
    const float a = head[i], b = head[i + half_dim], c = rope[i], s = rope[half_dim + i];
    head[i] = a * c - b * s;
    head[i + half_dim] = b * c + a * s;
  }
}

// Quantises a head to int8, `stride` elements apart. Returns the scale, which is NaN if a value is NaN.
float quantize_head(const float* x, int head_dim, int8_t* to, int stride) {
  float peak = 0.f, nan_if_any = 0.f;
  for (int d = 0; d < head_dim; d++) peak = std::max(peak, std::fabs(x[d])), nan_if_any += x[d] * 0.f;
  const float inverse = peak > 0.f ? 127.f / peak : 0.f;
  for (int d = 0; d < head_dim; d++)
    to[d * stride] = (int8_t)std::lrint(std::min(std::max(x[d] * inverse, -127.f), 127.f));
  return peak / 127.f + nan_if_any;
}

// Applies the head norms and RoPE to one row, and writes its keys and values to its KV slot.
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
      scales[0] = quantize_head(key, m.head_dim, keys + offset, BLOCK);
      scales[BLOCK] = quantize_head(value, m.head_dim, values, 1);
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
__attribute__((noinline)) void weighted_values(
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
  // Later rows attend to a few tokens more. Other rows skip those: a weight of 0 times NaN would be NaN.
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

// Numerators of the softmax over the first `length` scores, in place, then zeros up to `padded`. Returns their sum.
float softmax_without_division(float* scores, int length, int padded, float scale) {
  const int whole = (length + BLOCK - 1) / BLOCK * BLOCK;
  for (int i = length; i < padded; i++) scores[i] = -INFINITY;
  Vector top = broadcast(-INFINITY);
  for (int i = 0; i < whole; i += LANES) top = maximum(top, load(scores + i));
  const Vector offset = broadcast(reduce_max(top)), factor = broadcast(scale * 1.44269504f);
  for (int i = 0; i < whole; i += LANES) store(scores + i, exp2((load(scores + i) - offset) * factor));
  for (int i = length; i < padded; i++) scores[i] = 0.f;
  Vector total = broadcast(0.f);
  for (int i = 0; i < whole; i += LANES) total = total + load(scores + i);
  return sum(total);
}

// Query vectors of one sequence and one KV head: consecutive rows, or heads of one group.
struct QueryTile {
  int count;
  const float* vector[QUERY_TILE];
  int length[QUERY_TILE];  // tokens each of them attends to
  float* out[QUERY_TILE];
};

// Prefetches memory. A KV block is at most a page, and the hardware prefetcher stops at page boundaries.
inline void prefetch(const void* p, size_t bytes) {
  for (size_t i = 0; i < bytes; i += 64) __builtin_prefetch((const char*)p + i, 0, 2);
}

template <class Number, int QUERIES>
void attend(
    const Model& m, const uint8_t* const* blocks_of_head, const QueryTile& q, float* scores, const void** values) {
  const long stride = m.max_context + BLOCK;
  const int length = *std::max_element(q.length, q.length + QUERIES);
  const int blocks = (length + BLOCK - 1) / BLOCK;
  for (int b = 0; b < blocks; b++) {
    const uint8_t* numbers = blocks_of_head[b];
    const Number* keys = (const Number*)numbers;
    const float* scales = m.kv_is_bytes ? m.block_scales(numbers) : nullptr;
    const size_t half_block = BLOCK * m.head_dim * sizeof(Number);
    if (b + 1 < blocks) prefetch(blocks_of_head[b + 1], half_block);
    prefetch(keys + BLOCK * m.head_dim, half_block);
    score_block<Number, QUERIES>(keys, scales, m.head_dim, q.vector, scores + b * BLOCK, stride);
    values[b] = keys + BLOCK * m.head_dim;
  }
  float inverse[QUERIES];
  const float scale = 1.f / std::sqrt((float)m.head_dim);
  for (int i = 0; i < QUERIES; i++)
    inverse[i] = 1.f / softmax_without_division(scores + i * stride, q.length[i], blocks * BLOCK, scale);
  for (int b = 0; m.kv_is_bytes && b < blocks; b++) {
    const float* value_scales = m.block_scales(blocks_of_head[b]) + BLOCK;
    // Tokens beyond a query's own have weight 0 and, in a block that is not full, undefined scales.
    for (int i = 0; i < QUERIES; i++)
      for (int t = b * BLOCK; t < std::min(q.length[i], (b + 1) * BLOCK); t++)
        scores[i * stride + t] *= value_scales[t - b * BLOCK];
  }
  for (int d = 0; d < m.head_dim; d += VALUE_VECTORS * LANES) {
    alignas(64) float out[QUERIES * VALUE_VECTORS * LANES];
    weighted_values<Number, QUERIES>(values, d, q.length, m.head_dim, scores, stride, out);
    for (int i = 0; i < QUERIES; i++)
      for (int v = 0; v < VALUE_VECTORS; v++)
        store(q.out[i] + d + v * LANES, load(out + (i * VALUE_VECTORS + v) * LANES) * broadcast(inverse[i]));
  }
}

using AttentionKernel = void (*)(const Model&, const uint8_t* const*, const QueryTile&, float*, const void**);
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

// Consecutive rows of one sequence, as many as fill a query tile with the heads of a group.
struct RowGroup {
  int first, count;
};

std::vector<RowGroup> group_rows(const Model& m, const Step& step) {
  const int peak = std::max(1, QUERY_TILE / (m.heads / m.kv_heads));
  std::vector<RowGroup> groups;
  for (int row = 0; row < step.rows; row++) {
    const bool joins = row && step.row_sequence[row] == step.row_sequence[row - 1] && groups.back().count < peak &&
                       !step.branches(row) && !step.branches(row - 1);
    if (joins)
      groups.back().count++;
    else
      groups.push_back({row, 1});
  }
  return groups;
}

// Copies a token's key and value of one head from one block to another, at other offsets.
void copy_token(const Model& m, const uint8_t* from, int at, uint8_t* to, int place) {
  const size_t size = m.kv_is_bytes ? 1 : sizeof(half);
  for (int d = 0; d < m.head_dim; d++)
    std::memcpy(to + (d * BLOCK + place) * size, from + (d * BLOCK + at) * size, size);
  const size_t row = m.head_dim * size, keys = BLOCK * row;
  std::memcpy(to + keys + place * row, from + keys + at * row, row);
  if (!m.kv_is_bytes) return;
  for (int part = 0; part < 2; part++)
    m.block_scales(to)[part * BLOCK + place] = m.block_scales(from)[part * BLOCK + at];
}

// The blocks that a row sees, in the order of its tokens. What a row of a branching draft sees does not lie in this
// order: its last tokens are copied to `tail`, so that it is computed as if they did, to the last bit.
void blocks_seen(
    const Model& m, int layer_index, const Step& step, int row, int kv_head, uint8_t* tail, const uint8_t** blocks) {
  const int32_t* table = step.block_tables + (long)step.row_sequence[row] * step.table_width;
  const bool branches = step.branches(row);
  const int length = step.positions[row] + 1, whole = branches ? step.seen[row] / BLOCK : (length + BLOCK - 1) / BLOCK;
  for (int b = 0; b < whole; b++) blocks[b] = m.block(layer_index, table[b], kv_head);
  if (!branches) return;
  const size_t bytes = m.head_bytes();
  for (int i = 0; i * BLOCK < length - whole * BLOCK; i++) blocks[whole + i] = tail + i * bytes;
  int copied = 0;
  auto copy = [&](int place) {
    const uint8_t* from = m.block(layer_index, table[place / BLOCK], kv_head);
    copy_token(m, from, place % BLOCK, tail + copied / BLOCK * bytes, copied % BLOCK);
    copied++;
  };
  for (int place = whole * BLOCK; place < step.seen[row]; place++) copy(place);
  for (int i = 0; i < 63; i++)
    if (step.masks[row] >> i & 1) copy(step.seen[row] + i);
}

void attention(Model& m, int layer_index, const Step& step, const std::vector<RowGroup>& groups, int thread) {
  const int tasks = (int)groups.size() * m.kv_heads, group_heads = m.heads / m.kv_heads;
#pragma omp for schedule(dynamic, 1)
  for (int task = 0; task < tasks; task++) {
    // Long contexts come last in a prefill; start with them, so that the threads end together.
    const RowGroup& group = groups[groups.size() - 1 - task / m.kv_heads];
    const int kv_head = task % m.kv_heads;
    const uint8_t** blocks = m.blocks_of_head[thread].data();
    blocks_seen(m, layer_index, step, group.first + group.count - 1, kv_head, m.tails[thread].data(), blocks);
    const int vectors = group.count * group_heads;
    for (int start = 0; start < vectors; start += QUERY_TILE) {
      QueryTile q;
      q.count = std::min(QUERY_TILE, vectors - start);
      for (int i = 0; i < q.count; i++) {
        const long row = group.first + (start + i) / group_heads;
        const int head = kv_head * group_heads + (start + i) % group_heads;
        q.vector[i] = &m.qkv[row * m.qkv_width() + head * m.head_dim];
        q.length[i] = step.positions[row] + 1;
        q.out[i] = &m.attention_output[(row * m.heads + head) * m.head_dim];
      }
      ATTENTION_KERNELS[m.kv_is_bytes][q.count](m, blocks, q, m.scores[thread].data(), m.values[thread].data());
    }
  }
}

}  // namespace
