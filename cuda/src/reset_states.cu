// SPDX-License-Identifier: Apache-2.0
// Owns hotpage_reset_states: the row maps of some state rows become empty, in all index groups.
//
// Contract: called before the first resolve of requests that get a hot region: their state rows
// hold what another request, or another region, left there. Grid (state rows, index groups), one
// block each. Reads the list; writes row maps, stamps and epochs of listed state rows. Holder bits
// may stay: a set bit says "may hold". Caller's stream, graph-safe.

#include <climits>
#include <cstdint>

#include "hotpage/launch.cuh"

namespace hotpage {
namespace {

constexpr int kThreads = 256;

struct ResetArgs {
  hotpage_reset_states_params p;
};

// 16 bytes of row map and 8 of stamps a turn: hot rows are a multiple of 4.
__global__ void __launch_bounds__(kThreads) reset_states_kernel(const __grid_constant__
                                                                ResetArgs args) {
  const hotpage_reset_states_params &p = args.p;
  const int num_rows = p.num_listed;
  const int group = static_cast<int>(blockIdx.x) / num_rows;
  const int at = static_cast<int>(blockIdx.x) % num_rows;
  const int state_row = reinterpret_cast<const int32_t *>(p.state_row)[at];
  if (state_row < 0 || state_row >= p.num_state_rows) return;
  const int64_t *state =
      reinterpret_cast<const int64_t *>(p.states) + int64_t{group} * HOTPAGE_NUM_STATE_COLUMNS;
  const int64_t hot_rows = state[HOTPAGE_STATE_HOT_ROWS];
  const int64_t first = state_row * hot_rows;
  uint4 *row_map = reinterpret_cast<uint4 *>(state[HOTPAGE_STATE_ROW_MAP] + first * 4);
  uint64_t *last_used = reinterpret_cast<uint64_t *>(state[HOTPAGE_STATE_LAST_USED] + first * 2);
  for (int64_t i = threadIdx.x; i < hot_rows / 4; i += kThreads) {
    row_map[i] = make_uint4(~0u, ~0u, ~0u, ~0u);
    last_used[i] = 0;
  }
  if (threadIdx.x == 0) reinterpret_cast<int32_t *>(state[HOTPAGE_STATE_EPOCH])[state_row] = 0;
}

hotpage_status check_reset(const hotpage_reset_states_params *params) {
  const hotpage_status checked = check_params(params);
  if (checked != HOTPAGE_OK) return checked;
  const hotpage_reset_states_params &p = *params;
  const bool ok = p.num_index_groups >= 1 && p.num_state_rows >= 1 && p.num_listed >= 0 &&
                  p.states != 0 && (p.num_listed == 0 || p.state_row != 0);
  if (!ok) return HOTPAGE_STATUS_INVALID_ARGUMENT;
  const bool fits = p.num_state_rows <= HOTPAGE_MAX_STATE_ROWS &&
                    int64_t{p.num_index_groups} * p.num_listed <= INT_MAX;
  return fits ? HOTPAGE_OK : HOTPAGE_STATUS_UNSUPPORTED;
}

}  // namespace
}  // namespace hotpage

extern "C" hotpage_status hotpage_reset_states(const hotpage_reset_states_params *params,
                                               void *stream) {
  using namespace hotpage;
  const hotpage_status checked = check_reset(params);
  if (checked != HOTPAGE_OK) return checked;
  if (params->num_listed == 0) return HOTPAGE_OK;
  ResetArgs args = {};
  args.p = *params;
  const unsigned grid = static_cast<unsigned>(params->num_index_groups * params->num_listed);
  return launch(reset_states_kernel, grid, kThreads, args, stream);
}
