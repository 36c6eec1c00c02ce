// SPDX-License-Identifier: Apache-2.0
// Owns what a resolve launch carries to the device, and how blocks become rows there.
#pragma once

#include "hotpage/resolve_layout.h"
#include "hotpage/warp.cuh"

namespace hotpage {

// What the launcher works out once per launch.
struct ResolveArgs {
  hotpage_resolve_and_copy_params p;
  ResolveShared shared;
  uint32_t block_size_reciprocal;  // ceil(2^32 / block_size)
  int32_t passes_per_row;          // ceil(top_k / kResolveThreads)
  int32_t rows_per_request_guess;  // num_rows / num_requests: decode batches are mostly even
};

// Fills `args` for a launch; returns the variant that serves it, -1 if none does.
inline int plan_resolve(const hotpage_resolve_and_copy_params &p, int64_t shared_limit,
                        ResolveArgs *args) {
  *args = {};
  args->p = p;
  const int variant = choose_resolve_variant(p, shared_limit, &args->shared);
  args->block_size_reciprocal = reciprocal(static_cast<uint32_t>(p.copy.block_size));
  args->passes_per_row = (p.top_k + kResolveThreads - 1) / kResolveThreads;
  args->rows_per_request_guess = p.num_rows / p.copy.num_requests;
  return variant;
}

constexpr int32_t kNothing = -1;

enum : uint32_t { kSomeInvalid = 1, kNoHotRegion = 2 };

// First row of a block, or kNothing for the null block, a block that is none, or one that a pool of
// num_rows rows does not have.
__device__ __forceinline__ int32_t row_of_block(int32_t block, int32_t rows_per_block,
                                                int32_t block_size, int64_t num_rows) {
  if (block <= 0) return kNothing;
  const int64_t row = int64_t{block} * rows_per_block;
  return row + block_size <= num_rows ? static_cast<int32_t>(row) : kNothing;
}

// Keeps the compiler from carrying what it derived from `value`, homes in the table above all, over
// a barrier in registers: recomputing costs less than the spills.
__device__ __forceinline__ void forget(int32_t &value) {
#ifdef __CUDA_ARCH__
  asm volatile("" : "+r"(value));
#endif
}

template <class T>
__device__ __forceinline__ T *at_address(uint64_t address) {
  return reinterpret_cast<T *>(address);
}

}  // namespace hotpage
