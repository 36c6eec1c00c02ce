// SPDX-License-Identifier: Apache-2.0
// Owns hotpage_mirror_rows and hotpage_report_mirrored: this step's rows to the host pool, and
// which host blocks have landed whole.
//
// Contract: mirror_rows is launched once a step after the layers wrote their rows, and once more
// for draft layers. A warp takes a chunk: up to four (token, layer) pairs that lie side by side in
// the host pool where that is possible. Reads the slot mappings and GPU rows; writes host rows, the
// mask and counters. report_mirrored: one thread a block. Caller's stream, both graph-safe.

#include <climits>

#include "hotpage/pools.cuh"

namespace hotpage {
namespace {

// Writes to host memory are posted: few blocks fill the bus, see benches/gpu/README.md.
constexpr int32_t kDefaultMirrorBlocks = 132;

struct MirrorArgs {
  hotpage_mirror_rows_params p;
  RowUnits units;
  uint32_t num_units;  // tiles x chunks
};

// What this lane found for its token; equal in all lanes of a token.
struct TokenState {
  int64_t host_row;
  bool exists;
  bool copied;
  bool skipped;
};

__device__ __forceinline__ TokenState look_at_token(const hotpage_mirror_rows_params &p,
                                                    const Chunk &chunk, int64_t first_token) {
  const int in_chunk = lane_id() & (chunk.num_tokens - 1);
  const int64_t token = first_token + in_chunk;
  const int64_t block_size = p.pools.block_size;
  const int64_t gpu_rows = p.pools.num_gpu_blocks * block_size;
  TokenState state = {-1, token < p.num_tokens, false, false};
  bool any = false, all = true;
  if (state.exists) {
    const int64_t *slots = reinterpret_cast<const int64_t *>(p.resident_slot);
    const int32_t *slot_row = reinterpret_cast<const int32_t *>(p.slot_row);
    state.host_row = reinterpret_cast<const int64_t *>(p.host_row)[token];
    for (int group = lane_id() / chunk.num_tokens; group < p.pools.num_kv_groups;
         group += kWarpSize / chunk.num_tokens) {
      const int64_t slot = slots[slot_row[group] * p.resident_slot_stride + token];
      // Below block_size is -1 or lies in the null block.
      any = any || slot >= block_size;
      all = all && slot >= block_size && slot < gpu_rows;
    }
  }
  const uint32_t mine = chunk.lanes_of_token(in_chunk);
  const bool some_group = (__ballot_sync(kFullWarp, any) & mine) != 0;
  const bool every_group = (__ballot_sync(kFullWarp, all) & mine) == mine;
  state.skipped = state.exists && !some_group;
  state.copied = state.exists && some_group && every_group && state.host_row >= block_size &&
                 state.host_row < p.pools.num_host_blocks * block_size;
  return state;
}

__device__ __forceinline__ void mark_row(const hotpage_mirror_rows_params &p, uint32_t host_row) {
  const uint32_t block_size = p.pools.block_size;
  const uint32_t block = host_row / block_size, offset = host_row % block_size;
  const int64_t words_per_block = (block_size + 63) / 64;
  unsigned long long *word = reinterpret_cast<unsigned long long *>(p.mask) +
                             block * words_per_block + offset / 64;
  atomicOr(word, 1ull << (offset % 64));
}

// Counters and mask of the chunk's tokens; one chunk a token does this. OK to mark a row that
// another warp still copies, because the mask is read in stream order after the launch.
__device__ __forceinline__ void record_tokens(const hotpage_mirror_rows_params &p,
                                              const Chunk &chunk, const TokenState &state) {
  const bool speaks = lane_id() < chunk.num_tokens;
  const uint32_t exist = __popc(__ballot_sync(kFullWarp, speaks && state.exists));
  const uint32_t copied = __popc(__ballot_sync(kFullWarp, speaks && state.copied));
  const uint32_t skipped = __popc(__ballot_sync(kFullWarp, speaks && state.skipped));
  if (speaks && state.copied) mark_row(p, static_cast<uint32_t>(state.host_row));
  if (lane_id() == 0) {
    add_to_counter(p.counters, HOTPAGE_MIRROR_COPIED, copied);
    add_to_counter(p.counters, HOTPAGE_MIRROR_SKIPPED, skipped);
    add_to_counter(p.counters, HOTPAGE_MIRROR_LOST, exist - copied - skipped);
  }
}

__device__ __forceinline__ RowCopy find_row(const hotpage_mirror_rows_params &p, const Chunk &chunk,
                                            int64_t first_token, int64_t host_row, bool copied) {
  if (!copied || lane_id() >= static_cast<int>(chunk.num_rows())) return {0, 0};
  const Layer layer = load_layer(p.pools, chunk.layer_of(lane_id()));
  const int32_t slot_row = reinterpret_cast<const int32_t *>(p.slot_row)[layer.kv_group];
  const int64_t token = first_token + chunk.token_of(lane_id());
  // OK to narrow: look_at_token bounded the slot by the pool's rows, which int32 holds.
  const uint32_t slot = static_cast<uint32_t>(reinterpret_cast<const int64_t *>(
      p.resident_slot)[slot_row * p.resident_slot_stride + token]);
  const uint32_t block_size = p.pools.block_size;
  return {layer.gpu_row(slot / block_size, slot % block_size, p.pools.row_bytes),
          layer.host_row(host_row)};
}

__global__ void __launch_bounds__(kPoolThreads, 1)
    mirror_rows_kernel(const __grid_constant__ MirrorArgs args) {
  const hotpage_mirror_rows_params &p = args.p;
  for (uint32_t unit = first_unit(); unit < args.num_units; unit += unit_stride()) {
    const uint32_t tile = unit / p.pools.num_chunks;
    const Chunk chunk = load_chunk(p.pools, unit - tile * p.pools.num_chunks);
    const int64_t first_token = int64_t{tile} * kTileTokens + chunk.token;
    const TokenState state = look_at_token(p, chunk, first_token);
    if (chunk.layer == 0) record_tokens(p, chunk, state);
    // Lane i copies row i, whose token another lane may have looked at.
    const int owner = chunk.token_of(lane_id()) % chunk.num_tokens;
    const int64_t host_row = __shfl_sync(kFullWarp, state.host_row, owner);
    const bool copied = __shfl_sync(kFullWarp, state.copied, owner);
    const RowCopy mine = find_row(p, chunk, first_token, host_row, copied);
    copy_chunk(args.units, mine, chunk.num_rows());
  }
}

constexpr int kReportThreads = 256;

__global__ void __launch_bounds__(kReportThreads)
    report_mirrored_kernel(const __grid_constant__ hotpage_report_mirrored_params p) {
  const int i = blockIdx.x * kReportThreads + threadIdx.x;
  if (i >= p.num_blocks) return;
  const int32_t block = reinterpret_cast<const int32_t *>(p.host_block)[i];
  int32_t missing = p.block_size;
  if (is_real_block(block, p.num_host_blocks)) {
    const int words = (p.block_size + 63) / 64;
    const uint64_t *mask = reinterpret_cast<const uint64_t *>(p.mask) + int64_t{block} * words;
    for (int word = 0; word < words; ++word) missing -= __popcll(mask[word]);
  }
  reinterpret_cast<int32_t *>(p.missing_rows)[i] = missing;
  add_to_counter(p.counters, HOTPAGE_MIRROR_LOST, static_cast<uint32_t>(missing));
}

hotpage_status check_mirror(const hotpage_mirror_rows_params *params) {
  const hotpage_status checked = check_params(params);
  if (checked != HOTPAGE_OK) return checked;
  const hotpage_mirror_rows_params &p = *params;
  const bool ok = p.num_tokens >= 0 && p.resident_slot_stride >= 0 && p.resident_slot != 0 &&
                  p.slot_row != 0 && p.host_row != 0 && p.mask != 0 && p.counters != 0;
  return ok ? check_pools(p.pools) : HOTPAGE_STATUS_INVALID_ARGUMENT;
}

}  // namespace
}  // namespace hotpage

