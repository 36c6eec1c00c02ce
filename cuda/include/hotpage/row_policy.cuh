// SPDX-License-Identifier: Apache-2.0
// Owns the row policy: what a hit does to a hot slot's age. Chosen when the library is compiled.
//
// A policy is a struct with `kRefreshOnHit`. Victims are always the hot slots with the smallest
// stamp that no row of this step reads, ties by hot slot; a filled slot always gets this epoch.
#pragma once

namespace hotpage {

// Least recently used: a row read this step is as young as one copied this step.
struct LruRowPolicy {
  static constexpr bool kRefreshOnHit = true;
};

// First in, first out: only the copy sets the age.
struct FifoRowPolicy {
  static constexpr bool kRefreshOnHit = false;
};

#ifndef HOTPAGE_ROW_POLICY
#define HOTPAGE_ROW_POLICY LruRowPolicy
#endif

using RowPolicy = HOTPAGE_ROW_POLICY;

}  // namespace hotpage
