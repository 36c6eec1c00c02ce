// SPDX-License-Identifier: Apache-2.0
// Owns the copy of short rows that lie anywhere in a large host pool: all blocks sweep the pool
// together, so that the rows on the bus come from one part of it.
//
// Contract: as in copy_rows.cuh, of which this is another way to go through the list. The host's
// address translation reaches only a part of a large pool at a time, and a miss of it costs more
// than a short row. So the list of all requests is dealt to the blocks by host row, in small tiles
// that follow each other; few blocks keep few rows on the bus, hence few pages of translation.
//
// That pays where copies are dense. Where they lie far apart, nearly every one needs a translation
// of its own in any order, and many blocks with slices of the list are faster; the copies and the
// range that they lie in decide, on the device.
//
// Every block of a sweep counts all copies by bucket of host rows (in L2, 4 bytes a copy, against a
// row over the bus), and from the counts knows which buckets are its own. No block waits for
// another. What it copies lies in shared memory before the first row is asked for: a load of the
// list that waits behind rows on the bus takes several times as long as one that does not.
#pragma once

#include "hotpage/copy_rows.cuh"
#include "hotpage/rank_rows.cuh"

namespace hotpage {

// Blocks of a sweep: enough to fill the bus with short rows and no more. The others end at once.
constexpr uint32_t kSweepBlocks = 16;
// Bytes of the host pool between copies, on average, up to which a sweep was the faster one on an
// H200; see benches/gpu/README.md.
constexpr int64_t kMostBytesPerCopy = 640 << 10;
// Copies that a block holds at a time.
constexpr uint32_t kOwnCopies = 6144;
// Copies dealt at a time, at least, and tiles that every block must get: with fewer some blocks
// would end long before others.
constexpr uint32_t kLeastTile = 32;
constexpr uint32_t kLeastTilesPerBlock = 4;
// Loads of the list that a thread has under way.
constexpr int kListLoads = 8;

constexpr uint32_t kNotOwn = 0xffffffffu;

// A copy of the list: its place in it first, then its rows.
struct OwnCopy {
  int32_t host_row;
  int32_t hot_row;
};

struct SweepShared {
  CopyShared copy;
  uint32_t first_rank[kRankBuckets];  // copies in the buckets before
  uint32_t own_place[kRankBuckets];   // where the bucket's next copy goes in own; kNotOwn
  OwnCopy own[kOwnCopies];            // in the order in which they are made
  WarpWords<kCopyWarps> lowest, highest, largest, totals;
};

// How the buckets are dealt: bucket b belongs to tile first_rank[b] >> tile_log2, tiles go to the
// blocks in turn, and a window is as many tiles of each block as fit `own`.
struct SweepPlan {
  uint32_t num_copies;
  uint32_t num_blocks;
  uint32_t tile_log2;
  uint32_t tiles_per_window;  // of one block
  uint32_t num_windows;
};

// Calls f(place in the list, host row) for every copy, all threads together.
template <class F>
__device__ __forceinline__ void for_copies(const hotpage_copy_params &p,
                                           const uint32_t *first_of_request, uint32_t num_copies,
                                           F &&f) {
  const int32_t *host_rows = reinterpret_cast<const int32_t *>(p.copy_host_row);
  const uint32_t last_request = static_cast<uint32_t>(p.num_requests) - 1;
  uint32_t request = find_request(first_of_request, p.num_requests, threadIdx.x);
  for (uint32_t base = threadIdx.x; base < num_copies; base += kListLoads * kCopyThreads) {
    uint32_t places[kListLoads];
    int32_t rows[kListLoads];
    // All reads are under way before the first is used.
#pragma unroll
    for (int i = 0; i < kListLoads; ++i) {
      const uint32_t index = base + i * kCopyThreads;
      rows[i] = -1;
      if (index >= num_copies) continue;
      while (request < last_request && first_of_request[request + 1] <= index) ++request;
      places[i] = request * static_cast<uint32_t>(p.copy_list_stride) +
                  (index - first_of_request[request]);
      rows[i] = __ldcg(host_rows + places[i]);
    }
#pragma unroll
    for (int i = 0; i < kListLoads; ++i) {
      if (rows[i] >= 0) f(places[i], rows[i]);
    }
  }
}

// Puts the lowest and the highest host row of the list, and empties the buckets. OK by the ends of
// each request because its copies ascend. Ends with a barrier.
__device__ __forceinline__ void find_ends(const hotpage_copy_params &p, uint32_t num_copies,
                                          SweepShared *s) {
  const int32_t *host_rows = reinterpret_cast<const int32_t *>(p.copy_host_row);
  uint32_t lowest = UINT32_MAX, highest = 0;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint32_t request = 2 * threadIdx.x + i;
    const uint32_t first = s->copy.first_of_request[request];
    const uint32_t end =
        request + 1 < kMaxRequests ? s->copy.first_of_request[request + 1] : num_copies;
    if (first == end) continue;
    const uint32_t place = request * static_cast<uint32_t>(p.copy_list_stride);
    lowest = min(lowest, static_cast<uint32_t>(__ldcg(host_rows + place)));
    highest = max(highest, static_cast<uint32_t>(__ldcg(host_rows + place + (end - first - 1))));
  }
  s->lowest.put(__reduce_min_sync(kFullWarp, lowest));
  s->highest.put(__reduce_max_sync(kFullWarp, highest));
  for (int i = static_cast<int>(threadIdx.x); i < kRankBuckets; i += kCopyThreads) {
    s->first_rank[i] = 0;
  }
  __syncthreads();  // orders the ends and the empty buckets before the counts
}

