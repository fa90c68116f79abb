// Vectors of the widest kind that this processor has: only this file and neon.h know its instructions.
#pragma once

#include <algorithm>
#include <cstdint>

namespace {

using half = uint16_t;

// NormalFloat's levels (QLoRA, arXiv 2305.14314) in 127ths, rounded.
alignas(16) constexpr int8_t LEVELS[16] = {-127, -88, -67, -50, -36, -23, -12, 0, 10, 20, 31, 43, 56, 71, 92, 127};

}  // namespace

#if defined(__AARCH64EL__)
#include "neon.h"
#else
#include <immintrin.h>
#if defined(__AMX_TILE__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace {

inline half round_to_half(float x) { return _cvtss_sh(x, 0); }
inline float from_half(half x) { return _cvtsh_ss(x); }
inline __m128i levels() { return _mm_load_si128((const __m128i*)LEVELS); }
inline __m128i shifted_levels() { return _mm_xor_si128(levels(), _mm_set1_epi8(-128)); }

#if defined(__AVX512F__) && defined(__AVX512BW__)
#define WIDE
#if defined(__AVX512VNNI__)
#define BYTE_DOTS  // an instruction adds up four products of bytes in every 32-bit lane
#define INSTRUCTIONS_OF_BYTES " with VNNI"
#else
#define INSTRUCTIONS_OF_BYTES ""
#endif
#if defined(__AVX512BF16__)
#define BFLOAT16_DOTS  // an instruction adds up two products of bfloat16 in every float
#define INSTRUCTIONS "AVX-512" INSTRUCTIONS_OF_BYTES " and BF16"
#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__linux__)
#define BFLOAT16_TILES  // an instruction multiplies up to 16 rows of bfloat16 with 16 columns
#define INSTRUCTIONS_WITH_TILES "AVX-512" INSTRUCTIONS_OF_BYTES ", BF16 and AMX"
#endif
#else
#define INSTRUCTIONS "AVX-512" INSTRUCTIONS_OF_BYTES
#endif
constexpr int LANES = 16;
constexpr int ROW_TILE = 12;         // rows of a matrix product that share the weights in registers: 24 accumulators
constexpr int INTEGER_ROW_TILE = 6;  // the same where sums of integers need registers beside the float ones
constexpr int QUERY_TILE = 6;     // query vectors that share keys and values in registers
constexpr int VALUE_VECTORS = 4;  // vectors of a value row per pass
using Vector = __m512;
inline Vector load(const float* p) { return _mm512_loadu_ps(p); }
inline void store(float* p, Vector v) { _mm512_storeu_ps(p, v); }
inline Vector broadcast(float x) { return _mm512_set1_ps(x); }
inline Vector load_half(const half* p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }
inline Vector load_int8(const int8_t* p) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
}
inline Vector fma(Vector a, Vector b, Vector c) { return _mm512_fmadd_ps(a, b, c); }
inline Vector maximum(Vector a, Vector b) { return _mm512_max_ps(a, b); }
inline float sum(Vector v) { return _mm512_reduce_add_ps(v); }
inline float reduce_max(Vector v) { return _mm512_reduce_max_ps(v); }
inline Vector round_nearest(Vector v) { return _mm512_roundscale_ps(v, 8); }
inline Vector times_power_of_two(Vector v, Vector n) { return _mm512_scalef_ps(v, n); }
using Integers = __m512i;
inline Integers load_bytes(const uint8_t* p) { return _mm512_loadu_si512(p); }
inline Integers broadcast_word(int32_t x) { return _mm512_set1_epi32(x); }
inline Vector to_float(Integers v) { return _mm512_cvtepi32_ps(v); }
inline void store_int8(int8_t* p, Vector v) {
  _mm_storeu_si128((__m128i*)p, _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(v)));
}
inline Integers low_nibbles(Integers v) { return _mm512_and_si512(v, _mm512_set1_epi8(15)); }
inline Integers high_nibbles(Integers v) { return _mm512_and_si512(_mm512_srli_epi16(v, 4), _mm512_set1_epi8(15)); }
inline Integers add(Integers a, Integers b) { return _mm512_add_epi32(a, b); }
inline Integers high_e4m3_to_half(Integers v) {
  return _mm512_and_si512(_mm512_srai_epi16(v, 1), _mm512_set1_epi16((short)0xbf80));
}
inline Integers low_e4m3_to_half(Integers v) { return high_e4m3_to_half(_mm512_slli_epi16(v, 8)); }
inline Vector low_floats(Integers halves) { return _mm512_cvtph_ps(_mm512_castsi512_si256(halves)); }
inline Vector high_floats(Integers halves) { return _mm512_cvtph_ps(_mm512_extracti64x4_epi64(halves, 1)); }
inline Integers load_widened(const uint8_t* p) { return _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i*)p)); }
inline void store_int16(int16_t* p, Vector v) {
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtsepi32_epi16(_mm512_cvtps_epi32(v)));
}
inline void keep_order(Integers&) {}
using Nf4Operand = Integers;  // unsigned bytes, 128 above what they stand for
inline Nf4Operand nf4_operand(Integers nibbles) {
  return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(shifted_levels()), nibbles);
}
inline Integers begin_dot(int32_t shift) { return broadcast_word(shift); }
#if defined(BFLOAT16_DOTS)
inline Vector dot_bfloat16(Vector total, Integers pairs, Integers word) {
  return _mm512_dpbf16_ps(total, (__m512bh)pairs, (__m512bh)word);
}
inline void store_bfloat16(uint16_t* p, Vector v) { _mm256_storeu_si256((__m256i*)p, (__m256i)_mm512_cvtneps_pbh(v)); }
#endif
#if defined(BFLOAT16_TILES)
// Linux (5.16) gives a process the tiles' registers when it asks for them, before any of its threads uses one.
inline bool ask_for_tiles() {
  constexpr int REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
}
const bool HAS_TILES = ask_for_tiles();
struct TileShapes {  // as LDTILECFG reads them
  uint8_t palette, start_row, reserved[14];
  uint16_t row_bytes[16];
  uint8_t rows[16];
};
// total[rows][32 columns] = the products of rows [rows][in] with a panel [in / 2][32][2], `in` a multiple of 32.
template <int ROWS>
inline void multiply_tiles(const uint16_t* rows, const uint8_t* panel, int in, float* total) {
  alignas(64) static constexpr TileShapes SHAPES = {
      1, 0, {}, {64, 64, 64, 64, 64}, {ROWS, ROWS, ROWS, 16, 16}};  // totals, totals, rows, weights, weights
  _tile_loadconfig(&SHAPES);
  _tile_zero(0);
  _tile_zero(1);
  for (int k = 0; k < in; k += 32, rows += 32, panel += 2048) {
    _tile_loadd(2, rows, 2 * (long)in);
    _tile_loadd(3, panel, 128);
    _tile_loadd(4, panel + 64, 128);
    _tile_dpbf16ps(0, 2, 3);
    _tile_dpbf16ps(1, 2, 4);
  }
  _tile_stored(0, total, 128);
  _tile_stored(1, total + 16, 128);
  _tile_release();  // or every switch to another thread would save them
}
#endif
#if defined(BYTE_DOTS)
inline Integers dot4(Integers total, Nf4Operand bytes, Integers word) {
  return _mm512_dpbusd_epi32(total, bytes, word);
}
inline Integers dot4_int4(Integers total, Integers nibbles, Integers word) { return dot4(total, nibbles, word); }
inline Integers total_of_int4(Integers total) { return total; }
#else
inline Integers dot2(Integers total, Integers shorts, Integers word) {
  return add(total, _mm512_madd_epi16(shorts, word));
}
inline Integers even(Integers s) { return _mm512_srai_epi16(_mm512_slli_epi16(s, 8), 8); }
inline Integers dot4(Integers total, Nf4Operand bytes, Integers word) {
  const Integers evens = _mm512_madd_epi16(_mm512_and_si512(bytes, _mm512_set1_epi16(255)), even(word));
  const Integers odds = _mm512_madd_epi16(_mm512_srli_epi16(bytes, 8), _mm512_srai_epi16(word, 8));
  return add(total, add(evens, odds));
}
inline Integers dot4_int4(Integers total, Integers nibbles, Integers word) {
  return _mm512_add_epi16(total, _mm512_maddubs_epi16(nibbles, word));
}
inline Integers total_of_int4(Integers total) { return _mm512_madd_epi16(total, _mm512_set1_epi16(1)); }
#endif
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#if defined(__AVXVNNI__)
#define BYTE_DOTS
#define INSTRUCTIONS "AVX2 with VNNI"
#else
#define INSTRUCTIONS "AVX2"
#endif
constexpr int LANES = 8;
constexpr int ROW_TILE = 6;
constexpr int INTEGER_ROW_TILE = 3;
constexpr int QUERY_TILE = 4;
constexpr int VALUE_VECTORS = 2;
using Vector = __m256;
inline Vector load(const float* p) { return _mm256_loadu_ps(p); }
inline void store(float* p, Vector v) { _mm256_storeu_ps(p, v); }
inline Vector broadcast(float x) { return _mm256_set1_ps(x); }
inline Vector load_half(const half* p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)); }
inline Vector load_int8(const int8_t* p) {
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)));
}
inline Vector fma(Vector a, Vector b, Vector c) { return _mm256_fmadd_ps(a, b, c); }
inline Vector maximum(Vector a, Vector b) { return _mm256_max_ps(a, b); }
inline float sum(Vector v) {
  __m128 x = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  x = _mm_add_ps(x, _mm_movehl_ps(x, x));
  return _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)));
}
inline float reduce_max(Vector v) {
  __m128 x = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  x = _mm_max_ps(x, _mm_movehl_ps(x, x));
  return _mm_cvtss_f32(_mm_max_ss(x, _mm_movehdup_ps(x)));
}
inline Vector round_nearest(Vector v) { return _mm256_round_ps(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline Vector times_power_of_two(Vector v, Vector n) {
  __m256i exponent = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
  return _mm256_mul_ps(v, _mm256_castsi256_ps(exponent));
}
using Integers = __m256i;
inline Integers load_bytes(const uint8_t* p) { return _mm256_loadu_si256((const __m256i*)p); }
inline Integers broadcast_word(int32_t x) { return _mm256_set1_epi32(x); }
inline Vector to_float(Integers v) { return _mm256_cvtepi32_ps(v); }
inline void store_int8(int8_t* p, Vector v) {
  const __m256i words = _mm256_cvtps_epi32(v);
  const __m128i shorts = _mm_packs_epi32(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
  _mm_storel_epi64((__m128i*)p, _mm_packs_epi16(shorts, shorts));
}
inline Integers load_widened(const uint8_t* p) { return _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)p)); }
inline void store_int16(int16_t* p, Vector v) {
  const __m256i words = _mm256_cvtps_epi32(v);
  _mm_storeu_si128((__m128i*)p, _mm_packs_epi32(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1)));
}
inline Integers low_nibbles(Integers v) { return _mm256_and_si256(v, _mm256_set1_epi8(15)); }
inline Integers high_nibbles(Integers v) { return _mm256_and_si256(_mm256_srli_epi16(v, 4), _mm256_set1_epi8(15)); }
inline Integers add(Integers a, Integers b) { return _mm256_add_epi32(a, b); }
inline Integers high_e4m3_to_half(Integers v) {
  return _mm256_and_si256(_mm256_srai_epi16(v, 1), _mm256_set1_epi16((short)0xbf80));
}
inline Integers low_e4m3_to_half(Integers v) { return high_e4m3_to_half(_mm256_slli_epi16(v, 8)); }
inline Vector low_floats(Integers halves) { return _mm256_cvtph_ps(_mm256_castsi256_si128(halves)); }
inline Vector high_floats(Integers halves) { return _mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1)); }
inline Integers shuffle(__m128i table, Integers v) {
  return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(table), v);
}
inline void keep_order(Integers& v) { asm("" : "+x"(v)); }
#if defined(BYTE_DOTS)
using Nf4Operand = Integers;  // unsigned bytes, 128 above what they stand for
inline Nf4Operand nf4_operand(Integers nibbles) { return shuffle(shifted_levels(), nibbles); }
inline Integers begin_dot(int32_t shift) { return broadcast_word(shift); }
inline Integers dot4(Integers total, Nf4Operand bytes, Integers word) {
  return _mm256_dpbusd_avx_epi32(total, bytes, word);
}
inline Integers dot4_int4(Integers total, Integers nibbles, Integers word) { return dot4(total, nibbles, word); }
inline Integers total_of_int4(Integers total) { return total; }
#else
// The instruction multiplies an unsigned byte with a signed one: the levels' signs move over to the word, which never
// has a -128 that would stay what it is. Two products of 127 * 127 fit 16 bits.
struct Nf4Operand {
  Integers levels, magnitudes;
};
inline Nf4Operand nf4_operand(Integers nibbles) {
  const Integers signed_levels = shuffle(levels(), nibbles);
  return {signed_levels, _mm256_abs_epi8(signed_levels)};
}
inline Integers dot2(Integers total, Integers shorts, Integers word) {
  return add(total, _mm256_madd_epi16(shorts, word));
}
inline Integers begin_dot(int32_t) { return _mm256_setzero_si256(); }
inline Integers dot4(Integers total, Nf4Operand f, Integers word) {
  const Integers pairs = _mm256_maddubs_epi16(f.magnitudes, _mm256_sign_epi8(word, f.levels));
  return add(total, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}
inline Integers dot4_int4(Integers total, Integers nibbles, Integers word) {
  return _mm256_add_epi16(total, _mm256_maddubs_epi16(nibbles, word));
}
inline Integers total_of_int4(Integers total) { return _mm256_madd_epi16(total, _mm256_set1_epi16(1)); }
#endif
#else
#error "needs AVX-512 F and BW, AVX2 with FMA and F16C, or a 64-bit Arm processor"
#endif
#if defined(BYTE_DOTS)
inline Integers int8_operand(Integers codes) { return codes; }
#endif

}  // namespace
#endif

