// SPDX-License-Identifier: Apache-2.0
// Owns the copy of short rows that lie anywhere in a large host pool: a few blocks sweep the pool
// together, so that the rows on the bus come from one part of it.
//
// Contract: as in copy_rows.cuh, of which this is another way to go through the list, but the grid
// is one cluster of up to kMostSweepBlocks blocks, a power of two. A row that lies alone in the
// host pool costs a translation of its address, and those are cheaper in the order of addresses
// with few rows on the bus at a time.
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

// Clusters of this size need no leave, and fill the bus with short rows.
constexpr uint32_t kMostSweepBlocks = 8;
// Bytes of the host pool between copies, on average, from which on half of the warps are faster:
// they have fewer translations under way. See benches/gpu/README.md.
constexpr int64_t kSparseBytesPerCopy = 768 << 10;
// Sorted copies that a block keeps for all: whole chunks, and ranks of 16 bits in a window.
constexpr uint32_t kKeptCopies = 8188;
// Copies of each block from which on their order saves more than the sort takes.
constexpr uint32_t kLeastSwept = 256;
// Copies of the list that a thread loads at a time.
constexpr int kListLoads = 8;
constexpr uint32_t kListStrip = kListLoads * kCopyThreads;

// A copy's rows.
struct alignas(8) SortedCopy {
  int32_t host_row;
  int32_t hot_row;
};

struct SweepShared {
  CopyShared copy;
  uint4 counts[kRankBuckets / 8];  // of the block's part of the list by bucket, 16 bits each
  uint4 ranks[kRankBuckets / 4];   // of the next copy of the part, by bucket
  SortedCopy kept[kKeptCopies];
  WarpWords<kCopyWarps> lowest, highest;
  uint32_t next_chunk;  // of the sorted list; the first block's counts
};

static_assert(kRankBuckets == 8 * kCopyThreads, "a thread takes eight buckets");
static_assert(kKeptCopies % kRowsPerChunk == 0, "a block keeps whole chunks");
static_assert(kKeptCopies * kMostSweepBlocks < 1 << 16, "16 bits hold the count of any bucket");

// Puts the lowest and the highest host row of the list, and empties the counts. OK by the ends of
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
    const int64_t place = int64_t{request} * p.copy_list_stride;
    lowest = min(lowest, static_cast<uint32_t>(__ldcg(host_rows + place)));
    highest = max(highest, static_cast<uint32_t>(__ldcg(host_rows + place + (end - first - 1))));
  }
  s->lowest.put(__reduce_min_sync(kFullWarp, lowest));
  s->highest.put(__reduce_max_sync(kFullWarp, highest));
  s->counts[threadIdx.x] = make_uint4(0, 0, 0, 0);
  __syncthreads();  // orders the ends and the empty counts before they are used
}

// Copies of the list that a thread holds; host_row -1: none.
struct HeldCopies {
  uint32_t request[kListLoads];
  int32_t host_row[kListLoads];
  int32_t hot_row[kListLoads];

