// SPDX-License-Identifier: Apache-2.0
// Owns hotpage_digest_copies: the digest of a copy list, added to that of the lists before.
//
// Contract: any grid, kDigestThreads threads a block, a warp a request. Reads the copy list;
// `digest` and `scratch` belong to one stream. Graph-safe.

#include "hotpage/copy_digest.cuh"
#include "hotpage/launch.cuh"

namespace hotpage {
namespace {

constexpr int kDigestThreads = 512;
constexpr int kDigestWarps = kDigestThreads / kWarpSize;
constexpr int32_t kMostBlocks = 32;

using Word = unsigned long long;

__global__ void __launch_bounds__(kDigestThreads)
    digest_copies_kernel(const __grid_constant__ hotpage_digest_copies_params p) {
  __shared__ Word block_sum[kDigestWarps];
  Word *digest = reinterpret_cast<Word *>(p.digest);
  Word *scratch = reinterpret_cast<Word *>(p.scratch);
  uint64_t sum = 0;
  const uint32_t num_requests = static_cast<uint32_t>(p.num_requests);
  const uint32_t first = blockIdx.x * kDigestWarps + warp_id();
  for (uint32_t request = first; request < num_requests; request += gridDim.x * kDigestWarps) {
    const int32_t *host_rows = reinterpret_cast<const int32_t *>(p.copy_host_row) +
                               int64_t{request} * p.copy_list_stride;
    Entries entries;
    entries.read(host_rows, static_cast<uint32_t>(p.copy_list_stride), lane_id(), kWarpSize);
    const uint32_t count =
        static_cast<uint32_t>(reinterpret_cast<const int32_t *>(p.copy_count)[request]);
    const uint64_t entry_sum =
        warp_sum(sum_entries(host_rows, entries, count, lane_id(), kWarpSize));
    sum += digest_of_request(digest_of_sum(entry_sum, count, p.salt), request);
  }
  if (lane_id() == 0) block_sum[warp_id()] = sum;
  __syncthreads();  // orders every warp's sum before their total
  if (threadIdx.x != 0) return;
  Word total = 0;
  for (int warp = 0; warp < kDigestWarps; ++warp) total += block_sum[warp];
  atomicAdd(scratch, total);
  __threadfence();  // orders this block's part before its ticket
  if (atomicAdd(scratch + 1, Word{1}) + 1 != gridDim.x) return;
  __threadfence();  // orders the last ticket before the parts
  digest[0] = append_digest(digest[0], __ldcg(scratch));
  digest[1] += 1;
  scratch[0] = scratch[1] = 0;
}

}  // namespace
}  // namespace hotpage

extern "C" hotpage_status hotpage_digest_copies(const hotpage_digest_copies_params *params,
                                                void *stream) {
  using namespace hotpage;
  const hotpage_status checked = check_params(params);
  if (checked != HOTPAGE_OK) return checked;
  const hotpage_digest_copies_params &p = *params;
  if (p.num_requests < 1 || p.num_requests > HOTPAGE_MAX_REQUESTS || p.copy_list_stride < 1 ||
      p.copy_host_row == 0 || p.copy_count == 0 || p.digest == 0 || p.digest % 8 != 0 ||
      p.scratch == 0 || p.scratch % 8 != 0) {
    return HOTPAGE_STATUS_INVALID_ARGUMENT;
  }
  const int32_t useful = (p.num_requests + kDigestWarps - 1) / kDigestWarps;
  const int32_t blocks = useful < kMostBlocks ? useful : kMostBlocks;
  return launch(digest_copies_kernel, static_cast<unsigned>(blocks), kDigestThreads, p, stream);
}
