// The fused step as a program that an emulator runs: it takes requests from its input until that ends.
#include "emulated_arm.h"

#include <cstring>

#include "../../../../backend/runners/fused/step/fused_step.cpp"

namespace {

using Arrays = std::vector<std::vector<char>>;

struct Held {
  FusedShape shape;
  Arrays arrays;
  void* model;
  uint8_t* kv;
  size_t layer_block_bytes;  // of a block in one layer

  uint8_t* block(int layer, int block_index) {
    return kv + ((size_t)layer * shape.blocks + block_index) * layer_block_bytes;
  }
};

FusedLinear get_linear(Pipes& pipes, Arrays& arrays) {
  FusedLinear linear = pipes.get<FusedLinear>();
  for (int i = 0; i < linear.count; i++) {
    FusedPart& part = linear.parts[i];
    const int64_t within_first = pipes.get<int64_t>();
    part.panels = within_first ? linear.parts[0].panels + within_first : pipes.get_array<uint8_t>(arrays);
    part.scales = pipes.get_array<float>(arrays);
    part.bias = pipes.get_array<float>(arrays);
  }
  linear.order = pipes.get_array<int32_t>(arrays);
  return linear;
}

void create(Pipes& pipes) {
  Held* held = new Held{pipes.get<FusedShape>(), {}, nullptr, nullptr, 0};
  const FusedShape& shape = held->shape;
  std::vector<FusedLayer> layers(shape.layers);
  for (FusedLayer& layer : layers) {
    layer.input_norm = pipes.get_array<float>(held->arrays);
    layer.post_attention_norm = pipes.get_array<float>(held->arrays);
    layer.query_norm = pipes.get_array<float>(held->arrays);
    layer.key_norm = pipes.get_array<float>(held->arrays);
    for (FusedLinear* linear : {&layer.qkv, &layer.output, &layer.gate_up, &layer.down})
      *linear = get_linear(pipes, held->arrays);
  }
  const FusedLinear head = get_linear(pipes, held->arrays);
  const float* norm = pipes.get_array<float>(held->arrays);
  const float* rope = pipes.get_array<float>(held->arrays);
  held->layer_block_bytes = shape.kv_heads * head_bytes(shape.kv_is_bytes, shape.head_dim);
  held->kv = (uint8_t*)std::calloc((size_t)shape.layers * shape.blocks, held->layer_block_bytes);
  held->model = fused_create(&shape, layers.data(), &head, nullptr, norm, rope, held->kv);
  pipes.put((uint64_t)held);
}

void step(Pipes& pipes) {
  Held& held = *(Held*)pipes.get<uint64_t>();
  const StepSizes sizes = pipes.get<StepSizes>();
  Arrays arrays;
  const half* embedded = pipes.get_array<half>(arrays);  // [rows][hidden], in place of the whole embedding
  const int32_t* positions = pipes.get_array<int32_t>(arrays);
  const int64_t* slots = pipes.get_array<int64_t>(arrays);
  const int32_t* starts = pipes.get_array<int32_t>(arrays);
  const int32_t* tables = pipes.get_array<int32_t>(arrays);
  const int32_t* seen = pipes.get_array<int32_t>(arrays);
  const int64_t* masks = pipes.get_array<int64_t>(arrays);
  const int32_t* logits_rows = pipes.get_array<int32_t>(arrays);
  const int32_t* hidden_rows = pipes.get_array<int32_t>(arrays);
  const int32_t block_count = pipes.get<int32_t>();
  const int32_t* blocks = pipes.get_array<int32_t>(arrays);
  for (int layer = 0; layer < held.shape.layers; layer++)
    for (int i = 0; i < block_count; i++) pipes.read(held.block(layer, blocks[i]), held.layer_block_bytes);
  std::vector<int32_t> tokens(sizes.rows);
  for (int row = 0; row < sizes.rows; row++) tokens[row] = row;
  std::vector<float> logits((size_t)sizes.wanted * held.shape.vocab);
  std::vector<float> hidden((size_t)sizes.wanted_hidden * held.shape.hidden);
  static_cast<Model*>(held.model)->embedding = embedded;
  const int32_t failed = fused_step(
      held.model, sizes.rows, tokens.data(), positions, slots, sizes.sequences, starts, tables, sizes.table_width, seen,
      masks, sizes.wanted, logits_rows, logits.data(), sizes.wanted_hidden, hidden_rows, hidden.data(), sizes.threads);
  pipes.put(failed);
  pipes.write(logits.data(), logits.size() * sizeof(float));
  pipes.write(hidden.data(), hidden.size() * sizeof(float));
  for (int layer = 0; layer < held.shape.layers; layer++)
    for (int i = 0; i < block_count; i++) pipes.write(held.block(layer, blocks[i]), held.layer_block_bytes);
}

void destroy(Pipes& pipes) {
  Held* held = (Held*)pipes.get<uint64_t>();
  fused_destroy(held->model);
  std::free(held->kv);
  delete held;
}

}  // namespace

int main() {
  Pipes pipes(STDIN_FILENO, STDOUT_FILENO);
  BuiltKernels kernels{{}, fused_lanes(), fused_byte_dots(), fused_bfloat16_dots()};
  std::strncpy(kernels.instructions, fused_instructions(), sizeof kernels.instructions - 1);
  pipes.put(kernels);
  for (Request request; pipes.read(&request, sizeof request);) {
    if (request == Request::CREATE) create(pipes);
    if (request == Request::STEP) step(pipes);
    if (request == Request::DESTROY) destroy(pipes);
  }
}
