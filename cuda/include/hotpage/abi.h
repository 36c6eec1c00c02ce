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
#define HOTPAGE_ABI_VERSION 5

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
  X(hotpage_resolve_and_copy_params, 408) \
  X(hotpage_pools_params, 64)      \
  X(hotpage_mirror_rows_params, 120) \
  X(hotpage_report_mirrored_params, 56) \
  X(hotpage_copy_pages_params, 104) \
  X(hotpage_stage_prefill_params, 336) \
  X(hotpage_invalidate_params, 120) \
  X(hotpage_cooperative_copy_params, 888) \
  X(hotpage_digest_copies_params, 48) \
  X(hotpage_reset_states_params, 40)

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
  /* In and out, uint32 [num_host_rows / block_size][ceil(num_state_rows / 32)], or 0: holder bits,
     as in hotpage_invalidate_params; set for every row that gets a hot slot, by the copy if there
     is one. */
  uint64_t holders;
  /* Out: the copy list, at least max_rows_per_request x top_k long. Its layers are copied. */
  hotpage_copy_params copy;
} hotpage_resolve_and_copy_params;

/* Columns of a layer table, int64 [num_layers][HOTPAGE_NUM_LAYER_COLUMNS]. */
enum {
  /* Address of the layer's page of GPU block 0, 16-byte aligned. Rows of a page are adjacent. */
  HOTPAGE_LAYER_GPU_ADDRESS = 0,
  /* Bytes from one GPU block to the next in the layer's view. */
  HOTPAGE_LAYER_GPU_BLOCK_BYTES = 1,
  /* Address of host row 0 of the layer: pinned and mapped, 16-byte aligned. */
  HOTPAGE_LAYER_HOST_ADDRESS = 2,
  /* Bytes from a host row to the next in the layer. */
  HOTPAGE_LAYER_HOST_ROW_STRIDE = 3,
  /* KV cache group of the layer. */
  HOTPAGE_LAYER_KV_GROUP = 4,
  HOTPAGE_NUM_LAYER_COLUMNS = 5
};

/* Columns of a chunk table, int32 [num_chunks][HOTPAGE_NUM_CHUNK_COLUMNS], 16-byte aligned. */
enum {
  /* First layer of the chunk, a row of the layer table. */
  HOTPAGE_CHUNK_LAYER = 0,
  HOTPAGE_CHUNK_NUM_LAYERS = 1,
  /* First token of the chunk inside a tile of HOTPAGE_TILE_TOKENS tokens. */
  HOTPAGE_CHUNK_TOKEN = 2,
  /* 1, 2 or 4. */
  HOTPAGE_CHUNK_NUM_TOKENS = 3,
  HOTPAGE_NUM_CHUNK_COLUMNS = 4
};

/* Tokens of a tile, and rows (tokens x layers) of a chunk at most. */
#define HOTPAGE_TILE_TOKENS 4
#define HOTPAGE_CHUNK_ROWS 4

/* Both pools, as the ops see them that copy rows of many layers in one launch. */
typedef struct hotpage_pools_params {
  uint32_t struct_size;
  int32_t num_layers;
  /* Chunks that cover one tile of all layers, each (token, layer) once. */
  int32_t num_chunks;
  int32_t num_kv_groups;
  /* A multiple of 16, at most HOTPAGE_MAX_ROW_BYTES. */
  int32_t row_bytes;
  /* Tokens per block, 1 to 1,024. */
  int32_t block_size;
  /* Most thread blocks of a launch; 0 leaves it to the library. */
  int32_t max_blocks;
  int32_t reserved;
  /* Blocks of each pool, the null block counted; times block_size at most 2^31 - 1. */
  int64_t num_gpu_blocks;
  int64_t num_host_blocks;
  /* int64 [num_layers][HOTPAGE_NUM_LAYER_COLUMNS] in device memory. */
  uint64_t layers;
  /* int32 [num_chunks][HOTPAGE_NUM_CHUNK_COLUMNS] in device memory. */
  uint64_t chunks;
} hotpage_pools_params;

/* Places in the counters of mirror_rows. Its three kinds of token add up to the tokens. */
enum {
  /* Tokens whose rows were copied in every layer. */
  HOTPAGE_MIRROR_COPIED = 0,
  /* Tokens without a resident row in any KV cache group: padding. */
  HOTPAGE_MIRROR_SKIPPED = 1,
  /* Tokens with a resident row and no host row, or without a resident row in some group; and rows
     that report_mirrored found missing. */
  HOTPAGE_MIRROR_LOST = 2,
  HOTPAGE_NUM_MIRROR_COUNTERS = 3
};

