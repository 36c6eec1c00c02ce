// SPDX-License-Identifier: Apache-2.0
// Owns as much of CUDA's device language as the kernels use, run on a CPU: one thread block at a
// time, every thread a coroutine, warp collectives and barriers where the coroutines meet. Blocks
// that wait for each other run in threads of the CPU, a block in each.
//
// A thread runs until it waits, in an order that a seed shuffles, so a missing barrier shows as a
// wrong result for some seed; a collective that not all of its threads reach shows as a deadlock.
// What it cannot show: time, memory ordering weaker than sequential, and races within one phase of
// a thread.
#pragma once

#include <ucontext.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <numeric>
#include <random>
#include <thread>
#include <vector>

#define __device__
#define __host__
#define __forceinline__ inline

using std::max;
using std::min;

struct uint2 {
  uint32_t x, y;
};
struct int4 {
  int32_t x, y, z, w;
};
struct uint4 {
  uint32_t x, y, z, w;
};
inline uint2 make_uint2(uint32_t x, uint32_t y) { return {x, y}; }
inline int4 make_int4(int32_t x, int32_t y, int32_t z, int32_t w) { return {x, y, z, w}; }
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }

namespace cpu {

constexpr unsigned kWarp = 32;
constexpr size_t kStackBytes = 64 << 10;

enum class State { kReady, kWaitsForWarp, kWaitsForBlock, kDone };

struct Thread {
  ucontext_t context;
  std::unique_ptr<char[]> stack{new char[kStackBytes]};
  State state;
  unsigned number;
  unsigned collectives;
};

// Two sets of values: a lane can be one collective ahead of another, never two.
struct Warp {
  uint64_t values[2][kWarp];
  unsigned arrived;
};

struct Block {
  std::vector<Thread> threads;
  std::vector<Warp> warps;
  ucontext_t scheduler;
  Thread *running;
  unsigned arrived, barriers, index, grid;
  bool any[2];
  void (*body)(void *);
  void *argument;
};
inline thread_local Block block;

inline void wait_as(State state) {
  Thread *self = block.running;
  self->state = state;
  swapcontext(&self->context, &block.scheduler);
}

inline void wake(State waiting, size_t first, size_t end) {
  for (size_t i = first; i < end; ++i) {
    if (block.threads[i].state == waiting) block.threads[i].state = State::kReady;
  }
}

inline void enter() {
  block.body(block.argument);
  wait_as(State::kDone);
}

// Values that the warp's lanes brought to this collective.
inline const uint64_t *exchange(uint64_t value) {
  Thread *self = block.running;
  const unsigned number = self->number / kWarp, set = self->collectives++ % 2;
  Warp &warp = block.warps[number];
  warp.values[set][self->number % kWarp] = value;
  if (++warp.arrived == kWarp) {
    warp.arrived = 0;
    wake(State::kWaitsForWarp, number * kWarp, (number + 1) * kWarp);
  } else {
    wait_as(State::kWaitsForWarp);
  }
  return warp.values[set];
}

inline bool meet(bool predicate) {
  const unsigned set = block.barriers % 2;
  block.any[set] = block.any[set] || predicate;
  if (++block.arrived == block.threads.size()) {
    block.arrived = 0;
    ++block.barriers;
    block.any[block.barriers % 2] = false;
    wake(State::kWaitsForBlock, 0, block.threads.size());
  } else {
    wait_as(State::kWaitsForBlock);
  }
  return block.any[set];
}

// Runs one block; false if its threads wait for each other for ever.
inline bool run_block(unsigned num_threads, unsigned index, unsigned grid, unsigned seed,
                      void (*body)(void *), void *argument) {
  block.threads.resize(num_threads);
  block.warps.assign(num_threads / kWarp, Warp{});
  block.arrived = block.barriers = 0;
  block.any[0] = block.any[1] = false;
  block.index = index;
  block.grid = grid;
  block.body = body;
  block.argument = argument;
  std::vector<Thread *> order;
  for (unsigned i = 0; i < num_threads; ++i) {
    Thread &thread = block.threads[i];
    thread.number = i;
    thread.collectives = 0;
    thread.state = State::kReady;
    getcontext(&thread.context);
    thread.context.uc_stack.ss_sp = thread.stack.get();
    thread.context.uc_stack.ss_size = kStackBytes;
    thread.context.uc_link = &block.scheduler;
    makecontext(&thread.context, enter, 0);
    order.push_back(&thread);
  }
  std::shuffle(order.begin(), order.end(), std::mt19937(seed));
  for (;;) {
    bool moved = false;
    size_t done = 0;
    for (Thread *thread : order) {
      if (thread->state == State::kReady) {
        moved = true;
        block.running = thread;
        swapcontext(&block.scheduler, &thread->context);
      }
      done += thread->state == State::kDone;
    }
    if (done == order.size()) return true;
    if (!moved) return false;
  }
}

// Blocks that reach each other's shared memory, a thread of the CPU for each.
class Cluster {
 public:
  Cluster(unsigned size, size_t shared_bytes, unsigned seed)
      : memory_(size, std::vector<Line>(shared_bytes / sizeof(Line) + 1)), place_(size) {
    for (unsigned rank = 0; rank < size; ++rank) poison(rank);
    std::iota(place_.begin(), place_.end(), 0u);
    std::shuffle(place_.begin(), place_.end(), std::mt19937(seed));
  }
  uint32_t size() const { return static_cast<uint32_t>(memory_.size()); }
  char *shared(unsigned rank) { return memory_[rank].data()->bytes; }
  // Shared memory starts with anything, and is another block's once its block has ended.
  void poison(unsigned rank) {
    std::memset(memory_[rank].data(), 0x5a, memory_[rank].size() * sizeof(Line));
  }
  // Blocks start, and leave a meeting, one after the other: what one does before another is ready
  // for it shows.
  void stagger(unsigned rank) const {
    std::this_thread::sleep_for(std::chrono::milliseconds(2) * place_[rank]);
  }
  // Meets the other blocks. A block that never comes is a deadlock.
  void meet(unsigned rank) {
    wait_for_all();
    stagger(rank);
  }
  template <class T>
  T *peer(T *own, unsigned self, unsigned rank) {
    return reinterpret_cast<T *>(reinterpret_cast<char *>(own) - shared(self) + shared(rank));
  }

