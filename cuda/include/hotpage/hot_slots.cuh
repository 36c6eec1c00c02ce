// SPDX-License-Identifier: Apache-2.0
// Owns a block's view of one request's hot slots: their rows and stamps in registers, the hits
// among them, victims in order, and the stamps' way back to memory.
//
// Thread t takes slots 4t .. 4t+3 of every stripe of 4 x kResolveThreads slots, so that (stripe,
// thread, piece) is hot-slot order. Stamps are 16-bit epochs; 0 is a free slot.
#pragma once

#include "hotpage/resolve_layout.h"
#include "hotpage/row_policy.cuh"
#include "hotpage/row_table.cuh"
#include "hotpage/warp.cuh"

namespace hotpage {

constexpr uint32_t kNoStamp = 0xffffffffu;
constexpr uint32_t kLastEpoch = 0xffff;
constexpr uint32_t kStripeBits = (1u << kSlotsPerLoad) - 1u;
constexpr int kSlotsPerStripe = kSlotsPerLoad * kResolveThreads;

__device__ __forceinline__ uint32_t get_stamp(uint2 stamps, int piece) {
  return ((piece < 2 ? stamps.x : stamps.y) >> (16 * (piece & 1))) & 0xffffu;
}

__device__ __forceinline__ void set_stamp(uint2 *stamps, int piece, uint32_t stamp) {
  uint32_t &word = piece < 2 ? stamps->x : stamps->y;
  const int shift = 16 * (piece & 1);
  word = (word & ~(0xffffu << shift)) | (stamp << shift);
}

// Words that the victim search passes between warps; two sets, so that one barrier a round is
// enough: a set is written again only after the barrier that follows its last reader.
template <int kStripes>
struct VictimWords {
  WarpWords<kResolveWarps> equal[2][kStripes];
  WarpWords<kResolveWarps> next_oldest[2];
};

template <int kStripes>
struct HotSlots {
  static_assert(kSlotsPerLoad * kStripes <= 32, "one bit per slot of a thread");
  static constexpr int kUnroll = kStripes <= 3 ? kStripes : 1;
  // Few stripes: rows are fetched long before they are needed. Many: registers would not do.
  static constexpr bool kEarlyRows = kStripes == 1;

  int32_t *row_map;  // [hot_rows] of the state row, device memory
  uint16_t *stamps;  // [hot_rows] of the state row, device memory
  int hot_rows;
  int4 early_rows[kEarlyRows ? kStripes : 1];
  uint2 age[kStripes];
  uint32_t hits;    // bit per own slot: some row of this step reads it
  uint32_t filled;  // bit per own slot: got a miss of this step

  __device__ __forceinline__ int first_slot(int stripe) const {
    return stripe * kSlotsPerStripe + static_cast<int>(threadIdx.x) * kSlotsPerLoad;
  }

  __device__ __forceinline__ int4 load_rows(int stripe) const {
    return *reinterpret_cast<const int4 *>(row_map + first_slot(stripe));
  }

  // Brings rows and stamps to the L2 cache while the caller finds out whether it needs them: one
  // request per 128-byte line.
  // hot_rows is a multiple of 4, so a piece is inside or outside as a whole.
  __device__ __forceinline__ void prefetch() const {
#ifdef __CUDA_ARCH__
#pragma unroll kUnroll
    for (int stripe = 0; stripe < kStripes; ++stripe) {
      if (first_slot(stripe) >= hot_rows) continue;
      if (threadIdx.x % 8 == 0) {
        asm volatile("prefetch.global.L2 [%0];" ::"l"(row_map + first_slot(stripe)));
      }
      if (threadIdx.x % 16 == 0) {
        asm volatile("prefetch.global.L2 [%0];" ::"l"(stamps + first_slot(stripe)));
      }
    }
#endif
  }

  // Starts the loads.
  __device__ __forceinline__ void load() {
    hits = filled = 0;
#pragma unroll kUnroll
    for (int stripe = 0; stripe < kStripes; ++stripe) {
      const bool inside = first_slot(stripe) < hot_rows;
      if (kEarlyRows) {
        early_rows[stripe] = inside ? load_rows(stripe) : make_int4(-1, -1, -1, -1);
      }
      age[stripe] = inside ? *reinterpret_cast<const uint2 *>(stamps + first_slot(stripe))
                           : make_uint2(0, 0);
    }
  }

