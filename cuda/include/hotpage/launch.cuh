// SPDX-License-Identifier: Apache-2.0
// Owns what every launcher does with a parameter block and with a CUDA error.
#pragma once

#include <cuda_runtime.h>

#include "hotpage/abi.h"

namespace hotpage {

// Status of a CUDA call that has just returned.
inline hotpage_status status_of(cudaError_t error) {
  if (error == cudaSuccess) return HOTPAGE_OK;
  // The error is in the status; left behind, it would be blamed on the next launch.
  (void)cudaGetLastError();
  return HOTPAGE_STATUS_CUDA_BASE + static_cast<hotpage_status>(error);
}

// Status of the launch just made. OK because cudaGetLastError only reads and clears this thread's
// error; it neither waits for the kernel nor disturbs a capture.
inline hotpage_status launch_status() { return status_of(cudaGetLastError()); }

// Enqueues kernel(args). A call and not <<<>>>, so that a C++ compiler reads the launchers too:
// tests run them on a CPU.
template <typename Args>
hotpage_status launch(void (*kernel)(Args), unsigned num_blocks, unsigned num_threads,
                      const Args &args, void *stream) {
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(num_blocks);
  config.blockDim = dim3(num_threads);
  config.stream = static_cast<cudaStream_t>(stream);
  (void)cudaLaunchKernelEx(&config, kernel, args);
  return launch_status();
}

// HOTPAGE_OK if `params` is a block of the size that this library was built with.
template <typename Params>
hotpage_status check_params(const Params *params) {
  if (params == nullptr) return HOTPAGE_STATUS_INVALID_ARGUMENT;
  return params->struct_size == sizeof(Params) ? HOTPAGE_OK : HOTPAGE_STATUS_STRUCT_SIZE;
}

}  // namespace hotpage
