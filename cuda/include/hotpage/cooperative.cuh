// SPDX-License-Identifier: Apache-2.0
// Owns the cooperative copy kernel: ranks fetch a part of the misses each, for all of them.
//
// Contract: launched by cooperative_copy, the same launch on every rank. kCooperativeThreads
// threads a block; all blocks of all ranks have to run at the same time. Reads the rank's copy list
// and host rows over the bus, and the other ranks' hot rows over the link; writes hot rows of all
// ranks, and the channels. Caller's stream, graph-safe. What the words mean: channel.cuh.
//
// Of a request's misses, ordered by host row, rank r fetches those whose index plus request number
// is r modulo the ranks: every rank knows its own without asking, so its first rows are on the bus
// while the first warp of each block, which copies nothing, meets the other ranks. Requests whose
// lists differ between ranks are fetched by each rank for itself, on all ranks alike because all
// compare the same digests.
#pragma once

#include <cstdint>

#include "hotpage/channel.cuh"
#include "hotpage/copy_digest.cuh"
#include "hotpage/copy_rows.cuh"

namespace hotpage {

constexpr int kCooperativeThreads = 512;
constexpr int kCooperativeWarps = kCooperativeThreads / kWarpSize;
constexpr uint32_t kFetchWarps = kCooperativeWarps - 1;
static_assert(kMaxRequests == 2 * kCooperativeThreads, "a thread takes two requests");
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
  uint32_t first_of_request[kMaxRequests];
  uint32_t agreed[kMaxRequests / 32];  // bit r % 32 of word r / 32: all ranks list the same rows
  WarpWords<kCooperativeWarps> totals;
  uint32_t is_shared;  // this block may write to the other ranks
  uint32_t differs;    // some request is not agreed on
  uint32_t is_last;    // this block ended last
  uint32_t recovers;   // and some block of the launch gave up
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

// A row of one layer that a warp copies; every lane that holds it knows this much.
struct Fetch {
  uint64_t source;  // 0: none
  int64_t place;    // in the copy list
  uint32_t request;
  uint32_t layer;
};

class CooperativeBlock {
 public:
  __device__ __forceinline__ CooperativeBlock(const CooperativeArgs &args,
                                              CooperativeShared *shared)
      : args_(args), p_(args.p), s_(shared), rank_(static_cast<uint32_t>(args.p.rank)),
        num_ranks_(static_cast<uint32_t>(args.p.num_ranks)) {}

  __device__ __forceinline__ void run() {
    // OK to read unordered: only the last block of an earlier launch writes it.
    if (own()->failed != 0) {
      run_alone();
    } else {
      run_shared(epoch_after(own()->epoch));
    }
  }

 private:
  __device__ __forceinline__ Channel *channel(uint32_t rank) const {
    return reinterpret_cast<Channel *>(p_.channel[rank]);
  }
  __device__ __forceinline__ Channel *own() const { return channel(rank_); }
  __device__ __forceinline__ uint32_t num_requests() const {
    return static_cast<uint32_t>(p_.copy.num_requests);
  }
  // True in lanes of a warp that stand for another rank.
  __device__ __forceinline__ bool stands_for_rank() const {
    return static_cast<uint32_t>(lane_id()) < num_ranks_ &&
           static_cast<uint32_t>(lane_id()) != rank_;
  }
  __device__ __forceinline__ bool is_agreed(uint32_t request) const {
    return s_->agreed[request / 32] >> request % 32 & 1;
  }
  __device__ __forceinline__ uint32_t count_of(uint32_t request) const {
    return static_cast<uint32_t>(reinterpret_cast<const int32_t *>(p_.copy.copy_count)[request]);
  }
  __device__ __forceinline__ const int32_t *host_rows_of(uint32_t request) const {
    return reinterpret_cast<const int32_t *>(p_.copy.copy_host_row) +
           int64_t{request} * p_.copy.copy_list_stride;
  }

