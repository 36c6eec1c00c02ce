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

// A lane's part of a list: some entries from one on, every `step`th of them.
struct Entries {
  static constexpr uint32_t kNum = 4;
  int32_t value[kNum];

  // All reads are under way when this returns.
  __device__ __forceinline__ void read(const int32_t *list, uint32_t end, uint32_t first,
                                       uint32_t step) {
#pragma unroll
    for (uint32_t i = 0; i < kNum; ++i) {
      const uint32_t at = first + i * step;
      value[i] = at < end ? __ldcg(list + at) : 0;
    }
  }
  // What those before `count` add to the list's sum.
  __device__ __forceinline__ uint64_t sum(uint32_t count, uint32_t first, uint32_t step) const {
    uint64_t sum = 0;
#pragma unroll
    for (uint32_t i = 0; i < kNum; ++i) {
      const uint32_t at = first + i * step;
      if (at < count) sum += mix_bits(uint64_t{at + 1} << 32 | static_cast<uint32_t>(value[i]));
    }
    return sum;
  }
};

// A lane's part of the sum over a list's `count` entries from `first` on, every `step`th of them.
// `entries` are the first, which need not wait for the count to be known.
__device__ __forceinline__ uint64_t sum_entries(const int32_t *list, Entries entries,
                                                uint32_t count, uint32_t first, uint32_t step) {
  uint64_t sum = entries.sum(count, first, step);
  for (uint32_t at = first + Entries::kNum * step; at < count; at += Entries::kNum * step) {
    entries.read(list, count, at, step);
    sum += entries.sum(count, at, step);
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
