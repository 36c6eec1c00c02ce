// SPDX-License-Identifier: Apache-2.0
// Owns the cooperative copy kernel: ranks fetch a part of the misses each, for all of them.
//
// Contract: launched by cooperative_copy, the same launch on every rank. kCooperativeThreads
// threads a block; all blocks of all ranks have to run at the same time. Reads the rank's copy list
// and host rows over the bus, and the other ranks' hot rows over the link; writes hot rows of all
// ranks, and the channels. Caller's stream, graph-safe. What the words mean: channel.cuh.
//
// Of a request's misses, ordered by host row, rank r fetches those whose index plus request number
// is r modulo the ranks. Requests whose lists differ between ranks are fetched by each rank for
// itself, on all ranks alike because all compare the same digests. Ranks may keep a row in other
// hot slots: only then are another rank's hot rows read.
//
// The first warps of a block meet the other ranks, and some of the others have their first rows on
// the bus meanwhile. Not all of them: reads that fill the bus hold up everything behind them, the
// words of the meeting too. Nor do warps that meet: what they say is behind a fence, and a fence
// waits for reads under way.
#pragma once

#include <cstdint>

#include "hotpage/channel.cuh"
#include "hotpage/cooperative_args.cuh"
#include "hotpage/copy_digest.cuh"

namespace hotpage {

class CooperativeBlock {
 public:
  __device__ __forceinline__ CooperativeBlock(const CooperativeArgs &args,
                                              CooperativeShared *shared)
      : args_(args), p_(args.p), s_(shared), rank_(static_cast<uint32_t>(args.p.rank)),
        num_ranks_(static_cast<uint32_t>(args.p.num_ranks)) {}

  __device__ __forceinline__ void run() {
    const uint32_t epoch = epoch_after(own()->epoch[blockIdx.x]);
    const uint32_t failed = load_relaxed(&own()->failed);
    // Nothing of these waits for the two loads.
    const Share share = {Part::kOwn, rank_, num_ranks_};
    const OwnEntries entries = read_first_own();
    clear_shared();
    const uint32_t num_rows = sum_share(share, false);
    // A block of this launch that failed does not keep the others from telling their peers.
    if (failed != 0 && failed != epoch) {
      run_alone();
    } else {
      run_shared(share, num_rows, epoch, entries);
    }
  }

 private:
  // Of a request's list, what a lane reads first of the host rows and of the hot rows.
  struct OwnEntries {
    Entries host, hot;
  };

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
  // The rank `steps` after this one, in turn.
  __device__ __forceinline__ uint32_t next_rank(uint32_t steps) const {
    const uint32_t rank = rank_ + steps;
    return rank < num_ranks_ ? rank : rank - num_ranks_;
  }
  __device__ __forceinline__ bool is_agreed(uint32_t request) const {
    return s_->agreed[request / 32] >> request % 32 & 1;
  }
  __device__ __forceinline__ bool is_same_hot(uint32_t request) const {
    return s_->same_hot[request / 32] >> request % 32 & 1;
  }
  __device__ __forceinline__ uint32_t count_of(uint32_t request) const {
    return static_cast<uint32_t>(reinterpret_cast<const int32_t *>(p_.copy.copy_count)[request]);
  }
  __device__ __forceinline__ const int32_t *host_rows_of(uint32_t request) const {
    return reinterpret_cast<const int32_t *>(p_.copy.copy_host_row) +
           int64_t{request} * p_.copy.copy_list_stride;
  }