// Counts the copies by bucket and decides how to deal them; false if that would not be even: few
// copies, or most of them in few buckets. Ends with a barrier.
__device__ __forceinline__ bool plan_sweep(const hotpage_copy_params &p, const BucketMap &bucket_of,
                                           uint32_t num_copies, uint32_t num_blocks,
                                           SweepShared *s, SweepPlan *plan) {
  for_copies(p, s->copy.first_of_request, num_copies, [&](uint32_t, int32_t row) {
    atomicAdd(&s->first_rank[bucket_of(row)], 1u);
  });
  __syncthreads();  // orders the counts before they are read
  uint32_t largest = 0;
  for (int i = static_cast<int>(threadIdx.x); i < kRankBuckets; i += kCopyThreads) {
    largest = max(largest, s->first_rank[i]);
  }
  s->largest.put(__reduce_max_sync(kFullWarp, largest));
  __syncthreads();  // orders every look at the counts before the scan replaces them
  scan_buckets<kCopyThreads>(s->first_rank, &s->totals);
  largest = s->largest.max();
  uint32_t log2 = 0;
  while ((1u << log2) < max(largest, kLeastTile)) ++log2;
  const uint32_t tile = 1u << log2;
  // A tile ends with the bucket that begins in it, so it holds less than `tile + largest` copies.
  if (tile + largest > kOwnCopies) return false;
  if (num_copies / num_blocks < kLeastTilesPerBlock * tile) return false;
  const uint32_t per_window = kOwnCopies / (tile + largest);
  const uint32_t tiles_per_block = (num_copies / tile) / num_blocks + 1;
  const uint32_t num_windows = (tiles_per_block + per_window - 1) / per_window;
  *plan = {num_copies, num_blocks, log2, per_window, num_windows};
  return true;
}

// Gives this block's buckets of a window their places; returns how many copies they hold. Ends
// with a barrier.
__device__ __forceinline__ uint32_t place_buckets(const SweepPlan &plan, uint32_t window,
                                                  SweepShared *s) {
  constexpr int kPerThread = kRankBuckets / kCopyThreads;
  static_assert(kPerThread * kCopyThreads == kRankBuckets, "threads take whole runs of buckets");
  const int first = static_cast<int>(threadIdx.x) * kPerThread;
  uint32_t counts[kPerThread];
  uint32_t sum = 0;
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    const int bucket = first + i;
    const uint32_t rank = s->first_rank[bucket];
    const uint32_t end = bucket + 1 < kRankBuckets ? s->first_rank[bucket + 1] : plan.num_copies;
    const uint32_t tile = rank >> plan.tile_log2;
    const uint32_t turn = tile / plan.num_blocks;
    const bool own = tile - turn * plan.num_blocks == blockIdx.x &&
                     turn / plan.tiles_per_window == window;
    counts[i] = own ? end - rank : 0;
    sum += counts[i];
  }
  uint32_t warp_total;
  const uint32_t before = warp_exclusive_sum(sum, &warp_total);
  s->totals.put(warp_total);
  __syncthreads();  // orders every warp's total before the sums
  uint32_t place = s->totals.sum_before() + before;
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    s->own_place[first + i] = counts[i] != 0 ? place : kNotOwn;
    place += counts[i];
  }
  const uint32_t total = s->totals.sum();
  __syncthreads();  // orders the places before they are taken
  return total;
}

