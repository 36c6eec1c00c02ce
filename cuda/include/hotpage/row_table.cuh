// SPDX-License-Identifier: Apache-2.0
// Owns the hash table of one request's union in shared memory: host row -> hot slot.
//
// Open addressing over buckets of four places, which one 16-byte load shows at once. A row lies in
// its home bucket, or, if that is full, in the next one that was not. Host rows of a block are
// consecutive numbers, so homes come from a multiplicative hash, scaled by a high multiply.
#pragma once

#include <cstdint>

#include "hotpage/check.cuh"

namespace hotpage {

constexpr int32_t kEmptyKey = -1;
constexpr uint16_t kNoHotSlot = 0xffff;

constexpr uint32_t kBucketPlaces = 4;

struct RowTable {
  int32_t *keys;        // [num_places] host row or kEmptyKey, shared memory, 16-byte aligned
  uint16_t *hot_slots;  // [num_places] hot slot of the row, kNoHotSlot while it has none
  uint32_t *claimed;    // bit [num_places], shared memory
  uint32_t num_places;  // a multiple of 4, and more than the union can hold, so that a search ends

  static __device__ __forceinline__ uint32_t hash(int32_t host_row) {
    return static_cast<uint32_t>(host_row) * 0x9E3779B1u;
  }

  __device__ __forceinline__ uint32_t home_bucket(int32_t host_row) const {
    return __umulhi(hash(host_row), num_places / kBucketPlaces);
  }

  __device__ __forceinline__ uint32_t next_bucket(uint32_t bucket) const {
    return bucket + 1 == num_places / kBucketPlaces ? 0 : bucket + 1;
  }

  // The place of its home bucket that a row tries first.
  __device__ __forceinline__ uint32_t home(int32_t host_row) const {
    return home_bucket(host_row) * kBucketPlaces + hash(host_row) % kBucketPlaces;
  }

  // Inserting goes in two steps with a barrier between them. Every row is written to its home
  // without asking: of several rows one stays. Then each looks whether it was the one, and the
  // others insert themselves with compare-and-swap. Most rows so never need an atomic that is
  // waited for. The race is meant; the checked build writes atomically, so that a race checker
  // sees only those that are not.
  __device__ __forceinline__ void put_home(int32_t host_row) const {
#ifdef HOTPAGE_DEBUG
    atomicExch(&keys[home(host_row)], host_row);
#else
    keys[home(host_row)] = host_row;
#endif
  }

  // Place of a row whose home went to another row. OK for rows that several threads insert because
  // they all try the same places in the same order, and no place is ever emptied.
  __device__ __forceinline__ uint32_t insert(int32_t host_row) const {
    uint32_t bucket = home_bucket(host_row);
    for (uint32_t tried = 1;; ++tried) {
      HOTPAGE_CHECK(tried < num_places);
      if (tried % kBucketPlaces == 0) bucket = next_bucket(bucket);
      const uint32_t place = bucket * kBucketPlaces + (hash(host_row) + tried) % kBucketPlaces;
      const int32_t held = atomicCAS(&keys[place], kEmptyKey, host_row);
      if (held == kEmptyKey || held == host_row) return place;
    }
  }

  // Places of kCount rows, num_places for rows that are negative or not in the union. Call it after
  // a barrier that orders every insert before it. The rows' loads overlap.
  template <int kCount>
  __device__ __forceinline__ void find(const int32_t *host_rows, uint32_t *places) const {
    uint32_t bucket[kCount];
    unsigned open = 0;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      bucket[i] = home_bucket(host_rows[i]);
      places[i] = num_places;
      if (host_rows[i] >= 0) open |= 1u << i;
    }
    while (open) {
      int4 held[kCount];
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        if (open & (1u << i)) held[i] = reinterpret_cast<const int4 *>(keys)[bucket[i]];
      }
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        if (!(open & (1u << i))) continue;
        const int32_t row = host_rows[i];
        const int4 h = held[i];
        const int at = h.x == row ? 0 : h.y == row ? 1 : h.z == row ? 2 : h.w == row ? 3 : -1;
        if (at >= 0) places[i] = bucket[i] * kBucketPlaces + static_cast<uint32_t>(at);
        // A row beyond a bucket means that the bucket is full.
        const bool full = h.x != kEmptyKey && h.y != kEmptyKey && h.z != kEmptyKey &&
                          h.w != kEmptyKey;
        if (at >= 0 || !full) open &= ~(1u << i);
        bucket[i] = next_bucket(bucket[i]);
      }
    }
  }

  // True for the first thread that asks for a place.
  __device__ __forceinline__ bool claim(uint32_t place) const {
    const uint32_t bit = 1u << (place % 32);
    return !(atomicOr(&claimed[place / 32], bit) & bit);
  }
};

}  // namespace hotpage
