// SPDX-License-Identifier: Apache-2.0
// Owns the entry points through which a test runs the bodies of resolve and copy on a CPU, and the
// seed of what runs through the launchers of the other kernels.

#include "cuda_runtime.h"

#include <cstring>

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
  std::vector<SweepShared> left;  // by each block
};

void sweep_body(void *argument) {
  Sweep *sweep = static_cast<Sweep *>(argument);
  SweepShared *shared = reinterpret_cast<SweepShared *>(cpu::launched_shared());
  copy_swept(sweep->args, shared);
  if (threadIdx.x == 0 && !sweep->left.empty()) sweep->left[blockIdx.x] = *shared;
}

// Blocks of a sweep's cluster, at most so many.
unsigned sweep_blocks(unsigned most) {
  unsigned size = kMostSweepBlocks;
  while (size > most) size /= 2;
  return size;
}

int emulate_sweep(unsigned num_blocks, Sweep *sweep) {
  const bool ended = cpu::run_cluster(num_blocks, sizeof(SweepShared), kCopyThreads, num_blocks,
                                      sweep_body, sweep);
  return ended ? 0 : kDeadlock;
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
    Sweep sweep = {args, {}};
    return emulate_sweep(sweep_blocks(num_blocks), &sweep);
  }
  for (unsigned index = 0; index < num_blocks; ++index) {
    if (!cpu::run_block(kCopyThreads, index, num_blocks, index, copy_body, &args)) return kDeadlock;
  }
  return 0;
}

// Sweeps a list of one window and says in which order: its host rows, by rank.
extern "C" int emulate_sweep_order(const hotpage_copy_params *params, unsigned num_blocks,
                                   unsigned num_copies, int32_t *host_rows) {
  const unsigned size = sweep_blocks(num_blocks);
  Sweep sweep = {plan_copy(*params, {}), std::vector<SweepShared>(size)};
  const int status = emulate_sweep(size, &sweep);
  for (unsigned rank = 0; rank < num_copies; ++rank) {
    const unsigned chunk = rank / kRowsPerChunk;
    const unsigned at = chunk / size * kRowsPerChunk + rank % kRowsPerChunk;
    host_rows[rank] = sweep.left[chunk % size].kept[at].host_row;
  }
  return status;
}

// Orders of blocks and threads of the launches that follow.
extern "C" void seed_launches(unsigned seed) { cpu::launch_seed = seed; }

// Clusters of more blocks are refused from now on.
extern "C" void limit_clusters(unsigned blocks) { cpu::most_cluster_blocks = blocks; }

// Blocks of the last launch.
extern "C" unsigned count_launched_blocks() { return cpu::launched_blocks; }

// Bytes that copies wrote since the last call.
extern "C" uint64_t take_stored_bytes() { return cpu::stored_bytes.exchange(0); }

// The error that the next launcher would be blamed for.
extern "C" int take_last_error() { return cudaGetLastError(); }
