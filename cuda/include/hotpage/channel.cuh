// SPDX-License-Identifier: Apache-2.0
// Owns the words through which ranks agree on a cooperative copy, and who may write when.
//
// A launch has an epoch, the same on every rank because all ranks make the same launches in the
// same order. Rank r's words lie in every rank's channel at [r], so that a rank waits on its own
// memory and writes into others'. One launch, between any two ranks A and B:
//
//   ready     A is past everything that was enqueued before, so its hot slots may be written. It
//             says so at B: its gate becomes kReady, and each request's digest follows.
//   claimed   B has seen the digests and the gates of all ranks, and swaps A's gate, which lies in
//             B's memory, from kReady to kClaimed: from here on B may write to A.
//   revoked   A gave up waiting and swapped its gate at B from kReady to kRevoked: B will not write.
//             One of the two swaps wins, so a rank that gives up knows whether B may be writing.
//   done      a block of B has ended: its writes to A are seen by whoever sees its word.
//
// A launch of A ends normally once every rank's blocks are done; no rank is then a whole launch
// ahead, so a word is never overwritten before it was read. If A gives up, it revokes every gate,
// waits for those who had claimed one, and fetches all rows itself; the same ends the launch of the
// others, by their time limit, by A's abort word, or by a block of A that is done without success.
#pragma once

#include <cstdint>

#include "hotpage/abi.h"
#include "hotpage/system_scope.cuh"

namespace hotpage {

constexpr uint32_t kMaxRanks = HOTPAGE_MAX_RANKS;
constexpr uint32_t kMaxCooperativeBlocks = HOTPAGE_MAX_COOPERATIVE_BLOCKS;

struct Channel {
  uint64_t counters[HOTPAGE_NUM_CHANNEL_COUNTERS];
  // This rank's own.
  uint32_t epoch;          // of the last launch that ended
  uint32_t num_ended;      // blocks of this launch that have ended
  uint32_t launch_failed;  // some block of this launch gave up
  uint32_t failed;         // some launch failed: this rank fetches alone
  // Written by any rank that gave up.
  uint32_t abort;
  uint32_t padding[11];
  // [rank]: gate of that rank.
  uint32_t gate[kMaxRanks];
  uint32_t more_padding[24];
  // [rank][block].
  uint32_t done[kMaxRanks][kMaxCooperativeBlocks];
  // [rank][request]: the epoch in the upper half of both words, the digest in their lower halves.
  uint64_t digest[kMaxRanks][HOTPAGE_MAX_REQUESTS][2];
};
static_assert(sizeof(Channel) == HOTPAGE_CHANNEL_BYTES, "abi.h says how large a channel is");

enum GateState : uint32_t { kReady = 1, kClaimed = 2, kRevoked = 3 };

// Epochs count from 1 to 2^30 - 1 and again; 0 is what fresh memory holds.
constexpr uint32_t kEpochs = 1u << 30;

__device__ __forceinline__ uint32_t epoch_after(uint32_t epoch) {
  return epoch + 1 < kEpochs ? epoch + 1 : 1;
}
__device__ __forceinline__ uint32_t gate_word(uint32_t epoch, GateState state) {
  return epoch << 2 | state;
}
__device__ __forceinline__ uint32_t done_word(uint32_t epoch, bool ok) {
  return epoch << 1 | (ok ? 0 : 1);
}

// A bounded wait. Over when the time is, or when another rank said that it gave up.
struct Patience {
  const uint32_t *abort;
  uint64_t deadline;

  __device__ __forceinline__ Patience(const Channel *own, int64_t limit_ns)
      : abort(&own->abort), deadline(clock_ns() + static_cast<uint64_t>(limit_ns)) {}
  __device__ __forceinline__ bool is_over() const {
    return load_relaxed(abort) != 0 || clock_ns() > deadline;
  }
};

__device__ __forceinline__ void publish_digest(Channel *at, uint32_t rank, uint32_t request,
                                               uint32_t epoch, uint64_t digest) {
  uint64_t *words = at->digest[rank][request];
  store_relaxed(words, uint64_t{epoch} << 32 | static_cast<uint32_t>(digest));
  store_relaxed(words + 1, uint64_t{epoch} << 32 | digest >> 32);
}

// Waits for a request's digest of this epoch; false if the wait is over without it.
__device__ __forceinline__ bool await_digest(const Channel *own, uint32_t rank, uint32_t request,
                                             uint32_t epoch, const Patience &patience,
                                             uint64_t *digest) {
  const uint64_t *words = own->digest[rank][request];
  for (;;) {
    const uint64_t low = load_relaxed(words), high = load_relaxed(words + 1);
    *digest = high << 32 | static_cast<uint32_t>(low);
    if (low >> 32 == epoch && high >> 32 == epoch) return true;
    if (patience.is_over()) return false;
  }
}

// Claims a rank's gate in this rank's channel; false if it was revoked or the wait is over.
__device__ __forceinline__ bool claim_gate(Channel *own, uint32_t rank, uint32_t epoch,
                                           const Patience &patience) {
  uint32_t *gate = &own->gate[rank];
  for (;;) {
    const uint32_t found =
        compare_and_swap(gate, gate_word(epoch, kReady), gate_word(epoch, kClaimed));
    if (found == gate_word(epoch, kReady) || found == gate_word(epoch, kClaimed)) return true;
    if (found == gate_word(epoch, kRevoked) || patience.is_over()) return false;
  }
}

// Waits until a block of a rank has ended; false if it failed or the wait is over.
__device__ __forceinline__ bool await_done(const Channel *own, uint32_t rank, uint32_t block,
                                           uint32_t epoch, const Patience &patience) {
  for (;;) {
    const uint32_t word = load_relaxed(&own->done[rank][block]);
    if (word >> 1 == epoch) return word == done_word(epoch, true);
    if (patience.is_over()) return false;
  }
}

// After this no block of `theirs`' rank begins to write to this rank in this epoch, and those that
// had begun have ended; false if they did not end within the limit.
__device__ __forceinline__ bool revoke_gate(const Channel *own, Channel *theirs, uint32_t rank,
                                            uint32_t their_rank, uint32_t num_blocks,
                                            uint32_t epoch, int64_t limit_ns) {
  const uint32_t found = compare_and_swap(&theirs->gate[rank], gate_word(epoch, kReady),
                                          gate_word(epoch, kRevoked));
  if (found != gate_word(epoch, kClaimed)) return true;
  // The abort word is no reason to leave: it says nothing of this rank's writes.
  const uint64_t deadline = clock_ns() + static_cast<uint64_t>(limit_ns);
  for (uint32_t block = 0; block < num_blocks; ++block) {
    while (load_relaxed(&own->done[their_rank][block]) >> 1 != epoch) {
      if (clock_ns() > deadline) return false;
    }
  }
  return true;
}

}  // namespace hotpage
