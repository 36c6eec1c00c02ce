// SPDX-License-Identifier: Apache-2.0
// Owns as much of the CUDA runtime as launchers use, on a CPU: a launch runs its blocks one after
// the other, in an order that a seed shuffles, and ends before it returns.
//
// A block of shared variables is one object of a CPU thread: a block finds in it what the last one
// left.
#pragma once

#include <numeric>

#include "cuda_on_cpu.h"

#define __global__
#define __shared__ static thread_local
#define __grid_constant__
#define __launch_bounds__(...)

enum cudaError_t { cudaSuccess = 0, cudaErrorLaunchTimeout = 702 };
using cudaStream_t = void *;

struct dim3 {
  unsigned x;
  dim3(unsigned count = 1) : x(count) {}
};
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  cudaStream_t stream;
};

namespace cpu {

inline unsigned launch_seed = 0;
inline cudaError_t last_error = cudaSuccess;

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

// cudaErrorLaunchTimeout: a block's threads wait for each other for ever.
template <class Args>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t *config, void (*kernel)(Args),
                               const Args &args) {
  cpu::Launch<Args> launch = {kernel, &args};
  std::vector<unsigned> order(config->gridDim.x);
  std::iota(order.begin(), order.end(), 0u);
  std::shuffle(order.begin(), order.end(), std::mt19937(cpu::launch_seed));
  for (const unsigned index : order) {
    if (!cpu::run_block(config->blockDim.x, index, config->gridDim.x, cpu::launch_seed + index,
                        &cpu::Launch<Args>::run, &launch)) {
      return cpu::last_error = cudaErrorLaunchTimeout;
    }
  }
  return cudaSuccess;
}

inline cudaError_t cudaGetLastError() {
  const cudaError_t error = cpu::last_error;
  cpu::last_error = cudaSuccess;
  return error;
}
