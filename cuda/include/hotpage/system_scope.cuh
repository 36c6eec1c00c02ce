// SPDX-License-Identifier: Apache-2.0
// Owns how ranks on several GPUs write and read words of each other's memory, and their clock.
//
// Every access here is of system scope. Relaxed accesses order nothing by themselves: a fence
// before a store and an acquiring load, or a fence after the load, order what lies around them.
#pragma once

#include <cstdint>

#ifndef __CUDACC__
#include <sched.h>
#include <time.h>
#endif

namespace hotpage {

#ifdef __CUDACC__

__device__ __forceinline__ uint32_t load_relaxed(const uint32_t *at) {
  uint32_t value;
  asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(at) : "memory");
  return value;
}
__device__ __forceinline__ uint64_t load_relaxed(const uint64_t *at) {
  uint64_t value;
  asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(at) : "memory");
  return value;
}
// Orders what the writer's fence put before the word before everything that follows here.
__device__ __forceinline__ uint32_t load_acquire(const uint32_t *at) {
  uint32_t value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(at) : "memory");
  return value;
}
__device__ __forceinline__ uint64_t load_acquire(const uint64_t *at) {
  uint64_t value;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(at) : "memory");
  return value;
}
__device__ __forceinline__ void store_relaxed(uint32_t *at, uint32_t value) {
  asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(at), "r"(value) : "memory");
}
__device__ __forceinline__ void store_relaxed(uint64_t *at, uint64_t value) {
  asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(at), "l"(value) : "memory");
}
// Returns what was there.
__device__ __forceinline__ uint32_t compare_and_swap(uint32_t *at, uint32_t expected,
                                                     uint32_t value) {
  uint32_t old;
  asm volatile("atom.acq_rel.sys.global.cas.b32 %0, [%1], %2, %3;"
               : "=r"(old)
               : "l"(at), "r"(expected), "r"(value)
               : "memory");
  return old;
}
// The same, ordering nothing before it: a fence would wait for reads that are under way.
__device__ __forceinline__ uint32_t compare_and_swap_acquire(uint32_t *at, uint32_t expected,
                                                             uint32_t value) {
  uint32_t old;
  asm volatile("atom.acquire.sys.global.cas.b32 %0, [%1], %2, %3;"
               : "=r"(old)
               : "l"(at), "r"(expected), "r"(value)
               : "memory");
  return old;
}
__device__ __forceinline__ void fence_system() {
  asm volatile("fence.acq_rel.sys;" ::: "memory");
}
__device__ __forceinline__ uint64_t clock_ns() {
  uint64_t now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now)::"memory");
  return now;
}

// Polls of a word between two looks at the clock, each of which takes as long as a poll.
constexpr uint32_t kPollsPerLook = 16;

#else  // Tests run ranks as threads of a CPU.

inline uint32_t load_relaxed(const uint32_t *at) { return __atomic_load_n(at, __ATOMIC_RELAXED); }
inline uint64_t load_relaxed(const uint64_t *at) { return __atomic_load_n(at, __ATOMIC_RELAXED); }
inline uint32_t load_acquire(const uint32_t *at) { return __atomic_load_n(at, __ATOMIC_ACQUIRE); }
inline uint64_t load_acquire(const uint64_t *at) { return __atomic_load_n(at, __ATOMIC_ACQUIRE); }
inline void store_relaxed(uint32_t *at, uint32_t value) {
  __atomic_store_n(at, value, __ATOMIC_RELAXED);
}
inline void store_relaxed(uint64_t *at, uint64_t value) {
  __atomic_store_n(at, value, __ATOMIC_RELAXED);
}
inline uint32_t compare_and_swap(uint32_t *at, uint32_t expected, uint32_t value) {
  __atomic_compare_exchange_n(at, &expected, value, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE);
  return expected;
}
inline uint32_t compare_and_swap_acquire(uint32_t *at, uint32_t expected, uint32_t value) {
  return compare_and_swap(at, expected, value);
}
inline void fence_system() { __atomic_thread_fence(__ATOMIC_ACQ_REL); }
// Whoever asks is waiting, so the block's other threads and other blocks get the core.
inline uint64_t clock_ns() {
  cpu::wait_as(cpu::State::kReady);
  sched_yield();
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<uint64_t>(now.tv_sec) * 1000000000u + static_cast<uint64_t>(now.tv_nsec);
}
constexpr uint32_t kPollsPerLook = 1;

#endif

}  // namespace hotpage