  // Puts where each request's part of the share begins; returns the rows of the share. Requests
  // that are agreed on are left out if so told. Ends with a barrier.
  __device__ __forceinline__ uint32_t sum_share(const Share &share, bool without_agreed) {
    const uint32_t request = 2 * threadIdx.x;
    const auto size_of = [&](uint32_t r) {
      if (r >= num_requests() || (without_agreed && is_agreed(r))) return 0u;
      return share.size(r, count_of(r));
    };
    const uint32_t even = size_of(request), odd = size_of(request + 1);
    uint32_t warp_total;
    const uint32_t before = warp_exclusive_sum(even + odd, &warp_total);
    s_->totals.put(warp_total);
    __syncthreads();  // orders every warp's total before the sums
    const uint32_t first = s_->totals.sum_before() + before;
    s_->first_of_request[request] = first;
    s_->first_of_request[request + 1] = first + even;
    const uint32_t total = s_->totals.sum();
    __syncthreads();  // orders the sums before the searches
    return total;
  }

  // Lane l looks after row l % 4 of a chunk, for rank l / 4.
  __device__ __forceinline__ Fetch find(const Share &share, uint32_t num_rows, uint32_t chunk,
                                        uint32_t end) const {
    const uint32_t num_layers = static_cast<uint32_t>(p_.copy.num_layers);
    const uint32_t item = chunk * kRowsPerChunk + lane_id() % kRowsPerChunk;
    if (chunk >= end || item >= num_rows * num_layers) return {0, 0, 0, 0};
    const uint32_t layer = args_.layers_innermost ? item % num_layers : item / num_rows;
    const uint32_t number = args_.layers_innermost ? item / num_layers : item - layer * num_rows;
    const uint32_t request = find_request(s_->first_of_request, p_.copy.num_requests, number);
    const uint32_t index = share.index(request, number - s_->first_of_request[request]);
    const int64_t place = int64_t{request} * p_.copy.copy_list_stride + index;
    const int64_t host_row = reinterpret_cast<const int32_t *>(p_.copy.copy_host_row)[place];
    const uint64_t source =
        p_.copy.host_layer[layer] + static_cast<uint64_t>(host_row * p_.copy.host_row_stride);
    return {source, place, request, layer};
  }

  // Where the lane's row goes on the lane's rank; 0: nowhere.
  __device__ __forceinline__ uint64_t target_of(const Fetch &fetch, bool is_shared) const {
    const uint32_t rank = static_cast<uint32_t>(lane_id()) / kRowsPerChunk;
    if (fetch.source == 0 || rank >= num_ranks_) return 0;
    if (rank != rank_ && !(is_shared && is_agreed(fetch.request))) return 0;
    const int32_t hot_row =
        __ldcg(reinterpret_cast<const int32_t *>(p_.hot_row[rank]) + fetch.place);
    const int32_t block = hot_row / p_.copy.block_stride_rows;
    const int64_t row_in_block = hot_row - block * p_.copy.block_stride_rows;
    return p_.gpu_layer[rank * HOTPAGE_MAX_GROUP_LAYERS + fetch.layer] +
           static_cast<uint64_t>(block * p_.copy.gpu_block_stride +
                                 row_in_block * p_.copy.row_bytes);
  }

  // Reads the chunk's units from number `base` on; all reads are under way when this returns.
  __device__ __forceinline__ void read(const Fetch &fetch, uint32_t base, uint4 *held) const {
#pragma unroll
    for (int i = 0; i < kUnitsPerLane; ++i) {
      const uint32_t unit = base + i * kWarpSize + lane_id();
      const uint32_t row = args_.units.row_of(unit);
      const uint64_t source = __shfl_sync(kFullWarp, fetch.source, row % kRowsPerChunk);
      const uint32_t offset = (unit - row * args_.units.per_row) * kUnitBytes;
      if (row < kRowsPerChunk && source != 0) {
        held[i] = __ldcg(reinterpret_cast<const uint4 *>(source + offset));
      }
    }
  }

  // Writes what `read` read to one rank.
  __device__ __forceinline__ void write(uint64_t my_target, uint32_t rank, uint32_t base,
                                        const uint4 *held) const {
#pragma unroll
    for (int i = 0; i < kUnitsPerLane; ++i) {
      const uint32_t unit = base + i * kWarpSize + lane_id();
      const uint32_t row = args_.units.row_of(unit);
      const uint64_t target =
          __shfl_sync(kFullWarp, my_target, rank * kRowsPerChunk + row % kRowsPerChunk);
      const uint32_t offset = (unit - row * args_.units.per_row) * kUnitBytes;
      if (row < kRowsPerChunk && target != 0) {
        __stcg(reinterpret_cast<uint4 *>(target + offset), held[i]);
      }
    }
  }

