// SPDX-License-Identifier: Apache-2.0
// Owns what the library says of itself and of a device; launches no kernel.

#include <cstddef>
#include <cstring>

#include "hotpage/launch.cuh"

#ifndef HOTPAGE_ARCHITECTURES
#error "cuda/build.py defines HOTPAGE_ARCHITECTURES, the list of images it asks the compiler for"
#endif

using hotpage::status_of;

namespace {

struct Attribute {
  cudaDeviceAttr attribute;
  size_t offset;  // of its int32_t in hotpage_device_properties
};

constexpr Attribute kAttributes[] = {
    {cudaDevAttrComputeCapabilityMajor, offsetof(hotpage_device_properties, compute_major)},
    {cudaDevAttrComputeCapabilityMinor, offsetof(hotpage_device_properties, compute_minor)},
    {cudaDevAttrMultiProcessorCount, offsetof(hotpage_device_properties, num_multiprocessors)},
    {cudaDevAttrMaxThreadsPerBlock, offsetof(hotpage_device_properties, max_threads_per_block)},
    {cudaDevAttrMaxRegistersPerMultiprocessor,
     offsetof(hotpage_device_properties, registers_per_multiprocessor)},
    {cudaDevAttrMaxSharedMemoryPerBlockOptin,
     offsetof(hotpage_device_properties, max_dynamic_shared_bytes_per_block)},
    {cudaDevAttrMaxSharedMemoryPerMultiprocessor,
     offsetof(hotpage_device_properties, shared_bytes_per_multiprocessor)},
    {cudaDevAttrL2CacheSize, offsetof(hotpage_device_properties, l2_bytes)},
    {cudaDevAttrCanUseHostPointerForRegisteredMem,
     offsetof(hotpage_device_properties, reads_registered_host_memory)},
    {cudaDevAttrClusterLaunch, offsetof(hotpage_device_properties, supports_clusters)},
};

}  // namespace

extern "C" int32_t hotpage_abi_version(void) { return HOTPAGE_ABI_VERSION; }

extern "C" const char *hotpage_architectures(void) { return HOTPAGE_ARCHITECTURES; }

extern "C" uint32_t hotpage_struct_size(const char *name) {
  if (name == nullptr) return 0;
#define HOTPAGE_MATCH(type, bytes) \
  if (std::strcmp(name, #type) == 0) return sizeof(struct type);
  HOTPAGE_STRUCTS(HOTPAGE_MATCH)
#undef HOTPAGE_MATCH
  return 0;
}

extern "C" const char *hotpage_status_text(hotpage_status status) {
  if (status >= HOTPAGE_STATUS_CUDA_BASE) {
    return cudaGetErrorString(static_cast<cudaError_t>(status - HOTPAGE_STATUS_CUDA_BASE));
  }
  switch (status) {
    case HOTPAGE_OK:
      return "success";
    case HOTPAGE_STATUS_STRUCT_SIZE:
      return "the parameter block has another size than the library was built with";
    case HOTPAGE_STATUS_INVALID_ARGUMENT:
      return "a field of the parameter block is out of range";
    case HOTPAGE_STATUS_UNSUPPORTED:
      return "the request is larger than this device or this build supports";
    default:
      return "unknown status";
  }
}

extern "C" hotpage_status hotpage_device_count(int32_t *count) {
  if (count == nullptr) return HOTPAGE_STATUS_INVALID_ARGUMENT;
  int found = 0;
  const cudaError_t error = cudaGetDeviceCount(&found);
  *count = error == cudaSuccess ? found : 0;
  return status_of(error);
}

extern "C" hotpage_status hotpage_query_device(hotpage_device_properties *properties) {
  const hotpage_status checked = hotpage::check_params(properties);
  if (checked != HOTPAGE_OK) return checked;
  cudaError_t error = cudaSuccess;
  for (const Attribute &entry : kAttributes) {
    int value = 0;
    error = cudaDeviceGetAttribute(&value, entry.attribute, properties->device);
    if (error != cudaSuccess) break;
    std::memcpy(reinterpret_cast<char *>(properties) + entry.offset, &value, sizeof(value));
  }
  if (error == cudaSuccess) error = cudaDriverGetVersion(&properties->driver_version);
  if (error == cudaSuccess) error = cudaRuntimeGetVersion(&properties->runtime_version);
  return status_of(error);
}

extern "C" int32_t hotpage_is_pinned(uint64_t address) {
  cudaPointerAttributes attributes = {};
  const void *pointer = reinterpret_cast<const void *>(address);
  const cudaError_t error = cudaPointerGetAttributes(&attributes, pointer);
  if (error != cudaSuccess) {
    // Left behind, it would be blamed on the caller's next launch.
    (void)cudaGetLastError();
    return 0;
  }
  return attributes.type == cudaMemoryTypeHost ? 1 : 0;
}