/* The step's rows of some layers, GPU pool to host pool. */
typedef struct hotpage_mirror_rows_params {
  uint32_t struct_size;
  /* Tokens of the launch, padding counted; may be 0. */
  int32_t num_tokens;
  /* Elements from a row of resident_slot to the next. */
  int64_t resident_slot_stride;
  /* int64 [rows][num_tokens]: GPU block x block_size + offset of each token. */
  uint64_t resident_slot;
  /* int32 [num_kv_groups]: row of resident_slot of each KV cache group. */
  uint64_t slot_row;
  /* int64 [num_tokens]: host block x block_size + offset, -1 for padding. */
  uint64_t host_row;
  /* In and out, uint64 [num_host_blocks][ceil(block_size / 64)]: bit r % 64 of word r / 64 of a
     block is set when its row r has landed. */
  uint64_t mask;
  /* In and out, uint64 [HOTPAGE_NUM_MIRROR_COUNTERS]. */
  uint64_t counters;
  hotpage_pools_params pools;
} hotpage_mirror_rows_params;

/* Which of some host blocks have landed whole. */
typedef struct hotpage_report_mirrored_params {
  uint32_t struct_size;
  int32_t num_blocks;
  int32_t block_size;
  int32_t reserved;
  int64_t num_host_blocks;
  /* int32 [num_blocks], device memory or pinned. */
  uint64_t host_block;
  /* As in hotpage_mirror_rows_params. */
  uint64_t mask;
  /* Out, int32 [num_blocks], device memory or pinned: rows of the block that have not landed;
     block_size for the null block and for blocks beyond the pool. */
  uint64_t missing_rows;
  /* In and out, uint64 [HOTPAGE_NUM_MIRROR_COUNTERS]; missing rows add to the lost ones. */
  uint64_t counters;
} hotpage_report_mirrored_params;

/* Places in the counters of spill_pages and restore_pages. */
enum {
  HOTPAGE_PAGES_COPIED = 0,
  /* Pages with a null block, a block beyond its pool, or more rows than a page has. */
  HOTPAGE_PAGES_SKIPPED = 1,
  HOTPAGE_NUM_PAGES_COUNTERS = 2
};

/* Whole pages or their first rows, all layers. No two pages of a launch share a target block. */
typedef struct hotpage_copy_pages_params {
  uint32_t struct_size;
  /* May be 0. */
  int32_t num_pages;
  /* int32 [num_pages]. */
  uint64_t host_block;
  /* int32 [num_pages][num_kv_groups]. */
  uint64_t resident_blocks;
  /* int32 [num_pages]: rows to copy from the page's start, 0 to block_size. */
  uint64_t num_rows;
  /* In and out, uint64 [HOTPAGE_NUM_PAGES_COUNTERS]. */
  uint64_t counters;
  hotpage_pools_params pools;
} hotpage_copy_pages_params;

/* What stage_prefill does with a row. */
enum {
  HOTPAGE_STAGE_RAW = 0,
  /* fp8_ds_mla, 656 bytes, to bfloat16 [576]: 512 scaled values and 64 that are copied. */
  HOTPAGE_STAGE_FP8_TO_BF16 = 1
};

/* Places in the counters of stage_prefill: rows by where they came from, once per launch. */
enum {
  HOTPAGE_STAGE_FROM_GPU = 0,
  HOTPAGE_STAGE_FROM_HOST = 1,
  /* Rows of positions that neither pool has: zeros were written. */
  HOTPAGE_STAGE_INVALID = 2,
  HOTPAGE_NUM_STAGE_COUNTERS = 3
};

/* Context rows of some requests, from wherever they are, into workspace rows of some layers. */
typedef struct hotpage_stage_prefill_params {
  uint32_t struct_size;
  /* Workspace rows of the launch; may be 0. Rows from row_start[num_requests] on stay as they
     are. */
  int32_t num_rows;
  /* At most HOTPAGE_MAX_REQUESTS. */
  int32_t num_requests;
  /* Layers of one index group, at most HOTPAGE_MAX_GROUP_LAYERS. */
  int32_t num_layers;
  int32_t row_bytes;
  /* HOTPAGE_STAGE_RAW or HOTPAGE_STAGE_FP8_TO_BF16. */
  int32_t conversion;
  int32_t block_size;
  int32_t num_pages;
  int32_t num_state_rows;
  int32_t max_blocks;
  int64_t num_gpu_blocks;
  int64_t num_host_blocks;
  int64_t gpu_block_bytes;
  int64_t host_row_stride;
  /* Bytes from a workspace row to the next, a multiple of 16. */
  int64_t workspace_row_stride;
  int64_t residency_stride;
  int64_t source_block_table_stride;
  /* int32 [num_requests + 1], ascending from 0: first workspace row of each request. */
  uint64_t row_start;
  /* int32 [num_requests]: context position of that row. */
  uint64_t first_position;
  /* int32 [num_requests]: row of residency, -1 for a request without resident pages. */
  uint64_t state_row;
  /* int32 [num_state_rows][num_pages]: GPU block of each page, 0 if host-only. */
  uint64_t residency;
  /* int32 [num_requests][num_pages]: host block of each page, 0 for none. */
  uint64_t source_block_table;
  /* In and out, uint64 [HOTPAGE_NUM_STAGE_COUNTERS]. */
  uint64_t counters;
  uint64_t host_layer[HOTPAGE_MAX_GROUP_LAYERS];
  uint64_t gpu_layer[HOTPAGE_MAX_GROUP_LAYERS];
  /* Workspace row 0 of each layer, 16-byte aligned. */
  uint64_t workspace[HOTPAGE_MAX_GROUP_LAYERS];
} hotpage_stage_prefill_params;

