# SPDX-License-Identifier: Apache-2.0
"""Owns the fill kernel on a device: the pattern's phase, the guard bytes, streams and graphs."""

from __future__ import annotations

import pytest

from hotpage.kernels import _abi, load

pytestmark = pytest.mark.gpu

GUARD = 64
POISON = 0xA5
PATTERN = 0x44332211


def fill(tensor, start: int, num_bytes: int, stream: int) -> None:
    params = _abi.FillParams(
        pattern=PATTERN, address=tensor.data_ptr() + start, num_bytes=num_bytes
    )
    load().launch("hotpage_fill", params, stream)


def expected(start: int, num_bytes: int, total: int) -> list[int]:
    pattern = PATTERN.to_bytes(4, "little")
    filled = [pattern[i % 4] for i in range(num_bytes)]
    return [POISON] * start + filled + [POISON] * (total - start - num_bytes)


@pytest.mark.parametrize("offset", [0, 1, 2, 3, 5, 15])
@pytest.mark.parametrize("num_bytes", [0, 1, 3, 15, 16, 17, 31, 656, 1152, 4099])
def test_exactly_the_range_gets_the_pattern(offset: int, num_bytes: int) -> None:
    import torch

    total = GUARD + offset + num_bytes + GUARD
    tensor = torch.full((total,), POISON, dtype=torch.uint8, device="cuda")
    fill(tensor, GUARD + offset, num_bytes, torch.cuda.current_stream().cuda_stream)
    assert tensor.tolist() == expected(GUARD + offset, num_bytes, total)


def test_a_range_larger_than_the_grid_is_filled() -> None:
    import torch

    num_bytes = 64 << 20
    tensor = torch.zeros(num_bytes, dtype=torch.uint8, device="cuda")
    fill(tensor, 0, num_bytes, torch.cuda.current_stream().cuda_stream)
    words = tensor.view(torch.int32)
    assert bool((words == PATTERN).all())


def test_a_captured_fill_is_replayed_on_another_stream() -> None:
    import torch

    tensor = torch.full((4096,), POISON, dtype=torch.uint8, device="cuda")
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(graph):
        fill(tensor, 3, 1001, torch.cuda.current_stream().cuda_stream)
    torch.cuda.synchronize()
    assert bool((tensor == POISON).all()), "capturing ran the kernel"
    with torch.cuda.stream(side):
        graph.replay()
    side.synchronize()
    assert tensor.tolist() == expected(3, 1001, 4096)


def test_the_device_reports_the_bounds_that_torch_reports() -> None:
    import torch

    properties = load().check_device(0)
    shown = torch.cuda.get_device_properties(0)
    assert (properties.compute_major, properties.compute_minor) == (shown.major, shown.minor)
    assert properties.num_multiprocessors == shown.multi_processor_count
    assert properties.l2_bytes == shown.L2_cache_size
    assert properties.max_dynamic_shared_bytes_per_block >= 48 << 10
