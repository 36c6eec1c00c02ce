// SPDX-License-Identifier: Apache-2.0
// Owns how a warp moves up to four rows at a time between the pools.
#pragma once

#include <cstdint>

#include "hotpage/abi.h"
#include "hotpage/warp.cuh"

namespace hotpage {

// Rows of one layer that a warp has in flight, and 16-byte units of them that a lane holds: four
// rows of 656 bytes are 164 units, 5.125 a lane.
constexpr int kRowsPerChunk = HOTPAGE_CHUNK_ROWS;
constexpr int kUnitsPerLane = 6;
constexpr int kUnitBytes = 16;

// A row of one layer: where from and where to. source 0: the row is left out.
struct RowCopy {
  uint64_t source;
  uint64_t target;
};

// 16-byte units of a row, and the reciprocal of their number.
struct RowUnits {
  uint32_t per_row;
  uint32_t per_row_reciprocal;

  // Row that a unit of a chunk belongs to. OK because unit x per_row < 2^32: a chunk has at most
  // 4 x 1,024 units. Rows of one unit have no reciprocal.
  __device__ __forceinline__ uint32_t row_of(uint32_t unit) const {
    return per_row == 1 ? unit : __umulhi(unit, per_row_reciprocal);
  }
};

inline RowUnits units_of_row(int32_t row_bytes) {
  const uint32_t units = static_cast<uint32_t>(row_bytes) / kUnitBytes;
  return {units, reciprocal(units)};
}

// True if rows of this width can be copied.
inline bool row_bytes_fit(int32_t row_bytes) {
  return row_bytes >= kUnitBytes && row_bytes % kUnitBytes == 0 &&
         row_bytes <= HOTPAGE_MAX_ROW_BYTES;
}

// 16-byte units of a chunk that a lane holds, and where the rows lie that they belong to.
struct HeldUnits {
  uint4 unit[kUnitsPerLane];
  uint64_t target[kUnitsPerLane];  // of the unit, if it goes where it came from; 0: not held
};

// Reads the chunk's units from number `base` on: unit i of lane l is base + 32 i + l, so that rows
// which lie side by side are read as one range. All reads are under way when this returns.
__device__ __forceinline__ void read_units(RowUnits units, const RowCopy &mine, uint32_t base,
                                           uint32_t num_units, HeldUnits *held) {
  uint64_t sources[kUnitsPerLane];
#pragma unroll
  for (int i = 0; i < kUnitsPerLane; ++i) {
    const uint32_t unit = base + i * kWarpSize + lane_id();
    const uint32_t row = units.row_of(unit);
    const uint64_t source = __shfl_sync(kFullWarp, mine.source, row % kRowsPerChunk);
    const uint64_t target = __shfl_sync(kFullWarp, mine.target, row % kRowsPerChunk);
    const uint32_t offset = (unit - row * units.per_row) * kUnitBytes;
    const bool is_held = unit < num_units && source != 0;
    sources[i] = is_held ? source + offset : 0;
    held->target[i] = is_held ? target + offset : 0;
  }
  // NOTE: a shuffle between two reads makes the compiler move what was read before it, and so wait.
#pragma unroll
  for (int i = 0; i < kUnitsPerLane; ++i) {
    if (sources[i] != 0) held->unit[i] = __ldcg(reinterpret_cast<const uint4 *>(sources[i]));
  }
}

// Copies num_rows rows; lane i < num_rows holds row i's addresses. All lanes of the warp call it.
__device__ __forceinline__ void copy_chunk(RowUnits units, const RowCopy &mine, uint32_t num_rows) {
  const uint32_t num_units = num_rows * units.per_row;
  for (uint32_t base = 0; base < num_units; base += kWarpSize * kUnitsPerLane) {
    HeldUnits held;
    read_units(units, mine, base, num_units, &held);
#pragma unroll
    for (int i = 0; i < kUnitsPerLane; ++i) {
      if (held.target[i] != 0) __stcg(reinterpret_cast<uint4 *>(held.target[i]), held.unit[i]);
    }
  }
}

}  // namespace hotpage
