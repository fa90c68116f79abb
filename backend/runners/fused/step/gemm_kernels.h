// Multiplies a tile of activations with one panel of a matrix; one kernel for each weight format.
//
// A matrix is stored in panels of PANEL output columns, so that a kernel reads one stream. A group is the number of
// inputs that share a scale, a multiple of GROUP; "words" are [group / GROUP][2][4][LANES][4] bytes: byte i of a vector
// holds word i of GROUP inputs in its low half and word i + 4 in its high half
//   float16   [panel][in][PANEL]
//   int8      [panel][in / 2][PANEL][2], weight = scale of the column * code; or, where a group shares a scale,
//             [panel][in / group]{ codes [group / 2][PANEL][2], scales [PANEL] }, weight = scale * code / 128
//   int4      [panel][in / group]{ words, scales [PANEL], minima [PANEL] }, weight = scale * nibble + minimum
//   fp8       [panel][in / 2][PANEL]{ second, first }, weight = scale of the column * E4M3 (arXiv 2209.05433) / 256
//   nf4       [panel][in / group]{ words, scales [PANEL] }, weight = scale * LEVELS[nibble] / 127
// A panel of gate columns is followed by the panel of up columns that belong to them, which may be of another format.
#pragma once

#include <cstdint>
#include <cstring>

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
  const int8_t* int8_values;
  const float *scales, *sums;
  const int32_t* shifts;
  const int16_t* int16_values;
  const float* int16_scales;
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

inline Integers load_word(const void* p) {
  int32_t word;
  std::memcpy(&word, p, sizeof word);
  return broadcast_word(word);
}

template <int ROWS>
__attribute__((noinline)) void gemm_int8(const WeightPanel& weights, const ActivationTile& rows, float* out) {
  const uint8_t* panel = weights.panel;
  const int in = weights.in, groups = in / GROUP, groups_per_scale = weights.group ? weights.group / GROUP : groups;
  Vector total[ROWS][2];
  clear(total);
  for (int end = groups_per_scale; end <= groups; end += groups_per_scale) {
    const half* numbers = (const half*)(panel + groups_per_scale * GROUP * PANEL);
    Vector scale[2];
#pragma GCC unroll 2
    for (int part = 0; part < 2; part++)
      scale[part] = weights.group ? load_half(numbers + part * LANES) * broadcast(1 / 128.f)
                                  : load(weights.scales + part * LANES);
    for (int g = end - groups_per_scale; g < end; g++) {
      const int16_t* x = rows.int16_values + g * GROUP;
      Integers acc[ROWS][2];
#pragma GCC unroll 8
      for (int r = 0; r < ROWS; r++) acc[r][0] = acc[r][1] = broadcast_word(0);
#pragma GCC unroll 2  // with more GCC does all products first, and keeps them on the stack
      for (int i = 0; i < GROUP / 2; i++, panel += 2 * PANEL) {
        const Integers w0 = load_widened(panel), w1 = load_widened(panel + 2 * LANES);
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++) {
          const Integers v = load_word(x + (long)r * in + 2 * i);
          acc[r][0] = dot2(acc[r][0], w0, v);
          acc[r][1] = dot2(acc[r][1], w1, v);
        }
      }
#pragma GCC unroll 8
      for (int r = 0; r < ROWS; r++) {
        const Vector row_scale = broadcast(rows.int16_scales[r * groups + g]);
#pragma GCC unroll 2
        for (int part = 0; part < 2; part++)
          total[r][part] = fma(to_float(acc[r][part]), scale[part] * row_scale, total[r][part]);
      }
    }
    if (weights.group) panel += PANEL * sizeof(half);
  }
  store_rows(total, out);
}

// Rows follow each other within a group of half a panel, whose weights stay in registers, unpacked once for all rows.
// The totals lie on the stack, for they are touched once a group: registers that held them would be weights' or sums'.
template <int ROWS>
__attribute__((noinline)) void gemm_int4(const WeightPanel& weights, const ActivationTile& rows, float* out) {
  constexpr int WORDS = GROUP / 4;
  const uint8_t* panel = weights.panel;
  const int in = weights.in, groups = in / GROUP, groups_per_scale = weights.group / GROUP;
  Vector total[ROWS][2];
  clear(total);
  for (int end = groups_per_scale; end <= groups; end += groups_per_scale) {
    const half* numbers = (const half*)(panel + groups_per_scale * (GROUP / 2) * PANEL);
    for (int g = end - groups_per_scale; g < end; g++, panel += (GROUP / 2) * PANEL) {
#pragma GCC unroll 1
      for (int part = 0; part < 2; part++) {
        Integers w[WORDS];
#pragma GCC unroll 4
        for (int i = 0; i < WORDS / 2; i++) {
          const Integers both = load_bytes(panel + (part * (GROUP / 2) + i * 4) * LANES);
          w[i] = low_nibbles(both);
          w[i + WORDS / 2] = high_nibbles(both);
        }
        const Vector scale = load_half(numbers + part * LANES), minimum = load_half(numbers + PANEL + part * LANES);
        const int8_t* x = rows.int8_values + g * GROUP;
        const float *row_scale = rows.scales + g, *row_sum = rows.sums + g;
#pragma GCC unroll 1
        for (int r = 0; r < ROWS; r++, x += in, row_scale += groups, row_sum += groups) {
          Integers acc = broadcast_word(0);
#pragma GCC unroll 8
          for (int i = 0; i < WORDS; i++) acc = dot4_int4(acc, w[i], load_word(x + 4 * i));
          const Vector products = scale * broadcast(*row_scale);
          total[r][part] = fma(products, to_float(total_of_int4(acc)), total[r][part]);
          total[r][part] = fma(minimum, broadcast(*row_sum), total[r][part]);
        }
      }
    }
    panel += 2 * PANEL * sizeof(half);
  }
  store_rows(total, out);
}