  // To every rank that the chunk goes to, this one first, so that links are used evenly.
  __device__ __forceinline__ void write_all(uint64_t my_target, bool is_shared, uint32_t base,
                                            const uint4 *held) const {
    const uint32_t num_targets = is_shared ? num_ranks_ : 1;
    for (uint32_t i = 0; i < num_targets; ++i) {
      const uint32_t rank = rank_ + i < num_ranks_ ? rank_ + i : rank_ + i - num_ranks_;
      write(my_target, rank, base, held);
    }
  }

  // Copies chunks from `chunk` on, the first of which is found and its first units read.
  __device__ __forceinline__ void copy(const Share &share, uint32_t num_rows, bool is_shared,
                                       uint32_t chunk, uint32_t end, Fetch fetch, uint4 *held) const {
    const uint32_t num_units = kRowsPerChunk * args_.units.per_row;
    constexpr uint32_t kUnitsAtOnce = kWarpSize * kUnitsPerLane;
    while (chunk < end) {
      const uint64_t my_target = target_of(fetch, is_shared);
      // The next chunk's addresses arrive while this one's rows are on the bus.
      const Fetch next = find(share, num_rows, chunk + kFetchWarps, end);
      write_all(my_target, is_shared, 0, held);
      for (uint32_t base = kUnitsAtOnce; base < num_units; base += kUnitsAtOnce) {
        read(fetch, base, held);
        write_all(my_target, is_shared, base, held);
      }
      fetch = next;
      chunk += kFetchWarps;
      if (chunk < end) read(fetch, 0, held);
    }
  }

  // Chunks [*chunk, returned) of this block, *chunk the warp's first one. All of them if `by_one`.
  __device__ __forceinline__ uint32_t slice_of(uint32_t num_rows, bool by_one,
                                               uint32_t *chunk) const {
    const uint32_t num_items = num_rows * static_cast<uint32_t>(p_.copy.num_layers);
    const uint32_t num_chunks = (num_items + kRowsPerChunk - 1) / kRowsPerChunk;
    const uint32_t slice = by_one ? num_chunks : (num_chunks + gridDim.x - 1) / gridDim.x;
    const uint32_t first = by_one ? 0 : blockIdx.x * slice;
    *chunk = first + warp_id() - 1;
    return min(num_chunks, first + slice);
  }

  // Copies a share to this rank, with all fetching warps. Begins and ends with barriers.
  __device__ __forceinline__ void copy_to_self(Part part, bool without_agreed, bool by_one) {
    const Share share = {part, rank_, num_ranks_};
    const uint32_t num_rows = sum_share(share, without_agreed);
    if (warp_id() != 0) {
      uint32_t chunk;
      const uint32_t end = slice_of(num_rows, by_one, &chunk);
      uint4 held[kUnitsPerLane];
      const Fetch fetch = find(share, num_rows, chunk, end);
      if (chunk < end) read(fetch, 0, held);
      copy(share, num_rows, false, chunk, end, fetch, held);
    }
    __syncthreads();  // orders the last search before the sums change
  }

  // Marks the holders of the whole list: rows that other ranks fetch enter this rank's row maps.
  __device__ __forceinline__ void mark_holders() const {
    if (p_.holders == 0) return;
    for (uint32_t request = blockIdx.x; request < num_requests(); request += gridDim.x) {
      const uint32_t count = count_of(request);
      const int32_t state_row = reinterpret_cast<const int32_t *>(p_.state_row)[request];
      for (uint32_t i = threadIdx.x - kWarpSize; i < count; i += kFetchWarps * kWarpSize) {
        const int32_t host_block = host_rows_of(request)[i] / p_.copy.block_size;
        mark_holder(p_.holders, p_.num_state_rows, host_block, state_row);
      }
    }
  }

  __device__ __forceinline__ void run_alone() {
    if (blockIdx.x == 0 && threadIdx.x == 0) {
      own()->counters[HOTPAGE_CHANNEL_PRIVATE_LAUNCHES] += 1;
    }
    if (warp_id() != 0) mark_holders();
    copy_to_self(Part::kAll, false, false);
  }

