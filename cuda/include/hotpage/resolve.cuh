// SPDX-License-Identifier: Apache-2.0
// Owns the resolve kernel: logical top-k to physical rows, hot row LRU, copy list.
//
// Contract: launched by resolve_and_copy.cu, one block of kResolveThreads threads per batch
// request. Reads the top-k, the tables and the state of its request; writes its rows of
// physical_topk and valid_counts, its part of the copy list, its state, and shared counters.
// Padding rows are written by whichever block their number falls to. Caller's stream, graph-safe.
//
// Chain of a step: {top-k, row numbers, state row, hot table} -> {page tables, row map, stamps} ->
// union table -> match of held rows -> misses. Braces are one round trip to memory; the rest
// happens in shared memory. A request whose rows are all resident stops before the union table.
#pragma once

#include <type_traits>
#include <utility>

#include "hotpage/holders.cuh"
#include "hotpage/hot_slots.cuh"
#include "hotpage/rank_rows.cuh"
#include "hotpage/resolve_args.cuh"
#include "hotpage/row_table.cuh"
#include "hotpage/warp.cuh"

namespace hotpage {

// kPasses: passes of the block over a row whose top-k is exactly so many times kResolveThreads;
// 0: the launch says how many, and the last one may be partial.
template <int kEntries, int kStripes, bool kRanksInShared, int kPasses>
class ResolveBlock {
 public:
  __device__ __forceinline__ ResolveBlock(const ResolveArgs &args, char *dynamic_shared)
      : a(args), p(args.p), request(static_cast<int>(blockIdx.x)), memory(dynamic_shared) {
    table.keys = reinterpret_cast<int32_t *>(memory + a.shared.keys);
    table.hot_slots = reinterpret_cast<uint16_t *>(memory + a.shared.hot_slots);
    table.claimed = reinterpret_cast<uint32_t *>(memory + a.shared.claimed);
    table.num_places = a.shared.table_places;
    pages = reinterpret_cast<int32_t *>(memory + a.shared.pages);
    buckets = reinterpret_cast<uint32_t *>(memory + a.shared.buckets);
    hot_base = reinterpret_cast<int32_t *>(memory + a.shared.hot_base);
    copy_host_row =
        at_address<int32_t>(p.copy.copy_host_row) + int64_t{request} * p.copy.copy_list_stride;
    copy_hot_row =
        at_address<int32_t>(p.copy.copy_hot_row) + int64_t{request} * p.copy.copy_list_stride;
    // NOTE: without room in shared memory, the request's part of the copy list holds the misses
    // while they are ranked: it is written in its final form only after the last such read.
    sorted = kRanksInShared ? reinterpret_cast<int32_t *>(memory + a.shared.sorted) : copy_host_row;
    bucketed =
        kRanksInShared ? reinterpret_cast<int32_t *>(memory + a.shared.bucketed) : copy_hot_row;
  }

  // Empties table, claims and buckets. Reads nothing that another kernel writes.
  __device__ __forceinline__ void clear_shared();
  __device__ __forceinline__ void run();

 private:
  static constexpr int kUnroll = kEntries <= 8 ? kEntries : 1;
  using Bits = typename std::conditional<(kEntries <= 32), uint32_t, uint64_t>::type;
  static __device__ constexpr Bits bit_of(int e) { return Bits{1} << e; }
  static __device__ __forceinline__ int lowest_bit(uint32_t bits) {
    return __ffs(static_cast<int>(bits)) - 1;
  }
  static __device__ __forceinline__ int lowest_bit(uint64_t bits) {
    return __ffsll(static_cast<long long>(bits)) - 1;
  }

  // entries[which] with constant indices only, so that the entries stay in registers.
  using EntryNumbers = std::make_index_sequence<kUnroll == kEntries ? kEntries : 0>;
  template <size_t... kE>
  __device__ __forceinline__ int32_t get_entry(int which, std::index_sequence<kE...>) const {
    if (kUnroll != kEntries) return entries[which];
    int32_t found = 0;
    ((found = static_cast<int>(kE) == which ? entries[kE] : found), ...);
    return found;
  }
  template <size_t... kE>
  __device__ __forceinline__ void set_entry(int which, int32_t value, std::index_sequence<kE...>) {
    if (kUnroll != kEntries) entries[which] = value;
    ((entries[kE] = static_cast<int>(kE) == which ? value : entries[kE]), ...);
  }

