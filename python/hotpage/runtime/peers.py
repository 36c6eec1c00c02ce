# SPDX-License-Identifier: Apache-2.0
"""Owns the reach into other ranks' device memory, and who fetches an index group's misses.

CUDA maps whole allocations between processes; a tensor somewhere inside one, such as a layer of
vLLM's KV pool, travels as the allocation's handle and an offset.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from hotpage.errors import ConfigError, RankError
from hotpage.kernels.cooperative_copy import (
    MAX_RANKS,
    Channel,
    ChannelCounts,
    CooperativeCopy,
    RankMemory,
)
from hotpage.kernels.replay_copy import CopyList, LayerRows, ReplayCopy
from hotpage.runtime._ipc import CudaIpc, IpcError, MemoryDriver
from hotpage.runtime.rendezvous import Rendezvous

logger = logging.getLogger(__name__)


class Peers:
    """Device memory of the other ranks of this host, mapped into this process.

    Made by `connect`. Every rank makes the same calls in the same order. What a rank shares must
    live until all ranks have closed; a rank that dies leaves mappings that stay harmless.
    """

    def __init__(self, rendezvous: Rendezvous, driver: MemoryDriver) -> None:
        self.rendezvous = rendezvous
        self._driver = driver
        self._opened: dict[bytes, int] = {}

    @classmethod
    def connect(
        cls, rendezvous: Rendezvous, *, device: int = 0, driver: MemoryDriver | None = None
    ) -> Peers | None:
        """The other ranks, or None, on every rank, where one cannot reach another's memory.

        Rank 0 logs one line where it is None: misses are then fetched by each rank for itself.

        Args:
            rendezvous: of the local ranks.
            device: CUDA ordinal of this rank's device.
            driver: the CUDA driver, by default this process's own.

        Raises:
            RankError: another rank failed.
            ConfigError: no driver or no such device.
        """
        with rendezvous.telling():
            if driver is None:
                driver = CudaIpc(device)
            places = rendezvous.all_gather(driver.pci_bus_id())
            reason = _why_not(places, rendezvous.num_ranks)
            for place in sorted({str(place) for place in places}):
                reason = reason or driver.why_no_access(place) or ""
            reasons = rendezvous.all_gather(reason)
        if not any(reasons):
            return cls(rendezvous, driver)
        _log_private(rendezvous, next(reason for reason in reasons if reason))
        return None

    def share(self, addresses: Mapping[str, int]) -> list[dict[str, int]] | None:
        """Every rank's addresses as this process sees them, in the order of ranks.

        Args:
            addresses: of this rank's device memory, by names that are the same on all ranks.

        Returns:
            None, on every rank, where some allocation cannot be mapped by other processes
            (allocators that map memory by pieces, say); rank 0 logs one line.

        Raises:
            RankError: another rank failed.
        """
        with self.rendezvous.telling():
            try:
                own: dict[str, Any] = {}
                for name, address in addresses.items():
                    handle, offset = self._driver.export_memory(address)
                    own[name] = [handle.hex(), offset]
                reason = ""
            except IpcError as error:
                own, reason = {}, str(error)
            shared = self.rendezvous.all_gather([reason, own])
            reason = next((reason for reason, _ in shared if reason), "")
            if not reason:
                reason, seen = self._open(addresses, [names for _, names in shared])
            reasons = self.rendezvous.all_gather(reason)
        if not any(reasons):
            return seen
        _log_private(self.rendezvous, next(reason for reason in reasons if reason))
        return None

    def _open(
        self, own: Mapping[str, int], shared: Sequence[Mapping[str, Any]]
    ) -> tuple[str, list[dict[str, int]]]:
        """Why a rank's memory cannot be mapped, empty if it can, and the addresses."""
        seen: list[dict[str, int]] = []
        for rank, names in enumerate(shared):
            if rank == self.rendezvous.rank:
                seen.append(dict(own))
                continue
            if names.keys() != own.keys():
                return f"rank {rank} shares other memory", []
            try:
                places = {name: self._base(h) + offset for name, (h, offset) in names.items()}
            except IpcError as error:
                return f"memory of rank {rank}: {error}", []
            seen.append(places)
        return "", seen

    def _base(self, handle: str) -> int:
        # An allocation is opened once, however many tensors lie in it.
        data = bytes.fromhex(handle)
        if data not in self._opened:
            self._opened[data] = self._driver.open_memory(data)
        return self._opened[data]

    def close(self) -> None:
        """Unmaps other ranks' memory; no launch may use it any more. May be called again."""
        while self._opened:
            _, address = self._opened.popitem()
            try:
                self._driver.close_memory(address)
            except IpcError as error:
                # The context is gone, and its mappings with it.
                logger.debug("memory of another rank was not unmapped: %s", error)


