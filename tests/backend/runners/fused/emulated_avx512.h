// AVX-512 F and BW, VNNI, BF16, AMX and AVX-VNNI in the instructions of AVX2, for the functions that step/simd.h uses.
//
// Included before everything else (g++ -include), it makes the kernels for newer processors run on any machine with
// AVX2: EMULATE_AVX512, EMULATE_VNNI, EMULATE_BF16, EMULATE_AMX and EMULATE_AVX_VNNI say which. What integers add up to
// is exact; products of bfloat16 are summed in the order of Intel's manual (VDPBF16PS, TDPBF16PS), with fused
// multiplications.
#pragma once

#include <immintrin.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>

namespace emulated {

union Floats {
  __m512 whole;
  __m256 half[2];
};
union Words {
  __m512i whole;
  __m256i half[2];
};

template <class Do>
inline __m512 of_floats(Do&& work) {
  Floats to;
  for (int i = 0; i < 2; i++) to.half[i] = work(i);
  return to.whole;
}
template <class Do>
inline __m512i of_words(Do&& work) {
  Words to;
  for (int i = 0; i < 2; i++) to.half[i] = work(i);
  return to.whole;
}
inline __m256 half_of(__m512 v, int i) { return Floats{v}.half[i]; }
inline __m256i half_of(__m512i v, int i) { return Words{v}.half[i]; }

inline __m512 loadu_ps(const float* p) { return of_floats([&](int i) { return _mm256_loadu_ps(p + 8 * i); }); }
inline void storeu_ps(float* p, __m512 v) {
  for (int i = 0; i < 2; i++) _mm256_storeu_ps(p + 8 * i, half_of(v, i));
}
inline __m512 set1_ps(float x) { return of_floats([&](int) { return _mm256_set1_ps(x); }); }
inline __m512 cvtph_ps(__m256i v) {
  return of_floats([&](int i) {
    return _mm256_cvtph_ps(i ? _mm256_extracti128_si256(v, 1) : _mm256_castsi256_si128(v));
  });
}
inline __m512 cvtepi32_ps(__m512i v) { return of_floats([&](int i) { return _mm256_cvtepi32_ps(half_of(v, i)); }); }
inline __m512 fmadd_ps(__m512 a, __m512 b, __m512 c) {
  return of_floats([&](int i) { return _mm256_fmadd_ps(half_of(a, i), half_of(b, i), half_of(c, i)); });
}
inline __m512 max_ps(__m512 a, __m512 b) {
  return of_floats([&](int i) { return _mm256_max_ps(half_of(a, i), half_of(b, i)); });
}
inline float reduce_add_ps(__m512 v) {
  float x[16], sum = 0.f;
  storeu_ps(x, v);
  for (float one : x) sum += one;
  return sum;
}
inline float reduce_max_ps(__m512 v) {
  float x[16];
  storeu_ps(x, v);
  return *std::max_element(x, x + 16);
}
inline __m512 roundscale_ps(__m512 v, int) {
  return of_floats([&](int i) { return _mm256_round_ps(half_of(v, i), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); });
}
inline __m512 scalef_ps(__m512 v, __m512 n) {
  float x[16], power[16];
  storeu_ps(x, v), storeu_ps(power, n);
  for (int i = 0; i < 16; i++) x[i] = std::ldexp(x[i], (int)std::floor(power[i]));
  return loadu_ps(x);
}
inline __m512i loadu_si512(const void* p) {
  return of_words([&](int i) { return _mm256_loadu_si256((const __m256i*)p + i); });
}
inline __m512i set1_epi32(int x) { return of_words([&](int) { return _mm256_set1_epi32(x); }); }
inline __m512i set1_epi16(short x) { return of_words([&](int) { return _mm256_set1_epi16(x); }); }
inline __m512i set1_epi8(char x) { return of_words([&](int) { return _mm256_set1_epi8(x); }); }
inline __m512i cvtepi8_epi32(__m128i v) {
  return of_words([&](int i) { return _mm256_cvtepi8_epi32(i ? _mm_srli_si128(v, 8) : v); });
}
inline __m512i cvtepi8_epi16(__m256i v) {
  return of_words([&](int i) {
    return _mm256_cvtepi8_epi16(i ? _mm256_extracti128_si256(v, 1) : _mm256_castsi256_si128(v));
  });
}
inline __m512i cvtps_epi32(__m512 v) { return of_words([&](int i) { return _mm256_cvtps_epi32(half_of(v, i)); }); }
template <class Number, class To>
inline To saturated(__m512i v) {
  int32_t x[16];
  Number narrow[16];
  std::memcpy(x, &v, sizeof x);
  const int32_t top = (1 << (8 * sizeof(Number) - 1)) - 1;
  for (int i = 0; i < 16; i++) narrow[i] = (Number)std::min(std::max(x[i], -top - 1), top);
  To to;
  std::memcpy(&to, narrow, sizeof to);
  return to;
}
inline __m128i cvtsepi32_epi8(__m512i v) { return saturated<int8_t, __m128i>(v); }
inline __m256i cvtsepi32_epi16(__m512i v) { return saturated<int16_t, __m256i>(v); }
inline __m256i castsi512_si256(__m512i v) { return half_of(v, 0); }
inline __m256i extracti64x4_epi64(__m512i v, int i) { return half_of(v, i); }
inline __m512i broadcast_i32x4(__m128i v) { return of_words([&](int) { return _mm256_broadcastsi128_si256(v); }); }
#define EMULATE_BINARY(name, intrinsic)        \
  inline __m512i name(__m512i a, __m512i b) { \
    return of_words([&](int i) { return intrinsic(half_of(a, i), half_of(b, i)); }); \
  }
EMULATE_BINARY(and_si512, _mm256_and_si256)
EMULATE_BINARY(add_epi32, _mm256_add_epi32)
EMULATE_BINARY(sub_epi32, _mm256_sub_epi32)
EMULATE_BINARY(mullo_epi32, _mm256_mullo_epi32)
EMULATE_BINARY(add_epi16, _mm256_add_epi16)
EMULATE_BINARY(madd_epi16, _mm256_madd_epi16)
EMULATE_BINARY(maddubs_epi16, _mm256_maddubs_epi16)
EMULATE_BINARY(shuffle_epi8, _mm256_shuffle_epi8)
#define EMULATE_SHIFT(name, intrinsic)     \
  inline __m512i name(__m512i a, int n) { \
    return of_words([&](int i) { return intrinsic(half_of(a, i), n); }); \
  }
EMULATE_SHIFT(srli_epi16, _mm256_srli_epi16)
EMULATE_SHIFT(srai_epi16, _mm256_srai_epi16)
EMULATE_SHIFT(slli_epi16, _mm256_slli_epi16)
EMULATE_SHIFT(slli_epi32, _mm256_slli_epi32)

inline __m256i dpbusd_avx_epi32(__m256i total, __m256i bytes, __m256i word) {
  const __m256i even = _mm256_madd_epi16(_mm256_and_si256(bytes, _mm256_set1_epi16(255)),
                                         _mm256_srai_epi16(_mm256_slli_epi16(word, 8), 8));
  const __m256i odd = _mm256_madd_epi16(_mm256_srli_epi16(bytes, 8), _mm256_srai_epi16(word, 8));
  return _mm256_add_epi32(total, _mm256_add_epi32(even, odd));
}
inline __m512i dpbusd_epi32(__m512i total, __m512i bytes, __m512i word) {
  return of_words([&](int i) { return dpbusd_avx_epi32(half_of(total, i), half_of(bytes, i), half_of(word, i)); });
}
inline __m512 dpbf16_ps(__m512 total, __m512bh pairs, __m512bh word) {
  const auto number = [](__m512bh v, int i, bool odd) {
    const __m256i bits = half_of((__m512i)v, i);
    return _mm256_castsi256_ps(odd ? _mm256_and_si256(bits, _mm256_set1_epi32((int)0xffff0000))
                                   : _mm256_slli_epi32(bits, 16));
  };
  return of_floats([&](int i) {
    const __m256 first = _mm256_fmadd_ps(number(pairs, i, true), number(word, i, true), half_of(total, i));
    return _mm256_fmadd_ps(number(pairs, i, false), number(word, i, false), first);
  });
}
inline __m256bh cvtneps_pbh(__m512 v) {
  uint32_t x[16];
  uint16_t rounded[16];
  std::memcpy(x, &v, sizeof x);
  for (int i = 0; i < 16; i++) {
    const bool nan = (x[i] & 0x7fffffff) > 0x7f800000;
    rounded[i] = nan ? (uint16_t)(x[i] >> 16 | 0x40) : (uint16_t)((x[i] + 0x7fff + (x[i] >> 16 & 1)) >> 16);
  }
  __m256bh to;
  std::memcpy(&to, rounded, sizeof to);
  return to;
}

// The tiles of a thread. Their functions stay functions, or GCC takes minutes for twelve kernels that have them all.
// What a processor refuses ends the program: no shapes, or shapes that do not fit each other.
struct Tiles {
  uint8_t shapes[64] = {};  // LDTILECFG's: palette, then bytes of a row from 16 on, then rows from 48 on
  uint8_t bytes[8][16][64] = {};