  // Calls f(entry, row of the request, position in the row's top-k) for every entry of the first
  // `rows` rows; positions reach past top_k in a row's last pass.
  template <class F>
  __device__ __forceinline__ void for_entries(int rows, F &&f) {
    int row = 0, pass = 0;
#pragma unroll kUnroll
    for (int e = 0; e < kEntries; ++e) {
      if (row < rows) f(e, row, pass * kResolveThreads + static_cast<int>(threadIdx.x));
      if (++pass == passes_per_row()) pass = 0, ++row;
    }
  }

  __device__ __forceinline__ int passes_per_row() const {
    return kPasses != 0 ? kPasses : a.passes_per_row;
  }

  // True if position i of a pass lies inside the top-k.
  __device__ __forceinline__ bool in_topk(int i) const { return kPasses != 0 || i < p.top_k; }

  __device__ __forceinline__ void load_topk(int first);
  __device__ __forceinline__ bool find_rows();
  __device__ __forceinline__ int load_row_owner(int base) const;
  __device__ __forceinline__ void fill_padding_rows(int first_owner);
  __device__ __forceinline__ void fill_row(int row);
  __device__ __forceinline__ const int32_t *hot_blocks() const;
  __device__ __forceinline__ uint32_t store_hot_table(int32_t first_block);
  __device__ __forceinline__ void load_pages();
  __device__ __forceinline__ int32_t page_word(int32_t resident, int32_t host) const;
  __device__ __forceinline__ int32_t get_page(int page) const;
  __device__ __forceinline__ bool translate(uint32_t hot_flags);
  __device__ __forceinline__ void settle();
  __device__ __forceinline__ uint32_t claim_misses();
  __device__ __forceinline__ void rank_misses(uint32_t num_misses);
  __device__ __forceinline__ void count(int which, uint32_t n) const;
  __device__ __forceinline__ bool resolve_hot(bool has_region);
  __device__ __forceinline__ void mark_holders();
  __device__ __forceinline__ void emit(bool dense);

  __device__ __forceinline__ int32_t hot_row(int hot_slot) const {
    HOTPAGE_CHECK(hot_slot >= 0 && hot_slot < p.hot_rows);
    const int block = static_cast<int>(__umulhi(hot_slot, a.block_size_reciprocal));
    return hot_base[block] + hot_slot - block * p.copy.block_size;
  }

  const ResolveArgs &a;
  const hotpage_resolve_and_copy_params &p;
  const int request;
  char *const memory;
  RowTable table;
  uint32_t *buckets;
  int32_t *hot_base;
  int32_t *pages;
  int32_t *copy_host_row, *copy_hot_row, *sorted, *bucketed;

  int first_row, num_rows, num_valid_rows, state_row;
  uint32_t epoch, num_copies;
  int lane_seq_len;  // of the request's row number `lane`
  // Logical position, then physical row or kNothing; for a waiting entry its host row, then its
  // place in the union table.
  int32_t entries[kEntries];
  Bits is_waiting;  // bit per entry: in the union
  HotSlots<kStripes> slots;

