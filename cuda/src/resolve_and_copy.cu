// SPDX-License-Identifier: Apache-2.0
// Owns hotpage_resolve_and_copy: checks, choice of the resolve variant, and the two launches.

#include "hotpage/copy_launch.h"
#include "hotpage/resolve.cuh"

namespace hotpage {
namespace {

hotpage_status check_resolve(const hotpage_resolve_and_copy_params *params) {
  const hotpage_status checked = check_params(params);
  if (checked != HOTPAGE_OK) return checked;
  const hotpage_resolve_and_copy_params &p = *params;
  const hotpage_status copy_checked = check_copy(p.copy, 0);
  if (copy_checked != HOTPAGE_OK) return copy_checked;
  const bool sizes = p.num_rows >= 1 && p.max_rows_per_request >= 1 &&
                     p.top_k >= 1 && p.hot_rows >= 1 && p.num_pages >= 1 && p.num_state_rows >= 1 &&
                     p.copy.block_size >= 2 &&
                     p.hot_rows % p.copy.block_size == 0 && p.hot_rows % kSlotsPerLoad == 0 &&
                     p.num_physical_rows >= 1 &&
                     p.num_physical_rows <= INT32_MAX && p.num_host_rows >= 1 &&
                     p.num_host_rows <= INT32_MAX && p.shared_limit_bytes >= 0 &&
                     int64_t{p.num_pages} * p.copy.block_size <= kMaxPositions;
  if (!sizes) return HOTPAGE_STATUS_INVALID_ARGUMENT;
  // The bound that makes a miss without a victim impossible, and the list long enough for it.
  if (union_rows(p) > p.hot_rows || p.copy.copy_list_stride < union_rows(p)) {
    return HOTPAGE_STATUS_INVALID_ARGUMENT;
  }
  const uint64_t addresses[] = {
      p.logical_topk,  p.row_request,        p.num_valid_rows,  p.state_row, p.seq_len,
      p.residency,     p.source_block_table, p.hot_block_table, p.row_map,   p.last_used,
      p.epoch,         p.physical_topk,      p.valid_counts,    p.counters};
  for (const uint64_t address : addresses) {
    if (address == 0) return HOTPAGE_STATUS_INVALID_ARGUMENT;
  }
  // Rows of state are read in 16-byte and 8-byte pieces; hot_rows is a multiple of 4.
  if (p.row_map % 16 != 0 || p.last_used % 8 != 0) return HOTPAGE_STATUS_INVALID_ARGUMENT;
  const bool supported = p.top_k <= kMaxTopK && p.max_rows_per_request <= kMaxRowsPerRequest &&
                         p.hot_rows <= kMaxHotRows;
  return supported ? HOTPAGE_OK : HOTPAGE_STATUS_UNSUPPORTED;
}

using ResolveKernel = void (*)(ResolveArgs);

// kPasses: as in ResolveBlock.
template <int kVariant, int kPasses>
constexpr ResolveKernel kernel_of() {
  constexpr ResolveCapacity v = kResolveVariants[kVariant];
  constexpr int kStripes = (v.hot_rows + kSlotsPerStripe - 1) / kSlotsPerStripe;
  return resolve_kernel<v.entries / kResolveThreads, kStripes, v.ranks_in_shared, kPasses>;
}

constexpr ResolveKernel kKernels[] = {kernel_of<0, 0>(), kernel_of<1, 0>(), kernel_of<2, 0>(),
                                      kernel_of<3, 0>(), kernel_of<4, 0>()};
static_assert(sizeof(kKernels) / sizeof(kKernels[0]) == kNumResolveVariants,
              "one kernel per variant");
// For the top-k of the models that there are; the last variant is memory-bound anyway.
constexpr int kUsualPasses = 2;
constexpr ResolveKernel kUsualKernels[] = {
    kernel_of<0, kUsualPasses>(), kernel_of<1, kUsualPasses>(), kernel_of<2, kUsualPasses>(),
    kernel_of<3, kUsualPasses>(), kernel_of<4, 0>()};
static_assert(sizeof(ResolveBlock<40, 8, false, 0>::Words) <= kStaticSharedBytes,
              "words do not fit");

hotpage_status launch_resolve(const hotpage_resolve_and_copy_params &p, cudaStream_t stream) {
  ResolveArgs args;
  const int variant = plan_resolve(p, p.shared_limit_bytes - kStaticSharedBytes, &args);
  if (variant < 0) return HOTPAGE_STATUS_UNSUPPORTED;
  const bool usual = p.top_k == kUsualPasses * kResolveThreads;
  const ResolveKernel kernel = usual ? kUsualKernels[variant] : kKernels[variant];
  // Idempotent, and allowed inside a capture.
  const cudaError_t raised =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                           static_cast<int>(args.shared.total_bytes));
  if (raised != cudaSuccess) return status_of(raised);
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(p.copy.num_requests);
  config.blockDim = dim3(kResolveThreads);
  config.dynamicSmemBytes = args.shared.total_bytes;
  config.stream = stream;
  // The kernel waits by itself for what was enqueued before it.
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &attribute;
  config.numAttrs = 1;
  return status_of(cudaLaunchKernelEx(&config, kernel, args));
}

}  // namespace
}  // namespace hotpage

extern "C" hotpage_status hotpage_resolve_and_copy(const hotpage_resolve_and_copy_params *params,
                                                   void *stream) {
  hotpage_status status = hotpage::check_resolve(params);
  if (status != HOTPAGE_OK) return status;
  const cudaStream_t on = static_cast<cudaStream_t>(stream);
  if (params->copy.num_layers == 0) return hotpage::launch_resolve(*params, on);
  // The copy waits for the bus anyway, so it marks the holders; alone, the resolve does.
  const hotpage::HolderMarks marks = {params->holders, params->state_row, params->num_state_rows};
  hotpage_resolve_and_copy_params resolve = *params;
  resolve.holders = 0;
  status = hotpage::launch_resolve(resolve, on);
  return status == HOTPAGE_OK ? hotpage::launch_copy(params->copy, true, marks, on) : status;
}