// Replaces the places of own copies by their rows, and marks holders. Ends with a barrier.
__device__ __forceinline__ void load_own(const CopyArgs &args, OwnCopy *own, uint32_t num_own) {
  const int32_t *host_rows = reinterpret_cast<const int32_t *>(args.p.copy_host_row);
  const int32_t *hot_rows = reinterpret_cast<const int32_t *>(args.p.copy_hot_row);
#pragma unroll 4
  for (uint32_t i = threadIdx.x; i < num_own; i += kCopyThreads) {
    const uint32_t place = static_cast<uint32_t>(own[i].host_row);
    own[i] = {__ldcg(host_rows + place), __ldcg(hot_rows + place)};
    if (args.marks.holders != 0) {
      mark_copy(args, own[i].host_row, place / static_cast<uint32_t>(args.p.copy_list_stride));
    }
  }
  __syncthreads();  // orders the rows before they are copied
}

// Copies every layer of the first num_own copies. Ends with a barrier.
__device__ __forceinline__ void copy_own(const CopyArgs &args, OwnCopy *own, uint32_t num_own) {
  load_own(args, own, num_own);
  const uint32_t num_layers = static_cast<uint32_t>(args.p.num_layers);
  const uint32_t num_items = num_own * num_layers;
  const auto find = [&](uint32_t item) {
    const uint32_t layer = args.layers_innermost ? item % num_layers : item / num_own;
    const uint32_t index = args.layers_innermost ? item / num_layers : item - layer * num_own;
    return rows_of(args.p, layer, own[index].host_row, own[index].hot_row);
  };
  copy_chunks(args, 0, (num_items + kRowsPerChunk - 1) / kRowsPerChunk, num_items, find);
  __syncthreads();  // orders the last look at these copies before the next ones replace them
}

// True if the copies lie so close that a sweep pays. find_ends came before.
__device__ __forceinline__ bool is_dense(const hotpage_copy_params &p, uint32_t num_copies,
                                         uint32_t lowest, uint32_t highest) {
  const int64_t range_bytes = (int64_t{highest} - lowest + 1) * p.host_row_stride;
  return range_bytes <= int64_t{num_copies} * kMostBytesPerCopy;
}

// What a block does once the copy list is there.
__device__ __forceinline__ void copy_swept(const CopyArgs &args, SweepShared *s) {
  const hotpage_copy_params &p = args.p;
  const uint32_t *first_of_request = s->copy.first_of_request;
  const uint32_t num_copies = sum_copy_counts(p, s->copy.first_of_request, &s->copy.totals);
  const uint32_t num_blocks = min(static_cast<uint32_t>(gridDim.x), kSweepBlocks);
  if (num_copies < kLeastTilesPerBlock * kLeastTile * num_blocks) {
    copy_slice(args, first_of_request, num_copies, gridDim.x);
    return;
  }
  find_ends(p, num_copies, s);
  const uint32_t lowest = s->lowest.min(), highest = s->highest.max();
  if (!is_dense(p, num_copies, lowest, highest)) {
    copy_slice(args, first_of_request, num_copies, gridDim.x);
    return;
  }
  if (blockIdx.x >= num_blocks) return;
  const BucketMap bucket_of(lowest, highest);
  SweepPlan plan;
  if (!plan_sweep(p, bucket_of, num_copies, num_blocks, s, &plan)) {
    copy_slice(args, first_of_request, num_copies, num_blocks);
    return;
  }
  for (uint32_t window = 0; window < plan.num_windows; ++window) {
    const uint32_t num_own = place_buckets(plan, window, s);
    for_copies(p, first_of_request, num_copies, [&](uint32_t place, int32_t row) {
      uint32_t *next = &s->own_place[bucket_of(row)];
      if (*next == kNotOwn) return;
      const uint32_t at = atomicAdd(next, 1u);
      HOTPAGE_CHECK(at < num_own && at < kOwnCopies);
      s->own[at].host_row = static_cast<int32_t>(place);
    });
    __syncthreads();  // orders the window's places before they are read
    copy_own(args, s->own, num_own);
  }
}

// The kernels' bodies also run on a CPU, in tests; the launch does not.
#ifdef __CUDACC__

template <bool kAfterResolve>
__global__ void __launch_bounds__(kCopyThreads, 1)
    sweep_copies_kernel(const __grid_constant__ CopyArgs args) {
  extern __shared__ __align__(16) char sweep_shared[];
#if __CUDA_ARCH__ >= 900
  // Orders the whole resolve, its copy list and counts included, before everything below.
  if (kAfterResolve) asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
  copy_swept(args, reinterpret_cast<SweepShared *>(sweep_shared));
}

#endif  // __CUDACC__

}  // namespace hotpage
