// The weights of a model, the work space of its steps, and the input of one step.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "simd.h"

namespace {

enum Format { FLOAT16, INT8, INT4, FP8, NF4, BFLOAT16 };

// Some output columns of a matrix, in panels of one format.
struct Part {
  const uint8_t* panels;
  const float* scales;  // of the columns, for INT8 and FP8
  const float* bias;    // padded like the columns; or null
  int out;              // output columns; the last panel may be padded
  Format format;
  int group;    // inputs that share a scale in the panel; 0 where none do
  long stride;  // bytes from one panel to the next

  int count() const { return (out + PANEL - 1) / PANEL; }
#ifdef BYTE_DOTS
  bool takes_int16() const { return false; }
  bool takes_low_digits() const { return format == INT8 || format == INT4 || format == NF4; }
#else
  bool takes_int16() const { return format == INT8; }
  bool takes_low_digits() const { return format == INT4; }
#endif
  bool takes_digits() const { return takes_low_digits() || format == NF4; }
  bool takes_bfloat16() const { return format == BFLOAT16; }
};

// GROUP inputs of a row as digits: value = high_scale * high + low_scale * low, or without the latter where one digit is
// enough. No digit is -128.
struct DigitGroup {
  float high_scale, low_scale, sum;  // sum: of the values
  int32_t high_shift, low_shift;     // -128 times the sum of the digits: what 128 in every byte adds to their products
};

// A matrix of one to three parts that multiply the same rows: query, key and value, or gate and up. Only the last panel
// of the last part may be padded where their outputs follow each other.
struct Linear {
  Part parts[3];
  int count;
  int in;
  const int32_t* order;  // input order[i] comes i-th in quantised rows; null: the inputs keep their order

  bool takes_digits() const { return any(&Part::takes_digits); }
  bool takes_low_digits() const { return any(&Part::takes_low_digits); }
  bool takes_int16() const { return any(&Part::takes_int16); }
  bool takes_bfloat16() const { return any(&Part::takes_bfloat16); }

 private:
  bool any(bool (Part::*takes)() const) const {
    return std::any_of(parts, parts + count, [takes](const Part& part) { return (part.*takes)(); });
  }
};

// Most blocks of the tokens that a row of a branching draft sees beyond those that lie in the order of the tokens.
constexpr int BRANCH_BLOCKS = (BLOCK - 1 + 63 + BLOCK - 1) / BLOCK;

// Rows that a matrix is multiplied with: floats and what its formats take, integers in the input order of the matrix.
struct Activations {
  std::vector<float> floats;
  std::vector<int16_t> int16_values;      // [row][in]
  std::vector<float> int16_scales;        // [row][in / GROUP]
  std::vector<int8_t> high, low;          // [row][in]
  std::vector<DigitGroup> groups;         // [row][in / GROUP]
  std::vector<uint8_t> has_low;           // [in / GROUP][rows], 1 where a group of a row has low digits
  long rows = 0;                          // that there is memory for
  std::vector<uint16_t> bfloat16_values;  // [row][in]

  void reserve(int wanted, int width) {
    if (rows >= wanted) return;
    int16_values.resize((size_t)wanted * width);
    int16_scales.resize((size_t)wanted * width / GROUP);
    high.resize((size_t)wanted * width);
    low.resize((size_t)wanted * width);
    groups.resize((size_t)wanted * width / GROUP);
    has_low.resize((size_t)wanted * width / GROUP);
    bfloat16_values.resize((size_t)wanted * width);
    floats.resize((size_t)wanted * width);
    rows = wanted;  // last: it says that all of them are allocated
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
  std::vector<float> residual, qkv, attention_output, activated;
  Activations activations;            // of all rows of the step
  std::vector<Activations> per_thread;  // of a single row: computing it in each thread is cheaper than a barrier
  std::vector<std::vector<float>> scores;        // attention scores, one buffer for each thread
  std::vector<std::vector<const void*>> values;  // likewise: where the values of each block of a sequence are
  std::vector<std::vector<const uint8_t*>> blocks_of_head;  // likewise: its blocks
  std::vector<std::vector<uint8_t>> tails;                  // likewise: the last blocks that a row of a tree sees

  int qkv_width() const { return (heads + 2 * kv_heads) * head_dim; }
  int max_width() const { return std::max({hidden, heads * head_dim, padded_intermediate()}); }
  int padded_intermediate() const { return (intermediate + PANEL - 1) / PANEL * PANEL; }
  size_t head_bytes() const {  // of one block and kv head
    const size_t numbers = 2UL * BLOCK * head_dim;
    return kv_is_bytes ? numbers + 2 * BLOCK * sizeof(float) : numbers * sizeof(half);
  }
  uint8_t* block(int layer_index, int block_index, int kv_head) const {
    return kv + ((layer_index * blocks + block_index) * kv_heads + kv_head) * head_bytes();
  }
  float* block_scales(uint8_t* block) const { return (float*)(block + 2L * BLOCK * head_dim); }
  const float* block_scales(const uint8_t* block) const { return (const float*)(block + 2L * BLOCK * head_dim); }
  // Allocates all memory that a step needs. Throws std::bad_alloc; a later, smaller step may still succeed.
  void reserve(int rows, int threads) {
    if (rows > capacity) {
      residual.resize((size_t)rows * hidden);
      activations.reserve(rows, max_width());
      qkv.resize((size_t)rows * qkv_width());
      attention_output.resize((size_t)rows * heads * head_dim);
      activated.resize((size_t)rows * padded_intermediate());
      capacity = rows;
    }
    scores.resize(std::max<size_t>(scores.size(), threads));
    values.resize(std::max<size_t>(values.size(), threads));
    blocks_of_head.resize(std::max<size_t>(blocks_of_head.size(), threads));
    tails.resize(std::max<size_t>(tails.size(), threads));
    per_thread.resize(std::max<size_t>(per_thread.size(), threads));
    for (auto& rows_of_one : per_thread) rows_of_one.reserve(1, max_width());
    for (auto& buffer : scores) buffer.resize((size_t)QUERY_TILE * (max_context + BLOCK));
    for (auto& buffer : values) buffer.resize(max_context / BLOCK + 1);
    for (auto& buffer : blocks_of_head) buffer.resize(max_context / BLOCK + 1);
    for (auto& buffer : tails) buffer.resize(BRANCH_BLOCKS * head_bytes());
  }
};

// The input of one step; see backend/engine/model_runner.py.
struct Step {
  int rows;
  const int32_t *tokens, *positions;
  const int64_t* slots;
  std::vector<int32_t> row_sequence;  // index of each row's block table
  const int32_t* block_tables;
  int table_width;
  // Of drafts that branch: a row sees the places before `seen`, and place seen + i where bit i of its mask is set.
  // Null: every row sees all places up to its own.
  const int32_t* seen;
  const int64_t* masks;

  bool branches(int row) const { return masks && masks[row]; }
};

}  // namespace
