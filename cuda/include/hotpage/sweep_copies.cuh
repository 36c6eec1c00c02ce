// SPDX-License-Identifier: Apache-2.0
// Owns the copy of short rows that lie anywhere in a large host pool: a few blocks sweep the pool
// together, so that the rows on the bus come from one part of it.
//
// Contract: as in copy_rows.cuh, of which this is another way to go through the list, but the grid
// is one cluster of up to kMostSweepBlocks blocks, a power of two, of kSweepThreads threads. A row
// that lies alone in the host pool costs a translation of its address, and those are cheaper in the
// order of addresses with few rows on the bus at a time.
//
// The blocks sort the list through each other's shared memory: each counts a part of it by bucket
// of host rows, adds up the counts of all, and puts its part's copies where their ranks say. Then
// every warp takes the next chunk of the sorted list until none is left. A list longer than the
// cluster's memory is taken in windows, each of them a sweep of its own.
#pragma once

#include "hotpage/cluster.cuh"
#include "hotpage/copy_rows.cuh"
#include "hotpage/rank_rows.cuh"

namespace hotpage {

constexpr int kSweepThreads = 1024;
constexpr int kSweepWarps = kSweepThreads / kWarpSize;
// Clusters of this size need no leave.
constexpr uint32_t kMostSweepBlocks = 8;
// Warps of a block that copy what was sorted: enough to fill the bus with short rows and no more.
constexpr int kSweepCopyWarps = 16;
// Sorted copies that a block keeps for all.
constexpr uint32_t kKeptCopies = 8192;
// Copies of each block from which on their order saves more than the sort takes.
constexpr uint32_t kLeastSwept = 256;
// Copies of the list that a thread loads at a time.
constexpr int kListLoads = 4;
constexpr uint32_t kListStrip = kListLoads * kSweepThreads;

// A copy's rows.
struct alignas(8) SortedCopy {
  int32_t host_row;
  int32_t hot_row;
};

struct SweepShared {
  uint32_t first_of_request[kMaxRequests];
  // Copies of the block's part of the list in each bucket, then the rank of its next one there.
  uint4 buckets[kRankBuckets / 4];
  SortedCopy kept[kKeptCopies];
  WarpWords<kSweepWarps> lowest, highest, totals;
  uint32_t next_chunk;  // of the sorted list; the first block's counts
};

static_assert(kRankBuckets == 4 * kSweepThreads, "a thread takes a piece of four buckets");
static_assert(kMaxRequests == kSweepThreads, "a thread takes a request");

// Sums the copies of the requests before each, and puts the lowest and the highest host row: those
// are ends of a request's copies, which ascend. Returns all copies; ends with a barrier.
__device__ __forceinline__ uint32_t survey_list(const hotpage_copy_params &p, SweepShared *s) {
  const int32_t *counts = reinterpret_cast<const int32_t *>(p.copy_count);
  const int request = static_cast<int>(threadIdx.x);
  const int32_t *host_rows =
      reinterpret_cast<const int32_t *>(p.copy_host_row) + int64_t{request} * p.copy_list_stride;
  const uint32_t own = request < p.num_requests ? static_cast<uint32_t>(counts[request]) : 0u;
  // Under way while the counts are summed.
  const uint32_t lowest = own != 0 ? static_cast<uint32_t>(__ldcg(host_rows)) : UINT32_MAX;
  const uint32_t highest = own != 0 ? static_cast<uint32_t>(__ldcg(host_rows + (own - 1))) : 0u;
  uint32_t warp_total;
  const uint32_t before = warp_exclusive_sum(own, &warp_total);
  s->totals.put(warp_total);
  s->lowest.put(__reduce_min_sync(kFullWarp, lowest));
  s->highest.put(__reduce_max_sync(kFullWarp, highest));
  s->buckets[threadIdx.x] = make_uint4(0, 0, 0, 0);
  __syncthreads();  // orders every warp's words before they are read
  s->first_of_request[request] = s->totals.sum_before() + before;
  const uint32_t total = s->totals.sum();
  __syncthreads();  // orders the sums before the searches
  return total;
}

// Copies of the list that a thread holds; host_row -1: none.
struct HeldCopies {
  uint32_t request[kListLoads];
  int32_t host_row[kListLoads];
  int32_t hot_row[kListLoads];

