// Rows made ready for a product: normed, and rounded to what the weights want.
#pragma once

#include <cmath>

#include "model.h"
#include "vectors.h"

namespace {

// Does something for every row and ends with a barrier; a single row is done by every thread, each in its own memory.
template <class Do>
void each_row(int rows, Do&& work) {
  if (rows == 1) {
    work(0);
    return;
  }
#pragma omp for schedule(static)
  for (int row = 0; row < rows; row++) work(row);
}

// Rounds a row to what the weights that it will be multiplied with want, in their order, with a scale for each group.
void round_row(const float* all, const Linear& weights, int row, Rows& to) {
  const int in = weights.in;
  const bool bytes = weights.wants_int8(), shorts = weights.wants_int16();
  if (!bytes && !shorts) return;
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
      zeros = fma(v, broadcast(0.f), zeros);  // NaN where a value is none, which the maximum may overlook
    }
    const float most = largest(top), nothing = sum(zeros);
    if (shorts) {
      const Vector inverse = broadcast(most > 0.f ? 32767.f / most : 0.f);
      for (int i = 0; i < GROUP; i += LANES) store_int16(&to.shorts[group * GROUP + i], nearest(load(x + i) * inverse));
      to.short_scales[group] = most / 32767.f + nothing;
    }
    if (bytes) {
      const Vector inverse = broadcast(most > 0.f ? 127.f / most : 0.f);
      Vector total = broadcast(0.f);
      for (int i = 0; i < GROUP; i += LANES) {
        const Vector whole = nearest(load(x + i) * inverse);
        store_int8(&to.rounded[group * GROUP + i], whole);
        total = total + whole;
      }
      const float whole = sum(total);
      to.scales[group] = most / 127.f + nothing;
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

// The norm of some rows, ready for a product with `weights`.
void norm_rows(const Model& m, const float* x, const float* norm, int rows, const int32_t* which, const Linear& weights,
               Rows& to) {
  each_row(rows, [&](int row) {
    float* normed = to.floats.data() + (long)row * m.hidden;
    rms_norm(x + (long)(which ? which[row] : row) * m.hidden, norm, m.hidden, m.eps, normed);
    round_row(normed, weights, row, to);
  });
}

// Rows that are floats already, ready for a product with `weights`.
void round_rows(const float* x, long stride, int rows, const Linear& weights, Rows& to) {
  if (!weights.wants_int8() && !weights.wants_int16()) return;
  each_row(rows, [&](int row) { round_row(x + row * stride, weights, row, to); });
}

}  // namespace
