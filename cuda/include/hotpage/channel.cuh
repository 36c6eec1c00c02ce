// SPDX-License-Identifier: Apache-2.0
// Owns the words through which ranks agree on a cooperative copy, and who may write when.
//
// A launch has an epoch, the same on every rank because all ranks make the same launches in the
// same order. Rank r's words lie in every rank's channel at [r], so that a rank waits on its own
// memory and writes into others'. One launch, between any two ranks A and B:
//
//   ready     A is past everything that was enqueued before, so its hot slots may be written. It
//             says so at B: its gate becomes kReady, and each request's digests follow.
//   claimed   B swaps A's gate, which lies in B's memory, from kReady to kClaimed. A block of B
//             that has done so for all ranks, and has seen all of their digests, may write to A.
//   revoked   A gave up waiting and swapped its gate at B from kReady to kRevoked: B will not
//             write. One of the two swaps wins, so a rank that gives up knows whether B may be
//             writing.
//   done      a block of B has ended: its writes to A are seen by whoever sees its word.
//
// A launch of A ends normally once every rank's blocks are done; no rank is then a whole launch
// ahead, so a word is never overwritten before it was read. A block of A that gives up revokes
// every gate, waits for those who had claimed one, and fetches all rows of the launch itself; the
// same ends the launch of the others, by their time limit, by A's abort word, or by a block of A
// that is done without success.
#pragma once

#include <cstdint>

#include "hotpage/abi.h"
#include "hotpage/system_scope.cuh"

namespace hotpage {

constexpr uint32_t kMaxRanks = HOTPAGE_MAX_RANKS;
constexpr uint32_t kMaxCooperativeBlocks = HOTPAGE_MAX_COOPERATIVE_BLOCKS;
constexpr uint32_t kDigestWords = 4;

struct Channel {
  uint64_t counters[HOTPAGE_NUM_CHANNEL_COUNTERS];
  // This rank's own.
  uint32_t epoch[kMaxCooperativeBlocks];  // [block]: of the last launch that it ended
  uint32_t failed;                        // epoch of the launch that failed; 0: none
  // Written by any rank that gave up, this one included.
  uint32_t abort;
  uint32_t padding[14];
  // [rank]: gate of that rank.
  uint32_t gate[kMaxRanks];
  uint32_t more_padding[24];
  // [rank][block].
  uint32_t done[kMaxRanks][kMaxCooperativeBlocks];
  // [rank][request]: the epoch in the upper half of every word; in the lower halves the digest of
  // the host rows, lower half first, then that of the hot rows.
  uint64_t digest[kMaxRanks][HOTPAGE_MAX_REQUESTS][kDigestWords];
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

// A bounded wait, asked after every poll that found nothing. Over when the time is, or when another
// rank said that it gave up. Looks seldom, since a look delays the next poll; the time runs from
// the first look on.
struct Patience {
  const uint32_t *abort;
  uint64_t limit_ns;
  uint64_t deadline;  // 0: not known yet
  uint32_t num_polls;

  __device__ __forceinline__ Patience(const Channel *own, int64_t limit)
      : abort(&own->abort), limit_ns(static_cast<uint64_t>(limit)), deadline(0), num_polls(0) {}
  __device__ __forceinline__ bool is_over() {
    if (++num_polls % kPollsPerLook != 0) return false;
    const uint64_t now = clock_ns();
    if (deadline == 0) deadline = now + limit_ns;
    return load_relaxed(abort) != 0 || now > deadline;
  }
};

// Digests of a request's host rows and of its hot rows.
struct Digests {
  uint64_t host;
  uint64_t hot;

  // What word `which` of a channel says of them.
  __device__ __forceinline__ uint64_t word(uint32_t which, uint32_t epoch) const {
    const uint64_t digest = which < 2 ? host : hot;
    return uint64_t{epoch} << 32 | static_cast<uint32_t>(which % 2 == 0 ? digest : digest >> 32);
  }
};

// Waits for a request's digests of this epoch; false if the wait is over without them. What the
// rank put before them is then ordered before whatever follows.
__device__ __forceinline__ bool await_digests(const Channel *own, uint32_t rank, uint32_t request,
                                              uint32_t epoch, Patience *patience,
                                              Digests *digests) {
  const uint64_t *at = own->digest[rank][request];
  for (;;) {
    uint64_t words[kDigestWords];
    bool all = true;
#pragma unroll
    for (uint32_t i = 0; i + 1 < kDigestWords; ++i) words[i] = load_relaxed(at + i);
    // One of the words is enough for that order; as the last it holds up none of the others.
    words[kDigestWords - 1] = load_acquire(at + kDigestWords - 1);
#pragma unroll
    for (uint32_t i = 0; i < kDigestWords; ++i) all = all && words[i] >> 32 == epoch;
    *digests = {words[1] << 32 | static_cast<uint32_t>(words[0]),
                words[3] << 32 | static_cast<uint32_t>(words[2])};
    if (all) return true;
    if (patience->is_over()) return false;
  }
}

// Claims a rank's gate in this rank's channel; false if it was revoked or the wait is over. What
// the rank put before it opened the gate is then ordered before whatever follows. The claim itself
// tells of nothing that came before it here.
__device__ __forceinline__ bool claim_gate(Channel *own, uint32_t rank, uint32_t epoch,
                                           Patience *patience) {
  uint32_t *gate = &own->gate[rank];
  for (;;) {
    const uint32_t found =
        compare_and_swap_acquire(gate, gate_word(epoch, kReady), gate_word(epoch, kClaimed));
    if (found == gate_word(epoch, kReady) || found == gate_word(epoch, kClaimed)) return true;
    if (found == gate_word(epoch, kRevoked) || patience->is_over()) return false;
  }
}

// Waits until a block of a rank has ended; false if it failed or the wait is over. Its writes here
// are then ordered before whatever follows.
__device__ __forceinline__ bool await_done(const Channel *own, uint32_t rank, uint32_t block,
                                           uint32_t epoch, Patience *patience) {
  for (;;) {
    const uint32_t word = load_acquire(&own->done[rank][block]);
    if (word >> 1 == epoch) return word == done_word(epoch, true);
    if (patience->is_over()) return false;
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
