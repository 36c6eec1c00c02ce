// SPDX-License-Identifier: Apache-2.0
// Owns hotpage_invalidate: hot slots whose host row was rewritten or recycled become free.
//
// Contract: called once a step, before the step's first resolve, for all index groups. Persistent
// blocks: each puts the ids, up to kMaxKeys at a time, into a table of its own, finds which state
// rows may hold one, and then takes warp-sized pieces of their row maps. Reads the id lists, holder
// bits and row maps; writes freed slots, the masks and holder bits of recycled blocks, a counter.
// Caller's stream, graph-safe: the scratch word is 0 again at the end.

#include <algorithm>
#include <climits>

#include "hotpage/holders.cuh"
#include "hotpage/pools.cuh"

namespace hotpage {
namespace {

constexpr int kThreads = 512;
constexpr int kWarps = kThreads / kWarpSize;
constexpr int32_t kDefaultBlocks = 264;

constexpr int kMaxStateRows = HOTPAGE_MAX_STATE_ROWS;
constexpr int kHolderWords = holder_words(kMaxStateRows);

// Ids of one pass, in a table at most half full.
constexpr int kMaxKeys = 4096;
constexpr int kMaxPlaces = 2 * kMaxKeys;
constexpr int kMinPlaces = 256;
// One bit a block, many blocks to a bit: most rows are dismissed by it.
constexpr int kFilterBits = 32768;

// Slots of a piece: one 16-byte load a lane, this many times.
constexpr int kLoadsPerLane = 8;
constexpr int kPieceSlots = 4 * kWarpSize * kLoadsPerLane;

constexpr int32_t kNoKey = -1;

// Words of holder bits that a thread reads at once: 256 state rows.
constexpr int kWordsAtOnce = 8;

struct InvalidateArgs {
  hotpage_invalidate_params p;
  uint32_t num_passes;
  uint32_t num_places;        // a power of two
  uint32_t pieces_per_state;  // of the widest state
};

struct Shared {
  int32_t keys[kMaxPlaces];
  uint32_t filter[kFilterBits / 32];
  uint32_t marked[kHolderWords];
  uint16_t state_rows[kMaxStateRows];
  WarpWords<kWarps> listed;
};

// A row is its own key and a block's key is below kNoKey, so that one table holds both.
__device__ __forceinline__ int32_t key_of_block(int32_t block) { return -2 - block; }

__device__ __forceinline__ uint32_t place_of_key(int32_t key, uint32_t num_places) {
  return (static_cast<uint32_t>(key) * 0x9e3779b1u >> 16) & (num_places - 1);
}

__device__ __forceinline__ void insert_key(int32_t *keys, uint32_t num_places, int32_t key) {
  // Ends because the table is at most half full.
  for (uint32_t place = place_of_key(key, num_places);; place = (place + 1) & (num_places - 1)) {
    const int32_t held = atomicCAS(&keys[place], kNoKey, key);
    if (held == kNoKey || held == key) return;
  }
}

__device__ __forceinline__ bool has_key(const int32_t *keys, uint32_t num_places, int32_t key) {
  for (uint32_t place = place_of_key(key, num_places);; place = (place + 1) & (num_places - 1)) {
    if (keys[place] == key) return true;
    if (keys[place] == kNoKey) return false;
  }
}

__device__ __forceinline__ uint32_t filter_bit(uint32_t block) { return block % kFilterBits; }

struct Id {
  int32_t block;  // -1: none
  int32_t key;
};

__device__ __forceinline__ Id load_id(const hotpage_invalidate_params &p, uint32_t i) {
  Id id = {-1, kNoKey};
  const uint32_t num_recycled = static_cast<uint32_t>(p.num_recycled);
  if (i < num_recycled) {
    id.block = reinterpret_cast<const int32_t *>(p.recycled_host_block)[i];
    id.key = key_of_block(id.block);
  } else {
    const int64_t row = reinterpret_cast<const int64_t *>(p.rewritten_host_row)[i - num_recycled];
    // A row map holds int32 rows only.
    if (row >= 0 && row <= INT32_MAX) {
      id.key = static_cast<int32_t>(row);
      id.block = id.key / p.block_size;
    }
  }
  if (id.block >= p.num_host_blocks) id.block = -1;
  return id;
}

__device__ __forceinline__ void mark_block(const hotpage_invalidate_params &p, Shared *s,
                                           int32_t block) {
  atomicOr(&s->filter[filter_bit(block) / 32], 1u << (filter_bit(block) % 32));
  if (p.holders == 0) return;
  const int words = holder_words(p.num_state_rows);
  const uint32_t *holders = reinterpret_cast<const uint32_t *>(p.holders) + int64_t{block} * words;
  for (int base = 0; base < words; base += kWordsAtOnce) {
    uint32_t bits[kWordsAtOnce];
    // All reads are under way before the first is looked at.
#pragma unroll
    for (int i = 0; i < kWordsAtOnce; ++i) {
      bits[i] = base + i < words ? __ldcg(holders + base + i) : 0;
    }
#pragma unroll
    for (int i = 0; i < kWordsAtOnce; ++i) {
      if (bits[i] != 0) atomicOr(&s->marked[base + i], bits[i]);
    }
  }
}

// Puts ids [first, end) of the two lists, recycled blocks first, into the table, and marks the
// state rows that may hold one of them.
__device__ void load_ids(const InvalidateArgs &args, Shared *s, uint32_t first, uint32_t end) {
  for (uint32_t base = first; base < end; base += kThreads) {
    const uint32_t i = base + threadIdx.x;
    const Id id = i < end ? load_id(args.p, i) : Id{-1, kNoKey};
    const int32_t before = __shfl_up_sync(kFullWarp, id.block, 1);
    if (id.block < 0) continue;
    insert_key(s->keys, args.num_places, id.key);
    // The rows of a prefill chunk follow each other: one lane a block and warp is enough.
    if (lane_id() == 0 || before != id.block) mark_block(args.p, s, id.block);
  }
}

// The state rows to look at; returns their number. Every block lists them in the same order,
// because the blocks divide the work by it.
__device__ uint32_t list_state_rows(const hotpage_invalidate_params &p, Shared *s) {
  const int32_t *active = reinterpret_cast<const int32_t *>(p.state_row);
  const bool by_holders = p.holders != 0;
  const int num = !by_holders && active != nullptr ? p.num_active : p.num_state_rows;
  uint32_t listed = 0;
  for (int base = 0; base < num; base += kThreads) {
    const int i = base + static_cast<int>(threadIdx.x);
    const int state_row = i >= num ? -1 : !by_holders && active != nullptr ? active[i] : i;
    const bool looked_at = state_row >= 0 && state_row < p.num_state_rows &&
                           (!by_holders || (s->marked[state_row / 32] >> (state_row % 32) & 1));
    const uint32_t voters = __ballot_sync(kFullWarp, looked_at);
    s->listed.put(__popc(voters));
    __syncthreads();  // orders every warp's count before the positions
    const uint32_t at = listed + s->listed.sum_before() + __popc(voters & lanes_below());
    if (looked_at) s->state_rows[at] = static_cast<uint16_t>(state_row);
    listed += s->listed.sum();
    __syncthreads();  // orders the counts' readers before the next ones, the list before its use
  }
  return listed;
}

__device__ __forceinline__ bool is_gone(const InvalidateArgs &args, const Shared &s, int32_t row) {
  if (row < 0) return false;
  const uint32_t block = static_cast<uint32_t>(row) / static_cast<uint32_t>(args.p.block_size);
  const uint32_t bit = filter_bit(block);
  if (!(s.filter[bit / 32] >> (bit % 32) & 1)) return false;
  return has_key(s.keys, args.num_places, row) ||
         has_key(s.keys, args.num_places, key_of_block(static_cast<int32_t>(block)));
}

struct RowState {
  int32_t *row_map;     // [hot_rows] of the state row
  uint16_t *last_used;  // [hot_rows] of the state row
  int32_t hot_rows;
};

__device__ __forceinline__ RowState load_state(const hotpage_invalidate_params &p, int group,
                                               int state_row) {
  const int64_t *columns =
      reinterpret_cast<const int64_t *>(p.states) + int64_t{group} * HOTPAGE_NUM_STATE_COLUMNS;
  const int64_t hot_rows = __ldg(columns + HOTPAGE_STATE_HOT_ROWS);
  const int64_t epoch = __ldg(columns + HOTPAGE_STATE_EPOCH);
  const bool empty = reinterpret_cast<const uint32_t *>(epoch)[state_row] == 0;
  int32_t *row_map = reinterpret_cast<int32_t *>(__ldg(columns + HOTPAGE_STATE_ROW_MAP));
  uint16_t *last_used = reinterpret_cast<uint16_t *>(__ldg(columns + HOTPAGE_STATE_LAST_USED));
  return {row_map + state_row * hot_rows, last_used + state_row * hot_rows,
          empty ? 0 : static_cast<int32_t>(hot_rows)};
}

// Frees the slots of one piece; returns how many this lane freed.
__device__ uint32_t scan_piece(const InvalidateArgs &args, const Shared &s, const RowState &state,
                               int32_t first) {
  int4 rows[kLoadsPerLane];
  const int32_t lane_first = first + 4 * lane_id();
  // OK to read four slots at once: hot_rows is a multiple of 4 and the row map 16-byte aligned.
#pragma unroll
  for (int i = 0; i < kLoadsPerLane; ++i) {
    const int32_t slot = lane_first + i * 4 * kWarpSize;
    rows[i] = slot < state.hot_rows ? *reinterpret_cast<const int4 *>(state.row_map + slot)
                                    : make_int4(-1, -1, -1, -1);
  }
  uint32_t freed = 0;
#pragma unroll
  for (int i = 0; i < kLoadsPerLane; ++i) {
    const int32_t slot = lane_first + i * 4 * kWarpSize;
    const int32_t four[4] = {rows[i].x, rows[i].y, rows[i].z, rows[i].w};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (!is_gone(args, s, four[j])) continue;
      state.row_map[slot + j] = -1;
      state.last_used[slot + j] = 0;
      ++freed;
    }
  }
  return freed;
}

__device__ uint32_t scan_states(const InvalidateArgs &args, const Shared &s,
                                uint32_t num_state_rows) {
  const uint32_t num_groups = static_cast<uint32_t>(args.p.num_index_groups);
  const uint32_t pieces = args.pieces_per_state;
  const uint32_t num_units = num_state_rows * num_groups * pieces;
  uint32_t freed = 0;
  // Consecutive units go to different multiprocessors, so that one state row spreads over all.
  for (uint32_t unit = warp_id() * gridDim.x + blockIdx.x; unit < num_units;
       unit += kWarps * gridDim.x) {
    const uint32_t state = unit / pieces;
    const int state_row = s.state_rows[state / num_groups];
    const RowState found = load_state(args.p, static_cast<int>(state % num_groups), state_row);
    // A piece covers whole loads; wider states than the widest do not exist.
    freed += scan_piece(args, s, found, static_cast<int32_t>((unit % pieces) * kPieceSlots));
  }
  return freed;
}

// Nothing has landed in a block that was allocated anew.
__device__ void clear_masks(const hotpage_invalidate_params &p) {
  const int words = (p.block_size + 63) / 64;
  const int total = p.num_recycled * words;
  for (int i = blockIdx.x * kThreads + threadIdx.x; i < total; i += gridDim.x * kThreads) {
    const int32_t block = reinterpret_cast<const int32_t *>(p.recycled_host_block)[i / words];
    if (!is_real_block(block, p.num_host_blocks)) continue;
    for (const uint64_t mask : p.mask) {
      if (mask != 0) reinterpret_cast<uint64_t *>(mask)[int64_t{block} * words + i % words] = 0;
    }
  }
}

// The last block to come here clears the holder bits: every block has read them by then.
__device__ void clear_holders(const hotpage_invalidate_params &p) {
  __shared__ bool is_last;
  __syncthreads();  // orders this block's reads of holder bits before its arrival
  if (threadIdx.x == 0) {
    uint32_t *arrived = reinterpret_cast<uint32_t *>(p.scratch);
    __threadfence();
    is_last = atomicAdd(arrived, 1u) == gridDim.x - 1;
    if (is_last) *arrived = 0;
  }
  __syncthreads();  // orders the decision before it is read
  if (!is_last) return;
  const int words = holder_words(p.num_state_rows);
  for (int64_t i = threadIdx.x; i < int64_t{p.num_recycled} * words; i += kThreads) {
    const int32_t block = reinterpret_cast<const int32_t *>(p.recycled_host_block)[i / words];
    if (block < 0 || block >= p.num_host_blocks) continue;
    reinterpret_cast<uint32_t *>(p.holders)[int64_t{block} * words + i % words] = 0;
  }
}

__global__ void __launch_bounds__(kThreads, 2)
    invalidate_kernel(const __grid_constant__ InvalidateArgs args) {
  __shared__ Shared s;
  const hotpage_invalidate_params &p = args.p;
  const uint32_t num_ids = static_cast<uint32_t>(p.num_recycled) + p.num_rewritten;
  uint32_t freed = 0;
  clear_masks(p);
  for (uint32_t pass = 0; pass < args.num_passes; ++pass) {
    __syncthreads();  // orders the last pass's reads of the table before it is emptied
    for (uint32_t i = threadIdx.x; i < args.num_places; i += kThreads) s.keys[i] = kNoKey;
    for (int i = threadIdx.x; i < kFilterBits / 32; i += kThreads) s.filter[i] = 0;
    for (int i = threadIdx.x; i < kHolderWords; i += kThreads) s.marked[i] = 0;
    __syncthreads();  // orders the empty table before the ids
    load_ids(args, &s, pass * kMaxKeys, min(num_ids, (pass + 1) * kMaxKeys));
    __syncthreads();  // orders the marks before they are read
    const uint32_t num_state_rows = list_state_rows(p, &s);
    freed += scan_states(args, s, num_state_rows);
  }
  freed = __reduce_add_sync(kFullWarp, freed);
  if (lane_id() == 0) add_to_counter(p.freed, 0, freed);
  if (p.holders != 0) clear_holders(p);
}

hotpage_status check_invalidate(const hotpage_invalidate_params *params) {
  const hotpage_status checked = check_params(params);
  if (checked != HOTPAGE_OK) return checked;
  const hotpage_invalidate_params &p = *params;
  const bool ok =
      p.num_index_groups >= 1 && p.num_state_rows >= 1 && p.block_size >= 1 &&
      p.num_recycled >= 0 && p.num_rewritten >= 0 && p.num_active >= 0 &&
      p.num_active <= p.num_state_rows && p.max_blocks >= 0 && p.max_hot_rows >= 1 &&
      p.num_host_blocks >= 1 && p.num_host_blocks <= INT32_MAX / p.block_size && p.states != 0 &&
      (p.num_recycled == 0 || p.recycled_host_block != 0) &&
      (p.num_rewritten == 0 || p.rewritten_host_row != 0) && p.freed != 0 &&
      (p.holders == 0 || p.scratch != 0);
  if (!ok) return HOTPAGE_STATUS_INVALID_ARGUMENT;
  return p.num_state_rows <= kMaxStateRows ? HOTPAGE_OK : HOTPAGE_STATUS_UNSUPPORTED;
}

}  // namespace
}  // namespace hotpage

extern "C" hotpage_status hotpage_invalidate(const hotpage_invalidate_params *params,
                                             void *stream) {
  using namespace hotpage;
  const hotpage_status checked = check_invalidate(params);
  if (checked != HOTPAGE_OK) return checked;
  const hotpage_invalidate_params &p = *params;
  const int64_t num_ids = int64_t{p.num_recycled} + p.num_rewritten;
  if (num_ids == 0) return HOTPAGE_OK;
  InvalidateArgs args = {};
  args.p = p;
  args.num_passes = static_cast<uint32_t>((num_ids + kMaxKeys - 1) / kMaxKeys);
  args.num_places = kMinPlaces;
  while (args.num_places < 2 * std::min<int64_t>(num_ids, kMaxKeys)) args.num_places *= 2;
  args.pieces_per_state = static_cast<uint32_t>((p.max_hot_rows + kPieceSlots - 1) / kPieceSlots);
  const unsigned grid = static_cast<unsigned>(p.max_blocks > 0 ? p.max_blocks : kDefaultBlocks);
  return launch(invalidate_kernel, grid, kThreads, args, stream);
}