extern "C" hotpage_status hotpage_mirror_rows(const hotpage_mirror_rows_params *params,
                                              void *stream) {
  using namespace hotpage;
  const hotpage_status checked = check_mirror(params);
  if (checked != HOTPAGE_OK || params->num_tokens == 0) return checked;
  const int64_t num_tiles = (int64_t{params->num_tokens} + kTileTokens - 1) / kTileTokens;
  const int64_t num_units = num_tiles * params->pools.num_chunks;
  if (num_units > INT32_MAX) return HOTPAGE_STATUS_UNSUPPORTED;
  const MirrorArgs args = {*params, units_of_row(params->pools.row_bytes),
                           static_cast<uint32_t>(num_units)};
  const unsigned grid = pool_grid(num_units, params->pools.max_blocks, kDefaultMirrorBlocks);
  return launch(mirror_rows_kernel, grid, kPoolThreads, args, stream);
}

extern "C" hotpage_status hotpage_report_mirrored(const hotpage_report_mirrored_params *params,
                                                  void *stream) {
  using namespace hotpage;
  const hotpage_status checked = check_params(params);
  if (checked != HOTPAGE_OK) return checked;
  const hotpage_report_mirrored_params &p = *params;
  if (p.num_blocks < 0 || p.block_size < 1 || p.num_host_blocks < 1 || p.mask == 0 ||
      p.counters == 0) {
    return HOTPAGE_STATUS_INVALID_ARGUMENT;
  }
  if (p.num_blocks == 0) return HOTPAGE_OK;
  if (p.host_block == 0 || p.missing_rows == 0) return HOTPAGE_STATUS_INVALID_ARGUMENT;
  const unsigned grid = (static_cast<unsigned>(p.num_blocks) + kReportThreads - 1) / kReportThreads;
  return launch(report_mirrored_kernel, grid, kReportThreads, p, stream);
}
