// SPDX-License-Identifier: Apache-2.0
// Owns the declaration of the copy launcher that resolve_and_copy and replay_copy share.
#pragma once

#include "hotpage/holders.cuh"
#include "hotpage/launch.cuh"

namespace hotpage {

// HOTPAGE_OK if the list and its copy are well formed; a copy has at least `least_layers` layers.
hotpage_status check_copy(const hotpage_copy_params &params, int32_t least_layers);

// Enqueues the copy of params' layers. `after_resolve`: the launch before it on the stream is the
// resolve that writes the copy list, and the copy's blocks may start before that has ended.
// `marks`: which holder bits the copy sets, if any.
hotpage_status launch_copy(const hotpage_copy_params &params, bool after_resolve,
                           const HolderMarks &marks, cudaStream_t stream);

}  // namespace hotpage
