# SPDX-License-Identifier: Apache-2.0
"""Owns the op cooperative_copy: ranks that fetch a copy list's rows for each other.

MLA rows are the same on every tensor-parallel rank, and so are, nearly always, the misses. Each
rank fetches its part of them over its own link and writes it to the hot slots of all ranks. What
the ranks say to each other in device memory is described in cuda/include/hotpage/channel.cuh.
`hotpage.runtime.peers` makes the memory of other processes reachable.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hotpage.errors import ConfigError
from hotpage.kernels import _abi
from hotpage.kernels._tensors import check_contiguous, check_tensor
from hotpage.kernels.replay_copy import CopyList, LayerRows, fill_copy_params, usable_library

if TYPE_CHECKING:
    import torch

MAX_RANKS = _abi.MAX_RANKS
DEFAULT_TIME_LIMIT_S = 10.0
"""How long a launch waits for the other ranks: far longer than ranks of one step are apart."""


@dataclass(frozen=True)
class ChannelCounts:
    """What a channel has counted since it was made."""

    shared_launches: int
    """Launches for which the ranks met."""
    private_launches: int
    """Launches after a failure, in which this rank fetched every row itself."""
    shared_rows: int
    """Rows that this rank fetched for all ranks; layers are not counted."""
    different_requests: int
    """Requests whose copy lists differed between ranks. Each rank fetched its own rows of them."""
    failed_launches: int
    """Launches that gave up waiting and fetched every row themselves: 0 or 1, since the channel
    is not used again."""
    lost_ranks: int
    """Ranks that had begun to write here and did not end in time, or could not be kept from it.
    Stop the engine if it is not 0, unless those processes are gone: what they still write may hit
    hot slots of later steps."""
    digest: int
    """Digest of all copy lists so far, in their order."""
    digested_launches: int
    """Launches that the digest covers; digests of equal numbers are equal on ranks that agree."""

    @classmethod
    def of(cls, values: Sequence[int]) -> ChannelCounts:
        """From the first int64 words of a channel, in the order in which they lie there."""
        counts = list(values)
        counts[_abi.CHANNEL_DIGEST] %= 1 << 64
        return cls(*counts)

    @property
    def failed(self) -> bool:
        """Whether the channel has failed, so that this rank fetches alone."""
        return self.failed_launches > 0


class Channel:
    """One rank's channel, through which ranks meet in device memory.

    All cooperative copies of a channel are launched on one stream, in the same order on all ranks.
    After a failure the channel stays failed; a channel for another attempt is made anew on every
    rank, and the copies are bound anew. Making one waits for the current stream: no rank's stream
    orders another rank's first words behind the zeros.

    Args:
        device: CUDA device of the rank.
    """

    def __init__(self, device: torch.device | str) -> None:
        import torch

        self.memory = torch.zeros(_abi.CHANNEL_BYTES // 8, dtype=torch.int64, device=device)
        """int64 `[CHANNEL_BYTES / 8]`, which every rank reads and writes."""
        if self.memory.is_cuda:
            torch.cuda.current_stream(self.memory.device).synchronize()

    def counts(self) -> ChannelCounts:
        """Copies the counters from the device; waits for the current stream."""
        return ChannelCounts.of(self.memory[: _abi.NUM_CHANNEL_COUNTERS].tolist())


@dataclass(frozen=True)
class RankMemory:
    """Addresses of one rank's memory as this process sees them."""

    channel: int
    hot_row: int
    """`CopyList.hot_row` of the rank."""
    gpu_layers: tuple[int, ...]
    """Block 0 of the GPU pool in each layer of the index group, leader first."""

    @classmethod
    def of(cls, channel: Channel, copies: CopyList, layers: LayerRows) -> RankMemory:
        """Memory of this process."""
        return cls(
            channel.memory.data_ptr(),
            copies.hot_row.data_ptr(),
            tuple(layer.data_ptr() for layer in layers.gpu),
        )


@dataclass(frozen=True)
class HolderWords:
    """Where the copy marks which row maps got rows of which host block, as in `ResolveAndCopy`."""

    words: torch.Tensor
    """int32 `[host blocks][ceil(state rows / 32)]`."""
    state_row: torch.Tensor
    """int32 `[requests]`: state row of each batch request, -1 for padding."""
    num_state_rows: int


