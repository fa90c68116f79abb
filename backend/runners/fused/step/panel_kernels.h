// Some rows times one panel of a matrix, for each format that a panel may have.
//
// A matrix lies in panels of PANEL output columns, so that a kernel reads one stream. A group is as many
// inputs as share a scale, a multiple of GROUP; "words" are [group / GROUP][2][4][LANES][4] bytes, of which byte i of a
// vector holds word i of GROUP inputs in its low half and word i + 4 in its high half
//   half floats   [panel][in][PANEL]
//   bytes         [panel][in / 2][PANEL][2], weight = scale of the column * byte; or, where a group shares a scale,
//                 [panel][in / group]{ bytes [group / 2][PANEL][2], scales [PANEL] }, weight = scale * byte / 128
//   nibbles       [panel][in / group]{ words, scales [PANEL], minima [PANEL] }, weight = scale * nibble + minimum
//   small floats  [panel][in / 2][PANEL]{ second, first }, weight = scale of the column * E4M3 (arXiv 2209.05433) / 256
//   levels        [panel][in / group]{ words, scales [PANEL] }, weight = scale * LEVELS[nibble] / 127
// A panel of gate columns is followed by the panel of up columns that belong to them, which may be of another format.
#pragma once

#include <cstdint>
#include <cstring>

#include "vectors.h"

namespace {

// A kernel multiplies ROWS rows with one panel: out[r][c] = sum over k of x[r][k] * weight[k][c], k ascending.
// Separate functions with a plain buffer as their only output keep the accumulators in registers; the pragmas unroll
// the loops that index them.
struct Columns {
  const uint8_t* panel;
  const float* scales;
  int in, group;
};
struct Operand {
  const float* x;
  long stride;
  const int8_t* rounded;
  const float *scales, *sums;
  const int32_t* shifts;
  const int16_t* shorts;
  const float* short_scales;
};
using PanelKernel = void (*)(const Columns& columns, const Operand& rows, float* out);

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
__attribute__((noinline)) void multiply_halves(const Columns& columns, const Operand& rows, float* out) {
  const half* panel = (const half*)columns.panel;
  const int in = columns.in;
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
__attribute__((noinline)) void multiply_small_floats(const Columns& columns, const Operand& rows, float* out) {
  const uint8_t* panel = columns.panel;
  const int in = columns.in;
  const float* x = rows.x;
  const long stride = rows.stride;
  Vector acc[ROWS][2];
  clear(acc);
  for (int k = 0; k < in; k += 2, panel += 2 * PANEL, x += 2) {
    const Integers both = load_bytes(panel);
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++) {
      const Integers halves = i == 0 ? first_halves(both) : second_halves(both);
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
    store(out + r * PANEL, acc[r][0] * load(columns.scales));
    store(out + r * PANEL + LANES, acc[r][1] * load(columns.scales + LANES));
  }
}

inline Integers word_of(const void* p) {
  int32_t word;
  std::memcpy(&word, p, sizeof word);
  return broadcast_word(word);
}

template <int ROWS>
__attribute__((noinline)) void multiply_bytes(const Columns& columns, const Operand& rows, float* out) {
  const uint8_t* panel = columns.panel;
  const int in = columns.in, groups = in / GROUP, together = columns.group ? columns.group / GROUP : groups;
  Vector total[ROWS][2];
  clear(total);
  for (int end = together; end <= groups; end += together) {
    const half* numbers = (const half*)(panel + together * GROUP * PANEL);
    Vector scale[2];
#pragma GCC unroll 2
    for (int part = 0; part < 2; part++)
      scale[part] = columns.group ? load_half(numbers + part * LANES) * broadcast(1 / 128.f)
                                  : load(columns.scales + part * LANES);
    for (int g = end - together; g < end; g++) {
      const int16_t* x = rows.shorts + g * GROUP;
      Integers acc[ROWS][2];
#pragma GCC unroll 8
      for (int r = 0; r < ROWS; r++) acc[r][0] = acc[r][1] = broadcast_word(0);
#pragma GCC unroll 2  // with more GCC does all products first, and keeps them on the stack
      for (int i = 0; i < GROUP / 2; i++, panel += 2 * PANEL) {
        const Integers w0 = load_widened(panel), w1 = load_widened(panel + 2 * LANES);
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++) {
          const Integers v = word_of(x + (long)r * in + 2 * i);
          acc[r][0] = dot2(acc[r][0], w0, v);
          acc[r][1] = dot2(acc[r][1], w1, v);
        }
      }
#pragma GCC unroll 8
      for (int r = 0; r < ROWS; r++) {
        const Vector row_scale = broadcast(rows.short_scales[r * groups + g]);
#pragma GCC unroll 2
        for (int part = 0; part < 2; part++)
          total[r][part] = fma(to_float(acc[r][part]), scale[part] * row_scale, total[r][part]);
      }
    }
    if (columns.group) panel += PANEL * sizeof(half);
  }
  store_rows(total, out);
}

// Rows follow each other within a group of half a panel, whose weights stay in registers, unpacked once for all rows.
// The totals lie on the stack, for they are touched once a group: registers that held them would be weights' or sums'.
template <int ROWS>
__attribute__((noinline)) void multiply_nibbles(const Columns& columns, const Operand& rows, float* out) {
  constexpr int WORDS = GROUP / 4;
  const uint8_t* panel = columns.panel;
  const int in = columns.in, groups = in / GROUP, together = columns.group / GROUP;
  Vector total[ROWS][2];
  clear(total);
  for (int end = together; end <= groups; end += together) {
    const half* numbers = (const half*)(panel + together * (GROUP / 2) * PANEL);
    for (int g = end - together; g < end; g++, panel += (GROUP / 2) * PANEL) {
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
        const int8_t* x = rows.rounded + g * GROUP;
        const float *row_scale = rows.scales + g, *row_sum = rows.sums + g;
#pragma GCC unroll 1
        for (int r = 0; r < ROWS; r++, x += in, row_scale += groups, row_sum += groups) {
          Integers acc = broadcast_word(0);
#pragma GCC unroll 8
          for (int i = 0; i < WORDS; i++) acc = dot4_small(acc, w[i], word_of(x + 4 * i));
          const Vector products = scale * broadcast(*row_scale);
          total[r][part] = fma(products, to_float(total_of_small(acc)), total[r][part]);
          total[r][part] = fma(minimum, broadcast(*row_sum), total[r][part]);
        }
      }
    }
    panel += 2 * PANEL * sizeof(half);
  }
  store_rows(total, out);
}

