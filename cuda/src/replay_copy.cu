// SPDX-License-Identifier: Apache-2.0
// Owns hotpage_replay_copy and the copy launcher: a copy list's rows for one or more layers.

#include "hotpage/copy_launch.h"
#include "hotpage/copy_rows.cuh"
#include "hotpage/sweep_copies.cuh"

namespace hotpage {
namespace {

// Enough rows on the bus to fill it, measured on an H200; see benches/gpu/README.md.
constexpr int32_t kDefaultCopyBlocks = 128;
// Reads of at least so many bytes side by side fill the bus in any order.
constexpr int64_t kWideReadBytes = 2048;

using CopyKernel = void (*)(CopyArgs);

constexpr int32_t kMinBlockSize = 1;
constexpr int32_t kMaxBlockSize = 128;

// True if rows are so short that the order in which they are copied matters.
bool may_sweep(const hotpage_copy_params &p, bool layers_innermost) {
  return int64_t{p.row_bytes} * (layers_innermost ? p.num_layers : 1) < kWideReadBytes;
}

// Blocks of a sweep's cluster: the largest power of two within the caller's bound.
unsigned num_sweep_blocks(int32_t max_blocks) {
  unsigned blocks = kMostSweepBlocks;
  while (max_blocks > 0 && blocks > static_cast<unsigned>(max_blocks)) blocks /= 2;
  return blocks;
}

// Enqueues a sweep of config's blocks, which are one cluster, its first attribute, or of as many as
// the device takes: a part of a GPU may have no room for all of them side by side.
cudaError_t launch_cluster(cudaLaunchConfig_t *config, CopyKernel kernel, const CopyArgs &args) {
  for (;;) {
    config->attrs[0].val.clusterDim = {config->gridDim.x, 1, 1};
    const cudaError_t error = cudaLaunchKernelEx(config, kernel, args);
    if (error != cudaErrorInvalidClusterSize || config->gridDim.x == 1) return error;
    // It is not the error of the launch that follows.
    (void)cudaGetLastError();
    config->gridDim.x /= 2;
  }
}

}  // namespace

hotpage_status check_copy(const hotpage_copy_params &p, int32_t least_layers) {
  if (p.struct_size != sizeof(p)) return HOTPAGE_STATUS_STRUCT_SIZE;
  bool ok = p.num_requests >= 1 && p.num_requests <= kMaxRequests && p.num_layers >= least_layers &&
            p.num_layers <= HOTPAGE_MAX_GROUP_LAYERS && row_bytes_fit(p.row_bytes) &&
            p.max_blocks >= 0 && p.copy_list_stride >= 1 && p.host_row_stride >= p.row_bytes &&
            p.host_row_stride % kUnitBytes == 0 && p.block_size >= kMinBlockSize &&
            p.block_size <= kMaxBlockSize && p.block_stride_rows >= p.block_size &&
            p.gpu_block_stride >= int64_t{p.block_size} * p.row_bytes &&
            p.gpu_block_stride % kUnitBytes == 0 && p.copy_host_row != 0 && p.copy_hot_row != 0 &&
            p.copy_count != 0;
  for (int32_t layer = 0; ok && layer < p.num_layers; ++layer) {
    ok = p.host_layer[layer] != 0 && p.host_layer[layer] % kUnitBytes == 0 &&
         p.gpu_layer[layer] != 0 && p.gpu_layer[layer] % kUnitBytes == 0;
  }
  return ok ? HOTPAGE_OK : HOTPAGE_STATUS_INVALID_ARGUMENT;
}

hotpage_status launch_copy(const hotpage_copy_params &params, bool after_resolve,
                           const HolderMarks &marks, cudaStream_t stream) {
  const CopyArgs args = plan_copy(params, marks);
  const bool sweeps = may_sweep(params, args.layers_innermost != 0);
  const CopyKernel kernel =
      sweeps ? (after_resolve ? sweep_copies_kernel<true> : sweep_copies_kernel<false>)
             : (after_resolve ? copy_rows_kernel<true> : copy_rows_kernel<false>);
  cudaLaunchConfig_t config = {};
  cudaLaunchAttribute attributes[2] = {};
  config.attrs = attributes;
  config.blockDim = dim3(kCopyThreads);
  config.stream = stream;
  if (sweeps) {
    config.gridDim = dim3(num_sweep_blocks(params.max_blocks));
    config.dynamicSmemBytes = sizeof(SweepShared);
    // Idempotent, and allowed inside a capture.
    const cudaError_t raised = cudaFuncSetAttribute(
        kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(SweepShared));
    if (raised != cudaSuccess) return status_of(raised);
    attributes[config.numAttrs++].id = cudaLaunchAttributeClusterDimension;
  } else {
    config.gridDim = dim3(params.max_blocks > 0 ? params.max_blocks : kDefaultCopyBlocks);
  }
  if (after_resolve) {
    cudaLaunchAttribute &early = attributes[config.numAttrs++];
    early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    early.val.programmaticStreamSerializationAllowed = 1;
  }
  return status_of(sweeps ? launch_cluster(&config, kernel, args)
                          : cudaLaunchKernelEx(&config, kernel, args));
}

}  // namespace hotpage

extern "C" hotpage_status hotpage_replay_copy(const hotpage_copy_params *params, void *stream) {
  if (params == nullptr) return HOTPAGE_STATUS_INVALID_ARGUMENT;
  const hotpage_status checked = hotpage::check_copy(*params, 1);
  if (checked != HOTPAGE_OK) return checked;
  return hotpage::launch_copy(*params, false, {}, static_cast<cudaStream_t>(stream));
}
