// SPDX-License-Identifier: Apache-2.0
// Owns the debug trap: bounds that the host proved before the launch, asserted on the device.
#pragma once

// Stops the kernel where a proved bound does not hold, in HOTPAGE_DEBUG builds; nothing otherwise.
#if defined(HOTPAGE_DEBUG) && defined(__CUDA_ARCH__)
#define HOTPAGE_CHECK(bound) \
  do {                       \
    if (!(bound)) __trap();  \
  } while (0)
#else
#define HOTPAGE_CHECK(bound) \
  do {                       \
  } while (0)
#endif
