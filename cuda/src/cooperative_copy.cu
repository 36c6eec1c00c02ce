// SPDX-License-Identifier: Apache-2.0
// Owns hotpage_cooperative_copy: its checks and its launch.

#include "hotpage/cooperative.cuh"
#include "hotpage/copy_launch.h"

namespace hotpage {
namespace {

// Enough warps to have the bus full, few enough to run beside others; see benches/gpu/README.md.
constexpr int32_t kDefaultCooperativeBlocks = 64;

hotpage_status check_cooperative(const hotpage_cooperative_copy_params *params) {
  const hotpage_status checked = check_params(params);
  if (checked != HOTPAGE_OK) return checked;
  const hotpage_cooperative_copy_params &p = *params;
  const hotpage_status copy_checked = check_copy(p.copy, 1);
  if (copy_checked != HOTPAGE_OK) return copy_checked;
  bool ok = p.num_ranks >= 2 && p.num_ranks <= HOTPAGE_MAX_RANKS && p.rank >= 0 &&
            p.rank < p.num_ranks && p.time_limit_ns >= 1 &&
            p.copy.max_blocks <= HOTPAGE_MAX_COOPERATIVE_BLOCKS &&
            (p.holders == 0 || (p.state_row != 0 && p.num_state_rows >= 1));
  for (int32_t rank = 0; ok && rank < p.num_ranks; ++rank) {
    ok = p.channel[rank] != 0 && p.channel[rank] % kUnitBytes == 0 && p.hot_row[rank] != 0;
    for (int32_t layer = 0; ok && layer < p.copy.num_layers; ++layer) {
      const uint64_t address = p.gpu_layer[rank * HOTPAGE_MAX_GROUP_LAYERS + layer];
      ok = address != 0 && address % kUnitBytes == 0;
    }
  }
  return ok ? HOTPAGE_OK : HOTPAGE_STATUS_INVALID_ARGUMENT;
}

}  // namespace
}  // namespace hotpage

extern "C" hotpage_status hotpage_cooperative_copy(const hotpage_cooperative_copy_params *params,
                                                   void *stream) {
  using namespace hotpage;
  const hotpage_status checked = check_cooperative(params);
  if (checked != HOTPAGE_OK) return checked;
  const CooperativeArgs args = plan_cooperative(*params);
  const int32_t most = params->copy.max_blocks;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(most > 0 ? most : kDefaultCooperativeBlocks);
  config.blockDim = dim3(kCooperativeThreads);
  config.stream = static_cast<cudaStream_t>(stream);
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &attribute;
  config.numAttrs = params->after_resolve != 0 ? 1 : 0;
  return status_of(params->after_resolve != 0
                       ? cudaLaunchKernelEx(&config, cooperative_copy_kernel<true>, args)
                       : cudaLaunchKernelEx(&config, cooperative_copy_kernel<false>, args));
}
