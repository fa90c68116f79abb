// Prepares activations for a matrix product: RMSNorm, and quantisation to the integers that the weights take.
#pragma once

#include <cmath>

#include "model.h"
#include "simd.h"

namespace {

// Calls `work` for every row and ends with a barrier. A single row is computed by every thread in its own memory.
template <class Do>
void for_each_row(int rows, Do&& work) {
  if (rows == 1) {
    work(0);
    return;
  }
#pragma omp for schedule(static)
  for (int row = 0; row < rows; row++) work(row);
}

// Where the mean square of the groups' largest values is exceeded this many times, a group has two digits.
constexpr float TWO_DIGITS_ABOVE = 2.f;

// A group whose values are all below this is rounded to zeros: the inverse of a smaller number would be infinite.
constexpr float SMALLEST_PEAK = 1e-30f;

// The largest magnitude of GROUP values; NaN where one of them is, which a maximum may miss.
inline float peak_of(const float* x) {
  Vector top = broadcast(0.f), zeros = broadcast(0.f);
  for (int i = 0; i < GROUP; i += LANES) {
    const Vector v = load(x + i);
    top = maximum(top, maximum(v, broadcast(0.f) - v));
    zeros = fma(v, broadcast(0.f), zeros);
  }
  return reduce_max(top) + sum(zeros);
}

// Rounds GROUP values to one digit or, to the base 255, two.
inline void round_to_digits(const float* x, float peak, bool two, int8_t* high, int8_t* low, DigitGroup& to) {
  const float largest = two ? 255 * 127 + 127 : 127;
  const Vector inverse = broadcast(peak > SMALLEST_PEAK ? largest / peak : 0.f), base = broadcast(255.f);
  Vector highs = broadcast(0.f), lows = broadcast(0.f);
  for (int i = 0; i < GROUP; i += LANES) {
    const Vector whole = round_nearest(load(x + i) * inverse);
    const Vector first = two ? round_nearest(whole * broadcast(1 / 255.f)) : whole;
    store_int8(high + i, first);
    highs = highs + first;
    if (!two) continue;
    const Vector second = whole - first * base;
    store_int8(low + i, second);
    lows = lows + second;
  }
  const float of_high = sum(highs), of_low = sum(lows), unit = peak / largest;
  to.high_scale = two ? 255.f * unit : unit;
  to.low_scale = unit;
  to.sum = to.high_scale * of_high + (two ? to.low_scale * of_low : 0.f);
  to.high_shift = -128 * (int32_t)of_high;
  to.low_shift = -128 * (int32_t)of_low;
}

inline void round_to_int16(const float* x, float peak, int16_t* values, float& scale) {
  const Vector inverse = broadcast(peak > SMALLEST_PEAK ? 32767.f / peak : 0.f);
  for (int i = 0; i < GROUP; i += LANES) store_int16(values + i, round_nearest(load(x + i) * inverse));
  scale = peak / 32767.f;
}

// Rounds a row to what the weights take, integers in their input order with a scale for each group.
void quantize_row(const float* x, const Linear& weights, int row, Activations& to) {
  const int in = weights.in, groups = in / GROUP;
  const long first = (long)row * in;
#ifdef BFLOAT16_DOTS
  if (weights.takes_bfloat16())
    for (int i = 0; i < in; i += LANES) store_bfloat16(&to.bfloat16_values[first + i], load(x + i));
#endif
  const bool to_digits = weights.takes_digits(), to_int16 = weights.takes_int16();
  if (!to_digits && !to_int16) return;
  alignas(64) float gathered[GROUP];
  const auto values_of = [&](int g) -> const float* {
    if (!weights.order) return x + g * GROUP;
    for (int i = 0; i < GROUP; i++) gathered[i] = x[weights.order[g * GROUP + i]];
    return gathered;
  };
  DigitGroup* const of_row = &to.groups[(long)row * groups];
  float squares = 0.f;
  for (int g = 0; g < groups; g++) {
    const float peak = of_row[g].high_scale = peak_of(values_of(g));
    squares += peak * peak;
  }
  const float limit = weights.takes_low_digits() ? TWO_DIGITS_ABOVE * squares / groups : INFINITY;
  for (int g = 0; g < groups; g++) {
    const float* values = values_of(g);
    const float peak = of_row[g].high_scale;
    const long at = first + g * GROUP;
    if (to_int16) round_to_int16(values, peak, &to.int16_values[at], to.int16_scales[(long)row * groups + g]);
    if (!to_digits) continue;
    const bool two = peak * peak > limit;
    to.has_low[g * to.rows + row] = two;
    round_to_digits(values, peak, two, &to.high[at], &to.low[at], of_row[g]);
  }
}

// RMSNorm (arXiv 1910.07467) of `size` values.
void rms_norm(const float* x, const float* weight, int size, float eps, float* y) {
  Vector squares = broadcast(0.f);
  for (int i = 0; i < size; i += LANES) squares = fma(load(x + i), load(x + i), squares);
  const Vector scale = broadcast(1.f / std::sqrt(sum(squares) / size + eps));
  for (int i = 0; i < size; i += LANES) store(y + i, load(x + i) * scale * load(weight + i));
}

// RMSNorm of some rows, then quantisation for a product with `weights`.
void norm_and_quantize_rows(
    const Model& m, const float* x, const float* norm, int rows, const int32_t* which, const Linear& weights,
    Activations& to) {
  for_each_row(rows, [&](int row) {
    float* normed = to.floats.data() + (long)row * m.hidden;
    rms_norm(x + (long)(which ? which[row] : row) * m.hidden, norm, m.hidden, m.eps, normed);
    quantize_row(normed, weights, row, to);
  });
}

// Quantises float rows for a product with `weights`.
void quantize_rows(const float* x, long stride, int rows, const Linear& weights, Activations& to) {
  if (!weights.takes_digits() && !weights.takes_int16() && !weights.takes_bfloat16()) return;
  for_each_row(rows, [&](int row) { quantize_row(x + row * stride, weights, row, to); });
}

}  // namespace
