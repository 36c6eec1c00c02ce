// SPDX-License-Identifier: Apache-2.0
// Owns hotpage_stage_prefill: context rows of some requests into workspace rows of some layers.
//
// Contract: called per chunk of context and index group (or layer) before attention reads the
// workspace. A warp takes up to four rows: the layers of a token where the group's rows lie side by
// side in the host pool, else tokens. Reads the tables and rows of both pools; writes workspace
// rows and counters. Caller's stream, graph-safe.

#include <cuda_bf16.h>
#include <cuda_fp8.h>

#include <climits>

#include "hotpage/pools.cuh"

namespace hotpage {
namespace {

constexpr int32_t kDefaultStageBlocks = 132;
constexpr int kMaxRequests = HOTPAGE_MAX_REQUESTS;

// fp8_ds_mla: values in four groups with a float scale each, then what is bfloat16 already.
constexpr int kScaledValues = 512;
constexpr int kScaleGroups = 4;
constexpr int kRopeValues = 64;
constexpr int kFp8RowBytes = kScaledValues + kScaleGroups * 4 + kRopeValues * 2;
constexpr int kBf16RowBytes = 2 * (kScaledValues + kRopeValues);
static_assert(kFp8RowBytes == 656 && kBf16RowBytes == 1152, "the row widths of fp8_ds_mla");
// Pieces of 16 bytes: the scaled values, one of scales, then what is bfloat16 already.
constexpr int kFp8Units = kFp8RowBytes / kUnitBytes;
constexpr int kScalesPiece = kScaledValues / kUnitBytes;
constexpr int kPiecesPerScale = kScalesPiece / kScaleGroups;
static_assert(kRowsPerChunk * kFp8Units <= kWarpSize * kUnitsPerLane, "a chunk is read at once");
static_assert(kRowsPerChunk * kScaleGroups <= kWarpSize, "a lane holds one scale of the chunk");

struct StageArgs {
  hotpage_stage_prefill_params p;
  RowUnits units;
  uint32_t layers_per_chunk;
  uint32_t tokens_per_chunk;
  uint32_t layer_chunks;  // chunks that cover the layers of a token
  uint32_t num_units;
};

// A workspace row: source 0 and a target is a row that gets zeros.
struct StagedRow {
  RowCopy copy;
  uint32_t from;  // HOTPAGE_STAGE_FROM_GPU, _FROM_HOST or _INVALID
};

__device__ __forceinline__ int find_request(const int32_t *row_start, int num_requests, int row) {
  int low = 0, high = num_requests;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (row_start[middle] <= row) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

// Where the row of `position` lies in `layer`.
__device__ __forceinline__ StagedRow find_source(const hotpage_stage_prefill_params &p, int request,
                                                 int32_t position, int layer) {
  StagedRow row = {{0, 0}, HOTPAGE_STAGE_INVALID};
  const int32_t page = position / p.block_size, offset = position % p.block_size;
  if (position < 0 || page >= p.num_pages) return row;
  const int32_t state_row = reinterpret_cast<const int32_t *>(p.state_row)[request];
  const int32_t host_block = reinterpret_cast<const int32_t *>(
      p.source_block_table)[request * p.source_block_table_stride + page];
  int32_t gpu_block = 0;
  if (state_row >= 0 && state_row < p.num_state_rows) {
    gpu_block =
        reinterpret_cast<const int32_t *>(p.residency)[state_row * p.residency_stride + page];
  }
  if (is_real_block(gpu_block, p.num_gpu_blocks)) {
    row.copy.source = p.gpu_layer[layer] + static_cast<uint64_t>(gpu_block * p.gpu_block_bytes) +
                      static_cast<uint64_t>(int64_t{offset} * p.row_bytes);
    row.from = HOTPAGE_STAGE_FROM_GPU;
  } else if (gpu_block == 0 && is_real_block(host_block, p.num_host_blocks)) {
    const int64_t host_row = int64_t{host_block} * p.block_size + offset;
    row.copy.source = p.host_layer[layer] + static_cast<uint64_t>(host_row * p.host_row_stride);
    row.from = HOTPAGE_STAGE_FROM_HOST;
  }
  return row;
}

__device__ __forceinline__ StagedRow find_staged_row(const StageArgs &args,
                                                     const int32_t *row_start, uint32_t unit) {
  const hotpage_stage_prefill_params &p = args.p;
  StagedRow none = {{0, 0}, HOTPAGE_STAGE_INVALID};
  if (unit >= args.num_units) return none;
  const uint32_t token_chunk = unit / args.layer_chunks;
  const uint32_t layer_chunk = unit - token_chunk * args.layer_chunks;
  const uint32_t in_chunk = lane_id() / args.layers_per_chunk;
  const int layer = layer_chunk * args.layers_per_chunk + lane_id() % args.layers_per_chunk;
  const int64_t row = int64_t{token_chunk} * args.tokens_per_chunk + in_chunk;
  const bool mine = in_chunk < args.tokens_per_chunk && layer < p.num_layers && row < p.num_rows &&
                    row < row_start[p.num_requests];
  if (!mine) return none;
  const int request = find_request(row_start, p.num_requests, static_cast<int>(row));
  const int32_t first = reinterpret_cast<const int32_t *>(p.first_position)[request];
  const int64_t position = int64_t{first} + (row - row_start[request]);
  StagedRow found = none;
  if (position <= INT32_MAX) {
    found = find_source(p, request, static_cast<int32_t>(position), layer);
  }
  found.copy.target = p.workspace[layer] + static_cast<uint64_t>(row * p.workspace_row_stride);
  return found;
}

// Sixteen scaled values as two units of bfloat16. Each is value x scale in float, rounded once more
// to bfloat16, which is what vLLM's conversion gives.
__device__ __forceinline__ void upconvert_unit(const uint4 &values, float scale, uint4 *out) {
  const uint32_t words[4] = {values.x, values.y, values.z, values.w};
  uint32_t results[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const __nv_fp8x2_storage_t pair =
        static_cast<__nv_fp8x2_storage_t>(words[i / 2] >> (16 * (i % 2)));
    const float2 f = __half22float2(__half2(__nv_cvt_fp8x2_to_halfraw2(pair, __NV_E4M3)));
    const __nv_bfloat162 b = __floats2bfloat162_rn(f.x * scale, f.y * scale);
    results[i] = *reinterpret_cast<const uint32_t *>(&b);
  }
  out[0] = make_uint4(results[0], results[1], results[2], results[3]);
  out[1] = make_uint4(results[4], results[5], results[6], results[7]);
}

// Scale lane % kScaleGroups of row lane / kScaleGroups of the chunk.
__device__ __forceinline__ float scale_of_lane(const HeldUnits &held) {
  uint32_t scale = 0;
#pragma unroll
  for (int row = 0; row < kRowsPerChunk; ++row) {
    const int unit = row * kFp8Units + kScalesPiece;
    const uint4 &holder = held.unit[unit / kWarpSize];
    const uint32_t words[kScaleGroups] = {holder.x, holder.y, holder.z, holder.w};
#pragma unroll
    for (int group = 0; group < kScaleGroups; ++group) {
      const uint32_t word = __shfl_sync(kFullWarp, words[group], unit % kWarpSize);
      if (lane_id() == row * kScaleGroups + group) scale = word;
    }
  }
  return __uint_as_float(scale);
}

// Lane i < kRowsPerChunk holds row i's addresses; every row with a source is converted. The rows
// are read as copy_chunk reads them, in one range where they lie side by side.
__device__ __forceinline__ void upconvert_chunk(RowUnits units, const RowCopy &mine) {
  HeldUnits held = {};
  read_units(units, mine, 0, kRowsPerChunk * kFp8Units, &held);
  const float scale_here = scale_of_lane(held);
#pragma unroll
  for (int i = 0; i < kUnitsPerLane; ++i) {
    const int unit = i * kWarpSize + lane_id();
    const int row = unit / kFp8Units, piece = unit % kFp8Units;
    const int holder = (row * kScaleGroups + piece / kPiecesPerScale) % kWarpSize;
    const float scale = __shfl_sync(kFullWarp, scale_here, holder);
    if (held.target[i] == 0) continue;
    uint4 *target = reinterpret_cast<uint4 *>(held.target[i] - piece * kUnitBytes);
    if (piece < kScalesPiece) {
      upconvert_unit(held.unit[i], scale, target + 2 * piece);
    } else if (piece > kScalesPiece) {
      target[2 * kScalesPiece + piece - kScalesPiece - 1] = held.unit[i];
    }
  }
}

__device__ __forceinline__ void zero_rows(const RowCopy &mine, uint32_t out_units) {
  uint32_t invalid = __ballot_sync(kFullWarp, mine.source == 0 && mine.target != 0);
  while (invalid != 0) {
    const int lane = __ffs(invalid) - 1;
    invalid &= invalid - 1;
    uint4 *target = reinterpret_cast<uint4 *>(__shfl_sync(kFullWarp, mine.target, lane));
    for (uint32_t unit = lane_id(); unit < out_units; unit += kWarpSize) {
      target[unit] = make_uint4(0, 0, 0, 0);
    }
  }
}

// Rows of this warp by where they came from, counted once a token.
struct StageCounts {
  uint32_t rows[HOTPAGE_NUM_STAGE_COUNTERS];
};

__device__ __forceinline__ void count_rows(const StagedRow &row, bool counts, StageCounts *sums) {
#pragma unroll
  for (uint32_t from = 0; from < HOTPAGE_NUM_STAGE_COUNTERS; ++from) {
    sums->rows[from] += __popc(__ballot_sync(kFullWarp, counts && row.from == from));
  }
}

template <bool kUpconvert>
__global__ void __launch_bounds__(kPoolThreads, 1)
    stage_prefill_kernel(const __grid_constant__ StageArgs args) {
  __shared__ int32_t row_start[kMaxRequests + 1];
  const hotpage_stage_prefill_params &p = args.p;
  for (int i = threadIdx.x; i <= p.num_requests; i += kPoolThreads) {
    row_start[i] = reinterpret_cast<const int32_t *>(p.row_start)[i];
  }
  __syncthreads();  // orders the request bounds before the searches
  const uint32_t out_units = kUpconvert ? kBf16RowBytes / kUnitBytes : args.units.per_row;
  StageCounts counts = {};
  StagedRow mine = find_staged_row(args, row_start, first_unit());
  for (uint32_t unit = first_unit(); unit < args.num_units; unit += unit_stride()) {
    // The next rows' addresses arrive while these rows are on the bus.
    const StagedRow next = find_staged_row(args, row_start, unit + unit_stride());
    const bool first_layer =
        unit % args.layer_chunks == 0 && lane_id() % args.layers_per_chunk == 0;
    count_rows(mine, first_layer && mine.copy.target != 0, &counts);
    if (kUpconvert) {
      upconvert_chunk(args.units, mine.copy);
    } else {
      copy_chunk(args.units, mine.copy, kRowsPerChunk);
    }
    zero_rows(mine.copy, out_units);
    mine = next;
  }
  if (lane_id() == 0) {
#pragma unroll
    for (int from = 0; from < HOTPAGE_NUM_STAGE_COUNTERS; ++from) {
      add_to_counter(p.counters, from, counts.rows[from]);
    }
  }
}

bool aligned(uint64_t address) { return address != 0 && address % kUnitBytes == 0; }

hotpage_status check_stage(const hotpage_stage_prefill_params *params) {
  const hotpage_status checked = check_params(params);
  if (checked != HOTPAGE_OK) return checked;
  const hotpage_stage_prefill_params &p = *params;
  const bool upconverts = p.conversion == HOTPAGE_STAGE_FP8_TO_BF16;
  const int64_t out_bytes = upconverts ? kBf16RowBytes : p.row_bytes;
  bool ok = p.num_rows >= 0 && p.num_requests >= 1 && p.num_requests <= kMaxRequests &&
            p.num_layers >= 1 && p.num_layers <= HOTPAGE_MAX_GROUP_LAYERS &&
            row_bytes_fit(p.row_bytes) && (upconverts || p.conversion == HOTPAGE_STAGE_RAW) &&
            (!upconverts || p.row_bytes == kFp8RowBytes) && p.block_size >= 1 &&
            p.block_size <= kMaxPoolBlockSize && p.num_pages >= 1 && p.num_state_rows >= 0 &&
            p.max_blocks >= 0 && p.num_gpu_blocks >= 1 && p.num_host_blocks >= 1 &&
            p.gpu_block_bytes >= int64_t{p.row_bytes} * p.block_size &&
            p.gpu_block_bytes % kUnitBytes == 0 && p.host_row_stride >= p.row_bytes &&
            p.host_row_stride % kUnitBytes == 0 && p.workspace_row_stride >= out_bytes &&
            p.workspace_row_stride % kUnitBytes == 0 && p.row_start != 0 &&
            p.first_position != 0 && p.state_row != 0 && p.residency != 0 &&
            p.source_block_table != 0 && p.counters != 0;
  for (int32_t layer = 0; ok && layer < p.num_layers; ++layer) {
    ok = aligned(p.host_layer[layer]) && aligned(p.gpu_layer[layer]) && aligned(p.workspace[layer]);
  }
  return ok ? HOTPAGE_OK : HOTPAGE_STATUS_INVALID_ARGUMENT;
}

}  // namespace
}  // namespace hotpage

extern "C" hotpage_status hotpage_stage_prefill(const hotpage_stage_prefill_params *params,
                                                void *stream) {
  using namespace hotpage;
  const hotpage_status checked = check_stage(params);
  if (checked != HOTPAGE_OK || params->num_rows == 0) return checked;
  StageArgs args = {};
  args.p = *params;
  args.units = units_of_row(params->row_bytes);
  const bool side_by_side = params->host_row_stride > params->row_bytes;
  const uint32_t layers = static_cast<uint32_t>(params->num_layers);
  args.layers_per_chunk = !side_by_side ? 1u : layers < kRowsPerChunk ? layers : kRowsPerChunk;
  args.tokens_per_chunk = kRowsPerChunk / args.layers_per_chunk;
  args.layer_chunks = (layers + args.layers_per_chunk - 1) / args.layers_per_chunk;
  const int64_t token_chunks =
      (int64_t{params->num_rows} + args.tokens_per_chunk - 1) / args.tokens_per_chunk;
  if (token_chunks * args.layer_chunks > INT32_MAX) return HOTPAGE_STATUS_UNSUPPORTED;
  args.num_units = static_cast<uint32_t>(token_chunks * args.layer_chunks);
  const unsigned grid = pool_grid(args.num_units, params->max_blocks, kDefaultStageBlocks);
  const bool upconverts = params->conversion == HOTPAGE_STAGE_FP8_TO_BF16;
  return launch(upconverts ? stage_prefill_kernel<true> : stage_prefill_kernel<false>, grid,
                kPoolThreads, args, stream);
}
