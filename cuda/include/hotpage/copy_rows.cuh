// SPDX-License-Identifier: Apache-2.0
// Owns the copy kernel: the rows of a copy list, host pool to hot slots, for some layers.
//
// Contract: launched by copy_launch. Grid of any size, kCopyThreads threads a block. Reads the copy
// list and the host rows over the bus; writes the hot rows. Caller's stream, graph-safe. The list
// is cut into equal contiguous slices over all requests, one a block. Short rows that lie alone in
// the host pool are copied in another order, by sweep_copies.cuh.
#pragma once

#include <cstdint>

#include "hotpage/abi.h"
#include "hotpage/check.cuh"
#include "hotpage/holders.cuh"
#include "hotpage/row_chunk.cuh"
#include "hotpage/warp.cuh"

namespace hotpage {

constexpr int kCopyThreads = 512;
constexpr int kCopyWarps = kCopyThreads / kWarpSize;
constexpr int kMaxRequests = HOTPAGE_MAX_REQUESTS;
static_assert(kMaxRequests == 2 * kCopyThreads, "a thread takes two requests");

struct CopyArgs {
  hotpage_copy_params p;
  RowUnits units;
  HolderMarks marks;
  // 1: the list repeats every row for each layer in turn, so that rows that lie side by side in
  // the host pool are read together. 0: a layer's rows follow each other.
  uint32_t layers_innermost;
};

// `marks`: which holder bits the copy sets, if any.
inline CopyArgs plan_copy(const hotpage_copy_params &p, const HolderMarks &marks) {
  CopyArgs args = {};
  args.p = p;
  args.units = units_of_row(p.row_bytes);
  args.marks = marks;
  args.layers_innermost = p.host_row_stride > p.row_bytes ? 1 : 0;
  return args;
}

// first_of_request[i]: copies of the requests before i. Returns all copies; ends with a barrier.
__device__ __forceinline__ uint32_t sum_copy_counts(const hotpage_copy_params &p,
                                                    uint32_t *first_of_request,
                                                    WarpWords<kCopyWarps> *totals) {
  const int32_t *counts = reinterpret_cast<const int32_t *>(p.copy_count);
  const int request = 2 * static_cast<int>(threadIdx.x);
  const auto count_of = [&](int i) {
    return i < p.num_requests ? static_cast<uint32_t>(counts[i]) : 0u;
  };
  const uint32_t even = count_of(request), odd = count_of(request + 1);
  uint32_t warp_total;
  const uint32_t before = warp_exclusive_sum(even + odd, &warp_total);
  totals->put(warp_total);
  __syncthreads();  // orders every warp's total before the sums
  const uint32_t first = totals->sum_before() + before;
  first_of_request[request] = first;
  first_of_request[request + 1] = first + even;
  const uint32_t total = totals->sum();
  __syncthreads();  // orders the sums before the searches
  return total;
}

// The request that copy number `index` belongs to: the last whose first copy is not after it.
__device__ __forceinline__ uint32_t find_request(const uint32_t *first_of_request,
                                                 int32_t num_requests, uint32_t index) {
  uint32_t low = 0, high = static_cast<uint32_t>(num_requests);
  while (high - low > 1) {
    const uint32_t middle = (low + high) / 2;
    if (first_of_request[middle] <= index) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

// Marks the holder of a copied row.
__device__ __forceinline__ void mark_copy(const CopyArgs &args, int32_t host_row,
                                          uint32_t request) {
  const int32_t state_row = reinterpret_cast<const int32_t *>(args.marks.state_row)[request];
  mark_holder(args.marks.holders, args.marks.num_state_rows, host_row / args.p.block_size,
              state_row);
}

// Where the rows of a copy lie in one layer.
__device__ __forceinline__ RowCopy rows_of(const hotpage_copy_params &p, uint32_t layer,
                                           int64_t host_row, int32_t hot_row) {
  HOTPAGE_CHECK(layer < static_cast<uint32_t>(p.num_layers) && host_row >= 0 && hot_row >= 0);
  const int32_t block = hot_row / p.block_stride_rows;
  const int64_t row_in_block = hot_row - block * p.block_stride_rows;
  return {p.host_layer[layer] + static_cast<uint64_t>(host_row * p.host_row_stride),
          p.gpu_layer[layer] +
              static_cast<uint64_t>(block * p.gpu_block_stride + row_in_block * p.row_bytes)};
}

// Copies chunks [first, end) of num_items rows with all warps of the block; find(item) is the copy
// of a row.
template <class Find>
__device__ __forceinline__ void copy_chunks(const CopyArgs &args, uint32_t first, uint32_t end,
                                            uint32_t num_items, Find &&find) {
  const auto find_own = [&](uint32_t chunk) {
    const uint32_t item = chunk * kRowsPerChunk + lane_id();
    if (chunk >= end || lane_id() >= kRowsPerChunk || item >= num_items) return RowCopy{0, 0};
    return find(item);
  };
  uint32_t chunk = first + warp_id();
  RowCopy mine = find_own(chunk);
  for (; chunk < end; chunk += kCopyWarps) {
    // The next chunk's addresses arrive while this one's rows are on the bus.
    const RowCopy next = find_own(chunk + kCopyWarps);
    const uint32_t rows = min(uint32_t{kRowsPerChunk}, num_items - chunk * kRowsPerChunk);
    copy_chunk(args.units, mine, rows);
    mine = next;
  }
}

// Shared memory of a copy block.
struct CopyShared {
  uint32_t first_of_request[kMaxRequests];
  WarpWords<kCopyWarps> totals;
};

// Copies this block's slice of the list, which num_blocks blocks share.
__device__ __forceinline__ void copy_slice(const CopyArgs &args, const uint32_t *first_of_request,
                                           uint32_t num_copies, uint32_t num_blocks) {
  const hotpage_copy_params &p = args.p;
  const uint32_t num_layers = static_cast<uint32_t>(p.num_layers);
  const uint32_t num_items = num_copies * num_layers;
  const uint32_t num_chunks = (num_items + kRowsPerChunk - 1) / kRowsPerChunk;
  const uint32_t slice = (num_chunks + num_blocks - 1) / num_blocks;
  const auto find = [&](uint32_t item) {
    const uint32_t layer = args.layers_innermost ? item % num_layers : item / num_copies;
    const uint32_t index = args.layers_innermost ? item / num_layers : item - layer * num_copies;
    const uint32_t request = find_request(first_of_request, p.num_requests, index);
    const int64_t place =
        int64_t{request} * p.copy_list_stride + (index - first_of_request[request]);
    const int32_t host_row = reinterpret_cast<const int32_t *>(p.copy_host_row)[place];
    const int32_t hot_row = reinterpret_cast<const int32_t *>(p.copy_hot_row)[place];
    if (args.marks.holders != 0 && layer == 0) mark_copy(args, host_row, request);
    return rows_of(p, layer, host_row, hot_row);
  };
  copy_chunks(args, blockIdx.x * slice, min(num_chunks, (blockIdx.x + 1) * slice), num_items, find);
}

// What a block does once the copy list is there.
__device__ __forceinline__ void copy_list(const CopyArgs &args, CopyShared *shared) {
  const uint32_t num_copies = sum_copy_counts(args.p, shared->first_of_request, &shared->totals);
  copy_slice(args, shared->first_of_request, num_copies, gridDim.x);
}

template <bool kAfterResolve>
__global__ void __launch_bounds__(kCopyThreads, 1)
    copy_rows_kernel(const __grid_constant__ CopyArgs args) {
  __shared__ CopyShared shared;
#if __CUDA_ARCH__ >= 900
  // Orders the whole resolve, its copy list and counts included, before everything below.
  if (kAfterResolve) asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
  copy_list(args, &shared);
}

}  // namespace hotpage
