// SPDX-License-Identifier: Apache-2.0
// Owns as much of the CUDA runtime as launchers use, on a CPU: a launch runs its blocks one after
// the other, in an order that a seed shuffles, or as a cluster, and ends before it returns.
//
// A block of shared variables is one object of a CPU thread: a block finds in it what the last one
// left.
#pragma once

#include <map>
#include <numeric>

#include "cuda_on_cpu.h"

#define __global__
#define __shared__ static thread_local
#define __grid_constant__
#define __launch_bounds__(...)

enum cudaError_t {
  cudaSuccess = 0,
  cudaErrorInvalidValue = 1,
  cudaErrorLaunchTimeout = 702,
  cudaErrorInvalidClusterSize = 912,
};
using cudaStream_t = void *;

struct dim3 {
  unsigned x;
  dim3(unsigned count = 1) : x(count) {}
};
enum cudaLaunchAttributeID {
  cudaLaunchAttributeClusterDimension,
  cudaLaunchAttributeProgrammaticStreamSerialization,
};
struct cudaLaunchAttribute {
  cudaLaunchAttributeID id;
  struct {
    struct {
      unsigned x, y, z;
    } clusterDim;
    int programmaticStreamSerializationAllowed;
  } val;
};
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes;
  cudaStream_t stream;
  cudaLaunchAttribute *attrs;
  unsigned numAttrs;
};
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize };

namespace cpu {

inline unsigned launch_seed = 0;
inline cudaError_t last_error = cudaSuccess;
inline cudaError_t leave(cudaError_t error) {
  if (error != cudaSuccess) last_error = error;
  return error;
}

// What a block may ask for on the smallest device, and what it gets without asking.
constexpr size_t kMostSharedBytes = 101376, kSharedBytes = 48 << 10;
// By kernel.
inline std::map<const void *, size_t> raised_bytes;
// Blocks of a cluster that the device has room for.
inline unsigned most_cluster_blocks = 8;
// Blocks of the last launch.
inline unsigned launched_blocks = 0;

template <class Args>
struct Launch {
  void (*kernel)(Args);
  const Args *args;
  static void run(void *self) {
    const Launch *launch = static_cast<Launch *>(self);
    launch->kernel(*launch->args);
  }
};

}  // namespace cpu

template <class Kernel>
cudaError_t cudaFuncSetAttribute(Kernel *kernel, cudaFuncAttribute, int bytes) {
  const size_t wanted = static_cast<size_t>(bytes);
  if (wanted > cpu::kMostSharedBytes) return cpu::leave(cudaErrorInvalidValue);
  cpu::raised_bytes[reinterpret_cast<const void *>(kernel)] = wanted;
  return cudaSuccess;
}

// A launch of a cluster is one of that cluster alone. cudaErrorLaunchTimeout: a block's threads
// wait for each other for ever.
template <class Args>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t *config, void (*kernel)(Args),
                               const Args &args) {
  cpu::Launch<Args> launch = {kernel, &args};
  const size_t raised = cpu::raised_bytes[reinterpret_cast<const void *>(kernel)];
  if (config->dynamicSmemBytes > max(raised, cpu::kSharedBytes)) {
    return cpu::leave(cudaErrorInvalidValue);
  }
  for (unsigned i = 0; i < config->numAttrs; ++i) {
    if (config->attrs[i].id != cudaLaunchAttributeClusterDimension) continue;
    const unsigned size = config->attrs[i].val.clusterDim.x;
    if (size > cpu::most_cluster_blocks) return cpu::leave(cudaErrorInvalidClusterSize);
    if (size != config->gridDim.x) return cpu::leave(cudaErrorInvalidValue);
    cpu::launched_blocks = size;
    const bool ended =
        cpu::run_cluster(size, config->dynamicSmemBytes, config->blockDim.x, cpu::launch_seed,
                         &cpu::Launch<Args>::run, &launch);
    return cpu::leave(ended ? cudaSuccess : cudaErrorLaunchTimeout);
  }
  cpu::launched_blocks = config->gridDim.x;
  std::vector<unsigned> order(config->gridDim.x);
  std::iota(order.begin(), order.end(), 0u);
  std::shuffle(order.begin(), order.end(), std::mt19937(cpu::launch_seed));
  for (const unsigned index : order) {
    if (!cpu::run_block(config->blockDim.x, index, config->gridDim.x, cpu::launch_seed + index,
                        &cpu::Launch<Args>::run, &launch)) {
      return cpu::leave(cudaErrorLaunchTimeout);
    }
  }
  return cudaSuccess;
}

inline cudaError_t cudaGetLastError() {
  const cudaError_t error = cpu::last_error;
  cpu::last_error = cudaSuccess;
  return error;
}