  // Reads those of [first, end) that fall to this thread, every kSweepThreads-th.
  __device__ __forceinline__ void load(const hotpage_copy_params &p,
                                       const uint32_t *first_of_request, uint32_t first,
                                       uint32_t end) {
    const uint32_t last_request = static_cast<uint32_t>(p.num_requests) - 1;
    uint32_t index = first + threadIdx.x;
    uint32_t found = find_request(first_of_request, p.num_requests, index);
#pragma unroll
    for (int i = 0; i < kListLoads; ++i, index += kSweepThreads) {
      host_row[i] = -1;
      if (index >= end) continue;
      while (found < last_request && first_of_request[found + 1] <= index) ++found;
      const int64_t place = int64_t{found} * p.copy_list_stride + (index - first_of_request[found]);
      request[i] = found;
      host_row[i] = __ldcg(reinterpret_cast<const int32_t *>(p.copy_host_row) + place);
      hot_row[i] = __ldcg(reinterpret_cast<const int32_t *>(p.copy_hot_row) + place);
    }
  }
};

__device__ __forceinline__ void add(uint4 *sum, const uint4 &more) {
  sum->x += more.x, sum->y += more.y, sum->z += more.z, sum->w += more.w;
}

// Turns this block's counts into the ranks of its first copy in each bucket, over all blocks: those
// of the buckets before, then those of the blocks before. Ends with a barrier.
__device__ __forceinline__ void rank_buckets(SweepShared *s) {
  uint4 *piece = &s->buckets[threadIdx.x];
  uint4 all = make_uint4(0, 0, 0, 0), before = all;
#pragma unroll 2
  for (uint32_t block = 0; block < cluster_size(); ++block) {
    const uint4 counts = *cluster_peer(piece, block);
    add(&all, counts);
    if (block < cluster_rank()) add(&before, counts);
  }
  uint32_t warp_total;
  const uint32_t lanes = warp_exclusive_sum(all.x + all.y + all.z + all.w, &warp_total);
  s->totals.put(warp_total);
  cluster_sync();  // orders every total before the sums, every look at the counts before the ranks
  uint4 rank;
  rank.x = s->totals.sum_before() + lanes;
  rank.y = rank.x + all.x;
  rank.z = rank.y + all.y;
  rank.w = rank.z + all.z;
  add(&rank, before);
  *piece = rank;
  __syncthreads();  // orders the ranks before they are taken
}

// Where the copy of a rank is kept: chunks go to the blocks in turn.
__device__ __forceinline__ SortedCopy *place_of_rank(SweepShared *s, uint32_t rank) {
  const uint32_t num_blocks = cluster_size();
  const uint32_t block_bits = static_cast<uint32_t>(__popc(num_blocks - 1));
  const uint32_t chunk = rank / kRowsPerChunk;
  const uint32_t at = (chunk >> block_bits) * kRowsPerChunk + rank % kRowsPerChunk;
  HOTPAGE_CHECK(at < kKeptCopies);
  return cluster_peer(&s->kept[at], chunk & (num_blocks - 1));
}

// Sorts the copies [first, end) of the list into the blocks' memory, and marks holders. The buckets
// are empty. Ends with a barrier of the cluster.
__device__ __forceinline__ void sort_copies(const CopyArgs &args, const BucketMap &bucket_of,
                                            uint32_t first, uint32_t end, SweepShared *s) {
  const uint32_t part = (end - first + cluster_size() - 1) / cluster_size();
  const uint32_t part_first = min(end, first + cluster_rank() * part);
  const uint32_t part_end = min(end, part_first + part);
  uint32_t *buckets = reinterpret_cast<uint32_t *>(s->buckets);
  HeldCopies held;
  for (uint32_t strip = part_first; strip < part_end; strip += kListStrip) {
    held.load(args.p, s->first_of_request, strip, part_end);
#pragma unroll
    for (int i = 0; i < kListLoads; ++i) {
      if (held.host_row[i] < 0) continue;
      atomicAdd(&buckets[bucket_of(held.host_row[i])], 1u);
      if (args.marks.holders != 0) mark_copy(args, held.host_row[i], held.request[i]);
    }
  }
  cluster_sync();  // orders all blocks' counts before they are added up
  rank_buckets(s);
  if (threadIdx.x == 0) s->next_chunk = 0;
  for (uint32_t strip = part_first; strip < part_end; strip += kListStrip) {
    // A part of one strip is held since it was counted.
    if (part > kListStrip) held.load(args.p, s->first_of_request, strip, part_end);
#pragma unroll
    for (int i = 0; i < kListLoads; ++i) {
      if (held.host_row[i] < 0) continue;
      const uint32_t rank = atomicAdd(&buckets[bucket_of(held.host_row[i])], 1u);
      *place_of_rank(s, rank) = {held.host_row[i], held.hot_row[i]};
    }
  }
  cluster_sync();  // orders all sorted copies, and the first chunk's number, before they are read
}

// The next chunk of the sorted list, for the whole warp; known to the first lane until it is shared.
__device__ __forceinline__ uint32_t take_chunk(SweepShared *s) {
  return lane_id() == 0 ? atomicAdd(cluster_peer(&s->next_chunk, 0), 1u) : 0u;
}

// Copies every layer of the sorted list's num_copies copies, this warp what it takes of them.
__device__ __forceinline__ void copy_sorted(const CopyArgs &args, SweepShared *s,
                                            uint32_t num_copies) {
  const uint32_t num_layers = static_cast<uint32_t>(args.p.num_layers);
  const uint32_t num_items = num_copies * num_layers;
  const uint32_t num_chunks = (num_items + kRowsPerChunk - 1) / kRowsPerChunk;
  uint32_t chunk = __shfl_sync(kFullWarp, take_chunk(s), 0);
  while (chunk < num_chunks) {
    // Under way with the rows. A chunk is taken no earlier, so that chunks in flight stay together.
    const uint32_t next = take_chunk(s);
    const uint32_t item = chunk * kRowsPerChunk + lane_id();
    RowCopy mine = {0, 0};
    if (lane_id() < kRowsPerChunk && item < num_items) {
      const uint32_t layer = args.layers_innermost ? item % num_layers : item / num_copies;
      const uint32_t rank = args.layers_innermost ? item / num_layers : item - layer * num_copies;
      const SortedCopy copy = *place_of_rank(s, rank);
      mine = rows_of(args.p, layer, copy.host_row, copy.hot_row);
    }
    copy_chunk_lean(args.units, mine,
                    min(uint32_t{kRowsPerChunk}, num_items - chunk * kRowsPerChunk));
    chunk = __shfl_sync(kFullWarp, next, 0);
  }
}

// What a block does once the copy list is there.
__device__ __forceinline__ void copy_swept(const CopyArgs &args, SweepShared *s) {
  const uint32_t num_copies = survey_list(args.p, s);
  if (num_copies < kLeastSwept * cluster_size()) {
    copy_slice<kSweepWarps>(args, s->first_of_request, num_copies, cluster_size());
    return;
  }
  const BucketMap bucket_of(s->lowest.min(), s->highest.max());
  for (uint32_t first = 0; first < num_copies; first += kKeptCopies * cluster_size()) {
    const uint32_t end = first + min(num_copies - first, kKeptCopies * cluster_size());
    sort_copies(args, bucket_of, first, end, s);
    if (warp_id() < kSweepCopyWarps) copy_sorted(args, s, end - first);
    // No other block looks at this one's buckets any more.
    s->buckets[threadIdx.x] = make_uint4(0, 0, 0, 0);
    // Orders the last look at sorted copies before others replace them or their block ends, and the
    // empty buckets before the counts.
    cluster_sync();
  }
}

// The kernels' bodies also run on a CPU, in tests; the launch does not.
#ifdef __CUDACC__

template <bool kAfterResolve>
__global__ void __launch_bounds__(kSweepThreads, 1)
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
