// SPDX-License-Identifier: Apache-2.0
// Owns hotpage_spill_pages: pages of all layers, GPU pool to host pool. See copy_pages.cuh.

#include "hotpage/copy_pages.cuh"

extern "C" hotpage_status hotpage_spill_pages(const hotpage_copy_pages_params *params,
                                              void *stream) {
  // Writes to host memory are posted: few blocks fill the bus, see benches/gpu/README.md.
  constexpr int32_t kDefaultBlocks = 132;
  return hotpage::launch_copy_pages<true>(params, kDefaultBlocks, stream);
}
