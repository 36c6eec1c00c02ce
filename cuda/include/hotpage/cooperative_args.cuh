// SPDX-License-Identifier: Apache-2.0
// Owns what a cooperative copy is given, what its blocks share, and which misses a rank fetches.
#pragma once

#include <cstdint>

#include "hotpage/channel.cuh"
#include "hotpage/copy_rows.cuh"

namespace hotpage {

constexpr int kCooperativeThreads = 512;
constexpr int kCooperativeWarps = kCooperativeThreads / kWarpSize;
// Warps that meet the other ranks come first; those that read meanwhile follow. More of these would
// hold up the words of the meeting, fewer would leave the bus idle; see benches/gpu/README.md.
constexpr int kMeetingWarps = 8;
constexpr int kMeetingThreads = kMeetingWarps * kWarpSize;
constexpr int kEarlyWarps = 4;
// Has no request to look at in all but large batches.
constexpr int kClaimingWarp = kMeetingWarps - 1;
static_assert(kMaxRequests == 2 * kCooperativeThreads, "a thread takes two requests");
static_assert(kMeetingWarps + kEarlyWarps <= kCooperativeWarps, "a warp does one or the other");
static_assert(kMaxRanks * kRowsPerChunk <= kWarpSize, "a lane holds one rank's target of a row");

struct CooperativeArgs {
  hotpage_cooperative_copy_params p;
  RowUnits units;
  uint32_t layers_innermost;  // as in CopyArgs
};

inline CooperativeArgs plan_cooperative(const hotpage_cooperative_copy_params &p) {
  CooperativeArgs args = {};
  args.p = p;
  args.units = units_of_row(p.copy.row_bytes);
  args.layers_innermost = p.copy.host_row_stride > p.copy.row_bytes ? 1 : 0;
  return args;
}

struct CooperativeShared {
  uint64_t entry_sum[kMeetingWarps][2];  // each warp's part of a request's sums, host and hot
  uint64_t list_sum[kMeetingWarps];      // each warp's part of the list's digest
  uint32_t num_summed[kMeetingWarps];    // [own request]: warps that have put their part
  uint32_t first_of_request[kMaxRequests];
  uint32_t agreed[kMaxRequests / 32];    // bit r % 32 of word r / 32: all ranks list the same rows
  uint32_t same_hot[kMaxRequests / 32];  // and keep them in the same hot rows
  uint32_t num_different;                // requests that are not agreed on
  WarpWords<kCooperativeWarps> totals;
};

// The requests that a block tells the other ranks of: those whose number is its own modulo the
// blocks. So many of the warps that meet share a request that all are under way at once, where they
// can be.
struct OwnRequests {
  uint32_t num;
  uint32_t num_parts;  // warps that share a request
  uint32_t block, num_blocks;

  __device__ __forceinline__ OwnRequests(uint32_t num_requests, uint32_t block_number,
                                         uint32_t blocks)
      : num(num_requests > block_number ? (num_requests - block_number - 1) / blocks + 1 : 0),
        num_parts(num > 4 ? 1 : num > 2 ? 2 : num > 1 ? 4 : 8), block(block_number),
        num_blocks(blocks) {
    static_assert(kMeetingWarps == 8, "all warps share a single request");
  }
  __device__ __forceinline__ uint32_t request(uint32_t number) const {
    return block + number * num_blocks;
  }
  // Number of the warp's first request, and from one of its requests to the next.
  __device__ __forceinline__ uint32_t first() const { return warp_id() / num_parts; }
  __device__ __forceinline__ uint32_t num_at_once() const { return kMeetingWarps / num_parts; }
  // The lane's first entry of a list, and from one of its entries to the next.
  __device__ __forceinline__ uint32_t first_entry() const {
    return warp_id() % num_parts * kWarpSize + lane_id();
  }
  __device__ __forceinline__ uint32_t step() const { return num_parts * kWarpSize; }
};

// Which of a request's misses are meant: those that this rank fetches for all, the others, or all.
enum class Part { kOwn, kOthers, kAll };

struct Share {
  Part part;
  uint32_t rank;
  uint32_t num_ranks;

  // Index of the first miss of a request that is the rank's own.
  __device__ __forceinline__ uint32_t first_own(uint32_t request) const {
    return (rank + num_ranks - request % num_ranks) % num_ranks;
  }
  __device__ __forceinline__ uint32_t size(uint32_t request, uint32_t count) const {
    if (part == Part::kAll) return count;
    const uint32_t first = first_own(request);
    const uint32_t own = count > first ? (count - first + num_ranks - 1) / num_ranks : 0;
    return part == Part::kOwn ? own : count - own;
  }
  // Index in the request's list of number `nth` of the share.
  __device__ __forceinline__ uint32_t index(uint32_t request, uint32_t nth) const {
    if (part == Part::kAll) return nth;
    const uint32_t first = first_own(request);
    if (part == Part::kOwn) return first + nth * num_ranks;
    return nth < first ? nth : nth + (nth - first) / (num_ranks - 1) + 1;
  }
};

// A row of one layer, as the lanes know it that look after it.
struct Fetch {
  uint64_t source;  // 0: none
  int64_t place;    // in the copy list
  int32_t hot_row;  // on this rank
  uint32_t request;
  uint32_t layer;
};

// Chunks [first, end) of a share: those of a block.
struct Slice {
  uint32_t first;
  uint32_t end;
};

}  // namespace hotpage
