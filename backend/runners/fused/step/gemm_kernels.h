// How weights are stored, and the kernels of floats; those of integers are in byte_kernels.h.
//
// A matrix is stored in panels of PANEL output columns, so that a kernel reads one stream. A group is the number of
// inputs that share a scale, a multiple of GROUP; "nibbles" are [group / GROUP][2][4][LANES][4] bytes: byte i of a
// vector holds word i of GROUP inputs in its low half and word i + 4 in its high half
//   float16   [panel][in][PANEL]
//   bfloat16  [panel][in / 2][PANEL][2]
//   int8      [panel][in / 2][PANEL][2], weight = scale of the column * code; or, where a group shares a scale,
//             [panel][in / group]{ codes [group / 2][PANEL][2], scales [PANEL] }, weight = scale * code / 128
//   int8 where there are BYTE_DOTS: the same, with codes, 128 higher, in [group / GROUP][2][8][LANES][4]
//   int4      [panel][in / group]{ nibbles, scales [PANEL], minima [PANEL] }, weight = scale * nibble + minimum
//   fp8       [panel][in / 2][PANEL]{ second, first }, weight = scale of the column * E4M3 (arXiv 2209.05433) / 256
//   nf4       [panel][in / group]{ nibbles, scales [PANEL] }, weight = scale * LEVELS[nibble] / 127
// A panel of gate columns is followed by the panel of up columns that belong to them, which may be of another format.
#pragma once

#include <cstdint>
#include <cstring>

#include "model.h"
#include "simd.h"

namespace {

// A kernel multiplies ROWS rows with one panel: out[r][c] = sum over k of x[r][k] * weight[k][c], k ascending.
// Separate functions with a plain buffer as their only output keep the accumulators in registers; the pragmas unroll
// the loops that index them.
struct WeightPanel {
  const uint8_t* panel;
  const float* scales;
  int in, group;
};
struct ActivationTile {
  const float* x;
  long stride;
  const int8_t *high, *low;
  const DigitGroup* groups;
  const uint8_t* has_low;
  long has_low_stride;
  const int16_t* int16_values;
  const float* int16_scales;
  const uint16_t* bfloat16_values;
};
using PanelKernel = void (*)(const WeightPanel& weights, const ActivationTile& rows, float* out);

template <int ROWS>
inline void clear(Vector (&sums)[ROWS][2]) {
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; r++) sums[r][0] = sums[r][1] = broadcast(0.f);
}

template <int ROWS>
inline void store_rows(const Vector (&sums)[ROWS][2], float* out) {
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; r++) {
    store(out + r * PANEL, sums[r][0]);
    store(out + r * PANEL + LANES, sums[r][1]);
  }
}

template <int ROWS>
__attribute__((noinline)) void gemm_float16(const WeightPanel& weights, const ActivationTile& rows, float* out) {
  const half* panel = (const half*)weights.panel;
  const int in = weights.in;
  const float* x = rows.x;
  const long stride = rows.stride;
  Vector acc[ROWS][2];
  clear(acc);
  for (int k = 0; k < in; k++, panel += PANEL, x++) {
    const Vector w0 = load_half(panel), w1 = load_half(panel + LANES);
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; r++) {
      const Vector v = broadcast(x[r * stride]);
      acc[r][0] = fma(v, w0, acc[r][0]);
      acc[r][1] = fma(v, w1, acc[r][1]);
    }
  }
  store_rows(acc, out);
}

inline Integers load_word(const void* p) {
  int32_t word;
  std::memcpy(&word, p, sizeof word);
  return broadcast_word(word);
}

#ifdef BFLOAT16_DOTS
template <int ROWS>
__attribute__((noinline)) void gemm_bfloat16(const WeightPanel& weights, const ActivationTile& rows, float* out) {
  const uint8_t* panel = weights.panel;
  const int in = weights.in;
  const uint16_t* x = rows.bfloat16_values;
  Vector acc[ROWS][2];
  clear(acc);
  for (int k = 0; k < in; k += 2, panel += 4 * PANEL, x += 2) {
    const Integers w0 = load_bytes(panel), w1 = load_bytes(panel + 4 * LANES);
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; r++) {
      const Integers v = load_word(x + (long)r * in);
      acc[r][0] = dot_bfloat16(acc[r][0], w0, v);
      acc[r][1] = dot_bfloat16(acc[r][1], w1, v);
    }
  }
  store_rows(acc, out);
}
#endif

#ifdef BFLOAT16_TILES
// One row takes tiles too: its sums run in their order.
template <int ROWS>
__attribute__((noinline)) void gemm_tiles(const WeightPanel& weights, const ActivationTile& rows, float* out) {
  multiply_tiles<ROWS>(rows.bfloat16_values, weights.panel, weights.in, out);
}
#endif

template <int ROWS>
__attribute__((noinline)) void gemm_fp8(const WeightPanel& weights, const ActivationTile& rows, float* out) {
  const uint8_t* panel = weights.panel;
  const int in = weights.in;
  const float* x = rows.x;
  const long stride = rows.stride;
  Vector acc[ROWS][2];
  clear(acc);
  for (int k = 0; k < in; k += 2, panel += 2 * PANEL, x += 2) {
    const Integers both = load_bytes(panel);
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++) {
      const Integers halves = i == 0 ? high_e4m3_to_half(both) : low_e4m3_to_half(both);
      const Vector w0 = low_floats(halves), w1 = high_floats(halves);
#pragma GCC unroll 16
      for (int r = 0; r < ROWS; r++) {
        const Vector v = broadcast(x[r * stride + i]);
        acc[r][0] = fma(v, w0, acc[r][0]);
        acc[r][1] = fma(v, w1, acc[r][1]);
      }
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; r++) {
    store(out + r * PANEL, acc[r][0] * load(weights.scales));
    store(out + r * PANEL + LANES, acc[r][1] * load(weights.scales + LANES));
  }
}

}  // namespace
