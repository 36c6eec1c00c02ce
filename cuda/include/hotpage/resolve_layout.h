// SPDX-License-Identifier: Apache-2.0
// Owns the sizes of resolve: which variant serves a shape, and where things lie in shared memory.
#pragma once

#include <cstdint>

#include "hotpage/abi.h"

namespace hotpage {

// Threads of a resolve block; one block serves one request. Half as many were slower by a third:
// probes are latency, and more warps hide it.
constexpr int kResolveThreads = 1024;
constexpr int kResolveWarps = kResolveThreads / 32;

// Hot slots that a thread takes at a time: 16 bytes of row map, 8 bytes of stamps.
constexpr int kSlotsPerLoad = 4;

// Buckets in which misses are counted before they are ranked.
constexpr int kRankBuckets = 4096;
static_assert(kRankBuckets % (4 * kResolveThreads) == 0 || 4 * kResolveThreads > kRankBuckets,
              "threads take whole 16-byte pieces of the bucket counts");

// Verification rows of one request; the limit of one warp's first look at row_request.
constexpr int kMaxRowsPerRequest = 10;
constexpr int kMaxTopK = 4096;
constexpr int kMaxHotRows = 32768;
// Positions below this divide by any block size through one high multiply (see Divider).
constexpr int64_t kMaxPositions = int64_t{1} << 25;

// What the kernel keeps for its own words beside the dynamic shared memory.
constexpr int64_t kStaticSharedBytes = 3584;

// Capacity of a compiled variant: top-k entries and hot slots per request, and where the misses
// are ranked: in shared memory, or in the request's part of the copy list.
struct ResolveCapacity {
  int entries;
  int hot_rows;
  bool ranks_in_shared;
};

constexpr ResolveCapacity kResolveVariants[] = {
    {2048, 4096, true},
    {4096, 8192, true},
    {8192, 12288, true},
    {8192, 12288, false},
    {40960, 32768, false},
};
constexpr int kNumResolveVariants = sizeof(kResolveVariants) / sizeof(kResolveVariants[0]);

__host__ __device__ constexpr int64_t round_up(int64_t value, int64_t unit) {
  return (value + unit - 1) / unit * unit;
}

// Byte offsets inside the dynamic shared memory of a resolve block. The first two parts start as
// all ones, the next two as zeros.
struct ResolveShared {
  uint32_t table_places;    // places of the union's hash table
  uint32_t pages_in_shared;  // 1 if the request's page words are kept here
  uint32_t keys;            // int32 [table_places]
  uint32_t hot_slots;       // uint16 [table_places]
  uint32_t claimed;         // bit [table_places]
  uint32_t buckets;         // uint32 [kRankBuckets]
  uint32_t hot_base;        // int32 [hot_rows / block_size] first physical row of each hot block
  uint32_t pages;           // int32 [num_pages] page words (pages_in_shared only)
  uint32_t bucketed;        // int32 [union] misses grouped by bucket (ranks_in_shared only)
  uint32_t sorted;          // int32 [union] misses in order (ranks_in_shared only)
  uint32_t total_bytes;
};

// Largest union of a request: its rows select at most that many entries, and the caller proved
// that they fit the hot region.
inline int64_t union_rows(const hotpage_resolve_and_copy_params &p) {
  return int64_t{p.max_rows_per_request} * p.top_k;
}

// Places that make probes short: at most half full, a quarter where the table is small anyway.
inline int64_t wanted_places(int64_t rows) {
  return round_up(rows <= 2048 ? 4 * rows : 2 * rows, 128);
}

// Layout for `shared_limit` bytes; total_bytes is 0 if the shape does not fit.
inline ResolveShared plan_resolve_shared(const hotpage_resolve_and_copy_params &p,
                                         bool ranks_in_shared, bool pages_in_shared,
                                         int64_t shared_limit) {
  const int64_t rows = union_rows(p);
  const int64_t hot_blocks = p.hot_rows / p.copy.block_size;
  const int64_t fixed = 4 * kRankBuckets + round_up(4 * hot_blocks, 16) +
                        (pages_in_shared ? round_up(4 * int64_t{p.num_pages}, 16) : 0) +
                        (ranks_in_shared ? 2 * round_up(4 * rows, 16) : 0);
  // A key, a hot slot and a bit for each place; 128 of them keep every part aligned.
  constexpr int64_t kBytesOf128Places = 128 * (4 + 2) + 128 / 8;
  const int64_t room = (shared_limit - fixed) / kBytesOf128Places * 128;
  const int64_t wanted = wanted_places(rows);
  const int64_t places = wanted < room ? wanted : room;
  ResolveShared s = {};
  // Never full, so that a search for a row that is not there ends.
  if (places < rows + rows / 128 + 1) return s;
  int64_t at = 0;
  const auto take = [&at](int64_t bytes) {
    const int64_t offset = at;
    at += round_up(bytes, 16);
    return static_cast<uint32_t>(offset);
  };
  s.table_places = static_cast<uint32_t>(places);
  s.pages_in_shared = pages_in_shared ? 1 : 0;
  s.keys = take(4 * places);
  s.hot_slots = take(2 * places);
  s.claimed = take(places / 8);
  s.buckets = take(4 * kRankBuckets);
  s.hot_base = take(4 * hot_blocks);
  if (pages_in_shared) s.pages = take(4 * int64_t{p.num_pages});
  if (ranks_in_shared) {
    s.bucketed = take(4 * rows);
    s.sorted = take(4 * rows);
  }
  s.total_bytes = static_cast<uint32_t>(at);
  return s;
}

// Entries of a request, counted as the kernel walks them: whole passes of the block over each row.
inline int64_t entry_slots(const hotpage_resolve_and_copy_params &p) {
  return int64_t{p.max_rows_per_request} * round_up(p.top_k, kResolveThreads);
}

// Index in kResolveVariants of the variant that serves `p` best, and its layout; -1 if none does.
// Page words in shared memory matter most, then a table at most half full, then ranks in shared.
inline int choose_resolve_variant(const hotpage_resolve_and_copy_params &p, int64_t shared_limit,
                                  ResolveShared *layout) {
  for (int attempt = 0; attempt < 3; ++attempt) {
    const bool pages_in_shared = attempt == 0;
    const int64_t least_places = attempt < 2 ? 2 * union_rows(p) : 1;
    for (int i = 0; i < kNumResolveVariants; ++i) {
      const ResolveCapacity &v = kResolveVariants[i];
      if (entry_slots(p) > v.entries || p.hot_rows > v.hot_rows) continue;
      *layout = plan_resolve_shared(p, v.ranks_in_shared, pages_in_shared, shared_limit);
      if (layout->total_bytes != 0 && layout->table_places >= least_places) return i;
    }
  }
  return -1;
}

}  // namespace hotpage