  __device__ __forceinline__ void run_shared(uint32_t epoch) {
    const Patience patience(own(), p_.time_limit_ns);
    const Share share = {Part::kOwn, rank_, num_ranks_};
    const uint32_t num_rows = sum_share(share, false);
    uint32_t chunk;
    const uint32_t end = slice_of(num_rows, false, &chunk);
    uint4 held[kUnitsPerLane];
    Fetch fetch = {0, 0, 0, 0};
    if (warp_id() == 0) {
      meet(share, epoch, patience);
    } else {
      fetch = find(share, num_rows, chunk, end);
      if (chunk < end) read(fetch, 0, held);
      mark_holders();
    }
    __syncthreads();  // orders what the ranks agreed on before the first write
    const bool is_shared = s_->is_shared != 0;
    if (is_shared && warp_id() != 0) copy(share, num_rows, true, chunk, end, fetch, held);
    __syncthreads();  // orders the last search before other sums, and all writes before the end
    // The others' share of requests that are not agreed on.
    if (is_shared && s_->differs != 0) copy_to_self(Part::kOthers, true, false);
    end_block(epoch, is_shared);
    if (s_->is_last != 0) end_launch(epoch);
  }

  // First warp. Tells the other ranks what this one lists and learns what they do.
  __device__ __forceinline__ void meet(const Share &share, uint32_t epoch,
                                       const Patience &patience) {
    // Orders the list and the end of every earlier reader of hot slots, both of which the stream
    // put before this launch, before the words that say so.
    fence_system();
    if (blockIdx.x == 0 && stands_for_rank()) {
      store_relaxed(&channel(lane_id())->gate[rank_], gate_word(epoch, kReady));
    }
    for (uint32_t request = blockIdx.x; request < num_requests(); request += gridDim.x) {
      const uint64_t digest = digest_rows(host_rows_of(request), count_of(request), p_.salt);
      if (static_cast<uint32_t>(lane_id()) < num_ranks_) {
        publish_digest(channel(lane_id()), rank_, request, epoch, digest);
      }
    }
    __syncwarp();  // no lane waits before every rank was told
    bool ok = compare(share, epoch, patience);
    if (ok && stands_for_rank()) ok = claim_gate(own(), lane_id(), epoch, patience);
    ok = __all_sync(kFullWarp, ok);
    // Orders the digests and gates of the others before reads of their hot rows and writes to them.
    fence_system();
    if (lane_id() == 0) s_->is_shared = ok;
  }

  // First warp. Waits for all digests and puts which requests are agreed on; false if the wait is
  // over before. Every rank comes to the same result from the same digests.
  __device__ __forceinline__ bool compare(const Share &share, uint32_t epoch,
                                          const Patience &patience) {
    bool ok = true;
    uint32_t num_different = 0, num_shared_rows = 0;
    uint64_t sum = 0;
    for (uint32_t base = 0; base < num_requests(); base += kWarpSize) {
      const uint32_t request = base + lane_id();
      const bool exists = request < num_requests();
      uint64_t first = 0;
      bool same = true;
      for (uint32_t rank = 0; exists && ok && rank < num_ranks_; ++rank) {
        uint64_t digest;
        ok = await_digest(own(), rank, request, epoch, patience, &digest);
        if (rank == 0) first = digest;
        if (rank == rank_) sum += digest_of_request(digest, request);
        same = same && digest == first;
      }
      const uint32_t agreed = __ballot_sync(kFullWarp, exists && ok && same);
      if (lane_id() == 0) s_->agreed[base / 32] = agreed;
      if (exists && ok && same) num_shared_rows += share.size(request, count_of(request));
      if (exists && !same) ++num_different;
    }
    ok = __all_sync(kFullWarp, ok);
    num_different = __reduce_add_sync(kFullWarp, num_different);
    if (lane_id() == 0) s_->differs = num_different;
    if (blockIdx.x == 0) count_launch(ok, sum, num_different, num_shared_rows);
    return ok;
  }