template <int ROWS>
__attribute__((noinline)) void multiply_levels(const Columns& columns, const Operand& rows, float* out) {
  constexpr int WORDS = GROUP / 4;
  const uint8_t* panel = columns.panel;
  const int in = columns.in, groups = in / GROUP, together = columns.group / GROUP;
  Vector total[ROWS][2];
  clear(total);
  for (int end = together; end <= groups; end += together) {
    const half* numbers = (const half*)(panel + together * (GROUP / 2) * PANEL);
    for (int g = end - together; g < end; g++, panel += (GROUP / 2) * PANEL) {
      Integers acc[ROWS][2];
#pragma GCC unroll 8
      for (int r = 0; r < ROWS; r++) acc[r][0] = acc[r][1] = begin_dot(rows.shifts[r * groups + g]);
#pragma GCC unroll 8
      for (int i = 0; i < WORDS; i++) {
        Factors w[2];
#pragma GCC unroll 2
        for (int part = 0; part < 2; part++) {
          const Integers both = load_bytes(panel + (part * (GROUP / 2) + i % (WORDS / 2) * 4) * LANES);
          w[part] = of_levels(i < WORDS / 2 ? low_nibbles(both) : high_nibbles(both));
        }
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++) {
          const Integers v = word_of(rows.rounded + (long)r * in + g * GROUP + 4 * i);
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
    {ROW_TILE, TO_TWELVE(multiply_halves)},        {INTEGER_ROW_TILE, TO_SIX(multiply_bytes)},
    {NIBBLE_ROW_TILE, TO_EIGHT(multiply_nibbles)}, {ROW_TILE, TO_TWELVE(multiply_small_floats)},
    {INTEGER_ROW_TILE, TO_SIX(multiply_levels)},
#else
    {ROW_TILE, TO_SIX(multiply_halves)},           {INTEGER_ROW_TILE, TO_THREE(multiply_bytes)},
    {NIBBLE_ROW_TILE, TO_EIGHT(multiply_nibbles)}, {ROW_TILE, TO_SIX(multiply_small_floats)},
    {INTEGER_ROW_TILE, TO_THREE(multiply_levels)},
#endif
};

}  // namespace
