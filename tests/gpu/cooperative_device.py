# SPDX-License-Identifier: Apache-2.0
"""Owns the ranks of a cooperative copy on one device: a stream, pools, list and channel each."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from cooperative_cases import RankCase, Sizes

from hotpage.kernels.cooperative_copy import Channel, CooperativeCopy, RankMemory
from hotpage.kernels.replay_copy import CopyList, LayerRows

DEVICE = "cuda"
TIME_LIMIT_S = 20.0


class DeviceRank:
    """One rank's tensors. Host bytes may change from step to step, addresses do not."""

    def __init__(self, sizes: Sizes) -> None:
        s = self.sizes = sizes
        shape = (s.host_rows, s.layers, s.row_bytes)
        if not s.interleaved:
            shape = (s.layers, s.host_rows, s.row_bytes)
        self.host = torch.zeros(shape, dtype=torch.uint8, pin_memory=True)
        gpu_shape = (s.hot_blocks, s.layers + 1, s.block_size, s.row_bytes)
        self.gpu = torch.zeros(gpu_shape, dtype=torch.uint8, device=DEVICE)
        self.copies = CopyList.allocate(s.requests, s.length, DEVICE)
        host = [self.host[:, i] if s.interleaved else self.host[i] for i in range(s.layers)]
        gpu = [self.gpu[:, i] for i in range(s.layers)]
        self.layers = LayerRows(host, gpu, s.block_stride_rows)
        self.channel = Channel(DEVICE)
        self.stream = torch.cuda.Stream()
        self.copy: CooperativeCopy | None = None

    @property
    def memory(self) -> RankMemory:
        """Addresses for the other ranks."""
        return RankMemory.of(self.channel, self.copies, self.layers)

    def load(self, case: RankCase) -> None:
        """Writes a step's pools and list; returns when they are there."""
        self.host.copy_(torch.from_numpy(case.host))
        self.gpu.copy_(torch.from_numpy(case.gpu))
        self.copies.host_row.copy_(torch.from_numpy(case.host_row))
        self.copies.hot_row.copy_(torch.from_numpy(case.hot_row))
        self.copies.count.copy_(torch.from_numpy(case.count))
        torch.cuda.synchronize()

    def launch(self) -> None:
        """Enqueues the copy on the rank's stream."""
        assert self.copy is not None
        self.copy(self.stream.cuda_stream)

    def rows(self) -> np.ndarray:
        """The GPU pool."""
        return self.gpu.cpu().numpy()


def make_device_ranks(
    sizes: Sizes, *, blocks: int = 8, time_limit_s: float = TIME_LIMIT_S
) -> list[DeviceRank]:
    """Ranks bound to each other; their blocks together fit the device."""
    ranks = [DeviceRank(sizes) for _ in range(sizes.ranks)]
    memories = [rank.memory for rank in ranks]
    for number, rank in enumerate(ranks):
        rank.copy = CooperativeCopy(
            rank.copies,
            rank.layers,
            rank.channel,
            number,
            memories,
            index_group=3,
            max_copy_blocks=blocks,
            time_limit_s=time_limit_s,
        )
    # The first launch loads the kernel, which may wait for the device: here nobody waits for it.
    for rank in ranks:
        rank.launch()
    torch.cuda.synchronize()
    return ranks


def load_all(ranks: Sequence[DeviceRank], cases: Sequence[RankCase]) -> None:
    """Loads a case into every rank."""
    for rank, case in zip(ranks, cases, strict=True):
        rank.load(case)