  int rows(int t) const { return shapes[48 + t]; }
  int row_bytes(int t) const { return shapes[16 + 2 * t] | shapes[17 + 2 * t] << 8; }
};
inline thread_local Tiles tiles;
inline void refuse_unless(bool legal) {
  if (!legal) std::abort();
}
__attribute__((noinline)) inline void tile_loadconfig(const void* shapes) {
  tiles = Tiles();
  std::memcpy(tiles.shapes, shapes, 64);
  refuse_unless(tiles.shapes[0] == 1);
  for (int t = 0; t < 8; t++) refuse_unless(tiles.rows(t) <= 16 && tiles.row_bytes(t) <= 64);
}
inline void tile_release() { tiles = Tiles(); }
inline void tile_zero(int t) {
  refuse_unless(tiles.rows(t) > 0);
  std::memset(tiles.bytes[t], 0, sizeof tiles.bytes[t]);
}
__attribute__((noinline)) inline void tile_loadd(int t, const void* from, long stride) {
  tile_zero(t);
  for (int row = 0; row < tiles.rows(t); row++)
    std::memcpy(tiles.bytes[t][row], (const uint8_t*)from + row * stride, tiles.row_bytes(t));
}
__attribute__((noinline)) inline void tile_stored(int t, void* to, long stride) {
  refuse_unless(tiles.rows(t) > 0);
  for (int row = 0; row < tiles.rows(t); row++)
    std::memcpy((uint8_t*)to + row * stride, tiles.bytes[t][row], tiles.row_bytes(t));
}
__attribute__((noinline)) inline void tile_dpbf16ps(int total, int left, int right) {
  const int pairs = tiles.row_bytes(left) / 4, columns = tiles.row_bytes(total) / 4;
  refuse_unless(tiles.rows(total) > 0 && tiles.rows(left) == tiles.rows(total) && tiles.rows(right) == pairs &&
                tiles.row_bytes(right) == tiles.row_bytes(total));
  const auto number = [](const uint8_t* row, int i) {
    uint16_t half;
    std::memcpy(&half, row + 2 * i, sizeof half);
    const uint32_t bits = (uint32_t)half << 16;
    float x;
    std::memcpy(&x, &bits, sizeof x);
    return x;
  };
  for (int row = 0; row < tiles.rows(total); row++) {
    float sums[2][16] = {}, so_far[16];
    for (int k = 0; k < pairs; k++)
      for (int odd = 0; odd < 2; odd++) {
        const float x = number(tiles.bytes[left][row], 2 * k + odd);
        for (int c = 0; c < columns; c++)
          sums[odd][c] = std::fma(x, number(tiles.bytes[right][k], 2 * c + odd), sums[odd][c]);
      }
    std::memcpy(so_far, tiles.bytes[total][row], sizeof so_far);
    for (int c = 0; c < columns; c++) so_far[c] += sums[0][c] + sums[1][c];
    std::memcpy(tiles.bytes[total][row], so_far, sizeof so_far);
  }
}

}  // namespace emulated

