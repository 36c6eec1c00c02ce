// SPDX-License-Identifier: Apache-2.0
// Owns the holder bits: which state rows may hold a row of a host block in some row map.
//
// A bit is set when a row enters a row map and cleared when the block is recycled, so a clear bit
// proves that no row map of the state row holds a row of the block. A set bit proves nothing.
#pragma once

#include <cstdint>

namespace hotpage {

__host__ __device__ constexpr int32_t holder_words(int32_t num_state_rows) {
  return (num_state_rows + 31) / 32;
}

// What a copy marks for the rows of its list.
struct HolderMarks {
  uint64_t holders;    // uint32 [host blocks][holder_words], 0: nothing is marked
  uint64_t state_row;  // int32 [num_requests]
  int32_t num_state_rows;
};

// holders: uint32 [host blocks][holder_words].
__device__ __forceinline__ void mark_holder(uint64_t holders, int32_t num_state_rows, int32_t block,
                                            int32_t state_row) {
  uint32_t *word = reinterpret_cast<uint32_t *>(holders) +
                   int64_t{block} * holder_words(num_state_rows) + state_row / 32;
  atomicOr(word, 1u << (state_row % 32));
}

}  // namespace hotpage