/* Columns of a state table, int64 [num_index_groups][HOTPAGE_NUM_STATE_COLUMNS]: the state of
   each index group as in hotpage_resolve_and_copy_params. */
enum {
  HOTPAGE_STATE_ROW_MAP = 0,
  HOTPAGE_STATE_LAST_USED = 1,
  /* A state row of epoch 0 holds no rows. */
  HOTPAGE_STATE_EPOCH = 2,
  HOTPAGE_STATE_HOT_ROWS = 3,
  HOTPAGE_NUM_STATE_COLUMNS = 4
};

#define HOTPAGE_MAX_STATE_ROWS 4096

/* Frees the hot slots, of all index groups, whose host row changed. */
typedef struct hotpage_invalidate_params {
  uint32_t struct_size;
  int32_t num_index_groups;
  /* At most HOTPAGE_MAX_STATE_ROWS. */
  int32_t num_state_rows;
  int32_t block_size;
  /* Lengths of the three lists; may be 0. */
  int32_t num_recycled;
  int32_t num_rewritten;
  /* Entries of state_row; ignored with holders. */
  int32_t num_active;
  int32_t max_blocks;
  /* Hot rows of the widest state; of every state a multiple of 4. */
  int32_t max_hot_rows;
  int32_t reserved;
  int64_t num_host_blocks;
  /* int64 [num_index_groups][HOTPAGE_NUM_STATE_COLUMNS] in device memory. */
  uint64_t states;
  /* int32 [num_active]: state rows to look at, -1 for none; 0 looks at all of them. */
  uint64_t state_row;
  /* int32 [num_recycled]: host blocks that were allocated anew; negative ones are ignored. */
  uint64_t recycled_host_block;
  /* int64 [num_rewritten]: host rows that a mirror wrote; negative ones are ignored. */
  uint64_t rewritten_host_row;
  /* In and out, uint32 [num_host_blocks][ceil(num_state_rows / 32)], or 0: bit s % 32 of word
     s / 32 of a block is set if a row map of state row s may hold one of its rows. Only state rows
     so marked are looked at, and the bits of recycled blocks are cleared. */
  uint64_t holders;
  /* In and out, mirror masks whose words of recycled blocks are cleared; 0 for none. */
  uint64_t mask[2];
  /* In and out, uint64 [1]: hot slots freed. */
  uint64_t freed;
  /* uint32 [1], 0 before and after each launch. */
  uint64_t scratch;
} hotpage_invalidate_params;

/* Ranks that fetch misses for each other, and thread blocks of one of their copies. */
#define HOTPAGE_MAX_RANKS 8
#define HOTPAGE_MAX_COOPERATIVE_BLOCKS 128

/*
 * A channel is HOTPAGE_CHANNEL_BYTES of device memory of one rank that all ranks of a group can
 * write, zero before another rank learns of it. It begins with uint64
 * [HOTPAGE_NUM_CHANNEL_COUNTERS]; the rest belongs to cooperative_copy. All launches of a channel
 * are on one stream, in the same order on every rank.
 */
#define HOTPAGE_CHANNEL_BYTES 267008
enum {
  /* Launches for which the ranks met. */
  HOTPAGE_CHANNEL_SHARED_LAUNCHES = 0,
  /* Launches after a failure: every row was fetched by the rank itself. */
  HOTPAGE_CHANNEL_PRIVATE_LAUNCHES = 1,
  /* Rows that this rank fetched for all ranks, layers not counted. */
  HOTPAGE_CHANNEL_SHARED_ROWS = 2,
  /* Requests whose copy lists differed between ranks; each rank fetched its own rows of them. */
  HOTPAGE_CHANNEL_DIFFERENT_REQUESTS = 3,
  /* Launches that ended a wait because of the time limit or of another rank's failure. From the
     first one on the channel has failed: this rank fetches alone. */
  HOTPAGE_CHANNEL_FAILED_LAUNCHES = 4,
  /* Ranks that had begun to write here and did not end in time, or could still begin because this
     rank's own first block did not end in time. Rows that they still write may hit hot slots of
     later steps: whoever sees this above 0 stops the engine, unless they died. */
  HOTPAGE_CHANNEL_LOST_RANKS = 5,
  /* Digest of all copy lists so far, in the order of the launches. */
  HOTPAGE_CHANNEL_DIGEST = 6,
  /* Launches that the digest covers. */
  HOTPAGE_CHANNEL_DIGESTED_LAUNCHES = 7,
  HOTPAGE_NUM_CHANNEL_COUNTERS = 8
};