  // Looks every held row up in the union; a row found gives its place the hot slot. Returns the
  // oldest stamp among own slots that are not read this step.
  __device__ __forceinline__ uint32_t match(const RowTable &table) {
    uint32_t oldest = kNoStamp;
#pragma unroll kUnroll
    for (int stripe = 0; stripe < kStripes; ++stripe) {
      const int first = first_slot(stripe);
      if (first >= hot_rows) continue;
      const int4 rows = kEarlyRows ? early_rows[kEarlyRows ? stripe : 0] : load_rows(stripe);
      const int32_t held[kSlotsPerLoad] = {rows.x, rows.y, rows.z, rows.w};
      uint32_t places[kSlotsPerLoad];
      table.find<kSlotsPerLoad>(held, places);
#pragma unroll
      for (int piece = 0; piece < kSlotsPerLoad; ++piece) {
        if (places[piece] < table.num_places) {
          table.hot_slots[places[piece]] = static_cast<uint16_t>(first + piece);
          hits |= 1u << (stripe * kSlotsPerLoad + piece);
        } else {
          oldest = min(oldest, get_stamp(age[stripe], piece));
        }
      }
    }
    return oldest;
  }

  // Calls fill(rank, hot slot) for the `wanted` oldest slots that are not read this step, ranked
  // by (stamp, hot slot); returns how many there were. One round per distinct stamp: victims
  // mostly share the few oldest epochs. `oldest` is the same in every thread.
  template <class Fill>
  __device__ __forceinline__ uint32_t take_victims(uint32_t wanted, uint32_t oldest,
                                                   VictimWords<kStripes> *words, Fill &&fill) {
    uint32_t taken = 0;
    for (int set = 0; taken < wanted && oldest != kNoStamp; set ^= 1) {
      uint32_t equal_bits = 0;
      uint32_t next_oldest = kNoStamp;
#pragma unroll kUnroll
      for (int stripe = 0; stripe < kStripes; ++stripe) {
        uint32_t count = 0;
        if (first_slot(stripe) < hot_rows) {
#pragma unroll
          for (int piece = 0; piece < kSlotsPerLoad; ++piece) {
            const uint32_t bit = 1u << (stripe * kSlotsPerLoad + piece);
            const uint32_t stamp = get_stamp(age[stripe], piece);
            if (hits & bit) continue;
            if (stamp == oldest) {
              equal_bits |= bit;
              ++count;
            } else if (stamp > oldest) {
              next_oldest = min(next_oldest, stamp);
            }
          }
        }
        words->equal[set][stripe].put(__reduce_add_sync(kFullWarp, count));
      }
      words->next_oldest[set].put(__reduce_min_sync(kFullWarp, next_oldest));
      __syncthreads();  // orders every warp's counts before the ranks below
      uint32_t first_rank[kStripes];
#pragma unroll kUnroll
      for (int stripe = 0; stripe < kStripes; ++stripe) {
        const WarpWords<kResolveWarps> &counts = words->equal[set][stripe];
        const uint32_t mine = (equal_bits >> (stripe * kSlotsPerLoad)) & kStripeBits;
        first_rank[stripe] = taken + counts.sum_before() + rank_in_warp(mine);
        taken += counts.sum();
      }
      // Few of a thread's slots at a time: a loop over those, not over all slots.
      for (uint32_t left = equal_bits; left != 0; left &= left - 1) {
        const int own = __ffs(static_cast<int>(left)) - 1;
        const int in_stripe = own / kSlotsPerLoad;
        uint32_t rank = 0;
#pragma unroll kUnroll
        for (int stripe = 0; stripe < kStripes; ++stripe) {
          rank = stripe == in_stripe ? first_rank[stripe] : rank;
        }
        const uint32_t below = equal_bits & ((1u << own) - 1u);
        rank += __popc(below >> (in_stripe * kSlotsPerLoad));
        if (rank >= wanted) continue;
        filled |= 1u << own;
        fill(rank, first_slot(in_stripe) + own % kSlotsPerLoad);
      }
      oldest = words->next_oldest[set].min();
    }
    return min(taken, wanted);
  }

