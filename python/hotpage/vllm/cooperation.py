# SPDX-License-Identifier: Apache-2.0
"""Owns the worker's part in cooperative copies: whether ranks fetch misses for each other, and the
rare looks at how that goes.

Every rank makes the same launches in the same order because it makes the same forward passes, which
vLLM's own collectives need as well.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hotpage.kernels import _abi
from hotpage.kernels.cooperative_copy import (
    Channel,
    ChannelCounts,
    CooperativeCopy,
    HolderWords,
)
from hotpage.kernels.digest_copies import DivergenceCheck
from hotpage.runtime.peers import ChannelWatch, Peers, bind_group_copy
from hotpage.runtime.streams import mark
from hotpage.runtime.upload import pinned_zeros

if TYPE_CHECKING:
    import torch

    from hotpage.kernels.replay_copy import CopyList, LayerRows
    from hotpage.runtime.rendezvous import Rendezvous

LOOK_STEPS = 256
"""Steps between two looks."""
_READ_STEPS = 8
"""Steps that a look takes: the device has passed its first one by then, so nobody waits for it."""

PATIENCE_S = 120.0
"""Seconds that a launch waits for the other ranks. One that compiles a kernel between two of a
step's collectives is late by that, and nothing is gained by less: collectives wait without end.
"""


class Cooperation:
    """One rank's channel to the others, and the copies bound to it.

    Made by `connect`. All ranks call all methods in the same order.
    """

    def __init__(self, peers: Peers, channel: Channel) -> None:
        import torch

        self._ranks = peers.rendezvous
        self._peers = peers
        self.channel = channel
        self._steps, self._num_bound, self._binds = 0, 0, True
        self._watch = ChannelWatch(channel, self._ranks.rank)
        self._counters = pinned_zeros((_abi.NUM_CHANNEL_COUNTERS,), torch.int64)
        self._event: torch.cuda.Event | None = None
        self._last: ChannelCounts | None = None
        self.divergence = DivergenceCheck(self._digest, self._ranks.all_gather, self._ranks.rank)

    @classmethod
    def connect(cls, ranks: Rendezvous | None, device: torch.device) -> Cooperation | None:
        """Meets the other ranks; None, on every rank, where one cannot reach another's memory.

        Args:
            ranks: that share the host pool; None if there is only this one.
            device: of this rank.

        Raises:
            RankError: another rank failed.
        """
        if ranks is None:
            return None
        peers = Peers.connect(ranks, device=device.index or 0)
        return None if peers is None else cls(peers, Channel(device))

    def bind(
        self, copies: CopyList, layers: LayerRows, holders: HolderWords
    ) -> CooperativeCopy | None:
        """The copy of the next index group; None, on every rank, if some memory of it cannot be
        mapped by other processes. No group is asked about after such a one.

        Args:
            copies: the list that the leader's resolve writes.
            layers: all layers of the group.
            holders: that the copy marks.

        Raises:
            ConfigError: tensors that the kernel does not take, or ranks whose sizes differ.
            RankError: another rank failed.
        """
        if not self._binds:
            return None
        copy = bind_group_copy(
            self._peers, self.channel, copies, layers,
            index_group=self._num_bound, after_resolve=True, holders=holders,
            time_limit_s=PATIENCE_S,
        )  # fmt: skip
        if not isinstance(copy, CooperativeCopy):
            # What is mapped stays: copies of earlier groups use it.
            self._binds = False
            return None
        self._num_bound += 1
        return copy

    def begin_step(self) -> None:
        """Now and then compares the ranks' copy lists, and asks whether the ranks still meet.

        The counters are copied on the current stream in one step and read a few steps later, when
        all ranks exchange them.

        Raises:
            RankError: a rank had begun to write here and did not end, or has left.
        """
        if not self._num_bound:
            return
        step = self._steps % LOOK_STEPS
        self._steps += 1
        if step == 0:
            memory = self.channel.memory[: _abi.NUM_CHANNEL_COUNTERS]
            self._counters.copy_(memory, non_blocking=True)
            self._event = mark()
        elif step == _READ_STEPS and self._event is not None:
            self._event.synchronize()
            self._event = None
            self._last = ChannelCounts.of(self._counters.tolist())
            self._watch.judge(self._last)
            self.divergence.compare()

    def _digest(self) -> tuple[int, int]:
        assert self._last is not None
        return self._last.digested_launches, self._last.digest

    def close(self) -> None:
        """Unmaps the other ranks' memory; streams are idle."""
        self._peers.close()