  // Reads those of [first, end) that fall to this thread, every kCopyThreads-th.
  __device__ __forceinline__ void load(const hotpage_copy_params &p,
                                       const uint32_t *first_of_request, uint32_t first,
                                       uint32_t end) {
    const uint32_t last_request = static_cast<uint32_t>(p.num_requests) - 1;
    uint32_t index = first + threadIdx.x;
    uint32_t found = find_request(first_of_request, p.num_requests, index);
#pragma unroll
    for (int i = 0; i < kListLoads; ++i, index += kCopyThreads) {
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

// The two counts of a word, and of four words.
__device__ __forceinline__ uint32_t low_half(uint32_t word) { return word & 0xffffu; }
__device__ __forceinline__ uint32_t sum_of_halves(uint32_t word) {
  return low_half(word) + (word >> 16);
}
__device__ __forceinline__ uint32_t sum_of_halves(const uint4 &words) {
  return sum_of_halves(words.x) + sum_of_halves(words.y) + sum_of_halves(words.z) +
         sum_of_halves(words.w);
}

// Ranks of this block's first copy in each bucket, over all blocks: behind those of the buckets
// before and those of the blocks before. Ends with a barrier.
__device__ __forceinline__ void rank_buckets(SweepShared *s) {
  uint4 counts[kMostSweepBlocks];
  // All reads are under way before the first is used.
#pragma unroll
  for (uint32_t block = 0; block < kMostSweepBlocks; ++block) {
    counts[block] = make_uint4(0, 0, 0, 0);
    if (block < cluster_size()) counts[block] = *cluster_peer(&s->counts[threadIdx.x], block);
  }
  // Two buckets a word: OK because no sum leaves its 16 bits.
  uint4 all = make_uint4(0, 0, 0, 0), before = all;
#pragma unroll
  for (uint32_t block = 0; block < kMostSweepBlocks; ++block) {
    if (block == cluster_rank()) before = all;
    all.x += counts[block].x, all.y += counts[block].y;
    all.z += counts[block].z, all.w += counts[block].w;
  }
  uint32_t warp_total;
  const uint32_t lanes = warp_exclusive_sum(sum_of_halves(all), &warp_total);
  s->copy.totals.put(warp_total);
  __syncthreads();  // orders every warp's total before the sums
  uint32_t first = s->copy.totals.sum_before() + lanes;
  const auto rank_two_words = [&](uint32_t word, uint32_t word_before, uint32_t next,
                                  uint32_t next_before) {
    const uint32_t second = first + low_half(word), third = first + sum_of_halves(word);
    const uint32_t fourth = third + low_half(next);
    const uint4 ranks =
        make_uint4(first + low_half(word_before), second + (word_before >> 16),
                   third + low_half(next_before), fourth + (next_before >> 16));
    first = third + sum_of_halves(next);
    return ranks;
  };
  s->ranks[2 * threadIdx.x] = rank_two_words(all.x, before.x, all.y, before.y);
  s->ranks[2 * threadIdx.x + 1] = rank_two_words(all.z, before.z, all.w, before.w);
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

// Sorts the copies [first, end) of the list into the blocks' memory, and marks holders. The counts
// are zero. Ends with a barrier of the cluster.
__device__ __forceinline__ void sort_copies(const CopyArgs &args, const BucketMap &bucket_of,
                                            uint32_t first, uint32_t end, SweepShared *s) {
  const uint32_t part = (end - first + cluster_size() - 1) / cluster_size();
  const uint32_t part_first = min(end, first + cluster_rank() * part);
  const uint32_t part_end = min(end, part_first + part);
  uint32_t *counts = reinterpret_cast<uint32_t *>(s->counts);
  uint32_t *ranks = reinterpret_cast<uint32_t *>(s->ranks);
  HeldCopies held;
  for (uint32_t strip = part_first; strip < part_end; strip += kListStrip) {
    held.load(args.p, s->copy.first_of_request, strip, part_end);
#pragma unroll
    for (int i = 0; i < kListLoads; ++i) {
      if (held.host_row[i] < 0) continue;
      const uint32_t bucket = bucket_of(held.host_row[i]);
      atomicAdd(&counts[bucket / 2], 1u << bucket % 2 * 16);
      if (args.marks.holders != 0) mark_copy(args, held.host_row[i], held.request[i]);
    }
  }
  cluster_sync();  // orders all blocks' counts before they are added up
  rank_buckets(s);
  if (threadIdx.x == 0) s->next_chunk = 0;
  for (uint32_t strip = part_first; strip < part_end; strip += kListStrip) {
    // A part of one strip is held since it was counted.
    if (part > kListStrip) held.load(args.p, s->copy.first_of_request, strip, part_end);
#pragma unroll
    for (int i = 0; i < kListLoads; ++i) {
      if (held.host_row[i] < 0) continue;
      const uint32_t rank = atomicAdd(&ranks[bucket_of(held.host_row[i])], 1u);
      *place_of_rank(s, rank) = {held.host_row[i], held.hot_row[i]};
    }
  }
  cluster_sync();  // orders all sorted copies, and the first chunk's number, before they are read
}

// The next chunk of the sorted list for the warp; its first lane knows it.
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
    copy_chunk(args.units, mine, min(uint32_t{kRowsPerChunk}, num_items - chunk * kRowsPerChunk));
    chunk = __shfl_sync(kFullWarp, next, 0);
  }
}

// What a block does once the copy list is there.
__device__ __forceinline__ void copy_swept(const CopyArgs &args, SweepShared *s) {
  const uint32_t num_copies = sum_copy_counts(args.p, s->copy.first_of_request, &s->copy.totals);
  if (num_copies < kLeastSwept * cluster_size()) {
    copy_slice(args, s->copy.first_of_request, num_copies, cluster_size());
    return;
  }
  find_ends(args.p, num_copies, s);
  const uint32_t lowest = s->lowest.min(), highest = s->highest.max();
  const BucketMap bucket_of(lowest, highest);
  const int64_t range_bytes = (int64_t{highest} - lowest + 1) * args.p.host_row_stride;
  const bool is_sparse = range_bytes > int64_t{num_copies} * kSparseBytesPerCopy;
  const int copy_warps = is_sparse ? kCopyWarps / 2 : kCopyWarps;
  for (uint32_t first = 0; first < num_copies; first += kKeptCopies * cluster_size()) {
    const uint32_t end = first + min(num_copies - first, kKeptCopies * cluster_size());
    sort_copies(args, bucket_of, first, end, s);
    if (warp_id() < copy_warps) copy_sorted(args, s, end - first);
    // Every block has added up the counts.
    s->counts[threadIdx.x] = make_uint4(0, 0, 0, 0);
    // Orders the last look at sorted copies before others replace them or their block ends, and the
    // zeros before the counts.
    cluster_sync();
  }
}

template <bool kAfterResolve>
__global__ void __launch_bounds__(kCopyThreads, 1)
    sweep_copies_kernel(const __grid_constant__ CopyArgs args) {
#ifdef __CUDACC__
  extern __shared__ __align__(16) char sweep_shared[];
#else
  char *sweep_shared = cpu::launched_shared();
#endif
#if __CUDA_ARCH__ >= 900
  // Orders the whole resolve, its copy list and counts included, before everything below.
  if (kAfterResolve) asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
  copy_swept(args, reinterpret_cast<SweepShared *>(sweep_shared));
}

}  // namespace hotpage