 public:
  // Words that cross warps; each member is put once between two barriers.
  struct Words {
    WarpWords<kResolveWarps> first, count, flags, hits, oldest, lowest, highest, totals;
    uint32_t num_misses;
    VictimWords<kStripes> victims;
  };
  Words *words;
};

#define HOTPAGE_RESOLVE(result)                                          \
  template <int kEntries, int kStripes, bool kRanksInShared, int kPasses> \
  __device__ __forceinline__ result ResolveBlock<kEntries, kStripes, kRanksInShared, kPasses>

// Starts the loads of the top-k and the lengths of up to max_rows_per_request rows.
HOTPAGE_RESOLVE(void)::load_topk(int first) {
  const int lane = lane_id();
  const bool has_row = lane < p.max_rows_per_request && first + lane < p.num_rows;
  lane_seq_len = has_row ? at_address<const int32_t>(p.seq_len)[first + lane] : 0;
  const int32_t *topk = at_address<const int32_t>(p.logical_topk);
  for_entries(p.max_rows_per_request, [&](int e, int row, int i) {
    const bool inside = first + row < p.num_rows && in_topk(i);
    entries[e] = inside ? topk[(first + row) * p.logical_topk_stride + i] : kNothing;
  });
}

// Finds the request's rows; false if it has none. A warp looks at the rows that an even batch
// would give the request; otherwise the block reads all row numbers. Loads the top-k of the
// guessed rows meanwhile.
HOTPAGE_RESOLVE(bool)::find_rows() {
  const int32_t *row_request = at_address<const int32_t>(p.row_request);
  const int guess = request * a.rows_per_request_guess;
  const int look = guess - 1 + lane_id();
  const bool looks = lane_id() < p.max_rows_per_request + 2 && look >= 0 && look < p.num_rows;
  const int here = looks ? row_request[look] : -1;
  num_valid_rows = min(*at_address<const int32_t>(p.num_valid_rows), p.num_rows);
  load_topk(guess);
  // Bit 0 is the row before the guess, bit 1 the guess.
  const unsigned mine = __ballot_sync(kFullWarp, here == request && look < num_valid_rows);
  num_rows = __ffs(static_cast<int>(~(mine >> 1))) - 1;
  first_row = guess;
  if (!(mine & 1u) && num_rows > 0 && num_rows <= p.max_rows_per_request) return true;

  unsigned lowest = UINT32_MAX, count = 0;
  for (int row = static_cast<int>(threadIdx.x); row < num_valid_rows; row += kResolveThreads) {
    if (row_request[row] != request) continue;
    lowest = min(lowest, static_cast<unsigned>(row));
    ++count;
  }
  words->first.put(__reduce_min_sync(kFullWarp, lowest));
  words->count.put(__reduce_add_sync(kFullWarp, count));
  __syncthreads();  // orders every warp's finding before it is read
  num_rows = static_cast<int>(words->count.sum());
  if (num_rows == 0) return false;
  first_row = static_cast<int>(words->first.min());
  // Rows beyond the bound that the caller proved get nothing.
  for (int row = p.max_rows_per_request; row < num_rows; ++row) fill_row(first_row + row);
  num_rows = min(num_rows, p.max_rows_per_request);
  load_topk(first_row);
  return true;
}

HOTPAGE_RESOLVE(void)::fill_row(int row) {
  int32_t *physical = at_address<int32_t>(p.physical_topk) + row * p.physical_topk_stride;
  for (int i = static_cast<int>(threadIdx.x); i < p.top_k; i += kResolveThreads) {
    physical[i] = kNothing;
  }
  if (threadIdx.x == 0) at_address<int32_t>(p.valid_counts)[row] = 0;
}

// Request of the row base + lane x num_requests, as the batch says it; 0 beyond the batch.
HOTPAGE_RESOLVE(int)::load_row_owner(int base) const {
  const int row = base + lane_id() * p.copy.num_requests;
  return row < p.num_rows ? at_address<const int32_t>(p.row_request)[row] : 0;
}

// Rows of no request of the batch: those whose number is this block's modulo num_requests.
HOTPAGE_RESOLVE(void)::fill_padding_rows(int first_owner) {
  int owner = first_owner;
  for (int base = request; base < p.num_rows; base += kWarpSize * p.copy.num_requests) {
    if (base != request) owner = load_row_owner(base);
    const int row = base + lane_id() * p.copy.num_requests;
    const bool is_padding = owner < 0 || owner >= p.copy.num_requests || row >= num_valid_rows;
    unsigned padding = __ballot_sync(kFullWarp, row < p.num_rows && is_padding);
    while (padding) {
      fill_row(base + (__ffs(static_cast<int>(padding)) - 1) * p.copy.num_requests);
      padding &= padding - 1;
    }
  }
}

HOTPAGE_RESOLVE(void)::clear_shared() {
  const uint4 ones = make_uint4(~0u, ~0u, ~0u, ~0u), zeros = make_uint4(0, 0, 0, 0);
  uint4 *pieces = reinterpret_cast<uint4 *>(memory);
  const int table_end = static_cast<int>(a.shared.claimed / sizeof(uint4));
  const int end = static_cast<int>(a.shared.hot_base / sizeof(uint4));
#pragma unroll 4
  for (int i = static_cast<int>(threadIdx.x); i < end; i += kResolveThreads) {
    pieces[i] = i < table_end ? ones : zeros;
  }
}

HOTPAGE_RESOLVE(const int32_t *)::hot_blocks() const {
  return at_address<const int32_t>(p.hot_block_table) + int64_t{request} * p.hot_block_table_stride;
}

// Keeps the first physical rows of the hot blocks; kNoHotRegion if one of the blocks is none.
// `first_block` is the thread's first block, loaded before.
HOTPAGE_RESOLVE(uint32_t)::store_hot_table(int32_t first_block) {
  uint32_t flags = 0;
  const int num_blocks = p.hot_rows / p.copy.block_size;
  int32_t block = first_block;
  for (int i = static_cast<int>(threadIdx.x); i < num_blocks; i += kResolveThreads) {
    if (i >= kResolveThreads) block = hot_blocks()[i];
    const int32_t base = row_of_block(block, p.copy.block_stride_rows, p.copy.block_size,
                                      p.num_physical_rows);
    hot_base[i] = base;
    if (base < 0) flags = kNoHotRegion;
  }
  return flags;
}

// A page in one word: the first physical row of its GPU block if it is resident, else minus the
// first host row of its host block, 0 for neither. OK because block 0 is the null block: no other
// block begins with row 0.
HOTPAGE_RESOLVE(int32_t)::page_word(int32_t resident, int32_t host) const {
  const int bs = p.copy.block_size;
  if (resident != 0) {
    return max(row_of_block(resident, p.copy.block_stride_rows, bs, p.num_physical_rows), 0);
  }
  return -max(row_of_block(host, bs, bs, p.num_host_rows), 0);
}

// Keeps the words of the pages that the request's rows may select.
HOTPAGE_RESOLVE(void)::load_pages() {
  const int32_t *residency =
      at_address<const int32_t>(p.residency) + state_row * p.residency_stride;
  const int32_t *source =
      at_address<const int32_t>(p.source_block_table) + request * p.source_block_table_stride;
  const int longest = static_cast<int>(
      __reduce_max_sync(kFullWarp, lane_id() < num_rows ? max(lane_seq_len, 0) : 0));
  const int end = min(p.num_pages, (longest - 1) / p.copy.block_size + 1);
  for (int i = static_cast<int>(threadIdx.x); i < end; i += 2 * kResolveThreads) {
    // Both pages' reads are under way before the first is used.
    const int other = min(i + kResolveThreads, end - 1);
    const int32_t resident = residency[i], other_resident = residency[other];
    const int32_t host = source[i], other_host = source[other];
    pages[i] = page_word(resident, host);
    pages[other] = page_word(other_resident, other_host);
  }
}

HOTPAGE_RESOLVE(int32_t)::get_page(int page) const {
  HOTPAGE_CHECK(page >= 0 && page < p.num_pages);
  if (a.shared.pages_in_shared) return pages[page];
  const int32_t *residency =
      at_address<const int32_t>(p.residency) + state_row * p.residency_stride;
  const int32_t *source =
      at_address<const int32_t>(p.source_block_table) + request * p.source_block_table_stride;
  return page_word(residency[page], source[page]);
}

// Step 1: resident entries get their physical row, host rows go to their homes in the table. True
// if some entry of the request is a host row. Ends with a barrier.
HOTPAGE_RESOLVE(bool)::translate(uint32_t hot_flags) {
  const int positions = p.num_pages * p.copy.block_size;
  uint32_t flags = hot_flags;
  is_waiting = 0;
  for_entries(num_rows, [&](int e, int row, int i) {
    // Every lane takes part in the shuffle: rows are the same for all of them.
    const int end = min(__shfl_sync(kFullWarp, lane_seq_len, row), positions);
    const int32_t t = entries[e];
    int32_t entry = kNothing;
    if (t >= 0 && t < end) {
      const int page = static_cast<int>(__umulhi(t, a.block_size_reciprocal));
      const int offset = t - page * p.copy.block_size;
      const int32_t word = get_page(page);
      if (word != 0) entry = abs(word) + offset;
      if (word < 0) {
        table.put_home(entry);
        is_waiting |= bit_of(e);
      }
    }
    if (entry == kNothing && in_topk(i)) flags |= kSomeInvalid;
    entries[e] = entry;
  });
  words->flags.put(__reduce_or_sync(kFullWarp, flags));
  return __syncthreads_or(is_waiting != 0);  // orders homes and flags before they are read
}

// Step 2: every waiting entry learns its row's place in the union. Ends with a barrier.
HOTPAGE_RESOLVE(void)::settle() {
  Bits homeless = 0;
  for_entries(num_rows, [&](int e, int, int) {
    forget(entries[e]);
    if (!(is_waiting & bit_of(e))) return;
    const uint32_t place = table.home(entries[e]);
    if (table.keys[place] == entries[e]) {
      entries[e] = static_cast<int32_t>(place);
    } else {
      homeless |= bit_of(e);
    }
  });
  // Few entries of few threads: a loop over those of a thread, not over all entries.
  while (homeless) {
    const int homeless_entry = lowest_bit(homeless);
    homeless &= homeless - 1;
    const int32_t row = get_entry(homeless_entry, EntryNumbers{});
    set_entry(homeless_entry, static_cast<int32_t>(table.insert(row)), EntryNumbers{});
  }
  __syncthreads();  // orders the whole union before it is searched
}

// Entries whose row has a hot slot get their physical row. Lists every other row of the union once,
// in any order, in `sorted`; returns how many there are, and puts their lowest and highest. Ends
// with a barrier.
HOTPAGE_RESOLVE(uint32_t)::claim_misses() {
  uint32_t lowest = UINT32_MAX, highest = 0;
  for_entries(num_rows, [&](int e, int, int) {
    const uint32_t place = static_cast<uint32_t>(entries[e]);
    bool missed = false;
    if (is_waiting & bit_of(e)) {
      const uint16_t hot_slot = table.hot_slots[place];
      missed = hot_slot == kNoHotSlot;
      if (!missed) {
        entries[e] = hot_row(hot_slot);
        is_waiting &= ~bit_of(e);
      }
    }
    // Warps without a miss are done here.
    if (!__any_sync(kFullWarp, missed)) return;
    const bool claims = missed && table.claim(place);
    const unsigned claiming = __ballot_sync(kFullWarp, claims);
    uint32_t at = 0;
    if (lane_id() == 0) at = atomicAdd(&words->num_misses, static_cast<uint32_t>(__popc(claiming)));
    at = __shfl_sync(kFullWarp, at, 0) + __popc(claiming & lanes_below());
    if (claims) {
      const int32_t row = table.keys[place];
      sorted[at] = row;
      lowest = min(lowest, static_cast<uint32_t>(row));
      highest = max(highest, static_cast<uint32_t>(row));
    }
  });
  words->lowest.put(__reduce_min_sync(kFullWarp, lowest));
  words->highest.put(__reduce_max_sync(kFullWarp, highest));
  __syncthreads();  // orders list, count and bounds before they are read
  return words->num_misses;
}

// Step 3: puts the misses in `sorted` in the order of their host rows.
HOTPAGE_RESOLVE(void)::rank_misses(uint32_t num_misses) {
  const BucketMap bucket_of(words->lowest.min(), words->highest.max());
  for (uint32_t i = threadIdx.x; i < num_misses; i += kResolveThreads) {
    atomicAdd(&buckets[bucket_of(sorted[i])], 1u);
  }
  __syncthreads();  // orders the counts before they are summed
  scan_buckets<kResolveThreads>(buckets, &words->totals);
  for (uint32_t i = threadIdx.x; i < num_misses; i += kResolveThreads) {
    const int32_t row = sorted[i];
    bucketed[atomicAdd(&buckets[bucket_of(row)], 1u)] = row;
  }
  __syncthreads();  // orders the groups, and the bucket ends they leave, before the ranks
  rank_in_buckets(bucketed, buckets, bucket_of, num_misses, sorted);
  __syncthreads();  // orders the sorted misses before the victims take them
}

HOTPAGE_RESOLVE(void)::count(int which, uint32_t n) const {
  if (threadIdx.x != 0 || n == 0) return;
  atomicAdd(at_address<unsigned long long>(p.counters) + which, static_cast<unsigned long long>(n));
}

// Steps 3 to 5 for a request whose union has settled. True if every row of it has a hot slot now.
HOTPAGE_RESOLVE(bool)::resolve_hot(bool has_region) {
  if (!has_region) {
    const uint32_t num_misses = claim_misses();
    count(HOTPAGE_COUNTER_MISSES, num_misses);
    count(HOTPAGE_COUNTER_OVERFLOW, num_misses);
    return false;
  }
  const bool renormalises = epoch >= kLastEpoch;
  if (renormalises) epoch = slots.renormalise(buckets, &words->totals);
  ++epoch;

  const uint32_t oldest = slots.match(table);
  words->hits.put(__reduce_add_sync(kFullWarp, __popc(slots.hits)));
  words->oldest.put(__reduce_min_sync(kFullWarp, oldest));
  __syncthreads();  // orders the hot slots of hits before entries look for them
  if (threadIdx.x == 0) at_address<uint32_t>(p.epoch)[state_row] = epoch;
  count(HOTPAGE_COUNTER_HITS, words->hits.sum());

  const uint32_t num_misses = claim_misses();
  if (num_misses != 0) {
    rank_misses(num_misses);
    num_copies = slots.take_victims(
        num_misses, words->oldest.min(), &words->victims, [&](uint32_t rank, int hot_slot) {
          HOTPAGE_CHECK(rank < static_cast<uint32_t>(p.copy.copy_list_stride));
          const int32_t row = sorted[rank];
          slots.row_map[hot_slot] = row;
          uint32_t place;
          table.find<1>(&row, &place);
          table.hot_slots[place] = static_cast<uint16_t>(hot_slot);
          if (kRanksInShared) copy_host_row[rank] = row;
          copy_hot_row[rank] = hot_row(hot_slot);
        });
    count(HOTPAGE_COUNTER_MISSES, num_misses);
    count(HOTPAGE_COUNTER_OVERFLOW, num_misses - num_copies);
    __syncthreads();  // orders the filled slots before entries look for them
  }
  slots.store(epoch, renormalises);
  if (p.holders != 0) mark_holders();
  return num_copies == num_misses;
}

// Marks the blocks whose rows got a hot slot. OK behind the victims, in a loop of its own: miss i
// got one if i < num_copies, `sorted` keeps it, and in the victims' loop the marks cost spills.
HOTPAGE_RESOLVE(void)::mark_holders() {
  for (uint32_t i = threadIdx.x; i < num_copies; i += kResolveThreads) {
    const int32_t block = sorted[i] / p.copy.block_size;
    mark_holder(p.holders, p.num_state_rows, block, state_row);
  }
}

// Writes the request's outputs. Dense rows have no invalid entry; otherwise valid entries move to
// the front in their order, counted per warp and pass in the bucket memory, which nobody else
// uses any more.
HOTPAGE_RESOLVE(void)::emit(bool dense) {
  int32_t *physical = at_address<int32_t>(p.physical_topk) + first_row * p.physical_topk_stride;
  int32_t *valid_counts = at_address<int32_t>(p.valid_counts) + first_row;
  for_entries(num_rows, [&](int e, int row, int i) {
    if (is_waiting & bit_of(e)) {
      const uint16_t hot_slot = table.hot_slots[entries[e]];
      entries[e] = hot_slot == kNoHotSlot ? kNothing : hot_row(hot_slot);
    }
    if (dense && in_topk(i)) physical[row * p.physical_topk_stride + i] = entries[e];
  });
  if (dense) {
    if (static_cast<int>(threadIdx.x) < num_rows) valid_counts[threadIdx.x] = p.top_k;
    return;
  }
  static_assert(kEntries * kResolveWarps <= kRankBuckets, "one word per entry pass and warp");
  WarpWords<kResolveWarps> *counts = reinterpret_cast<WarpWords<kResolveWarps> *>(buckets);
  __syncthreads();  // orders the last use of the bucket memory before the counts
  for_entries(num_rows, [&](int e, int, int i) {
    counts[e].put(__popc(__ballot_sync(kFullWarp, i < p.top_k && entries[e] >= 0)));
  });
  __syncthreads();  // orders every warp's counts before the positions
  const int passes = a.passes_per_row;
  for_entries(num_rows, [&](int e, int row, int i) {
    const int pass = i / kResolveThreads;
    uint32_t front = 0, valid = 0;
    for (int other = 0; other < passes; ++other) {
      const WarpWords<kResolveWarps> &words_of_pass = counts[e - pass + other];
      valid += words_of_pass.sum();
      if (other < pass) front = valid;
    }
    front += counts[e].sum_before();
    const bool is_valid = i < p.top_k && entries[e] >= 0;
    front += __popc(__ballot_sync(kFullWarp, is_valid) & lanes_below());
    int32_t *out = physical + row * p.physical_topk_stride;
    if (is_valid) out[front] = entries[e];
    if (i >= static_cast<int>(valid) && i < p.top_k) out[i] = kNothing;
    if (i == 0) valid_counts[row] = static_cast<int32_t>(valid);
  });
}

HOTPAGE_RESOLVE(void)::run() {
  state_row = at_address<const int32_t>(p.state_row)[request];
  const int owner = load_row_owner(request);
  const int num_hot_blocks = p.hot_rows / p.copy.block_size;
  const int tid = static_cast<int>(threadIdx.x);
  const int32_t hot_block = tid < num_hot_blocks ? hot_blocks()[tid] : 0;
  const bool has_rows = find_rows();
  const bool real = has_rows && state_row >= 0 && state_row < p.num_state_rows;
  if (real) {
    slots.row_map = at_address<int32_t>(p.row_map) + int64_t{state_row} * p.hot_rows;
    slots.stamps = at_address<uint16_t>(p.last_used) + int64_t{state_row} * p.hot_rows;
    slots.hot_rows = p.hot_rows;
    slots.prefetch();
    epoch = at_address<const uint32_t>(p.epoch)[state_row];
    if (a.shared.pages_in_shared) load_pages();
  }
  fill_padding_rows(owner);
  if (!real) {
    for (int row = 0; row < (has_rows ? num_rows : 0); ++row) fill_row(first_row + row);
    if (tid == 0) at_address<int32_t>(p.copy.copy_count)[request] = 0;
    return;
  }
  const uint32_t hot_flags = store_hot_table(hot_block);
  if (tid == 0) words->num_misses = 0;
  __syncthreads();  // orders emptied table, pages and hot table before they are used

  num_copies = 0;
  const bool some_waiting = translate(hot_flags);
  const uint32_t flags = words->flags.any();
  bool dense = !(flags & kSomeInvalid);
  if (some_waiting) {
    slots.load();
    settle();
    // A row without a hot slot leaves invalid entries.
    if (!resolve_hot(!(flags & kNoHotRegion))) dense = false;
  }
  if (tid == 0) at_address<int32_t>(p.copy.copy_count)[request] = static_cast<int>(num_copies);
  emit(dense);
}

#undef HOTPAGE_RESOLVE

// The kernel's body also runs on a CPU, in tests; the launch does not.
#ifdef __CUDACC__

template <int kEntries, int kStripes, bool kRanksInShared, int kPasses>
__global__ void __launch_bounds__(kResolveThreads)
    resolve_kernel(const __grid_constant__ ResolveArgs args) {
  using Block = ResolveBlock<kEntries, kStripes, kRanksInShared, kPasses>;
  extern __shared__ __align__(16) char dynamic_shared[];
  __shared__ typename Block::Words words;
#if __CUDA_ARCH__ >= 900
  // The copy may be made ready while this grid runs; it waits for this grid's end by itself.
  asm volatile("griddepcontrol.launch_dependents;");
#endif
  Block block(args, dynamic_shared);
  block.words = &words;
  block.clear_shared();
#if __CUDA_ARCH__ >= 900
  // Orders everything that was enqueued before, the indexer's top-k above all, before the reads
  // below. The launch lets this grid start while the last one ends.
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
  block.run();
}

#endif  // __CUDACC__

}  // namespace hotpage