/*
 * The copy of a copy list by several ranks: each fetches its part of the rows and writes them to
 * the hot rows of all. Sizes, strides and the order of launches are the same on every rank; lists
 * and hot rows may differ.
 */
typedef struct hotpage_cooperative_copy_params {
  uint32_t struct_size;
  int32_t rank;
  /* 2 to HOTPAGE_MAX_RANKS. */
  int32_t num_ranks;
  /* Tells copy lists of different index groups apart. */
  uint32_t salt;
  /* 1: the launch before on the stream is the resolve that writes the list. */
  int32_t after_resolve;
  int32_t num_state_rows;
  /* Nanoseconds to wait for other ranks, at least 1. */
  int64_t time_limit_ns;
  /* As in hotpage_resolve_and_copy_params; holders may be 0, and then state_row is not read. */
  uint64_t holders;
  uint64_t state_row;
  /* Channel of each rank, this rank's own at [rank]. */
  uint64_t channel[HOTPAGE_MAX_RANKS];
  /* copy_hot_row of each rank. */
  uint64_t hot_row[HOTPAGE_MAX_RANKS];
  /* [rank][layer]: gpu_layer of each rank. */
  uint64_t gpu_layer[HOTPAGE_MAX_RANKS * HOTPAGE_MAX_GROUP_LAYERS];
  /* This rank's list and layers. max_blocks is at most HOTPAGE_MAX_COOPERATIVE_BLOCKS, all of which
     have to run at the same time. */
  hotpage_copy_params copy;
} hotpage_cooperative_copy_params;

/* Adds the digest of a copy list to a sum that ranks compare now and then. */
typedef struct hotpage_digest_copies_params {
  uint32_t struct_size;
  int32_t num_requests;
  int32_t copy_list_stride;
  /* Tells copy lists of different index groups apart. */
  uint32_t salt;
  /* As in hotpage_copy_params. */
  uint64_t copy_host_row;
  uint64_t copy_count;
  /* In and out, uint64 [2]: digest of all lists so far, in order, and their number. */
  uint64_t digest;
  /* In and out, uint64 [2]: 0 before and after each launch. */
  uint64_t scratch;
} hotpage_digest_copies_params;

/* Empties the row maps of some state rows in all index groups. */
typedef struct hotpage_reset_states_params {
  uint32_t struct_size;
  int32_t num_index_groups;
  int32_t num_state_rows;
  int32_t num_listed;
  int64_t reserved;
  /* int64 [num_index_groups][HOTPAGE_NUM_STATE_COLUMNS] in device memory. */
  uint64_t states;
  /* int32 [num_listed]: state rows; those outside [0, num_state_rows) are ignored. */
  uint64_t state_row;
} hotpage_reset_states_params;

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

/* 1 if kernels can reach host memory at this address: pinned by CUDA or registered. Not for use
   inside a capture. */
HOTPAGE_API int32_t hotpage_is_pinned(uint64_t address);

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

/* Each enqueues one launch, or none if there is nothing to do. */
HOTPAGE_API hotpage_status hotpage_mirror_rows(const hotpage_mirror_rows_params *params,
                                               void *stream);
HOTPAGE_API hotpage_status hotpage_report_mirrored(const hotpage_report_mirrored_params *params,
                                                   void *stream);
HOTPAGE_API hotpage_status hotpage_spill_pages(const hotpage_copy_pages_params *params,
                                               void *stream);
HOTPAGE_API hotpage_status hotpage_restore_pages(const hotpage_copy_pages_params *params,
                                                 void *stream);
HOTPAGE_API hotpage_status hotpage_stage_prefill(const hotpage_stage_prefill_params *params,
                                                 void *stream);
HOTPAGE_API hotpage_status hotpage_invalidate(const hotpage_invalidate_params *params,
                                              void *stream);
HOTPAGE_API hotpage_status hotpage_reset_states(const hotpage_reset_states_params *params,
                                                void *stream);

/* Enqueues one launch whose blocks wait for the same launch of the other ranks. */
HOTPAGE_API hotpage_status hotpage_cooperative_copy(const hotpage_cooperative_copy_params *params,
                                                    void *stream);

/* Enqueues one launch. */
HOTPAGE_API hotpage_status hotpage_digest_copies(const hotpage_digest_copies_params *params,
                                                 void *stream);

#ifdef __cplusplus
}
#endif

#endif /* HOTPAGE_ABI_H_ */