 private:
  struct alignas(16) Line {
    char bytes[16];
  };

  void wait_for_all() {
    std::unique_lock<std::mutex> lock(mutex_);
    const unsigned meeting = meetings_;
    if (++arrived_ == size()) {
      arrived_ = 0;
      ++meetings_;
      all_here_.notify_all();
    } else if (!all_here_.wait_for(lock, std::chrono::minutes(1),
                                   [&] { return meetings_ != meeting; })) {
      std::fputs("a block of the cluster never came to the others\n", stderr);
      std::abort();
    }
  }

  std::vector<std::vector<Line>> memory_;
  std::vector<unsigned> place_;
  std::mutex mutex_;
  std::condition_variable all_here_;
  unsigned arrived_ = 0, meetings_ = 0;
};
inline thread_local Cluster *cluster;

// The shared memory that the launch of a cluster gave the caller's block.
inline char *launched_shared() { return cluster->shared(block.index); }

// Runs one cluster; false if threads of a block wait for each other for ever.
inline bool run_cluster(unsigned size, size_t shared_bytes, unsigned num_threads, unsigned seed,
                        void (*body)(void *), void *argument) {
  Cluster blocks(size, shared_bytes, seed);
  std::atomic<bool> ended = true;
  std::vector<std::thread> threads;
  for (unsigned rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      cluster = &blocks;
      blocks.stagger(rank);
      if (!run_block(num_threads, rank, size, seed + rank, body, argument)) ended = false;
      blocks.poison(rank);
    });
  }
  for (std::thread &thread : threads) thread.join();
  return ended;
}

// Bytes that copies wrote: a row that is copied twice is in no pool.
inline std::atomic<uint64_t> stored_bytes = 0;

struct ThreadNumber {
  operator unsigned() const { return block.running->number; }
};
struct BlockNumber {
  operator unsigned() const { return block.index; }
};
struct NumBlocks {
  operator unsigned() const { return block.grid; }
};
template <class Word>
struct OneDimension {
  Word x;
};

}  // namespace cpu