  // Writes the stamps of slots read or filled this step; `all` writes every stamp.
  __device__ __forceinline__ void store(uint32_t epoch, bool all) {
    const uint32_t young = (RowPolicy::kRefreshOnHit ? hits : 0u) | filled;
#pragma unroll kUnroll
    for (int stripe = 0; stripe < kStripes; ++stripe) {
      const uint32_t mine = (young >> (stripe * kSlotsPerLoad)) & kStripeBits;
      if (first_slot(stripe) >= hot_rows || (mine == 0 && !all)) continue;
      uint2 stamped = age[stripe];
#pragma unroll
      for (int piece = 0; piece < kSlotsPerLoad; ++piece) {
        if ((mine >> piece) & 1u) set_stamp(&stamped, piece, epoch);
      }
      *reinterpret_cast<uint2 *>(stamps + first_slot(stripe)) = stamped;
    }
  }

  // Replaces every stamp by its rank among the distinct stamps, so that order and ties stay and
  // epochs start again at the number of distinct stamps, which is returned. `scratch` is zeroed
  // shared memory of 2 x 2,048 words and is zeroed again at the end. Runs once in about 2^15
  // resolves of a state row.
  __device__ __forceinline__ uint32_t renormalise(uint32_t *scratch,
                                               WarpWords<kResolveWarps> *totals);

 private:
  // Slots of lower lanes in this warp's `mine`, in hot-slot order.
  __device__ __forceinline__ uint32_t rank_in_warp(uint32_t mine) const {
    uint32_t rank = 0;
#pragma unroll
    for (int piece = 0; piece < kSlotsPerLoad; ++piece) {
      rank += __popc(__ballot_sync(kFullWarp, (mine >> piece) & 1u) & lanes_below());
    }
    return rank;
  }
};

template <int kStripes>
__device__ __forceinline__ uint32_t HotSlots<kStripes>::renormalise(
    uint32_t *scratch, WarpWords<kResolveWarps> *totals) {
  constexpr int kWords = (kLastEpoch + 1) / 32;
  constexpr int kPerThread = kWords / kResolveThreads;
  static_assert(kWords % kResolveThreads == 0, "threads take whole runs of words");
  uint32_t *present = scratch;
  uint32_t *ranks = scratch + kWords;
#pragma unroll kUnroll
  for (int stripe = 0; stripe < kStripes; ++stripe) {
    if (first_slot(stripe) >= hot_rows) continue;
#pragma unroll
    for (int piece = 0; piece < kSlotsPerLoad; ++piece) {
      const uint32_t stamp = get_stamp(age[stripe], piece);
      if (stamp != 0) atomicOr(&present[stamp / 32], 1u << (stamp % 32));
    }
  }
  __syncthreads();  // orders every mark before the counts
  const int first = static_cast<int>(threadIdx.x) * kPerThread;
  uint32_t count = 0;
  for (int i = 0; i < kPerThread; ++i) count += __popc(present[first + i]);
  uint32_t warp_total;
  const uint32_t before = warp_exclusive_sum(count, &warp_total);
  totals->put(warp_total);
  __syncthreads();  // orders every warp's total before the ranks
  uint32_t rank = totals->sum_before() + before;
  for (int i = 0; i < kPerThread; ++i) {
    ranks[first + i] = rank;
    rank += __popc(present[first + i]);
  }
  const uint32_t distinct = totals->sum();
  __syncthreads();  // orders the ranks before the slots read them
#pragma unroll kUnroll
  for (int stripe = 0; stripe < kStripes; ++stripe) {
    if (first_slot(stripe) >= hot_rows) continue;
#pragma unroll
    for (int piece = 0; piece < kSlotsPerLoad; ++piece) {
      const uint32_t stamp = get_stamp(age[stripe], piece);
      if (stamp == 0) continue;
      const uint32_t below = present[stamp / 32] & ((1u << (stamp % 32)) - 1u);
      set_stamp(&age[stripe], piece, ranks[stamp / 32] + __popc(below) + 1);
    }
  }
  __syncthreads();  // orders the last look at the ranks before they are cleared
  for (int i = 0; i < kPerThread; ++i) present[first + i] = ranks[first + i] = 0;
  __syncthreads();  // orders the clearing before the next user of the scratch
  return distinct;
}

}  // namespace hotpage
