// SPDX-License-Identifier: Apache-2.0
// Owns how the blocks of a thread block cluster meet and reach each other's shared memory.
#pragma once

#include <cstdint>

namespace hotpage {

#ifdef __CUDACC__

// Blocks of the caller's cluster.
__device__ __forceinline__ uint32_t cluster_size() {
  uint32_t size;
  asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
  return size;
}
// The caller's block among them.
__device__ __forceinline__ uint32_t cluster_rank() {
  uint32_t rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
// All threads of all blocks of the cluster meet. Orders what each did to any shared memory of the
// cluster before what each does afterwards.
__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
// Where another block of the cluster keeps what the caller's block keeps at `own`.
template <class T>
__device__ __forceinline__ T *cluster_peer(T *own, uint32_t rank) {
  uint64_t peer;
  asm("mapa.u64 %0, %1, %2;" : "=l"(peer) : "l"(own), "r"(rank));
  return reinterpret_cast<T *>(peer);
}

#else

inline uint32_t cluster_size() { return cpu::cluster->size(); }
inline uint32_t cluster_rank() { return blockIdx.x; }
inline void cluster_sync() {
  // One thread of the block meets the others' on behalf of all.
  __syncthreads();
  if (threadIdx.x == 0) cpu::cluster->meet(blockIdx.x);
  __syncthreads();
}
template <class T>
T *cluster_peer(T *own, uint32_t rank) {
  return cpu::cluster->peer(own, blockIdx.x, rank);
}

#endif  // __CUDACC__

}  // namespace hotpage
