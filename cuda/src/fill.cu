// SPDX-License-Identifier: Apache-2.0
// Owns hotpage_fill: writes a repeated 32-bit pattern over a byte range.
//
// Contract: called by tests and debug set-up to poison outputs and guard rows. Grid of at most
// kMaxBlocks blocks of kThreads threads, grid-stride. Reads nothing; writes exactly
// [address, address + num_bytes). Caller's stream, graph-safe.

#include <algorithm>
#include <climits>

#include "hotpage/launch.cuh"

namespace {

constexpr int kThreads = 256;
constexpr int64_t kMaxBlocks = 1024;
constexpr int64_t kVectorBytes = sizeof(uint4);

__device__ __forceinline__ uint8_t pattern_byte(uint32_t pattern, int64_t offset) {
  return static_cast<uint8_t>(pattern >> (8 * (offset & 3)));
}

// head: bytes before the first 16-byte boundary, at most num_bytes.
// num_vectors: whole 16-byte words after the head; what is left over is the tail.
__global__ void __launch_bounds__(kThreads)
    fill_kernel(uint8_t *base, int64_t num_bytes, int64_t head, int64_t num_vectors,
                uint32_t pattern) {
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kThreads;

  // Every vector starts at a range offset congruent to head mod 4, so one rotation serves all.
  const uint32_t shift = 8 * static_cast<uint32_t>(head & 3);
  const uint32_t word = __funnelshift_r(pattern, pattern, shift);
  uint4 *vectors = reinterpret_cast<uint4 *>(base + head);
  for (int64_t i = first; i < num_vectors; i += stride) {
    vectors[i] = make_uint4(word, word, word, word);
  }

  // Head and tail are under 16 bytes each: block 0 has more threads than both together.
  if (first < head) base[first] = pattern_byte(pattern, first);
  const int64_t tail = head + num_vectors * kVectorBytes + first;
  if (first < kVectorBytes && tail < num_bytes) base[tail] = pattern_byte(pattern, tail);
}

}  // namespace

extern "C" hotpage_status hotpage_fill(const hotpage_fill_params *params, void *stream) {
  const hotpage_status checked = hotpage::check_params(params);
  if (checked != HOTPAGE_OK) return checked;
  if (params->num_bytes == 0) return HOTPAGE_OK;
  if (params->address == 0 || params->num_bytes > static_cast<uint64_t>(LLONG_MAX)) {
    return HOTPAGE_STATUS_INVALID_ARGUMENT;
  }
  const int64_t num_bytes = static_cast<int64_t>(params->num_bytes);
  const int64_t misaligned = static_cast<int64_t>(params->address % kVectorBytes);
  const int64_t head = std::min((kVectorBytes - misaligned) % kVectorBytes, num_bytes);
  const int64_t num_vectors = (num_bytes - head) / kVectorBytes;
  const int64_t wanted = (num_vectors + kThreads - 1) / kThreads;
  const int64_t num_blocks = std::clamp<int64_t>(wanted, 1, kMaxBlocks);
  fill_kernel<<<static_cast<unsigned>(num_blocks), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(
      reinterpret_cast<uint8_t *>(params->address), num_bytes, head, num_vectors, params->pattern);
  return hotpage::launch_status();
}
