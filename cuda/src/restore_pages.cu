// SPDX-License-Identifier: Apache-2.0
// Owns hotpage_restore_pages: pages of all layers, host pool to GPU pool. See copy_pages.cuh.

#include "hotpage/copy_pages.cuh"

extern "C" hotpage_status hotpage_restore_pages(const hotpage_copy_pages_params *params,
                                                void *stream) {
  constexpr int32_t kDefaultBlocks = 132;
  return hotpage::launch_copy_pages<false>(params, kDefaultBlocks, stream);
}
