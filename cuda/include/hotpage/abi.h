/* SPDX-License-Identifier: Apache-2.0 */
/* Owns the C contract between libhotpage_cuda.so and hotpage.kernels; holds no device code. */
#ifndef HOTPAGE_ABI_H_
#define HOTPAGE_ABI_H_

#include <stdint.h>

/*
 * Rules of this header:
 *  - Parameter blocks are plain structs of fixed-width integers. The first field is struct_size,
 *    which the caller sets to sizeof(struct); a launcher refuses any other value.
 *  - Addresses and byte counts are 64-bit. A device address is a uint64_t, never a typed pointer,
 *    so that the Python mirror has no pointer width to get wrong.
 *  - Nothing here transfers ownership. Launchers allocate nothing, synchronise nothing, use only
 *    the caller's stream, and may be recorded into a CUDA graph.
 *  - A change of any struct, status or signature increments HOTPAGE_ABI_VERSION and is repeated in
 *    python/hotpage/kernels/_abi.py, which tests/unit/test_abi_sync.py compares with this file.
 */
#define HOTPAGE_ABI_VERSION 1

#define HOTPAGE_API __attribute__((visibility("default")))

#ifdef __cplusplus
#define HOTPAGE_STATIC_ASSERT(condition, text) static_assert(condition, text)
#else
#define HOTPAGE_STATIC_ASSERT(condition, text) _Static_assert(condition, text)
#endif

/* Every parameter block: its name and its size in bytes. An op adds its own line. */
#define HOTPAGE_STRUCTS(X)          \
  X(hotpage_device_properties, 56) \
  X(hotpage_fill_params, 24)

#ifdef __cplusplus
extern "C" {
#endif

/* What a call returns. From HOTPAGE_STATUS_CUDA_BASE on, the rest is the cudaError_t. */
typedef int32_t hotpage_status;
enum {
  HOTPAGE_OK = 0,
  /* struct_size is not the size of the struct: the caller was built against another header. */
  HOTPAGE_STATUS_STRUCT_SIZE = 1,
  /* A field is outside what its comment allows. */
  HOTPAGE_STATUS_INVALID_ARGUMENT = 2,
  /* A size is valid but larger than this device or this build supports. */
  HOTPAGE_STATUS_UNSUPPORTED = 3,
  HOTPAGE_STATUS_CUDA_BASE = 1000
};

/* Properties of one device, as bounds are checked against. */
typedef struct hotpage_device_properties {
  uint32_t struct_size;
  /* In: the CUDA device ordinal. */
  int32_t device;
  int32_t compute_major;
  int32_t compute_minor;
  int32_t num_multiprocessors;
  int32_t max_threads_per_block;
  /* Registers of 32 bits. */
  int32_t registers_per_multiprocessor;
  /* Largest dynamic shared memory that a kernel may opt in to, bytes. */
  int32_t max_dynamic_shared_bytes_per_block;
  int32_t shared_bytes_per_multiprocessor;
  int32_t l2_bytes;
  /* 1 if kernels can read pinned host memory at its host address. */
  int32_t reads_registered_host_memory;
  /* 1 if the device can launch thread block clusters. */
  int32_t supports_clusters;
  /* Versions as CUDA writes them: 1000 x major + 10 x minor; driver is 0 where there is none. */
  int32_t driver_version;
  int32_t runtime_version;
} hotpage_device_properties;

/* Bytes [address, address + num_bytes) of device or registered host memory get a pattern. */
typedef struct hotpage_fill_params {
  uint32_t struct_size;
  /* Byte i of the range becomes byte (i mod 4) of this word, least significant byte first. */
  uint32_t pattern;
  /* Any alignment; may be 0 only if num_bytes is 0. */
  uint64_t address;
  uint64_t num_bytes;
} hotpage_fill_params;

#define HOTPAGE_ASSERT_SIZE(name, bytes) \
  HOTPAGE_STATIC_ASSERT(sizeof(struct name) == (bytes), #name " has an unexpected size");
HOTPAGE_STRUCTS(HOTPAGE_ASSERT_SIZE)
#undef HOTPAGE_ASSERT_SIZE

/* HOTPAGE_ABI_VERSION of the library. */
HOTPAGE_API int32_t hotpage_abi_version(void);

/* The images in the library, comma-separated: sm_* is machine code, compute_* is PTX. */
HOTPAGE_API const char *hotpage_architectures(void);

/* Size in bytes of the named struct in the library; 0 if it has none of that name. */
HOTPAGE_API uint32_t hotpage_struct_size(const char *name);

/* English text of any status; static storage, never null. */
HOTPAGE_API const char *hotpage_status_text(hotpage_status status);

/* Number of CUDA devices; a missing driver is an error status. Not for use inside a capture. */
HOTPAGE_API hotpage_status hotpage_device_count(int32_t *count);

/* Fills every field after `device`. Not for use inside a capture. */
HOTPAGE_API hotpage_status hotpage_query_device(hotpage_device_properties *properties);

/* Enqueues one launch on `stream` (a cudaStream_t; null is the legacy default stream). */
HOTPAGE_API hotpage_status hotpage_fill(const hotpage_fill_params *params, void *stream);

#ifdef __cplusplus
}
#endif

#endif /* HOTPAGE_ABI_H_ */