namespace {

// high_e4m3_to_half, low_e4m3_to_half: E4M3 in the high or the low byte of 16 bits to half floats 256 times smaller,
// subnormal ones included; the other byte is ignored.
// load_widened: signed bytes as 16 bits each. dot2: total + the sum of two products of 16 bits, in every 32-bit lane.
// keep_order: GCC reads nothing that comes after before this value is there; with sixteen registers it would otherwise
// load all words of a row at once, and keep weights on the stack.
// BYTE_DOTS: products of bytes are as quick as those of 16 bits, so INT8 is laid out in words of four.
// begin_dot, dot4: the running total + the sum of four products of an NF4 level with a signed byte, in every 32-bit
// lane, exactly. `shift` is -128 times the sum of all signed bytes that will follow, none of which is -128.
// int8_operand: codes of INT8, which are 128 above what they stand for, as dot4 takes them.
// dot4_int4: total + the sum of four products of a nibble with a signed byte, for the words of one GROUP; total_of_int4
// gives their total. Without BYTE_DOTS the products of a group fit 16 bits, which saves a widening a word.

constexpr int PANEL = 2 * LANES;
constexpr int GROUP = 32;  // inputs that share a scale where weights are integers
constexpr int WORD_ROW_TILE = 8;  // rows of products whose totals are in memory and not in registers
constexpr int MAX_ROWS = std::max(ROW_TILE, WORD_ROW_TILE);
static_assert(ROW_TILE <= 12 && INTEGER_ROW_TILE <= 6 && WORD_ROW_TILE <= 8 && QUERY_TILE <= 6,
              "the tables of kernels end there");
static_assert(GROUP / 2 * 15 * 127 <= 32767, "dot4_int4 adds up GROUP / 2 products in 16 bits");
static_assert(GROUP * 128L * 32768 <= 2147483647, "dot2 adds up the products of a group in 32 bits");
constexpr int BLOCK = 16;  // tokens of a KV block
constexpr int BLOCK_VECTORS = BLOCK / LANES;
constexpr float HALF_MAX = 65504.f;

inline half to_half(float x) { return round_to_half(std::min(std::max(x, -HALF_MAX), HALF_MAX)); }
inline Vector load_number(const half* p) { return load_half(p); }
inline Vector load_number(const int8_t* p) { return load_int8(p); }

// 2^x for x <= 0: exponent and a polynomial (Taylor of 2^f on [-1/2, 1/2], error below 2e-7).
inline Vector exp2(Vector x) {
  x = maximum(x, broadcast(-126.f));
  const Vector whole = round_nearest(x), f = x - whole;
  Vector p = broadcast(1.5403530e-4f);
  for (float c : {1.3333558e-3f, 9.6181291e-3f, 5.5504109e-2f, 2.4022651e-1f, 6.9314718e-1f, 1.f})
    p = fma(p, f, broadcast(c));
  return times_power_of_two(p, whole);
}

inline Vector silu(Vector x) {
  const Vector one = broadcast(1.f), magnitude = maximum(x, broadcast(0.f) - x);
  const Vector e = exp2(magnitude * broadcast(-1.44269504f));  // exp(-|x|), which cannot overflow
  const Vector sigmoid_of_magnitude = one / (one + e);
  const Vector positive = maximum(x, broadcast(0.f)) * sigmoid_of_magnitude;
  const Vector negative = (x - maximum(x, broadcast(0.f))) * (e * sigmoid_of_magnitude);
  return positive + negative;
}

}  // namespace
