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

// Quantises a row to the integers that the weights take, in their input order, with one scale for each group.
void quantize_row(const float* all, const Linear& weights, int row, Activations& to) {
  const int in = weights.in;
  const bool to_int8 = weights.takes_int8(), to_int16 = weights.takes_int16();
  if (!to_int8 && !to_int16) return;
  for (int g = 0; g < in / GROUP; g++) {
    const long group = (long)row * (in / GROUP) + g;
    alignas(64) float gathered[GROUP];
    if (weights.order)
      for (int i = 0; i < GROUP; i++) gathered[i] = all[weights.order[g * GROUP + i]];
    const float* x = weights.order ? gathered : all + g * GROUP;
    Vector top = broadcast(0.f), zeros = broadcast(0.f);
    for (int i = 0; i < GROUP; i += LANES) {
      const Vector v = load(x + i);
      top = maximum(top, maximum(v, broadcast(0.f) - v));
      zeros = fma(v, broadcast(0.f), zeros);  // NaN if a value is NaN, which the maximum may miss
    }
    const float peak = reduce_max(top), nan_if_any = sum(zeros);
    if (to_int16) {
      const Vector inverse = broadcast(peak > 0.f ? 32767.f / peak : 0.f);
      for (int i = 0; i < GROUP; i += LANES)
        store_int16(&to.int16_values[group * GROUP + i], round_nearest(load(x + i) * inverse));
      to.int16_scales[group] = peak / 32767.f + nan_if_any;
    }
    if (to_int8) {
      const Vector inverse = broadcast(peak > 0.f ? 127.f / peak : 0.f);
      Vector total = broadcast(0.f);
      for (int i = 0; i < GROUP; i += LANES) {
        const Vector whole = round_nearest(load(x + i) * inverse);
        store_int8(&to.int8_values[group * GROUP + i], whole);
        total = total + whole;
      }
      const float whole = sum(total);
      to.scales[group] = peak / 127.f + nan_if_any;
      to.sums[group] = to.scales[group] * whole;
      to.shifts[group] = -128 * (int32_t)whole;
    }
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
  if (!weights.takes_int8() && !weights.takes_int16()) return;
  for_each_row(rows, [&](int row) { quantize_row(x + row * stride, weights, row, to); });
}

}  // namespace