#ifdef EMULATE_AVX512
#define __AVX512F__ 1
#define __AVX512BW__ 1
#undef _mm512_loadu_ps
#define _mm512_loadu_ps emulated::loadu_ps
#undef _mm512_storeu_ps
#define _mm512_storeu_ps emulated::storeu_ps
#undef _mm512_set1_ps
#define _mm512_set1_ps emulated::set1_ps
#undef _mm512_cvtph_ps
#define _mm512_cvtph_ps emulated::cvtph_ps
#undef _mm512_cvtepi32_ps
#define _mm512_cvtepi32_ps emulated::cvtepi32_ps
#undef _mm512_fmadd_ps
#define _mm512_fmadd_ps emulated::fmadd_ps
#undef _mm512_max_ps
#define _mm512_max_ps emulated::max_ps
#undef _mm512_reduce_add_ps
#define _mm512_reduce_add_ps emulated::reduce_add_ps
#undef _mm512_reduce_max_ps
#define _mm512_reduce_max_ps emulated::reduce_max_ps
#undef _mm512_roundscale_ps
#define _mm512_roundscale_ps emulated::roundscale_ps
#undef _mm512_scalef_ps
#define _mm512_scalef_ps emulated::scalef_ps
#undef _mm512_loadu_si512
#define _mm512_loadu_si512 emulated::loadu_si512
#undef _mm512_set1_epi32
#define _mm512_set1_epi32 emulated::set1_epi32
#undef _mm512_set1_epi16
#define _mm512_set1_epi16 emulated::set1_epi16
#undef _mm512_set1_epi8
#define _mm512_set1_epi8 emulated::set1_epi8
#undef _mm512_cvtepi8_epi32
#define _mm512_cvtepi8_epi32 emulated::cvtepi8_epi32
#undef _mm512_cvtepi8_epi16
#define _mm512_cvtepi8_epi16 emulated::cvtepi8_epi16
#undef _mm512_cvtps_epi32
#define _mm512_cvtps_epi32 emulated::cvtps_epi32
#undef _mm512_cvtsepi32_epi8
#define _mm512_cvtsepi32_epi8 emulated::cvtsepi32_epi8
#undef _mm512_cvtsepi32_epi16
#define _mm512_cvtsepi32_epi16 emulated::cvtsepi32_epi16
#undef _mm512_castsi512_si256
#define _mm512_castsi512_si256 emulated::castsi512_si256
#undef _mm512_extracti64x4_epi64
#define _mm512_extracti64x4_epi64 emulated::extracti64x4_epi64
#undef _mm512_broadcast_i32x4
#define _mm512_broadcast_i32x4 emulated::broadcast_i32x4
#undef _mm512_and_si512
#define _mm512_and_si512 emulated::and_si512
#undef _mm512_add_epi32
#define _mm512_add_epi32 emulated::add_epi32
#undef _mm512_sub_epi32
#define _mm512_sub_epi32 emulated::sub_epi32
#undef _mm512_mullo_epi32
#define _mm512_mullo_epi32 emulated::mullo_epi32
#undef _mm512_add_epi16
#define _mm512_add_epi16 emulated::add_epi16
#undef _mm512_madd_epi16
#define _mm512_madd_epi16 emulated::madd_epi16
#undef _mm512_maddubs_epi16
#define _mm512_maddubs_epi16 emulated::maddubs_epi16
#undef _mm512_shuffle_epi8
#define _mm512_shuffle_epi8 emulated::shuffle_epi8
#undef _mm512_srli_epi16
#define _mm512_srli_epi16 emulated::srli_epi16
#undef _mm512_srai_epi16
#define _mm512_srai_epi16 emulated::srai_epi16
#undef _mm512_slli_epi16
#define _mm512_slli_epi16 emulated::slli_epi16
#undef _mm512_slli_epi32
#define _mm512_slli_epi32 emulated::slli_epi32
#endif
#ifdef EMULATE_VNNI
#define __AVX512VNNI__ 1
#define _mm512_dpbusd_epi32 emulated::dpbusd_epi32
#endif
#ifdef EMULATE_BF16
#define __AVX512BF16__ 1
#define _mm512_dpbf16_ps emulated::dpbf16_ps
#define _mm512_cvtneps_pbh emulated::cvtneps_pbh
#endif
#ifdef EMULATE_AMX
#define __AMX_TILE__ 1
#define __AMX_BF16__ 1
#define syscall(...) 0  // by which the kernel gives tiles
#undef _tile_loadconfig
#define _tile_loadconfig emulated::tile_loadconfig
#undef _tile_release
#define _tile_release emulated::tile_release
#undef _tile_zero
#define _tile_zero emulated::tile_zero
#undef _tile_loadd
#define _tile_loadd emulated::tile_loadd
#undef _tile_stored
#define _tile_stored emulated::tile_stored
#undef _tile_dpbf16ps
#define _tile_dpbf16ps emulated::tile_dpbf16ps
#endif
#ifdef EMULATE_AVX_VNNI
#define __AVXVNNI__ 1
#define _mm256_dpbusd_avx_epi32 emulated::dpbusd_avx_epi32
#endif
