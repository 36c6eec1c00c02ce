// SPDX-License-Identifier: Apache-2.0
// Owns the order of a request's misses: ascending host row, whatever order they were found in.
//
// Rows are spread over buckets by a monotone map of [lowest, highest], counted, grouped, and
// ranked inside their bucket by comparison. The result is a function of the set alone: the order
// in which atomics arrive decides only where a row waits inside its bucket.
#pragma once

#include "hotpage/resolve_layout.h"
#include "hotpage/warp.cuh"

namespace hotpage {

// Monotone map of host rows to buckets.
struct BucketMap {
  uint32_t lowest;
  float buckets_per_row;

  __device__ BucketMap(uint32_t lowest_row, uint32_t highest_row)
      : lowest(lowest_row),
        buckets_per_row(static_cast<float>(kRankBuckets) /
                        (static_cast<float>(highest_row - lowest_row) + 1.0f)) {}

  // OK as an order because every step (subtract, convert, multiply, truncate) is monotone.
  __device__ __forceinline__ uint32_t operator()(int32_t host_row) const {
    const float scaled = static_cast<float>(static_cast<uint32_t>(host_row) - lowest) *
                         buckets_per_row;
    const uint32_t bucket = static_cast<uint32_t>(scaled);
    return bucket < kRankBuckets ? bucket : kRankBuckets - 1;
  }
};

// Turns bucket counts into the first rank of each bucket. Ends with a barrier; `totals` is free
// for reuse after it. kThreads: of the block.
template <int kThreads>
__device__ __forceinline__ void scan_buckets(uint32_t *buckets,
                                             WarpWords<kThreads / kWarpSize> *totals) {
  constexpr int kPieces = kRankBuckets / 4;
  constexpr int kPerThread = (kPieces + kThreads - 1) / kThreads;
  uint4 *pieces = reinterpret_cast<uint4 *>(buckets);
  const int first = static_cast<int>(threadIdx.x) * kPerThread;
  uint32_t sum = 0;
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    if (first + i < kPieces) {
      const uint4 c = pieces[first + i];
      sum += c.x + c.y + c.z + c.w;
    }
  }
  uint32_t warp_total;
  const uint32_t before = warp_exclusive_sum(sum, &warp_total);
  totals->put(warp_total);
  __syncthreads();  // orders every warp's total before the sums below
  uint32_t rank = totals->sum_before() + before;
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    if (first + i < kPieces) {
      const uint4 c = pieces[first + i];
      uint4 start;
      start.x = rank;
      start.y = start.x + c.x;
      start.z = start.y + c.y;
      start.w = start.z + c.z;
      rank = start.w + c.w;
      pieces[first + i] = start;
    }
  }
  __syncthreads();  // orders the bucket starts before whoever groups by them
}

// Ranks the `num_rows` rows of `bucketed` inside their buckets and writes them to `sorted` in
// order. `bucket_ends` holds, per bucket, one past the last rank.
__device__ __forceinline__ void rank_in_buckets(const int32_t *bucketed,
                                                const uint32_t *bucket_ends, const BucketMap &map,
                                                uint32_t num_rows, int32_t *sorted) {
  for (uint32_t i = threadIdx.x; i < num_rows; i += kResolveThreads) {
    const int32_t row = bucketed[i];
    const uint32_t bucket = map(row);
    const uint32_t first = bucket == 0 ? 0 : bucket_ends[bucket - 1];
    const uint32_t end = bucket_ends[bucket];
    uint32_t rank = first;
    for (uint32_t j = first; j < end; ++j) rank += bucketed[j] < row;
    sorted[rank] = row;
  }
}

}  // namespace hotpage
