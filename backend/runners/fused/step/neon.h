// Vectors of a 64-bit Arm processor, for simd.h: two registers each, so that one row keeps four sums in flight.
//
// Products of bytes take one instruction where the processor has dot products (ARMv8.2, FEAT_DotProd) and four
// elsewhere; both multiply signed bytes, so that nothing is shifted. Half floats are only converted.
#pragma once

#include <arm_neon.h>

#include <cstdint>
#include <cstring>

namespace {

#define BYTE_DOTS
#if defined(__ARM_FEATURE_DOTPROD) && defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#define BFLOAT16_DOTS
#define INSTRUCTIONS "NEON with dot products and BF16"
#elif defined(__ARM_FEATURE_DOTPROD)
#define INSTRUCTIONS "NEON with dot products"
#else
#define INSTRUCTIONS "NEON"
#endif
constexpr int LANES = 8;
constexpr int ROW_TILE = 5;  // of six rows GCC keeps sums on the stack
constexpr int INTEGER_ROW_TILE = 3;
constexpr int QUERY_TILE = 4;
constexpr int VALUE_VECTORS = 2;

inline half round_to_half(float x) {
  const __fp16 rounded = (__fp16)x;
  half bits;
  std::memcpy(&bits, &rounded, sizeof bits);
  return bits;
}
inline float from_half(half x) {
  __fp16 number;
  std::memcpy(&number, &x, sizeof number);
  return number;
}

struct Vector {
  float32x4_t low, high;
};
inline Vector operator+(Vector a, Vector b) { return {vaddq_f32(a.low, b.low), vaddq_f32(a.high, b.high)}; }
inline Vector operator-(Vector a, Vector b) { return {vsubq_f32(a.low, b.low), vsubq_f32(a.high, b.high)}; }
inline Vector operator*(Vector a, Vector b) { return {vmulq_f32(a.low, b.low), vmulq_f32(a.high, b.high)}; }
inline Vector operator/(Vector a, Vector b) { return {vdivq_f32(a.low, b.low), vdivq_f32(a.high, b.high)}; }
inline Vector load(const float* p) { return {vld1q_f32(p), vld1q_f32(p + 4)}; }
inline void store(float* p, Vector v) { vst1q_f32(p, v.low), vst1q_f32(p + 4, v.high); }
inline Vector broadcast(float x) { return {vdupq_n_f32(x), vdupq_n_f32(x)}; }
inline Vector widened(float16x8_t v) { return {vcvt_f32_f16(vget_low_f16(v)), vcvt_high_f32_f16(v)}; }
inline Vector load_half(const half* p) { return widened(vreinterpretq_f16_u16(vld1q_u16(p))); }
inline Vector load_int8(const int8_t* p) {
  const int16x8_t shorts = vmovl_s8(vld1_s8(p));
  return {vcvtq_f32_s32(vmovl_s16(vget_low_s16(shorts))), vcvtq_f32_s32(vmovl_high_s16(shorts))};
}
inline Vector fma(Vector a, Vector b, Vector c) {
  return {vfmaq_f32(c.low, a.low, b.low), vfmaq_f32(c.high, a.high, b.high)};
}
inline Vector maximum(Vector a, Vector b) { return {vmaxq_f32(a.low, b.low), vmaxq_f32(a.high, b.high)}; }
inline float sum(Vector v) { return vaddvq_f32(vaddq_f32(v.low, v.high)); }
inline float reduce_max(Vector v) { return vmaxvq_f32(vmaxq_f32(v.low, v.high)); }
inline Vector round_nearest(Vector v) { return {vrndnq_f32(v.low), vrndnq_f32(v.high)}; }

struct Integers {
  int32x4_t low, high;
};
inline Integers load_bytes(const uint8_t* p) {
  return {vreinterpretq_s32_u8(vld1q_u8(p)), vreinterpretq_s32_u8(vld1q_u8(p + 16))};
}
inline Integers broadcast_word(int32_t x) { return {vdupq_n_s32(x), vdupq_n_s32(x)}; }
inline Integers add(Integers a, Integers b) { return {vaddq_s32(a.low, b.low), vaddq_s32(a.high, b.high)}; }
inline Vector to_float(Integers v) { return {vcvtq_f32_s32(v.low), vcvtq_f32_s32(v.high)}; }
inline Integers to_integers(Vector v) { return {vcvtnq_s32_f32(v.low), vcvtnq_s32_f32(v.high)}; }
inline Vector times_power_of_two(Vector v, Vector n) {
  const Integers exponent = add(to_integers(n), broadcast_word(127));
  return v * Vector{vreinterpretq_f32_s32(vshlq_n_s32(exponent.low, 23)),
                    vreinterpretq_f32_s32(vshlq_n_s32(exponent.high, 23))};
}
inline int16x8_t to_shorts(Vector v) {
  const Integers whole = to_integers(v);
  return vqmovn_high_s32(vqmovn_s32(whole.low), whole.high);
}
inline void store_int8(int8_t* p, Vector v) { vst1_s8(p, vqmovn_s16(to_shorts(v))); }
inline void store_int16(int16_t* p, Vector v) { vst1q_s16(p, to_shorts(v)); }
template <class Do>
inline Integers of_bytes(Integers v, Do&& work) {
  return {vreinterpretq_s32_u8(work(vreinterpretq_u8_s32(v.low))),
          vreinterpretq_s32_u8(work(vreinterpretq_u8_s32(v.high)))};
}
inline Integers low_nibbles(Integers v) {
  return of_bytes(v, [](uint8x16_t bytes) { return vandq_u8(bytes, vdupq_n_u8(15)); });
}
inline Integers high_nibbles(Integers v) {
  return of_bytes(v, [](uint8x16_t bytes) { return vshrq_n_u8(bytes, 4); });
}
inline int32x4_t high_e4m3_to_half(int32x4_t v) {
  const int16x8_t shifted = vshrq_n_s16(vreinterpretq_s16_s32(v), 1);
  return vreinterpretq_s32_s16(vandq_s16(shifted, vdupq_n_s16((int16_t)0xbf80)));
}
inline Integers high_e4m3_to_half(Integers v) { return {high_e4m3_to_half(v.low), high_e4m3_to_half(v.high)}; }
inline int32x4_t low_e4m3_to_half(int32x4_t v) {
  return high_e4m3_to_half(vreinterpretq_s32_s16(vshlq_n_s16(vreinterpretq_s16_s32(v), 8)));
}
inline Integers low_e4m3_to_half(Integers v) { return {low_e4m3_to_half(v.low), low_e4m3_to_half(v.high)}; }
inline Vector low_floats(Integers halves) { return widened(vreinterpretq_f16_s32(halves.low)); }
inline Vector high_floats(Integers halves) { return widened(vreinterpretq_f16_s32(halves.high)); }
inline void keep_order(Integers&) {}

inline int32x4_t dot4(int32x4_t total, int32x4_t bytes, int32x4_t word) {
  const int8x16_t a = vreinterpretq_s8_s32(bytes), b = vreinterpretq_s8_s32(word);
#if defined(__ARM_FEATURE_DOTPROD)
  return vdotq_s32(total, a, b);
#else  // two products of -128 and 127 fit 16 bits
  return vpadalq_s16(total, vpaddq_s16(vmull_s8(vget_low_s8(a), vget_low_s8(b)), vmull_high_s8(a, b)));
#endif
}
inline Integers dot4(Integers total, Integers bytes, Integers word) {
  return {dot4(total.low, bytes.low, word.low), dot4(total.high, bytes.high, word.high)};
}
inline Integers begin_dot(int32_t) { return broadcast_word(0); }
inline Integers dot4_int4(Integers total, Integers nibbles, Integers word) { return dot4(total, nibbles, word); }
inline Integers total_of_int4(Integers total) { return total; }
inline Integers nf4_operand(Integers nibbles) {
  const uint8x16_t table = vreinterpretq_u8_s8(vld1q_s8(LEVELS));
  return of_bytes(nibbles, [table](uint8x16_t bytes) { return vqtbl1q_u8(table, bytes); });
}
inline Integers int8_operand(Integers codes) {
  return of_bytes(codes, [](uint8x16_t bytes) { return veorq_u8(bytes, vdupq_n_u8(128)); });
}
#if defined(BFLOAT16_DOTS)
inline float32x4_t dot_bfloat16(float32x4_t total, int32x4_t pairs, int32x4_t word) {
  return vbfdotq_f32(total, vreinterpretq_bf16_s32(pairs), vreinterpretq_bf16_s32(word));
}
inline Vector dot_bfloat16(Vector total, Integers pairs, Integers word) {
  return {dot_bfloat16(total.low, pairs.low, word.low), dot_bfloat16(total.high, pairs.high, word.high)};
}
inline void store_bfloat16(uint16_t* p, Vector v) {
  vst1q_u16(p, vreinterpretq_u16_bf16(vcvtq_high_bf16_f32(vcvtq_low_bf16_f32(v.low), v.high)));
}
#endif

}  // namespace
