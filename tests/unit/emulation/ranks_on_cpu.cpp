// SPDX-License-Identifier: Apache-2.0
// Owns the entry point through which a test runs a cooperative copy on a CPU: every block of every
// rank is a thread of its own, so ranks wait for each other as they do on GPUs.

#include "cuda_runtime.h"

#include <atomic>
#include <chrono>
#include <cstring>
#include <thread>

#include "hotpage/cooperative.cuh"

using namespace hotpage;

namespace {

void cooperative_body(void *argument) {
  static thread_local CooperativeShared shared;
  CooperativeBlock(*static_cast<const CooperativeArgs *>(argument), &shared).run();
}

}  // namespace

// Runs one launch of each rank whose params are given; the others are as dead. delay_us: of each
// rank's start. held: a rank's first block does not start while the rank's word is not 0. Returns 0,
// or -2 if a block's threads wait for each other for ever.
extern "C" int emulate_cooperative(const hotpage_cooperative_copy_params *const *params,
                                   const int32_t *delay_us, const uint32_t *held,
                                   unsigned num_ranks, unsigned num_blocks, unsigned seed) {
  struct Start {
    const CooperativeArgs *args;
    unsigned rank, block;
  };
  std::vector<CooperativeArgs> args(num_ranks);
  std::vector<Start> starts;
  for (unsigned rank = 0; rank < num_ranks; ++rank) {
    if (params[rank] == nullptr) continue;
    args[rank] = plan_cooperative(*params[rank]);
    for (unsigned block = 0; block < num_blocks; ++block) {
      starts.push_back({&args[rank], rank, block});
    }
  }
  std::shuffle(starts.begin(), starts.end(), std::mt19937(seed));
  std::atomic<int> status = 0;
  std::vector<std::thread> threads;
  for (const Start &start : starts) {
    threads.emplace_back([&, start] {
      std::this_thread::sleep_for(std::chrono::microseconds(delay_us[start.rank]));
      while (start.block == 0 && load_acquire(held + start.rank) != 0) {
        std::this_thread::sleep_for(std::chrono::microseconds(100));
      }
      void *argument = const_cast<CooperativeArgs *>(start.args);
      if (!cpu::run_block(kCooperativeThreads, start.block, num_blocks, seed + start.block,
                          cooperative_body, argument)) {
        status = -2;
      }
    });
  }
  for (std::thread &thread : threads) thread.join();
  return status;
}