static const cpu::OneDimension<cpu::ThreadNumber> threadIdx;
static const cpu::OneDimension<cpu::BlockNumber> blockIdx;
static const cpu::OneDimension<cpu::NumBlocks> gridDim;

inline void __syncthreads() { cpu::meet(false); }
inline void __syncwarp() { cpu::exchange(0); }
inline int __syncthreads_or(int predicate) { return cpu::meet(predicate != 0); }

inline unsigned __ballot_sync(unsigned, bool predicate) {
  const uint64_t *values = cpu::exchange(predicate);
  unsigned bits = 0;
  for (unsigned i = 0; i < cpu::kWarp; ++i) bits |= static_cast<unsigned>(values[i]) << i;
  return bits;
}
inline bool __all_sync(unsigned mask, bool predicate) {
  return __ballot_sync(mask, predicate) == 0xffffffffu;
}
inline bool __any_sync(unsigned mask, bool predicate) {
  return __ballot_sync(mask, predicate) != 0;
}

// A value crosses lanes by its bits, whatever its type.
template <class T>
uint64_t bits_of(T value) {
  static_assert(sizeof(T) <= sizeof(uint64_t), "a lane brings one word");
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof value);
  return bits;
}
template <class T>
T value_of(uint64_t bits) {
  T value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}
template <class T>
T __shfl_sync(unsigned, T value, unsigned source) {
  return value_of<T>(cpu::exchange(bits_of(value))[source % cpu::kWarp]);
}
template <class T>
T __shfl_up_sync(unsigned, T value, unsigned delta) {
  const unsigned lane = threadIdx.x % cpu::kWarp;
  const uint64_t *values = cpu::exchange(bits_of(value));
  return value_of<T>(values[lane >= delta ? lane - delta : lane]);
}

template <class Combine>
uint32_t reduce_warp(uint32_t value, Combine combine) {
  const uint64_t *values = cpu::exchange(value);
  uint32_t result = static_cast<uint32_t>(values[0]);
  for (unsigned i = 1; i < cpu::kWarp; ++i) {
    result = combine(result, static_cast<uint32_t>(values[i]));
  }
  return result;
}
inline uint32_t __reduce_add_sync(unsigned, uint32_t value) {
  return reduce_warp(value, [](uint32_t a, uint32_t b) { return a + b; });
}
inline uint32_t __reduce_or_sync(unsigned, uint32_t value) {
  return reduce_warp(value, [](uint32_t a, uint32_t b) { return a | b; });
}
inline uint32_t __reduce_min_sync(unsigned, uint32_t value) {
  return reduce_warp(value, [](uint32_t a, uint32_t b) { return min(a, b); });
}
inline uint32_t __reduce_max_sync(unsigned, uint32_t value) {
  return reduce_warp(value, [](uint32_t a, uint32_t b) { return max(a, b); });
}

inline uint32_t __umulhi(uint32_t a, uint32_t b) {
  return static_cast<uint32_t>(uint64_t{a} * b >> 32);
}
inline int __popc(uint32_t bits) { return __builtin_popcount(bits); }
inline int __popcll(unsigned long long bits) { return __builtin_popcountll(bits); }
inline int __ffs(int bits) { return __builtin_ffs(bits); }
inline int __ffsll(long long bits) { return __builtin_ffsll(bits); }

inline int32_t atomicCAS(int32_t *at, int32_t expected, int32_t value) {
  __atomic_compare_exchange_n(at, &expected, value, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
  return expected;
}
template <class T>
T atomicAdd(T *at, T value) {
  return __atomic_fetch_add(at, value, __ATOMIC_RELAXED);
}
template <class T>
T atomicOr(T *at, T value) {
  return __atomic_fetch_or(at, value, __ATOMIC_RELAXED);
}
inline void __threadfence() {}
inline void __threadfence_block() {}
template <class T>
T __ldcg(const T *at) {
  return *at;
}
template <class T>
T __ldg(const T *at) {
  return *at;
}
template <class T>
void __stcg(T *at, T value) {
  *at = value;
  cpu::stored_bytes.fetch_add(sizeof value, std::memory_order_relaxed);
}
