// SPDX-License-Identifier: Apache-2.0
// Owns the digest of a copy list: 64 bits that are equal for equal entries in equal order.
#pragma once

#include <cstdint>

#include "hotpage/warp.cuh"

namespace hotpage {

// A bijection of 64-bit words in which every bit depends on every bit: splitmix64's last step.
__host__ __device__ __forceinline__ uint64_t mix_bits(uint64_t word) {
  word = (word ^ (word >> 30)) * 0xbf58476d1ce4e5b9ull;
  word = (word ^ (word >> 27)) * 0x94d049bb133111ebull;
  return word ^ (word >> 31);
}

// Sum over the warp's lanes; every lane gets it.
__device__ __forceinline__ uint64_t warp_sum(uint64_t value) {
#pragma unroll
  for (int step = 1; step < kWarpSize; step *= 2) {
    value += __shfl_sync(kFullWarp, value, lane_id() ^ step);
  }
  return value;
}

// A lane's part of the sum over a list's entries from `first` on, every `step`th of them. The list
// has room for `length` entries, of which the first `count` are its own.
__device__ __forceinline__ uint64_t sum_entries(const int32_t *entries, uint32_t length,
                                                uint32_t count, uint32_t first, uint32_t step) {
  constexpr uint32_t kLoads = 4;
  uint64_t sum = 0;
  // The first reads do not wait for the count, which is itself under way.
  for (uint32_t base = first, end = length; base < end; base += kLoads * step, end = count) {
    int32_t found[kLoads];
    // All reads are under way before the first is used.
#pragma unroll
    for (uint32_t i = 0; i < kLoads; ++i) {
      const uint32_t at = base + i * step;
      found[i] = at < end ? __ldcg(entries + at) : 0;
    }
#pragma unroll
    for (uint32_t i = 0; i < kLoads; ++i) {
      const uint32_t at = base + i * step;
      if (at < count) sum += mix_bits(uint64_t{at + 1} << 32 | static_cast<uint32_t>(found[i]));
    }
  }
  return sum;
}

// The digest of a list whose entries sum up to `sum`.
__host__ __device__ __forceinline__ uint64_t digest_of_sum(uint64_t sum, uint32_t count,
                                                           uint32_t salt) {
  return mix_bits(sum + mix_bits(uint64_t{salt} << 32 | count));
}

// What a request adds to the digest of a whole list: the sum over requests is a function of which
// request has which digest.
__host__ __device__ __forceinline__ uint64_t digest_of_request(uint64_t digest, uint32_t request) {
  return mix_bits(digest + mix_bits(request + 1));
}

// The digest of all lists up to one whose requests add up to `sum`.
__host__ __device__ __forceinline__ uint64_t append_digest(uint64_t so_far, uint64_t sum) {
  return mix_bits(so_far) + sum;
}

}  // namespace hotpage
