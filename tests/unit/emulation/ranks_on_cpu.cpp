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

// Runs launches of each rank, one after the other as a stream does, while other ranks may be at
// another launch; those without params are as dead. params: [launch][rank]. delay_us: of each
// block's start, [launch][rank][block]. held: a rank's first block does not start while the rank's
// word is not 0. Returns 0, or -2 if a block's threads wait for each other for ever.
extern "C" int emulate_cooperative(const hotpage_cooperative_copy_params *const *params,
                                   const int32_t *delay_us, const uint32_t *held,
                                   unsigned num_launches, unsigned num_ranks, unsigned num_blocks,
                                   unsigned seed) {
  std::atomic<int> status = 0;
  const auto run_block = [&](CooperativeArgs *args, unsigned rank, unsigned block, int32_t delay) {
    std::this_thread::sleep_for(std::chrono::microseconds(delay));
    while (block == 0 && load_acquire(held + rank) != 0) {
      std::this_thread::sleep_for(std::chrono::microseconds(100));
    }
    if (!cpu::run_block(kCooperativeThreads, block, num_blocks, seed + block, cooperative_body,
                        args)) {
      status = -2;
    }
  };
  const auto run_rank = [&](unsigned rank) {
    for (unsigned launch = 0; launch < num_launches; ++launch) {
      const unsigned number = launch * num_ranks + rank;
      if (params[number] == nullptr) continue;
      CooperativeArgs args = plan_cooperative(*params[number]);
      std::vector<unsigned> order(num_blocks);
      std::iota(order.begin(), order.end(), 0u);
      std::shuffle(order.begin(), order.end(), std::mt19937(seed + number));
      std::vector<std::thread> blocks;
      for (const unsigned block : order) {
        blocks.emplace_back(run_block, &args, rank, block, delay_us[number * num_blocks + block]);
      }
      for (std::thread &block : blocks) block.join();
    }
  };
  std::vector<unsigned> order(num_ranks);
  std::iota(order.begin(), order.end(), 0u);
  std::shuffle(order.begin(), order.end(), std::mt19937(seed));
  std::vector<std::thread> ranks;
  for (const unsigned rank : order) ranks.emplace_back(run_rank, rank);
  for (std::thread &rank : ranks) rank.join();
  return status;
}
