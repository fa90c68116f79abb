// Activations times a whole matrix; the threads divide it by panels.
#pragma once

#include <algorithm>

#include "byte_kernels.h"
#include "gemm_kernels.h"
#include "model.h"
#include "simd.h"

namespace {

struct Kernels {
  int tile;  // rows that one call takes at most
  PanelKernel of[13];
};
#define TO_THREE(kernel) {nullptr, kernel<1>, kernel<2>, kernel<3>}
#define TO_SIX(kernel) {nullptr, kernel<1>, kernel<2>, kernel<3>, kernel<4>, kernel<5>, kernel<6>}
#define TO_TWELVE(kernel) \
  {nullptr, kernel<1>, kernel<2>, kernel<3>, kernel<4>, kernel<5>, kernel<6>, \
   kernel<7>, kernel<8>, kernel<9>, kernel<10>, kernel<11>, kernel<12>}
#define WORDS_TO_EIGHT(words) \
  {nullptr, gemm_words_of_one<words>, gemm_words<words, 2>, gemm_words<words, 3>, gemm_words<words, 4>, \
   gemm_words<words, 5>, gemm_words<words, 6>, gemm_words<words, 7>, gemm_words<words, 8>}
#ifdef WIDE
#define TO_ROW_TILE TO_TWELVE
#define TO_INTEGER_ROW_TILE TO_SIX
#else
#define TO_ROW_TILE TO_SIX
#define TO_INTEGER_ROW_TILE TO_THREE
#endif
constexpr Kernels KERNELS[] = {  // by format
    {ROW_TILE, TO_ROW_TILE(gemm_float16)},
#ifdef BYTE_DOTS
    {WORD_ROW_TILE, WORDS_TO_EIGHT(Int8Words)},
#else
    {INTEGER_ROW_TILE, TO_INTEGER_ROW_TILE(gemm_int8)},
#endif
    {WORD_ROW_TILE, WORDS_TO_EIGHT(Int4Words)},
    {ROW_TILE, TO_ROW_TILE(gemm_fp8)},
#ifdef BYTE_DOTS
    {WORD_ROW_TILE, WORDS_TO_EIGHT(Nf4Words)},
#else
    {INTEGER_ROW_TILE, TO_INTEGER_ROW_TILE(gemm_nf4)},
#endif
#ifdef BFLOAT16_DOTS
    {ROW_TILE, TO_ROW_TILE(gemm_bfloat16)},
#endif
};

inline const Kernels& kernels_of(Format format) {
#ifdef BFLOAT16_TILES
  static constexpr Kernels TILES = {ROW_TILE, TO_ROW_TILE(gemm_tiles)};
  if (format == BFLOAT16 && HAS_TILES) return TILES;
#endif
  return KERNELS[format];
}

enum class Epilogue { store, add, silu_mul };

// Multiplies some rows with one panel and adds its bias: out [rows][PANEL].
inline void gemm_panel(const Part& part, int p, int in, const ActivationTile& rows, int count, float* out) {
  const float* scales = part.scales ? part.scales + p * PANEL : nullptr;
  kernels_of(part.format).of[count]({part.panels + p * part.stride, scales, in, part.group}, rows, out);
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
    tile = std::min(tile, kernels_of(weights.parts[i].format).tile);
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
      const long first_group = (long)first * groups, first_value = (long)first * weights.in;
      const ActivationTile operand{x + first * x_stride,
                                   x_stride,
                                   input.high.data() + first_value,
                                   input.low.data() + first_value,
                                   input.groups.data() + first_group,
                                   input.has_low.data() + first,
                                   input.rows,
                                   input.int16_values.data() + first_value,
                                   input.int16_scales.data() + first_group,
                                   input.bfloat16_values.data() + first_value};
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
