// Activations times a whole matrix; the threads divide it by panels.
#pragma once

#include <algorithm>

#include "gemm_kernels.h"
#include "model.h"
#include "simd.h"

namespace {

enum class Epilogue { store, add, silu_mul };

// Multiplies some rows with one panel and adds its bias: out [rows][PANEL].
inline void gemm_panel(const Part& part, int p, int in, const ActivationTile& rows, int count, float* out) {
  const float* scales = part.scales ? part.scales + p * PANEL : nullptr;
  KERNELS[part.format].of[count]({part.panels + p * part.stride, scales, in, part.group}, rows, out);
  if (!part.bias) return;
  for (int i = 0; i < count * PANEL; i += LANES)
    store(out + i, load(out + i) + load(part.bias + p * PANEL + i % PANEL));
}

// y = x · weights + bias, added to y or the first part gating the second where asked for. Threads take whole panels;
// ends with a barrier.
template <Epilogue EPILOGUE>
void linear(
    const Linear& weights, const Activations& input, const float* x, long x_stride, int rows, float* y, long y_stride) {
  constexpr bool GATES = EPILOGUE == Epilogue::silu_mul;  // then a unit of work is one panel of each part
  int pieces = 0, tile = MAX_ROWS;
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
      const ActivationTile operand{x + first * x_stride,
                            x_stride,
                            input.int8_values.data() + (long)first * weights.in,
                            input.scales.data() + first_group,
                            input.sums.data() + first_group,
                            input.shifts.data() + first_group,
                            input.int16_values.data() + (long)first * weights.in,
                            input.int16_scales.data() + first_group};
      float* target = y + first * y_stride + piece * PANEL;
      alignas(64) float out[MAX_ROWS * PANEL], gated[MAX_ROWS * PANEL];
      gemm_panel(*part, p, weights.in, operand, count, out);
      if constexpr (GATES) gemm_panel(part[1], p, weights.in, operand, count, gated);
      for (int r = 0; r < count; r++, target += y_stride) {
        if (!GATES && left < PANEL) {  // the padded panel at the end
          for (int c = 0; c < left; c++) target[c] = (EPILOGUE == Epilogue::add ? target[c] : 0.f) + out[r * PANEL + c];
          continue;
        }
        for (int i = 0; i < PANEL; i += LANES) {
          Vector v = load(out + r * PANEL + i);
          if constexpr (EPILOGUE == Epilogue::add) v = load(target + i) + v;
          if constexpr (GATES) v = silu(v) * load(gated + r * PANEL + i);
          store(target + i, v);
        }
      }
    }
  }
}

}  // namespace
