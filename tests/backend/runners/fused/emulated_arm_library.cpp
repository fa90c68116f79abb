// The C interface of the fused step for this machine, in front of EMULATOR -cpu PROCESSOR PROGRAM, which computes.
#include <fcntl.h>
#include <spawn.h>

#include <mutex>
#include <set>

#include "../../../../backend/runners/fused/step/interface.h"
#include "emulated_arm.h"

namespace {

constexpr int BLOCK = 16;  // tokens of a KV block

struct Emulated {
  Pipes pipes;
  BuiltKernels kernels;
  std::mutex one_at_a_time;

  explicit Emulated(Pipes to) : pipes(to), kernels(pipes.get<BuiltKernels>()) {}
};

Pipes start_emulator() {
  int requests[2], replies[2];
  if (pipe2(requests, O_CLOEXEC) || pipe2(replies, O_CLOEXEC)) std::abort();
  posix_spawn_file_actions_t files;
  posix_spawn_file_actions_init(&files);
  posix_spawn_file_actions_adddup2(&files, requests[0], STDIN_FILENO);
  posix_spawn_file_actions_adddup2(&files, replies[1], STDOUT_FILENO);
  const char* command[] = {EMULATOR, "-cpu", PROCESSOR, PROGRAM, nullptr};
  pid_t id;
  if (posix_spawnp(&id, EMULATOR, &files, nullptr, (char* const*)command, environ)) {
    std::fprintf(stderr, "%s does not start\n", EMULATOR);
    std::abort();
  }
  posix_spawn_file_actions_destroy(&files);
  close(requests[0]), close(replies[1]);
  return Pipes(replies[0], requests[1]);
}

Emulated& emulated() {
  static Emulated one(start_emulator());
  return one;
}

struct Remote {
  uint64_t handle;  // in the other process
  FusedShape shape;
  const uint16_t* embedding;
  uint8_t* kv;
};

void put_linear(Emulated& to, const FusedLinear& linear) {
  const int columns = 2 * to.kernels.lanes;
  to.pipes.put(linear);
  for (int i = 0; i < linear.count; i++) {
    const FusedPart &part = linear.parts[i], &first = linear.parts[0];
    const size_t panels = (part.out + columns - 1) / columns;
    // Panels of two parts may lie in turn.
    const bool within = i && first.panels < part.panels && part.panels < first.panels + first.stride;
    to.pipes.put(within ? (int64_t)(part.panels - first.panels) : (int64_t)0);
    if (!within) to.pipes.put_array(part.panels, panels * part.stride);
    to.pipes.put_array(part.scales, panels * columns);
    to.pipes.put_array(part.bias, panels * columns);
  }
  to.pipes.put_array(linear.order, linear.in);
}

}  // namespace

extern "C" {

const char* fused_instructions() { return emulated().kernels.instructions; }
int fused_lanes() { return emulated().kernels.lanes; }
int fused_byte_dots() { return emulated().kernels.byte_dots; }
int fused_bfloat16_dots() { return emulated().kernels.bfloat16_dots; }

void* fused_create(const FusedShape* shape, const FusedLayer* layers, const FusedLinear* head,
                   const uint16_t* embedding, const float* norm, const float* rope, uint8_t* kv) {
  Emulated& to = emulated();
  const std::lock_guard<std::mutex> alone(to.one_at_a_time);
  to.pipes.put(Request::CREATE);
  to.pipes.put(*shape);
  for (int i = 0; i < shape->layers; i++) {
    const FusedLayer& layer = layers[i];
    to.pipes.put_array(layer.input_norm, shape->hidden);
    to.pipes.put_array(layer.post_attention_norm, shape->hidden);
    to.pipes.put_array(layer.query_norm, shape->head_dim);
    to.pipes.put_array(layer.key_norm, shape->head_dim);
    for (const FusedLinear* linear : {&layer.qkv, &layer.output, &layer.gate_up, &layer.down}) put_linear(to, *linear);
  }
  put_linear(to, *head);
  to.pipes.put_array(norm, shape->hidden);
  to.pipes.put_array(rope, (size_t)shape->max_context * shape->head_dim);
  return new Remote{to.pipes.get<uint64_t>(), *shape, embedding, kv};
}

void fused_destroy(void* model) {
  Emulated& to = emulated();
  const std::lock_guard<std::mutex> alone(to.one_at_a_time);
  Remote* remote = (Remote*)model;
  to.pipes.put(Request::DESTROY);
  to.pipes.put(remote->handle);
  delete remote;
}

int fused_step(void* model, int rows, const int32_t* tokens, const int32_t* positions, const int64_t* slots,
               int sequences, const int32_t* query_starts, const int32_t* block_tables, int table_width,
               const int32_t* seen, const int64_t* masks, int wanted, const int32_t* logits_rows, float* logits,
               int wanted_hidden, const int32_t* hidden_rows, float* hidden, int threads) {
  Emulated& to = emulated();
  const std::lock_guard<std::mutex> alone(to.one_at_a_time);
  const Remote& m = *(Remote*)model;
  std::vector<uint16_t> embedded;
  for (int row = 0; row < rows; row++) {
    const uint16_t* of_token = m.embedding + (size_t)tokens[row] * m.shape.hidden;
    embedded.insert(embedded.end(), of_token, of_token + m.shape.hidden);
  }
  std::set<int32_t> distinct(block_tables, block_tables + (size_t)sequences * table_width);
  for (int row = 0; row < rows; row++) distinct.insert(slots[row] / BLOCK);
  const std::vector<int32_t> blocks(distinct.begin(), distinct.end());
  const size_t bytes = m.shape.kv_heads * head_bytes(m.shape.kv_is_bytes, m.shape.head_dim);
  const auto block = [&](int layer, int32_t index) { return m.kv + ((size_t)layer * m.shape.blocks + index) * bytes; };
  to.pipes.put(Request::STEP);
  to.pipes.put(m.handle);
  to.pipes.put(StepSizes{rows, sequences, table_width, wanted, wanted_hidden, threads});
  to.pipes.put_array(embedded.data(), embedded.size());
  to.pipes.put_array(positions, rows);
  to.pipes.put_array(slots, rows);
  to.pipes.put_array(query_starts, sequences + 1);
  to.pipes.put_array(block_tables, (size_t)sequences * table_width);
  to.pipes.put_array(seen, rows);
  to.pipes.put_array(masks, rows);
  to.pipes.put_array(logits_rows, wanted);
  to.pipes.put_array(hidden_rows, wanted_hidden);
  to.pipes.put((int32_t)blocks.size());
  to.pipes.put_array(blocks.data(), blocks.size());
  for (int layer = 0; layer < m.shape.layers; layer++)
    for (int32_t index : blocks) to.pipes.write(block(layer, index), bytes);
  const int failed = to.pipes.get<int32_t>();
  to.pipes.read(logits, (size_t)wanted * m.shape.vocab * sizeof(float));
  to.pipes.read(hidden, (size_t)wanted_hidden * m.shape.hidden * sizeof(float));
  for (int layer = 0; layer < m.shape.layers; layer++)
    for (int32_t index : blocks) to.pipes.read(block(layer, index), bytes);
  return failed;
}
}