template <int ROWS>
__attribute__((noinline)) void gemm_nf4(const WeightPanel& weights, const ActivationTile& rows, float* out) {
  constexpr int WORDS = GROUP / 4;
  const uint8_t* panel = weights.panel;
  const int in = weights.in, groups = in / GROUP, groups_per_scale = weights.group / GROUP;
  Vector total[ROWS][2];
  clear(total);
  for (int end = groups_per_scale; end <= groups; end += groups_per_scale) {
    const half* numbers = (const half*)(panel + groups_per_scale * (GROUP / 2) * PANEL);
    for (int g = end - groups_per_scale; g < end; g++, panel += (GROUP / 2) * PANEL) {
      Integers acc[ROWS][2];
#pragma GCC unroll 8
      for (int r = 0; r < ROWS; r++) acc[r][0] = acc[r][1] = begin_dot(rows.shifts[r * groups + g]);
#pragma GCC unroll 8
      for (int i = 0; i < WORDS; i++) {
        Nf4Operand w[2];
#pragma GCC unroll 2
        for (int part = 0; part < 2; part++) {
          const Integers both = load_bytes(panel + (part * (GROUP / 2) + i % (WORDS / 2) * 4) * LANES);
          w[part] = nf4_operand(i < WORDS / 2 ? low_nibbles(both) : high_nibbles(both));
        }
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++) {
          const Integers v = load_word(rows.int8_values + (long)r * in + g * GROUP + 4 * i);
          acc[r][0] = dot4(acc[r][0], w[0], v);
          acc[r][1] = dot4(acc[r][1], w[1], v);
        }
      }
#pragma GCC unroll 2
      for (int part = 0; part < 2; part++) {
        const Vector scale = load_half(numbers + part * LANES) * broadcast(1 / 127.f);
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++)
          total[r][part] = fma(scale * broadcast(rows.scales[r * groups + g]), to_float(acc[r][part]), total[r][part]);
      }
    }
    panel += PANEL * sizeof(half);
  }
  store_rows(total, out);
}

struct Kernels {
  int tile;  // rows that one call takes at most
  PanelKernel of[13];
};
#define TO_THREE(kernel) {nullptr, kernel<1>, kernel<2>, kernel<3>}
#define TO_SIX(kernel) {nullptr, kernel<1>, kernel<2>, kernel<3>, kernel<4>, kernel<5>, kernel<6>}
#define TO_EIGHT(kernel) \
  {nullptr, kernel<1>, kernel<2>, kernel<3>, kernel<4>, kernel<5>, kernel<6>, kernel<7>, kernel<8>}
#define TO_TWELVE(kernel) \
  {nullptr, kernel<1>, kernel<2>, kernel<3>, kernel<4>, kernel<5>, kernel<6>, \
   kernel<7>, kernel<8>, kernel<9>, kernel<10>, kernel<11>, kernel<12>}
constexpr Kernels KERNELS[] = {  // by format
#ifdef WIDE
    {ROW_TILE, TO_TWELVE(gemm_float16)},        {INTEGER_ROW_TILE, TO_SIX(gemm_int8)},
    {INT4_ROW_TILE, TO_EIGHT(gemm_int4)}, {ROW_TILE, TO_TWELVE(gemm_fp8)},
    {INTEGER_ROW_TILE, TO_SIX(gemm_nf4)},
#else
    {ROW_TILE, TO_SIX(gemm_float16)},           {INTEGER_ROW_TILE, TO_THREE(gemm_int8)},
    {INT4_ROW_TILE, TO_EIGHT(gemm_int4)}, {ROW_TILE, TO_SIX(gemm_fp8)},
    {INTEGER_ROW_TILE, TO_THREE(gemm_nf4)},
#endif
};

}  // namespace
