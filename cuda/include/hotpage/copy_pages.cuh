// SPDX-License-Identifier: Apache-2.0
// Owns the kernel of spill_pages and restore_pages: the first rows of pages, all layers.
//
// Contract: a warp takes a chunk of one page: up to four (token, layer) pairs that lie side by side
// in the host pool where that is possible. Reads the page list and the source pool; writes the
// target pool and counters. A page that is not wholly well formed is left out and counted. Caller's
// stream, graph-safe.
#pragma once

#include <climits>

#include "hotpage/pools.cuh"

namespace hotpage {

struct CopyPagesArgs {
  hotpage_copy_pages_params p;
  RowUnits units;
  uint32_t units_per_page;  // tiles of a page x chunks
  uint32_t num_units;
};

// Rows of the page to copy, -1 if the page is malformed. Equal in all lanes.
__device__ __forceinline__ int32_t rows_of_page(const hotpage_copy_pages_params &p, uint32_t page,
                                                int32_t host_block) {
  const int32_t num_rows = reinterpret_cast<const int32_t *>(p.num_rows)[page];
  const int32_t *blocks =
      reinterpret_cast<const int32_t *>(p.resident_blocks) + int64_t{page} * p.pools.num_kv_groups;
  bool ok = is_real_block(host_block, p.pools.num_host_blocks) && num_rows >= 0 &&
            num_rows <= p.pools.block_size;
  for (int group = lane_id(); group < p.pools.num_kv_groups; group += kWarpSize) {
    ok = ok && is_real_block(blocks[group], p.pools.num_gpu_blocks);
  }
  return __all_sync(kFullWarp, ok) ? num_rows : -1;
}

template <bool kToHost>
__device__ __forceinline__ RowCopy find_page_row(const hotpage_copy_pages_params &p,
                                                 const Chunk &chunk, uint32_t page,
                                                 int32_t host_block, int token) {
  const Layer layer = load_layer(p.pools, chunk.layer_of(lane_id()));
  const uint32_t gpu_block = reinterpret_cast<const int32_t *>(
      p.resident_blocks)[int64_t{page} * p.pools.num_kv_groups + layer.kv_group];
  const uint64_t gpu = layer.gpu_row(gpu_block, token, p.pools.row_bytes);
  const uint64_t host = layer.host_row(int64_t{host_block} * p.pools.block_size + token);
  return kToHost ? RowCopy{gpu, host} : RowCopy{host, gpu};
}

template <bool kToHost>
__global__ void __launch_bounds__(kPoolThreads, 1)
    copy_pages_kernel(const __grid_constant__ CopyPagesArgs args) {
  const hotpage_copy_pages_params &p = args.p;
  for (uint32_t unit = first_unit(); unit < args.num_units; unit += unit_stride()) {
    const uint32_t page = unit / args.units_per_page;
    const uint32_t in_page = unit - page * args.units_per_page;
    const uint32_t tile = in_page / p.pools.num_chunks;
    const int32_t host_block = reinterpret_cast<const int32_t *>(p.host_block)[page];
    const int32_t num_rows = rows_of_page(p, page, host_block);
    if (in_page == 0 && lane_id() == 0) {
      add_to_counter(p.counters, num_rows < 0 ? HOTPAGE_PAGES_SKIPPED : HOTPAGE_PAGES_COPIED, 1);
    }
    const Chunk chunk = load_chunk(p.pools, in_page - tile * p.pools.num_chunks);
    const int first_token = static_cast<int>(tile) * kTileTokens + chunk.token;
    if (first_token >= num_rows) continue;
    RowCopy mine = {0, 0};
    const int token = first_token + chunk.token_of(lane_id());
    if (lane_id() < static_cast<int>(chunk.num_rows()) && token < num_rows) {
      mine = find_page_row<kToHost>(p, chunk, page, host_block, token);
    }
    copy_chunk(args.units, mine, chunk.num_rows());
  }
}

template <bool kToHost>
hotpage_status launch_copy_pages(const hotpage_copy_pages_params *params, int32_t default_blocks,
                                 void *stream) {
  hotpage_status checked = check_params(params);
  if (checked != HOTPAGE_OK) return checked;
  const hotpage_copy_pages_params &p = *params;
  if (p.num_pages < 0 || p.counters == 0) return HOTPAGE_STATUS_INVALID_ARGUMENT;
  checked = check_pools(p.pools);
  if (checked != HOTPAGE_OK || p.num_pages == 0) return checked;
  if (p.host_block == 0 || p.resident_blocks == 0 || p.num_rows == 0) {
    return HOTPAGE_STATUS_INVALID_ARGUMENT;
  }
  const int64_t tiles = (p.pools.block_size + kTileTokens - 1) / kTileTokens;
  const int64_t units_per_page = tiles * p.pools.num_chunks;
  if (units_per_page > INT32_MAX / p.num_pages) return HOTPAGE_STATUS_UNSUPPORTED;
  const int64_t num_units = units_per_page * p.num_pages;
  const CopyPagesArgs args = {p, units_of_row(p.pools.row_bytes),
                              static_cast<uint32_t>(units_per_page),
                              static_cast<uint32_t>(num_units)};
  const unsigned grid = pool_grid(num_units, p.pools.max_blocks, default_blocks);
  return launch(copy_pages_kernel<kToHost>, grid, kPoolThreads, args, stream);
}

}  // namespace hotpage