class CooperativeCopy:
    """cooperative_copy bound to this rank's copy list and layers, and to the other ranks' memory.

    All checks happen here; a call enqueues one launch, which may be captured. It ends when the
    rows of this rank's list have arrived here, from whichever rank. Every rank makes the launch;
    sizes, order of launches and `max_copy_blocks` are the same on all of them, the lists and hot
    rows need not be. All blocks must be able to run at the same time: leave them multiprocessors.

    If another rank does not come within the time limit, or says that it gave up, the launch takes
    back the others' leave to write, waits for those who were writing, and fetches every row itself;
    every later launch fetches alone, without waiting. `Channel.counts` tells.

    Args:
        copies: the list that an earlier resolve on the same stream wrote.
        layers: all layers of the index group.
        channel: this rank's.
        rank: this rank, from 0.
        ranks: every rank's memory, this rank's own included, in the order of ranks.
        index_group: number of the index group, the same on all ranks; lists of different groups
            have different digests.
        after_resolve: the launch just before on the stream is the resolve that writes the list;
            the copy's blocks are then ready when it ends.
        holders: marks the holders of the list's rows.
        max_copy_blocks: thread blocks of the launch, at most 128; 0 leaves it to the library.
        time_limit_s: seconds to wait for other ranks.

    Raises:
        ConfigError: a tensor or size that the kernel does not take.
        KernelUnavailableError: no kernels for this device.
    """

    def __init__(
        self,
        copies: CopyList,
        layers: LayerRows,
        channel: Channel,
        rank: int,
        ranks: Sequence[RankMemory],
        *,
        index_group: int = 0,
        after_resolve: bool = False,
        holders: HolderWords | None = None,
        max_copy_blocks: int = 0,
        time_limit_s: float = DEFAULT_TIME_LIMIT_S,
    ) -> None:
        if not 2 <= len(ranks) <= MAX_RANKS:
            raise ConfigError(
                f"a cooperative copy has {len(ranks)} ranks, expected 2 to {MAX_RANKS}"
            )
        if not 0 <= rank < len(ranks):
            raise ConfigError(f"rank is {rank}, expected 0 to {len(ranks) - 1}")
        if not 0 <= max_copy_blocks <= _abi.MAX_COOPERATIVE_BLOCKS:
            raise ConfigError(
                f"max_copy_blocks is {max_copy_blocks}, expected 0 to {_abi.MAX_COOPERATIVE_BLOCKS}"
            )
        if not 0 < time_limit_s < 1e9:
            raise ConfigError(f"time_limit_s is {time_limit_s}, expected a positive time")
        self.params = _abi.CooperativeCopyParams(
            rank=rank,
            num_ranks=len(ranks),
            salt=index_group,
            after_resolve=int(after_resolve),
            time_limit_ns=max(1, round(time_limit_s * 1e9)),
        )
        fill_copy_params(self.params.copy, copies, layers, max_copy_blocks)
        if ranks[rank] != RankMemory.of(channel, copies, layers):
            raise ConfigError(f"the memory of rank {rank} is not this rank's own")
        self._fill_ranks(ranks, len(layers.gpu))
        self._fill_holders(holders, copies)
        self._library, _ = usable_library(copies.count.device)
        self._tensors = (copies, layers, channel, holders)

    def _fill_ranks(self, ranks: Sequence[RankMemory], num_layers: int) -> None:
        for i, memory in enumerate(ranks):
            if len(memory.gpu_layers) != num_layers:
                raise ConfigError(
                    f"rank {i} has {len(memory.gpu_layers)} layers, expected {num_layers}"
                )
            self.params.channel[i] = memory.channel
            self.params.hot_row[i] = memory.hot_row
            for layer, address in enumerate(memory.gpu_layers):
                self.params.gpu_layer[i * _abi.MAX_GROUP_LAYERS + layer] = address

    def _fill_holders(self, holders: HolderWords | None, copies: CopyList) -> None:
        if holders is None:
            return
        device, num_requests = copies.count.device, int(copies.count.shape[0])
        words = (holders.num_state_rows + 31) // 32
        check_tensor("holders", holders.words, "int32", (None, words), device)
        check_contiguous("holders", holders.words)
        check_tensor("state_row", holders.state_row, "int32", (num_requests,), device)
        self.params.holders = holders.words.data_ptr()
        self.params.state_row = holders.state_row.data_ptr()
        self.params.num_state_rows = holders.num_state_rows

    def set_batch(self, num_requests: int) -> None:
        """Serves the first requests of the list from now on, as many on all ranks: a resolve of a
        smaller batch leaves the lists of later requests as they were. A captured graph keeps its
        own number.

        Raises:
            ConfigError: more requests than the list has, or none.
        """
        most = int(self._tensors[0].count.shape[0])
        if not 1 <= num_requests <= most:
            raise ConfigError(f"a batch has {num_requests} requests, expected 1 to {most}")
        self.params.copy.num_requests = num_requests

    def __call__(self, stream: int) -> None:
        """Enqueues the copy.

        Args:
            stream: address of the CUDA stream (torch's `stream.cuda_stream`), the same for all
                copies of the channel. May be capturing.

        Raises:
            KernelError: the launch failed.
        """
        self._library.launch("hotpage_cooperative_copy", self.params, stream)
