// SPDX-License-Identifier: Apache-2.0
// Owns the fp8 conversion that kernels use, on a CPU. A half is held as a float: every finite e4m3
// value is one in both.
#pragma once

#include <cmath>

#include "cuda_bf16.h"

using __nv_fp8x2_storage_t = uint16_t;
enum __nv_fp8_interpretation_t { __NV_E4M3 };

struct __half2_raw {
  float x, y;
};
struct __half2 {
  float x, y;
  explicit __half2(const __half2_raw &raw) : x(raw.x), y(raw.y) {}
};

// Sign, four bits of exponent with bias 7, three bits of mantissa; no infinity. NaN is not kept.
inline float float_of_e4m3(uint8_t bits) {
  const int exponent = bits >> 3 & 15, mantissa = bits & 7;
  const float size = exponent == 0 ? std::ldexp(static_cast<float>(mantissa), -9)
                                   : std::ldexp(static_cast<float>(8 + mantissa), exponent - 10);
  return bits & 0x80 ? -size : size;
}
inline __half2_raw __nv_cvt_fp8x2_to_halfraw2(__nv_fp8x2_storage_t pair,
                                              __nv_fp8_interpretation_t) {
  return {float_of_e4m3(pair & 0xff), float_of_e4m3(pair >> 8)};
}
inline float2 __half22float2(const __half2 &pair) { return {pair.x, pair.y}; }
