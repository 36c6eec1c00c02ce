# SPDX-License-Identifier: Apache-2.0
"""Owns the small program that runs resolve and copies under compute-sanitizer: exit 0 if right."""

from __future__ import annotations

from reference import resolve_batch
from resolve_cases import Shape, Workload, empty_states
from resolve_device import DeviceResolve

# The second has enough short rows to be sorted and swept by two blocks.
SHAPES = (
    Shape(num_layers=4, row_bytes=656),
    Shape(num_requests=14, rows_per_request=4, hot_rows=256, num_layers=1, row_bytes=656),
    Shape(rows_per_request=4, hot_rows=256, num_layers=2, interleaved=False),
    Shape(rows_per_request=10, top_k=48, hot_rows=480, num_layers=1, row_bytes=1152),
)
STEPS = 3


def main() -> None:
    """A few steps of a few shapes, compared in full."""
    for shape in SHAPES:
        for copy in ("group", "leader"):
            device = DeviceResolve(shape, copy=copy, max_copy_blocks=2)
            work = Workload(shape, 31)
            states = empty_states(shape)
            for step in range(STEPS):
                batch = work.step()
                device.load(batch)
                device.run()
                device.check(resolve_batch(batch, states), states, f"step {step}")
    print("results are right")


if __name__ == "__main__":
    main()
