// SPDX-License-Identifier: Apache-2.0
// Owns warp-level helpers and block-wide reductions that cost one barrier.
#pragma once

#include <cstdint>

namespace hotpage {

constexpr int kWarpSize = 32;
constexpr unsigned kFullWarp = 0xffffffffu;

// ceil(2^32 / divisor): n / divisor is the high word of n times it while n x divisor < 2^32.
// Divisor 1 has none: the result is 0.
inline uint32_t reciprocal(uint32_t divisor) {
  return static_cast<uint32_t>(((uint64_t{1} << 32) + divisor - 1) / divisor);
}

__device__ __forceinline__ int lane_id() { return static_cast<int>(threadIdx.x) & (kWarpSize - 1); }
__device__ __forceinline__ int warp_id() { return static_cast<int>(threadIdx.x) / kWarpSize; }

// Lanes below this one.
__device__ __forceinline__ unsigned lanes_below() { return (1u << lane_id()) - 1u; }

// One word per warp in shared memory. Every warp puts its word, the block meets at a barrier, and
// then any warp reduces all words by itself. A second barrier is needed before the next put only
// if no other barrier lies between the last reduce and that put.
template <int kWarps>
struct WarpWords {
  static_assert(kWarps >= 1 && kWarps <= kWarpSize, "one lane reads one warp's word");
  uint32_t words[kWarps];

  __device__ __forceinline__ void put(uint32_t word) {
    if (lane_id() == 0) words[warp_id()] = word;
  }
  __device__ __forceinline__ uint32_t get(uint32_t missing) const {
    return lane_id() < kWarps ? words[lane_id()] : missing;
  }
  __device__ __forceinline__ uint32_t sum() const { return __reduce_add_sync(kFullWarp, get(0)); }
  __device__ __forceinline__ uint32_t any() const { return __reduce_or_sync(kFullWarp, get(0)); }
  __device__ __forceinline__ uint32_t min() const {
    return __reduce_min_sync(kFullWarp, get(0xffffffffu));
  }
  __device__ __forceinline__ uint32_t max() const { return __reduce_max_sync(kFullWarp, get(0)); }
  // Sum over the warps before the caller's.
  __device__ __forceinline__ uint32_t sum_before() const {
    return __reduce_add_sync(kFullWarp, lane_id() < warp_id() ? get(0) : 0u);
  }
};

// Exclusive prefix of `value` over the warp; `total` gets the sum.
__device__ __forceinline__ uint32_t warp_exclusive_sum(uint32_t value, uint32_t *total) {
  uint32_t inclusive = value;
#pragma unroll
  for (int step = 1; step < kWarpSize; step *= 2) {
    const uint32_t below = __shfl_up_sync(kFullWarp, inclusive, step);
    if (lane_id() >= step) inclusive += below;
  }
  *total = __shfl_sync(kFullWarp, inclusive, kWarpSize - 1);
  return inclusive - value;
}

}  // namespace hotpage
