// Kernels of weights that are integers, or levels that are: products of bytes or of 16 bits, added up as integers.
//
// Rows are rounded for them in activations.h: to 16 bits for gemm_int8, else to one digit or two, each a byte. gemm_nf4
// leaves the low ones out, which would take it a third longer; NF4's own rounding loses a hundred times as much.
#pragma once

#include <cstdint>
#include <cstring>

#include "gemm_kernels.h"
#include "model.h"
#include "simd.h"

namespace {

constexpr int WORDS = GROUP / 4;

// How a format stores GROUP inputs of half a panel, in BYTES for each column, and the numbers after a group.
struct Int4Words {
  static constexpr int BYTES = GROUP / 2, NUMBERS = 2;
  static constexpr bool HAS_MINIMA = true;
  static void unpack(const uint8_t* p, Integers (&w)[WORDS]) {
#pragma GCC unroll 4
    for (int i = 0; i < WORDS / 2; i++) {
      const Integers both = load_bytes(p + i * 4 * LANES);
      w[i] = low_nibbles(both);
      w[i + WORDS / 2] = high_nibbles(both);
    }
  }
  static Integers begin(int32_t) { return broadcast_word(0); }
  static Integers end(Integers total) { return total_of_int4(total); }
  static Integers dot(Integers total, Integers w, Integers word) { return dot4_int4(total, w, word); }
  static Vector scale(const WeightPanel&, const half* numbers, int part) { return load_half(numbers + part * LANES); }
};

#ifdef BYTE_DOTS
struct Nf4Words {
  static constexpr int BYTES = GROUP / 2, NUMBERS = 1;
  static constexpr bool HAS_MINIMA = false;
  static void unpack(const uint8_t* p, Integers (&w)[WORDS]) {
    Int4Words::unpack(p, w);
#pragma GCC unroll 8
    for (int i = 0; i < WORDS; i++) w[i] = nf4_operand(w[i]);
  }
  static Integers begin(int32_t shift) { return begin_dot(shift); }
  static Integers end(Integers total) { return total; }
  static Integers dot(Integers total, Integers w, Integers word) { return dot4(total, w, word); }
  static Vector scale(const WeightPanel&, const half* numbers, int part) {
    return load_half(numbers + part * LANES) * broadcast(1 / 127.f);
  }
};

struct Int8Words {
  static constexpr int BYTES = GROUP, NUMBERS = 1;
  static constexpr bool HAS_MINIMA = false;
  static void unpack(const uint8_t* p, Integers (&w)[WORDS]) {
#pragma GCC unroll 8
    for (int i = 0; i < WORDS; i++) w[i] = int8_operand(load_bytes(p + i * 4 * LANES));
  }
  static Integers begin(int32_t shift) { return begin_dot(shift); }
  static Integers end(Integers total) { return total; }
  static Integers dot(Integers total, Integers w, Integers word) { return dot4(total, w, word); }
  static Vector scale(const WeightPanel& weights, const half* numbers, int part) {
    return weights.group ? load_half(numbers + part * LANES) * broadcast(1 / 128.f)
                         : load(weights.scales + part * LANES);
  }
};
#endif

// The sum of the products of GROUP digits in every lane.
template <class Words>
inline Vector dots(const Integers (&w)[WORDS], const int8_t* digits, int32_t shift) {
  Integers sum = Words::begin(shift);
#pragma GCC unroll 8
  for (int i = 0; i < WORDS; i++) {
    sum = Words::dot(sum, w[i], load_word(digits + 4 * i));
    if (i % 2) keep_order(sum);
  }
  return to_float(Words::end(sum));
}

// Rows follow each other within a group of half a panel, whose weights stay in registers, unpacked once for all rows.
// The totals lie on the stack, for they are touched once a group: registers that held them would be weights' or sums'.
// Then come the rows that have low digits in this group, as if they were more rows: a branch for each row would be
// mispredicted too often.
template <class Words, int ROWS>
__attribute__((noinline)) void gemm_words(const WeightPanel& weights, const ActivationTile& rows, float* out) {
  const uint8_t* panel = weights.panel;
  const int in = weights.in, groups = in / GROUP, groups_per_scale = weights.group ? weights.group / GROUP : groups;
  Vector total[ROWS][2];
  clear(total);
  for (int end = groups_per_scale; end <= groups; end += groups_per_scale) {
    const half* numbers = (const half*)(panel + groups_per_scale * Words::BYTES * PANEL);
    for (int g = end - groups_per_scale; g < end; g++, panel += Words::BYTES * PANEL) {
      uint64_t has_low = 0;  // a byte for each row
      std::memcpy(&has_low, rows.has_low + g * rows.has_low_stride, ROWS);
#pragma GCC unroll 1
      for (int part = 0; part < 2; part++) {
        Integers w[WORDS];
        Words::unpack(panel + part * Words::BYTES * LANES, w);
        const Vector scale = Words::scale(weights, numbers, part);
        Vector minimum;
        if constexpr (Words::HAS_MINIMA) minimum = load_half(numbers + PANEL + part * LANES);
        const int8_t* x = rows.high + g * GROUP;
        const DigitGroup* row = rows.groups + g;
#pragma GCC unroll 1
        for (int r = 0; r < ROWS; r++, x += in, row += groups) {
          const Vector products = dots<Words>(w, x, row->high_shift);
          total[r][part] = fma(scale * broadcast(row->high_scale), products, total[r][part]);
          if constexpr (Words::HAS_MINIMA) total[r][part] = fma(minimum, broadcast(row->sum), total[r][part]);
        }
        for (uint64_t left = has_low; left; left &= left - 1) {
          const int r = __builtin_ctzll(left) / 8;
          const DigitGroup& group = rows.groups[(long)r * groups + g];
          const Vector products = dots<Words>(w, rows.low + (long)r * in + g * GROUP, group.low_shift);
          total[r][part] = fma(scale * broadcast(group.low_scale), products, total[r][part]);
        }
      }
    }
    if (weights.group) panel += Words::NUMBERS * PANEL * sizeof(half);
  }
  store_rows(total, out);
}

// One row: the words of both halves of a panel pass by, with no need to keep them.
template <class Words>
__attribute__((noinline)) void gemm_words_of_one(const WeightPanel& weights, const ActivationTile& rows, float* out) {
  const uint8_t* panel = weights.panel;
  const int in = weights.in, groups = in / GROUP, groups_per_scale = weights.group ? weights.group / GROUP : groups;
  Vector total[2] = {broadcast(0.f), broadcast(0.f)};
  for (int end = groups_per_scale; end <= groups; end += groups_per_scale) {
    const half* numbers = (const half*)(panel + groups_per_scale * Words::BYTES * PANEL);
    for (int g = end - groups_per_scale; g < end; g++, panel += Words::BYTES * PANEL) {
      const DigitGroup& row = rows.groups[g];
      const int8_t *high = rows.high + g * GROUP, *low = rows.low + g * GROUP;
      const bool has_low = rows.has_low[g * rows.has_low_stride];
#pragma GCC unroll 2
      for (int part = 0; part < 2; part++) {
        Integers w[WORDS];
        Words::unpack(panel + part * Words::BYTES * LANES, w);
        const Vector scale = Words::scale(weights, numbers, part);
        total[part] = fma(scale * broadcast(row.high_scale), dots<Words>(w, high, row.high_shift), total[part]);
        if constexpr (Words::HAS_MINIMA)
          total[part] = fma(load_half(numbers + PANEL + part * LANES), broadcast(row.sum), total[part]);
        if (has_low)
          total[part] = fma(scale * broadcast(row.low_scale), dots<Words>(w, low, row.low_shift), total[part]);
      }
    }
    if (weights.group) panel += Words::NUMBERS * PANEL * sizeof(half);
  }
  store(out, total[0]);
  store(out + LANES, total[1]);
}

#ifndef BYTE_DOTS
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

template <int ROWS>
__attribute__((noinline)) void gemm_nf4(const WeightPanel& weights, const ActivationTile& rows, float* out) {
  const uint8_t* panel = weights.panel;
  const int in = weights.in, groups = in / GROUP, groups_per_scale = weights.group / GROUP;
  Vector total[ROWS][2];
  clear(total);
  for (int end = groups_per_scale; end <= groups; end += groups_per_scale) {
    const half* numbers = (const half*)(panel + groups_per_scale * (GROUP / 2) * PANEL);
    for (int g = end - groups_per_scale; g < end; g++, panel += (GROUP / 2) * PANEL) {
      Integers acc[ROWS][2];
#pragma GCC unroll 8
      for (int r = 0; r < ROWS; r++) acc[r][0] = acc[r][1] = begin_dot(rows.groups[r * groups + g].high_shift);
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
          const Integers v = load_word(rows.high + (long)r * in + g * GROUP + 4 * i);
          acc[r][0] = dot4(acc[r][0], w[0], v);
          acc[r][1] = dot4(acc[r][1], w[1], v);
        }
      }
#pragma GCC unroll 2
      for (int part = 0; part < 2; part++) {
        const Vector scale = load_half(numbers + part * LANES) * broadcast(1 / 127.f);
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++)
          total[r][part] = fma(scale * broadcast(rows.groups[r * groups + g].high_scale), to_float(acc[r][part]),
                               total[r][part]);
      }
    }
    panel += PANEL * sizeof(half);
  }
  store_rows(total, out);
}
#endif

}  // namespace
