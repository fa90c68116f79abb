// The structures of the C interface, which runner.py fills; the functions are at the end of fused_step.cpp.
#pragma once

#include <cstdint>

extern "C" {

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

}