  // First warp of the first block.
  __device__ __forceinline__ void count_launch(bool ok, uint64_t sum, uint32_t num_different,
                                               uint32_t num_shared_rows) {
    num_shared_rows = __reduce_add_sync(kFullWarp, num_shared_rows);
    sum = warp_sum(sum);
    if (!ok || lane_id() != 0) return;
    uint64_t *counters = own()->counters;
    counters[HOTPAGE_CHANNEL_SHARED_ROWS] += num_shared_rows;
    counters[HOTPAGE_CHANNEL_DIFFERENT_REQUESTS] += num_different;
    counters[HOTPAGE_CHANNEL_DIGEST] = append_digest(counters[HOTPAGE_CHANNEL_DIGEST], sum);
    counters[HOTPAGE_CHANNEL_DIGESTED_LAUNCHES] += 1;
  }

  // Tells the other ranks that this block writes no more, and waits for their blocks of its number.
  // All threads are past their writes. Ends with a barrier.
  __device__ __forceinline__ void end_block(uint32_t epoch, bool is_shared) {
    if (warp_id() == 0) {
      // Orders the block's writes, which the last barrier put before this, before the words.
      fence_system();
      if (stands_for_rank()) {
        store_relaxed(&channel(lane_id())->done[rank_][blockIdx.x], done_word(epoch, is_shared));
      }
      __syncwarp();  // no lane waits before every rank was told
      const Patience patience(own(), p_.time_limit_ns);
      bool ok = is_shared;
      if (ok && stands_for_rank()) ok = await_done(own(), lane_id(), blockIdx.x, epoch, patience);
      ok = __all_sync(kFullWarp, ok);
      // Orders what the other ranks wrote here before whatever follows the launch.
      fence_system();
      if (lane_id() == 0) {
        if (!ok) store_relaxed(&own()->launch_failed, 1);
        const uint32_t num_ended = fetch_and_add(&own()->num_ended, 1) + 1;
        s_->is_last = num_ended == gridDim.x;
        s_->recovers = s_->is_last != 0 && load_relaxed(&own()->launch_failed) != 0;
      }
    }
    __syncthreads();  // orders the verdict before everybody reads it
  }

  // Last block: every other one has ended.
  __device__ __forceinline__ void end_launch(uint32_t epoch) {
    const bool recovers = s_->recovers != 0;
    if (recovers) recover(epoch);
    if (threadIdx.x != 0) return;
    Channel *c = own();
    c->counters[recovers ? HOTPAGE_CHANNEL_FAILED_LAUNCHES : HOTPAGE_CHANNEL_SHARED_LAUNCHES] += 1;
    c->epoch = epoch;
    c->num_ended = 0;
    c->launch_failed = 0;
  }

  // Makes sure that nobody writes here any more, then fetches every row.
  __device__ __forceinline__ void recover(uint32_t epoch) {
    if (warp_id() == 0) {
      if (stands_for_rank()) store_relaxed(&channel(lane_id())->abort, 1);
      __syncwarp();  // no lane waits before every rank was told
      bool lost = false;
      if (stands_for_rank()) {
        lost = !revoke_gate(own(), channel(lane_id()), rank_, lane_id(), gridDim.x, epoch,
                            p_.time_limit_ns);
      }
      const uint32_t num_lost = __popc(__ballot_sync(kFullWarp, lost));
      fence_system();
      if (lane_id() == 0) {
        own()->counters[HOTPAGE_CHANNEL_LOST_RANKS] += num_lost;
        own()->failed = 1;
      }
    }
    __syncthreads();  // orders the others' last writes before this rank's
    copy_to_self(Part::kAll, false, true);
  }

  const CooperativeArgs &args_;
  const hotpage_cooperative_copy_params &p_;
  CooperativeShared *s_;
  const uint32_t rank_;
  const uint32_t num_ranks_;
};

// The kernel's body also runs on a CPU, in tests; the launch does not.
#ifdef __CUDACC__

template <bool kAfterResolve>
__global__ void __launch_bounds__(kCooperativeThreads, 1)
    cooperative_copy_kernel(const __grid_constant__ CooperativeArgs args) {
  __shared__ CooperativeShared shared;
#if __CUDA_ARCH__ >= 900
  // Orders the whole resolve, its copy list and counts included, before everything below.
  if (kAfterResolve) asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
  CooperativeBlock(args, &shared).run();
}

#endif  // __CUDACC__

}  // namespace hotpage