  // Empties what the meeting adds to. A barrier has to follow.
  __device__ __forceinline__ void clear_shared() {
    if (threadIdx.x < kMeetingWarps) s_->num_summed[threadIdx.x] = 0;
    if (threadIdx.x == 0) s_->num_different = 0;
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

  // Lane l looks after row l % 4 of a chunk, for rank l / 4. All ranks' lanes find the same.
  __device__ __forceinline__ Fetch find(const Share &share, uint32_t num_rows, uint32_t chunk,
                                        uint32_t end) const {
    const uint32_t num_layers = static_cast<uint32_t>(p_.copy.num_layers);
    const uint32_t item = chunk * kRowsPerChunk + lane_id() % kRowsPerChunk;
    if (chunk >= end || item >= num_rows * num_layers) return {0, 0, 0, 0, 0};
    const uint32_t layer = args_.layers_innermost ? item % num_layers : item / num_rows;
    const uint32_t number = args_.layers_innermost ? item / num_layers : item - layer * num_rows;
    const uint32_t request = find_request(s_->first_of_request, p_.copy.num_requests, number);
    const uint32_t index = share.index(request, number - s_->first_of_request[request]);
    const int64_t place = int64_t{request} * p_.copy.copy_list_stride + index;
    const int64_t host_row =
        __ldcg(reinterpret_cast<const int32_t *>(p_.copy.copy_host_row) + place);
    const int32_t hot_row = __ldcg(reinterpret_cast<const int32_t *>(p_.copy.copy_hot_row) + place);
    const uint64_t source =
        p_.copy.host_layer[layer] + static_cast<uint64_t>(host_row * p_.copy.host_row_stride);
    return {source, place, hot_row, request, layer};
  }

  // Where the lane's row goes on the lane's rank, 0 for nowhere. To this rank alone unless
  // is_shared.
  __device__ __forceinline__ uint64_t target_of(const Fetch &fetch, bool is_shared) const {
    const uint32_t rank = static_cast<uint32_t>(lane_id()) / kRowsPerChunk;
    if (fetch.source == 0) return 0;
    int32_t hot_row = fetch.hot_row;
    if (rank != rank_) {
      if (!is_shared || rank >= num_ranks_ || !is_agreed(fetch.request)) return 0;
      if (!is_same_hot(fetch.request)) {
        hot_row = __ldcg(reinterpret_cast<const int32_t *>(p_.hot_row[rank]) + fetch.place);
      }
    }
    const int32_t block = hot_row / p_.copy.block_stride_rows;
    const int64_t row_in_block = hot_row - block * p_.copy.block_stride_rows;
    return p_.gpu_layer[rank * HOTPAGE_MAX_GROUP_LAYERS + fetch.layer] +
           static_cast<uint64_t>(block * p_.copy.gpu_block_stride +
                                 row_in_block * p_.copy.row_bytes);
  }

  // Reads the chunk's units from number `base` on; all reads are under way when this returns.
  __device__ __forceinline__ void read(uint64_t my_source, uint32_t base, uint4 *held) const {
#pragma unroll
    for (int i = 0; i < kUnitsPerLane; ++i) {
      const uint32_t unit = base + i * kWarpSize + lane_id();
      const uint32_t row = args_.units.row_of(unit);
      const uint64_t source = __shfl_sync(kFullWarp, my_source, row % kRowsPerChunk);
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

  // To every rank that the chunk goes to: others in turn, so that links are used evenly, and this
  // one last, where a write takes the least time.
  __device__ __forceinline__ void write_all(uint64_t my_target, bool is_shared, uint32_t base,
                                            const uint4 *held) const {
    const uint32_t num_targets = is_shared ? num_ranks_ : 1;
    for (uint32_t i = 1; i <= num_targets; ++i) {
      const uint32_t rank = next_rank(i % num_targets);
      write(my_target, rank, base, held);
    }
  }

  // The block's slice of so many rows; all of them if `by_one`.
  __device__ __forceinline__ Slice slice_of(uint32_t num_rows, bool by_one) const {
    const uint32_t num_items = num_rows * static_cast<uint32_t>(p_.copy.num_layers);
    const uint32_t num_chunks = (num_items + kRowsPerChunk - 1) / kRowsPerChunk;
    if (by_one) return {0, num_chunks};
    const uint32_t size = (num_chunks + gridDim.x - 1) / gridDim.x;
    return {blockIdx.x * size, min(num_chunks, (blockIdx.x + 1) * size)};
  }
  // The warp's first chunk of a slice. Warps that do not meet are the first in turn.
  __device__ __forceinline__ uint32_t first_chunk(const Slice &slice) const {
    return slice.first + (warp_id() + kCooperativeWarps - kMeetingWarps) % kCooperativeWarps;
  }

  // Copies a slice with all warps; `mine` is the warp's first chunk in it, and `held` has its first
  // units if `is_held`.
  __device__ __forceinline__ void copy(const Share &share, uint32_t num_rows, bool is_shared,
                                       const Slice &slice, Fetch mine, uint4 *held,
                                       bool is_held) const {
    const uint32_t num_units = kRowsPerChunk * args_.units.per_row;
    constexpr uint32_t kUnitsAtOnce = kWarpSize * kUnitsPerLane;
    uint32_t chunk = first_chunk(slice);
    for (; chunk < slice.end; chunk += kCooperativeWarps) {
      const uint64_t my_target = target_of(mine, is_shared);
      // The next chunk's addresses arrive while this one's rows are on the bus.
      const Fetch next = find(share, num_rows, chunk + kCooperativeWarps, slice.end);
      for (uint32_t base = 0; base < num_units; base += kUnitsAtOnce) {
        if (!is_held) read(mine.source, base, held);
        is_held = false;
        write_all(my_target, is_shared, base, held);
      }
      mine = next;
    }
  }

  // Copies a share to this rank. Begins and ends with barriers.
  __device__ __forceinline__ void copy_to_self(Part part, bool without_agreed, bool by_one) {
    const Share share = {part, rank_, num_ranks_};
    const uint32_t num_rows = sum_share(share, without_agreed);
    const Slice slice = slice_of(num_rows, by_one);
    uint4 held[kUnitsPerLane];
    copy(share, num_rows, false, slice, find(share, num_rows, first_chunk(slice), slice.end), held,
         false);
    __syncthreads();  // orders the last search before the sums change
  }

  // Marks the holders of the whole list: rows that other ranks fetch enter this rank's row maps.
  __device__ __forceinline__ void mark_holders() const {
    if (p_.holders == 0) return;
    for (uint32_t request = blockIdx.x; request < num_requests(); request += gridDim.x) {
      const uint32_t count = count_of(request);
      const int32_t state_row = reinterpret_cast<const int32_t *>(p_.state_row)[request];
      for (uint32_t i = threadIdx.x; i < count; i += kCooperativeThreads) {
        const int32_t host_block = host_rows_of(request)[i] / p_.copy.block_size;
        mark_holder(p_.holders, p_.num_state_rows, host_block, state_row);
      }
    }
  }

  __device__ __forceinline__ void run_alone() {
    if (blockIdx.x == 0 && threadIdx.x == 0) {
      own()->counters[HOTPAGE_CHANNEL_PRIVATE_LAUNCHES] += 1;
    }
    mark_holders();
    copy_to_self(Part::kAll, false, false);
  }

  // `num_rows`: of the share, whose sums are there.
  __device__ __forceinline__ void run_shared(const Share &share, uint32_t num_rows, uint32_t epoch,
                                             const OwnEntries &entries) {
    if (meets()) publish(epoch, entries);
    // While the words are under way.
    const Slice slice = slice_of(num_rows, false);
    const Fetch first = find(share, num_rows, first_chunk(slice), slice.end);
    uint4 held[kUnitsPerLane];
    const bool is_held = reads_early() && first_chunk(slice) < slice.end;
    if (is_held) read(first.source, 0, held);
    const bool has_met = !meets() || compare(epoch);
    // Orders what the ranks agreed on, and what the words of the others say has ended, before reads
    // of their hot rows and writes to them.
    const bool is_shared = __syncthreads_or(!has_met) == 0;
    if (is_shared) copy(share, num_rows, true, slice, first, held, is_held);
    mark_holders();
    __syncthreads();  // orders the last search before other sums, and all writes before the end
    // The others' share of requests that are not agreed on.
    if (is_shared && s_->num_different != 0) copy_to_self(Part::kOthers, true, false);
    if (!end_block(share, epoch, is_shared)) recover(epoch);
    end_epoch(epoch);
  }

  // True in warps that tell the other ranks what this one lists, and look at what they do.
  __device__ __forceinline__ bool meets() const { return warp_id() < kMeetingWarps; }
  __device__ __forceinline__ bool reads_early() const {
    return warp_id() >= kMeetingWarps && warp_id() < kMeetingWarps + kEarlyWarps;
  }

  __device__ __forceinline__ OwnRequests own_requests() const {
    return {num_requests(), blockIdx.x, gridDim.x};
  }
  __device__ __forceinline__ const int32_t *hot_rows_of(uint32_t request) const {
    return reinterpret_cast<const int32_t *>(p_.copy.copy_hot_row) +
           int64_t{request} * p_.copy.copy_list_stride;
  }
  // What the lane reads first of its part of a request's list. All reads are under way when this
  // returns.
  __device__ __forceinline__ OwnEntries read_own(const OwnRequests &mine, uint32_t request) const {
    const uint32_t length = static_cast<uint32_t>(p_.copy.copy_list_stride);
    OwnEntries entries;
    entries.host.read(host_rows_of(request), length, mine.first_entry(), mine.step());
    entries.hot.read(hot_rows_of(request), length, mine.first_entry(), mine.step());
    return entries;
  }
  // That of the warp's first request, if it has one.
  __device__ __forceinline__ OwnEntries read_first_own() const {
    const OwnRequests mine = own_requests();
    if (!meets() || mine.first() >= mine.num) return {};
    return read_own(mine, mine.request(mine.first()));
  }

  // Tells the other ranks that this one is ready, and what the block's own requests list.
  __device__ __forceinline__ void publish(uint32_t epoch, OwnEntries entries) {
    // Orders the list and the end of every earlier reader of hot slots, both of which the stream
    // put before this launch, before the words that say so.
    fence_system();
    if (blockIdx.x == 0 && warp_id() == kClaimingWarp && stands_for_rank()) {
      store_relaxed(&channel(lane_id())->gate[rank_], gate_word(epoch, kReady));
    }
    const OwnRequests mine = own_requests();
    const uint32_t first = mine.first_entry(), step = mine.step();
    for (uint32_t number = mine.first(); number < mine.num; number += mine.num_at_once()) {
      const uint32_t request = mine.request(number);
      if (number != mine.first()) entries = read_own(mine, request);
      const uint32_t count = count_of(request);
      const int32_t *host_rows = host_rows_of(request), *hot_rows = hot_rows_of(request);
      uint64_t host = warp_sum(sum_entries(host_rows, entries.host, count, first, step));
      uint64_t hot = warp_sum(sum_entries(hot_rows, entries.hot, count, first, step));
      if (mine.num_parts > 1 && !add_parts(number, mine.num_parts, &host, &hot)) continue;
      publish_request(request, count, host, hot, epoch);
    }
  }

  // Puts the warp's part of a request's sums. True in the warp that comes last; it gets the sums.
  __device__ __forceinline__ bool add_parts(uint32_t number, uint32_t num_parts, uint64_t *host,
                                            uint64_t *hot) {
    uint32_t before = 0;
    if (lane_id() == 0) {
      s_->entry_sum[warp_id()][0] = *host;
      s_->entry_sum[warp_id()][1] = *hot;
      __threadfence_block();  // orders the part before its count
      before = atomicAdd(&s_->num_summed[number], 1u);
      __threadfence_block();  // orders the others' counts before their parts
    }
    before = __shfl_sync(kFullWarp, before, 0);
    __syncwarp();  // orders what the first lane has seen before the other lanes' reads
    if (before + 1 != num_parts) return false;
    *host = *hot = 0;
    for (uint32_t part = 0; part < num_parts; ++part) {
      *host += s_->entry_sum[number * num_parts + part][0];
      *hot += s_->entry_sum[number * num_parts + part][1];
    }
    return true;
  }

  // One warp. Lane l stores word l % 4 of the request's digests at rank l / 4.
  __device__ __forceinline__ void publish_request(uint32_t request, uint32_t count, uint64_t host,
                                                  uint64_t hot, uint32_t epoch) {
    static_assert(kMaxRanks * kDigestWords == kWarpSize, "a lane stores one word");
    const Digests digests = {digest_of_sum(host, count, p_.salt),
                             digest_of_sum(hot, count, p_.salt)};
    const uint32_t rank = static_cast<uint32_t>(lane_id()) / kDigestWords;
    const uint32_t which = static_cast<uint32_t>(lane_id()) % kDigestWords;
    if (rank >= num_ranks_) return;
    store_relaxed(&channel(rank)->digest[rank_][request][which], digests.word(which, epoch));
  }

  // Waits for all digests and claims the gates of all ranks, with the warps that meet; false if one
  // of them did not come in time or was revoked. Puts which requests are agreed on: every rank
  // comes to the same result from the same digests. A barrier has to follow.
  __device__ __forceinline__ bool compare(uint32_t epoch) {
    Patience patience(own(), p_.time_limit_ns);
    bool ok = true;
    if (warp_id() == kClaimingWarp && stands_for_rank()) {
      ok = claim_gate(own(), lane_id(), epoch, &patience);
    }
    uint64_t sum = 0;
    for (uint32_t base = warp_id() * kWarpSize; base < num_requests(); base += kMeetingThreads) {
      const uint32_t request = base + lane_id();
      const bool exists = request < num_requests();
      Digests first = {0, 0};
      bool same = exists, same_hot = exists;
      for (uint32_t rank = 0; exists && ok && rank < num_ranks_; ++rank) {
        Digests digests;
        ok = await_digests(own(), rank, request, epoch, &patience, &digests);
        if (rank == 0) first = digests;
        if (rank == rank_) sum += digest_of_request(digests.host, request);
        same = same && digests.host == first.host;
        same_hot = same_hot && digests.hot == first.hot;
      }
      const uint32_t agreed = __ballot_sync(kFullWarp, ok && same);
      const uint32_t equal = __ballot_sync(kFullWarp, ok && same_hot);
      const uint32_t different = __ballot_sync(kFullWarp, ok && exists && !same);
      if (lane_id() == 0) {
        s_->agreed[base / kWarpSize] = agreed;
        s_->same_hot[base / kWarpSize] = equal;
        if (different != 0) atomicAdd(&s_->num_different, static_cast<uint32_t>(__popc(different)));
      }
    }
    sum = warp_sum(sum);
    if (lane_id() == 0) s_->list_sum[warp_id()] = sum;
    return ok;
  }

  // Tells the other ranks that this block writes no more, and waits for their blocks of its number.
  // All threads are past their writes. False if a rank failed or did not come in time. Ends with a
  // barrier.
  __device__ __forceinline__ bool end_block(const Share &share, uint32_t epoch, bool is_shared) {
    bool ok = is_shared;
    if (warp_id() == 0) {
      // Orders the block's writes, which the last barrier put before this, before the words.
      fence_system();
      if (stands_for_rank()) {
        store_relaxed(&channel(lane_id())->done[rank_][blockIdx.x], done_word(epoch, is_shared));
      }
      __syncwarp();  // no lane waits before every rank was told
      Patience patience(own(), p_.time_limit_ns);
      if (ok && stands_for_rank()) ok = await_done(own(), lane_id(), blockIdx.x, epoch, &patience);
    } else if (blockIdx.x == 0 && warp_id() == 1 && is_shared) {
      count_launch(share);
    }
    return __syncthreads_or(!ok) == 0;
  }

  // One warp of the first block, while another waits.
  __device__ __forceinline__ void count_launch(const Share &share) {
    uint32_t num_rows = 0;
    for (uint32_t request = lane_id(); request < num_requests(); request += kWarpSize) {
      if (is_agreed(request)) num_rows += share.size(request, count_of(request));
    }
    num_rows = __reduce_add_sync(kFullWarp, num_rows);
    const uint64_t sum = warp_sum(lane_id() < kMeetingWarps ? s_->list_sum[lane_id()] : 0);
    if (lane_id() != 0) return;
    uint64_t *counters = own()->counters;
    counters[HOTPAGE_CHANNEL_SHARED_LAUNCHES] += 1;
    counters[HOTPAGE_CHANNEL_SHARED_ROWS] += num_rows;
    counters[HOTPAGE_CHANNEL_DIFFERENT_REQUESTS] += s_->num_different;
    counters[HOTPAGE_CHANNEL_DIGEST] = append_digest(counters[HOTPAGE_CHANNEL_DIGEST], sum);
    counters[HOTPAGE_CHANNEL_DIGESTED_LAUNCHES] += 1;
  }

  // Makes sure that nobody writes here any more, then fetches every row. Blocks that do so at the
  // same time write the same bytes.
  __device__ __forceinline__ void recover(uint32_t epoch) {
    if (warp_id() == 0) {
      if (static_cast<uint32_t>(lane_id()) < num_ranks_) {
        store_relaxed(&channel(lane_id())->abort, 1);
      }
      __syncwarp();  // no lane waits before every rank was told
      bool lost = false;
      if (stands_for_rank()) {
        lost = !revoke_gate(own(), channel(lane_id()), rank_, lane_id(), gridDim.x, epoch,
                            p_.time_limit_ns);
      }
      const uint32_t num_lost = __popc(__ballot_sync(kFullWarp, lost));
      fence_system();
      // Of the blocks that fail, one counts.
      if (lane_id() == 0 && compare_and_swap(&own()->failed, 0, epoch) == 0) {
        own()->counters[HOTPAGE_CHANNEL_FAILED_LAUNCHES] += 1;
        own()->counters[HOTPAGE_CHANNEL_LOST_RANKS] += num_lost;
      }
    }
    __syncthreads();  // orders the others' last writes before this rank's
    copy_to_self(Part::kAll, false, true);
  }

  // The epoch that the next launch's blocks continue from, those that this launch has not included.
  __device__ __forceinline__ void end_epoch(uint32_t epoch) {
    const bool is_mine = threadIdx.x == blockIdx.x;
    const bool is_nobodys = blockIdx.x == 0 && threadIdx.x >= gridDim.x;
    if (threadIdx.x < kMaxCooperativeBlocks && (is_mine || is_nobodys)) {
      own()->epoch[threadIdx.x] = epoch;
    }
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
