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
#define HOTPAGE_ABI_VERSION 2

#define HOTPAGE_API __attribute__((visibility("default")))

#ifdef __cplusplus
#define HOTPAGE_STATIC_ASSERT(condition, text) static_assert(condition, text)
#else
#define HOTPAGE_STATIC_ASSERT(condition, text) _Static_assert(condition, text)
#endif

/* Every parameter block: its name and its size in bytes. An op adds its own line. */
#define HOTPAGE_STRUCTS(X)          \
  X(hotpage_device_properties, 56) \
  X(hotpage_fill_params, 24)       \
  X(hotpage_copy_params, 200)      \
  X(hotpage_resolve_and_copy_params, 400)

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

/* Limits of resolve and copy. */
#define HOTPAGE_MAX_REQUESTS 1024
#define HOTPAGE_MAX_GROUP_LAYERS 8
#define HOTPAGE_MAX_ROW_BYTES 16384

/* Places in `counters`. */
enum {
  /* Union rows found in a hot slot. */
  HOTPAGE_COUNTER_HITS = 0,
  /* Union rows that were not. */
  HOTPAGE_COUNTER_MISSES = 1,
  /* Misses that got no hot slot: no hot region, or a union larger than it. A bug where it moves. */
  HOTPAGE_COUNTER_OVERFLOW = 2,
  HOTPAGE_NUM_COUNTERS = 3
};

/* A copy list, and the copy of its rows, host pool to GPU pool, for some layers. */
typedef struct hotpage_copy_params {
  uint32_t struct_size;
  /* Batch requests of the launch, at most HOTPAGE_MAX_REQUESTS. */
  int32_t num_requests;
  /* Layers to copy, at most HOTPAGE_MAX_GROUP_LAYERS; 0 in a resolve that copies nothing. */
  int32_t num_layers;
  /* A multiple of 16, at most HOTPAGE_MAX_ROW_BYTES. */
  int32_t row_bytes;
  /* Most thread blocks that the copy may take; 0 leaves it to the library. */
  int32_t max_blocks;
  /* Elements of copy_host_row and copy_hot_row per request. */
  int32_t copy_list_stride;
  /* Tokens per block, at most 128; a resolve needs at least 2. */
  int32_t block_size;
  /* Physical rows from one GPU block to the next: row t of block b is b x block_stride_rows + t. */
  int32_t block_stride_rows;
  /* Bytes from a host row to the next in one layer: row_bytes x layers of the index group where
     rows are interleaved, row_bytes where they are not. */
  int64_t host_row_stride;
  /* Bytes from one GPU block to the next. */
  int64_t gpu_block_stride;
  /* int32 [num_requests][copy_list_stride]: misses by ascending host row. */
  uint64_t copy_host_row;
  /* int32 [num_requests][copy_list_stride]: physical rows that they go to. */
  uint64_t copy_hot_row;
  /* int32 [num_requests]: misses in the list. */
  uint64_t copy_count;
  /* Address of host row 0 of each layer: pinned and mapped, 16-byte aligned. */
  uint64_t host_layer[HOTPAGE_MAX_GROUP_LAYERS];
  /* Address of row 0 of block 0 of each layer, 16-byte aligned. */
  uint64_t gpu_layer[HOTPAGE_MAX_GROUP_LAYERS];
} hotpage_copy_params;

/*
 * One resolve of an index group, whose leader's top-k becomes physical rows, and the copy of its
 * misses. Strides are in elements. A batch request is a number below copy.num_requests; a state
 * row is where a request's row map and stamps lie between steps.
 */
typedef struct hotpage_resolve_and_copy_params {
  uint32_t struct_size;
  /* Verification rows of the launch, padding counted. */
  int32_t num_rows;
  /* Most verification rows of one request, 1 to 10. */
  int32_t max_rows_per_request;
  /* Entries of a row, at most 4,096. */
  int32_t top_k;
  /* Hot slots of a request: at least max_rows_per_request x top_k, at most 32,768, a multiple of
     copy.block_size and of 4. */
  int32_t hot_rows;
  /* Pages of a row of residency and of source_block_table; times copy.block_size at most 2^25. */
  int32_t num_pages;
  int32_t num_state_rows;
  /* max_dynamic_shared_bytes_per_block of the device. */
  int32_t shared_limit_bytes;
  /* Rows of a layer's view of the GPU pool and of the host pool, at most 2^31 - 1. A block beyond
     them is invalid. */
  int64_t num_physical_rows;
  int64_t num_host_rows;
  int64_t logical_topk_stride;
  int64_t physical_topk_stride;
  int64_t residency_stride;
  int64_t source_block_table_stride;
  int64_t hot_block_table_stride;
  /* int32 [num_rows][top_k]: selected positions, -1 for nothing. */
  uint64_t logical_topk;
  /* int32 [num_rows]: batch request of each row, -1 for padding; a request's rows are adjacent. */
  uint64_t row_request;
  /* int32 [1]: rows from this number on are padding. */
  uint64_t num_valid_rows;
  /* int32 [num_requests]: state row, -1 for padding. No two requests share one. */
  uint64_t state_row;
  /* int32 [num_rows]: positions from this number on are invalid for the row. */
  uint64_t seq_len;
  /* int32 [num_state_rows][num_pages]: GPU block of each page, 0 if host-only. */
  uint64_t residency;
  /* int32 [num_requests][num_pages]: host block of each page, 0 for none. */
  uint64_t source_block_table;
  /* int32 [num_requests][hot_rows / copy.block_size]: GPU blocks of the hot region, 0 for none. */
  uint64_t hot_block_table;
  /* In and out, int32 [num_state_rows][hot_rows]: host row of each hot slot, -1 if free; 16-byte
     aligned. */
  uint64_t row_map;
  /* In and out, uint16 [num_state_rows][hot_rows]: epoch of the last use, 0 if free; 8-byte
     aligned. */
  uint64_t last_used;
  /* In and out, uint32 [num_state_rows]: epoch of the last resolve that met a host-only page. */
  uint64_t epoch;
  /* Out, int32 [num_rows][top_k]: valid physical rows first, then -1. Not the logical top-k. */
  uint64_t physical_topk;
  /* Out, int32 [num_rows]. */
  uint64_t valid_counts;
  /* In and out, uint64 [HOTPAGE_NUM_COUNTERS]. */
  uint64_t counters;
  /* Out: the copy list, at least max_rows_per_request x top_k long. Its layers are copied. */
  hotpage_copy_params copy;
} hotpage_resolve_and_copy_params;

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

/*
 * Enqueues the resolve and, if copy.num_layers is not 0, the copy of its misses as a second launch
 * whose blocks may start while the first ends.
 */
HOTPAGE_API hotpage_status hotpage_resolve_and_copy(const hotpage_resolve_and_copy_params *params,
                                                    void *stream);

/* Enqueues one launch: copies by a list that an earlier resolve on the stream wrote. */
HOTPAGE_API hotpage_status hotpage_replay_copy(const hotpage_copy_params *params, void *stream);

#ifdef __cplusplus
}
#endif

#endif /* HOTPAGE_ABI_H_ */