def _why_not(places: Sequence[str | None], num_ranks: int) -> str:
    if not 2 <= num_ranks <= MAX_RANKS:
        return f"{num_ranks} ranks, and 2 to {MAX_RANKS} can"
    return "" if all(places) else "a device without a PCI address"


def _log_private(rendezvous: Rendezvous, reason: str) -> None:
    if rendezvous.rank == 0:
        logger.warning("each rank fetches all of its misses itself: %s", reason)


def bind_group_copy(
    peers: Peers | None,
    channel: Channel | None,
    copies: CopyList,
    layers: LayerRows,
    *,
    max_copy_blocks: int = 0,
    **options: Any,
) -> CooperativeCopy | ReplayCopy:
    """The copy of an index group's misses: with the other ranks where they can be reached.

    Every rank calls it for the same index groups in the same order, after the KV pool was
    allocated. The result is called once per resolve, with the stream; see `CooperativeCopy` for
    what ranks have to have in common.

    Args:
        peers: what `Peers.connect` gave.
        channel: this rank's; not used without peers.
        copies: the list that the leader's resolve writes.
        layers: all layers of the index group.
        max_copy_blocks: thread blocks of the launch, the same on all ranks; 0 leaves it to the
            library.
        options: of `CooperativeCopy` (index_group, after_resolve, holders, time_limit_s); without
            peers a `ReplayCopy` is bound, which has none of them, so holders are then the
            resolve's to mark.

    Raises:
        ConfigError: tensors that a kernel does not take, or ranks whose sizes differ.
        RankError: another rank failed.
    """
    if peers is None or channel is None:
        return ReplayCopy(copies, layers, max_copy_blocks=max_copy_blocks)
    own = RankMemory.of(channel, copies, layers)
    with peers.rendezvous.telling():
        _check_sizes(peers.rendezvous, copies, layers, max_copy_blocks, options)
        names = {f"layer {i}": address for i, address in enumerate(own.gpu_layers)}
        seen = peers.share({"channel": own.channel, "hot_row": own.hot_row, **names})
        if seen is None:
            return ReplayCopy(copies, layers, max_copy_blocks=max_copy_blocks)
        ranks = [
            RankMemory(
                addresses["channel"],
                addresses["hot_row"],
                tuple(addresses[f"layer {i}"] for i in range(len(layers.gpu))),
            )
            for addresses in seen
        ]
        copy = CooperativeCopy(
            copies,
            layers,
            channel,
            peers.rendezvous.rank,
            ranks,
            max_copy_blocks=max_copy_blocks,
            **options,
        )
        peers.rendezvous.barrier()
    return copy


def _check_sizes(
    rendezvous: Rendezvous,
    copies: CopyList,
    layers: LayerRows,
    max_copy_blocks: int,
    options: Mapping[str, Any],
) -> None:
    """Raises ConfigError unless what must be equal on all ranks is."""
    own = {
        "shape of the copy list": list(copies.host_row.shape),
        "shape of the GPU pool": list(layers.gpu[0].shape),
        "strides of the GPU pool": list(layers.gpu[0].stride()),
        "rows between blocks": layers.block_stride_rows,
        "distance of host rows": layers.host[0].stride(0),
        "number of layers": len(layers.gpu),
        "max_copy_blocks": max_copy_blocks,
        "index_group": options.get("index_group", 0),
    }
    for rank, other in enumerate(rendezvous.all_gather(own)):
        for name, value in own.items():
            if other[name] != value:
                raise ConfigError(f"{name} is {value}, but {other[name]} on rank {rank}")


class ChannelWatch:
    """The worker's rare look at a channel's counters.

    Args:
        channel: this rank's.
        rank: this rank.
    """

    def __init__(self, channel: Channel, rank: int) -> None:
        self._channel, self._rank = channel, rank
        self._logged = False

    def look(self) -> ChannelCounts:
        """The counters; logs once that the channel has failed. Waits for the current stream.

        Raises:
            RankError: a rank had begun to write here and did not end. Its late writes may hit hot
                slots that have been handed on, so the engine has to stop.
        """
        counts = self._channel.counts()
        self.judge(counts)
        return counts

    def judge(self, counts: ChannelCounts) -> None:
        """As `look`, of counters that were read before."""
        if counts.failed and not self._logged:
            self._logged = True
            logger.error(
                "rank %d: another rank did not take part in a cooperative copy; from now on each "
                "rank fetches all of its misses itself",
                self._rank,
            )
        if counts.lost_ranks:
            raise RankError(
                f"{counts.lost_ranks} ranks began a cooperative copy and did not end it; rows of "
                "hot regions may be overwritten"
            )
