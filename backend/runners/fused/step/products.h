// Rows times a whole matrix, shared out to the threads by panels.
#pragma once

#include <algorithm>

#include "model.h"
#include "panel_kernels.h"
#include "vectors.h"

namespace {

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
  int pieces = 0, tile = MOST_ROWS;
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
      alignas(64) float out[MOST_ROWS * PANEL], gated[MOST_ROWS * PANEL];
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

}  // namespace
