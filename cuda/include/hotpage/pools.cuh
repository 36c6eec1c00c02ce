// SPDX-License-Identifier: Apache-2.0
// Owns how device code finds rows of many layers in both pools: layer table, chunk table, bounds.
#pragma once

#include <cstdint>

#include "hotpage/check.cuh"
#include "hotpage/launch.cuh"
#include "hotpage/row_chunk.cuh"

namespace hotpage {

constexpr int kPoolThreads = 512;
constexpr int kPoolWarps = kPoolThreads / kWarpSize;
constexpr int kTileTokens = HOTPAGE_TILE_TOKENS;
constexpr int kMaxPoolBlockSize = 1024;

// Rows of up to four (token, layer) pairs: layers side by side in the host pool, or tokens.
struct Chunk {
  int layer;
  int num_layers;
  int token;       // inside its tile
  int num_tokens;  // 1, 2 or 4

  __device__ __forceinline__ uint32_t num_rows() const { return num_layers * num_tokens; }
  // Row i of the chunk belongs to token token_of(i) of the chunk and to layer layer_of(i).
  __device__ __forceinline__ int token_of(int row) const { return row / num_layers; }
  __device__ __forceinline__ int layer_of(int row) const { return layer + row % num_layers; }
  // Lane l looks after token l % num_tokens; bits of the lanes that share token `token`.
  __device__ __forceinline__ uint32_t lanes_of_token(int token) const {
    const uint32_t first = num_tokens == 1   ? 0xffffffffu
                           : num_tokens == 2 ? 0x55555555u
                                             : 0x11111111u;
    return first << token;
  }
};

__device__ __forceinline__ Chunk load_chunk(const hotpage_pools_params &pools, uint32_t chunk) {
  static_assert(HOTPAGE_NUM_CHUNK_COLUMNS == 4, "a chunk is one 16-byte load");
  HOTPAGE_CHECK(chunk < static_cast<uint32_t>(pools.num_chunks));
  const int4 c = __ldg(reinterpret_cast<const int4 *>(pools.chunks) + chunk);
  return {c.x, c.y, c.z, c.w};
}

struct Layer {
  uint64_t gpu;
  int64_t gpu_block_bytes;
  uint64_t host;
  int64_t host_row_stride;
  int kv_group;

  __device__ __forceinline__ uint64_t gpu_row(uint32_t block, uint32_t offset,
                                              int32_t row_bytes) const {
    return gpu + static_cast<uint64_t>(int64_t{block} * gpu_block_bytes) +
           uint64_t{offset} * static_cast<uint32_t>(row_bytes);
  }
  __device__ __forceinline__ uint64_t host_row(int64_t row) const {
    return host + static_cast<uint64_t>(row * host_row_stride);
  }
};

__device__ __forceinline__ Layer load_layer(const hotpage_pools_params &pools, int layer) {
  HOTPAGE_CHECK(layer >= 0 && layer < pools.num_layers);
  const int64_t *columns =
      reinterpret_cast<const int64_t *>(pools.layers) + int64_t{layer} * HOTPAGE_NUM_LAYER_COLUMNS;
  return {static_cast<uint64_t>(__ldg(columns + HOTPAGE_LAYER_GPU_ADDRESS)),
          __ldg(columns + HOTPAGE_LAYER_GPU_BLOCK_BYTES),
          static_cast<uint64_t>(__ldg(columns + HOTPAGE_LAYER_HOST_ADDRESS)),
          __ldg(columns + HOTPAGE_LAYER_HOST_ROW_STRIDE),
          static_cast<int>(__ldg(columns + HOTPAGE_LAYER_KV_GROUP))};
}

// A block that a pool of num_blocks blocks has, the null block not counted.
__device__ __forceinline__ bool is_real_block(int32_t block, int64_t num_blocks) {
  return block > 0 && block < num_blocks;
}

// Work is numbered; consecutive numbers go to different multiprocessors at the same time, so that
// a short list spreads and a long one keeps to few pages of the host's address translation.
__device__ __forceinline__ uint32_t first_unit() { return warp_id() * gridDim.x + blockIdx.x; }
__device__ __forceinline__ uint32_t unit_stride() { return kPoolWarps * gridDim.x; }

__device__ __forceinline__ void add_to_counter(uint64_t counters, int which, uint32_t n) {
  if (n == 0) return;
  atomicAdd(reinterpret_cast<unsigned long long *>(counters) + which,
            static_cast<unsigned long long>(n));
}

inline hotpage_status check_pools(const hotpage_pools_params &p) {
  if (p.struct_size != sizeof(p)) return HOTPAGE_STATUS_STRUCT_SIZE;
  const bool ok = p.num_layers >= 1 && p.num_chunks >= 1 && p.num_kv_groups >= 1 &&
                  row_bytes_fit(p.row_bytes) && p.block_size >= 1 &&
                  p.block_size <= kMaxPoolBlockSize && p.max_blocks >= 0 && p.num_gpu_blocks >= 1 &&
                  p.num_gpu_blocks <= INT32_MAX / p.block_size && p.num_host_blocks >= 1 &&
                  p.num_host_blocks <= INT32_MAX / p.block_size && p.layers != 0 &&
                  p.chunks != 0 && p.chunks % 16 == 0;
  return ok ? HOTPAGE_OK : HOTPAGE_STATUS_INVALID_ARGUMENT;
}

// Thread blocks for `num_units` warps' worth of work: no more than are useful, spread wide.
inline unsigned pool_grid(int64_t num_units, int32_t max_blocks, int32_t default_blocks) {
  const int64_t most = max_blocks > 0 ? max_blocks : default_blocks;
  return static_cast<unsigned>(num_units < most ? num_units : most);
}

}  // namespace hotpage
