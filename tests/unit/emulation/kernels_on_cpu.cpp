// SPDX-License-Identifier: Apache-2.0
// Owns the entry points through which a test runs the bodies of resolve and copy on a CPU, and the
// seed of what runs through the launchers of the other kernels.

#include "cuda_runtime.h"

#include <atomic>
#include <cstring>
#include <thread>

#include "hotpage/copy_rows.cuh"
#include "hotpage/resolve.cuh"
#include "hotpage/sweep_copies.cuh"

using namespace hotpage;

namespace {

constexpr int kDeadlock = -2;
constexpr unsigned char kPoison = 0x5a;

template <int kVariant, int kPasses>
void resolve_body(void *argument) {
  constexpr ResolveCapacity v = kResolveVariants[kVariant];
  constexpr int kStripes = (v.hot_rows + kSlotsPerStripe - 1) / kSlotsPerStripe;
  using Block = ResolveBlock<v.entries / kResolveThreads, kStripes, v.ranks_in_shared, kPasses>;
  alignas(16) static char dynamic_shared[256 << 10];
  static typename Block::Words words;
  if (argument == nullptr) {
    // Shared memory starts with anything.
    std::memset(dynamic_shared, kPoison, sizeof dynamic_shared);
    std::memset(static_cast<void *>(&words), kPoison, sizeof words);
    return;
  }
  Block block(*static_cast<const ResolveArgs *>(argument), dynamic_shared);
  block.words = &words;
  block.clear_shared();
  block.run();
}

void copy_body(void *argument) {
  static CopyShared shared;
  copy_list(*static_cast<const CopyArgs *>(argument), &shared);
}

struct Sweep {
  CopyArgs args;
  std::vector<SweepShared> shared;  // of each block
};

void sweep_body(void *argument) {
  Sweep *sweep = static_cast<Sweep *>(argument);
  copy_swept(sweep->args, &sweep->shared[blockIdx.x]);
}

// A cluster of as many blocks as the launcher takes, each in a thread of its own.
int emulate_sweep(const CopyArgs &args, unsigned num_blocks, Sweep *sweep) {
  unsigned size = kMostSweepBlocks;
  while (size > num_blocks) size /= 2;
  *sweep = {args, std::vector<SweepShared>(size)};
  std::memset(static_cast<void *>(sweep->shared.data()), kPoison, size * sizeof(SweepShared));
  std::vector<char *> shared;
  for (SweepShared &block : sweep->shared) shared.push_back(reinterpret_cast<char *>(&block));
  cpu::Cluster cluster(shared);
  std::atomic<int> status = 0;
  std::vector<std::thread> threads;
  for (unsigned index = 0; index < size; ++index) {
    threads.emplace_back([&, index] {
      cpu::cluster = &cluster;
      if (!cpu::run_block(kCopyThreads, index, size, index, sweep_body, sweep)) {
        status = kDeadlock;
      }
    });
  }
  for (std::thread &thread : threads) thread.join();
  return status;
}

}  // namespace

// Returns the variant that served the launch, -1 for none, kDeadlock.
extern "C" int emulate_resolve(const hotpage_resolve_and_copy_params *params, unsigned seed) {
  // Bodies for any top-k and for one of two passes, as the launcher chooses them.
  constexpr void (*kBodies[][kNumResolveVariants])(void *) = {
      {resolve_body<0, 0>, resolve_body<1, 0>, resolve_body<2, 0>, resolve_body<3, 0>,
       resolve_body<4, 0>},
      {resolve_body<0, 2>, resolve_body<1, 2>, resolve_body<2, 2>, resolve_body<3, 2>,
       resolve_body<4, 0>}};
  const auto &bodies = kBodies[params->top_k == 2 * kResolveThreads ? 1 : 0];
  ResolveArgs args;
  const int variant = plan_resolve(*params, params->shared_limit_bytes - kStaticSharedBytes, &args);
  if (variant < 0) return variant;
  std::vector<unsigned> order(static_cast<size_t>(params->copy.num_requests));
  std::iota(order.begin(), order.end(), 0u);
  std::shuffle(order.begin(), order.end(), std::mt19937(seed));
  for (const unsigned request : order) {
    bodies[variant](nullptr);
    if (!cpu::run_block(kResolveThreads, request, static_cast<unsigned>(order.size()),
                        seed + request, bodies[variant], &args)) {
      return kDeadlock;
    }
  }
  return variant;
}

extern "C" int emulate_copy(const hotpage_copy_params *params, const HolderMarks *marks,
                            unsigned num_blocks, int sweeps) {
  CopyArgs args = plan_copy(*params, *marks);
  if (sweeps) {
    Sweep sweep;
    return emulate_sweep(args, num_blocks, &sweep);
  }
  for (unsigned index = 0; index < num_blocks; ++index) {
    if (!cpu::run_block(kCopyThreads, index, num_blocks, index, copy_body, &args)) return kDeadlock;
  }
  return 0;
}

// Sweeps a list of one window and says in which order: its host rows, by rank.
extern "C" int emulate_sweep_order(const hotpage_copy_params *params, unsigned num_blocks,
                                   unsigned num_copies, int32_t *host_rows) {
  Sweep sweep;
  const int status = emulate_sweep(plan_copy(*params, {}), num_blocks, &sweep);
  const unsigned size = static_cast<unsigned>(sweep.shared.size());
  for (unsigned rank = 0; rank < num_copies; ++rank) {
    const unsigned chunk = rank / kRowsPerChunk;
    const unsigned at = chunk / size * kRowsPerChunk + rank % kRowsPerChunk;
    host_rows[rank] = sweep.shared[chunk % size].kept[at].host_row;
  }
  return status;
}

// Orders of blocks and threads of the launches that follow.
extern "C" void seed_launches(unsigned seed) { cpu::launch_seed = seed; }
