# SPDX-License-Identifier: Apache-2.0
"""Owns the reach into other ranks' memory: processes with a stand-in driver."""

from __future__ import annotations

import functools
import logging

import pytest
from ranks import run_ranks

from hotpage.errors import RankError
from hotpage.kernels.cooperative_copy import Channel, ChannelCounts
from hotpage.runtime._ipc import HANDLE_BYTES, IpcError
from hotpage.runtime.peers import ChannelWatch, Peers
from hotpage.runtime.rendezvous import Rendezvous

ALLOCATION = 1 << 21


class StandIn:
    """Allocations of 2 MiB; another process's lie where this one says."""

    def __init__(self, rank: int, fault: str = "") -> None:
        self.rank, self.fault = rank, fault
        self.opened: list[bytes] = []
        self.closed: list[int] = []

    def pci_bus_id(self) -> str | None:
        return None if self.fault == "no place" else f"0000:{self.rank:02x}:00.0"

    def why_no_access(self, pci_bus_id: str) -> str | None:
        far = self.fault == "no access" and pci_bus_id != self.pci_bus_id()
        return f"no peer access to {pci_bus_id}" if far else None

    def export_memory(self, address: int) -> tuple[bytes, int]:
        if self.fault == "no export":
            raise IpcError("cuIpcGetMemHandle: invalid argument")
        number, offset = divmod(address, ALLOCATION)
        return bytes([self.rank, number]).ljust(HANDLE_BYTES, b"\0"), offset

    def open_memory(self, handle: bytes) -> int:
        if self.fault == "no mapping":
            raise IpcError("cuIpcOpenMemHandle: out of memory")
        self.opened.append(handle)
        return (1000 * (handle[0] + 1) + handle[1]) * ALLOCATION

    def close_memory(self, address: int) -> None:
        self.closed.append(address)


class Lines(logging.Handler):
    """Keeps log lines."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def _share(faults: dict[int, str], name: str, rank: int, n: int) -> list:
    log = Lines()
    logging.getLogger("hotpage").addHandler(log)
    driver = StandIn(rank, faults.get(rank, ""))
    with Rendezvous(name, rank, n) as ranks:
        peers = Peers.connect(ranks, driver=driver)
        if peers is None:
            return ["no peers", log.lines]
        # Two tensors of one allocation and one of another.
        own = {"a": 5 * ALLOCATION + 512, "b": 5 * ALLOCATION + 4096, "c": 7 * ALLOCATION}
        if faults.get(rank) == "other names":
            del own["c"]
        seen = peers.share(own)
        ranks.barrier()
        peers.close()
        peers.close()
        return [seen, log.lines, len(driver.opened), len(driver.closed)]


def test_addresses_in_other_processes_are_handle_and_offset_and_opened_once() -> None:
    outcomes = run_ranks(functools.partial(_share, {}), 3)
    offsets = {"a": (5, 512), "b": (5, 4096), "c": (7, 0)}
    for rank, outcome in enumerate(outcomes):
        assert outcome.error == ""
        seen, lines, opened, closed = outcome.value
        assert lines == []
        assert opened == closed == 4, "two allocations of each of two other ranks"
        for other, addresses in enumerate(seen):
            base = 0 if other == rank else 1000 * (other + 1)
            expected = {k: (base + n) * ALLOCATION + offset for k, (n, offset) in offsets.items()}
            assert addresses == expected


@pytest.mark.parametrize("fault", ["no place", "no access"])
@pytest.mark.parametrize("rank", [0, 1])
def test_without_access_between_any_two_all_ranks_fetch_alone_and_one_line_says_so(
    fault: str, rank: int
) -> None:
    outcomes = run_ranks(functools.partial(_share, {rank: fault}), 3)
    assert [outcome.value[0] for outcome in outcomes] == ["no peers"] * 3
    assert [len(outcome.value[1]) for outcome in outcomes] == [1, 0, 0]
    text = {"no place": "without a PCI address", "no access": "no peer access to 0000"}[fault]
    assert text in outcomes[0].value[1][0]


@pytest.mark.parametrize("fault", ["no export", "no mapping", "other names"])
@pytest.mark.parametrize("rank", [0, 1])
def test_memory_that_one_rank_cannot_map_is_shared_by_none(fault: str, rank: int) -> None:
    outcomes = run_ranks(functools.partial(_share, {rank: fault}), 2)
    for outcome in outcomes:
        assert outcome.error == ""
        assert outcome.value[0] is None
        assert outcome.value[2] == outcome.value[3], "what was opened is closed"
    assert len(outcomes[0].value[1]) == 1
    assert outcomes[1].value[1] == []


def test_a_group_of_one_or_of_more_than_eight_has_no_peers() -> None:
    for n in (1, 9):
        outcomes = run_ranks(functools.partial(_share, {}), n)
        assert all(outcome.value[0] == "no peers" for outcome in outcomes)
        assert f"{n} ranks" in outcomes[0].value[1][0]


class Counted(Channel):
    """A channel whose counters the test sets."""

    def __init__(self, **counts: int) -> None:
        self.values = dict.fromkeys(ChannelCounts.__dataclass_fields__, 0) | counts

    def counts(self) -> ChannelCounts:
        return ChannelCounts(**self.values)


def test_a_failed_channel_is_logged_once_and_a_lost_rank_stops_the_engine(
    caplog: pytest.LogCaptureFixture,
) -> None:
    channel = Counted(shared_launches=5)
    watch = ChannelWatch(channel, 3)
    assert not watch.look().failed
    channel.values["failed_launches"] = 1
    for _ in range(3):
        assert watch.look().failed
    assert caplog.text.count("rank 3: another rank did not take part") == 1
    channel.values["lost_ranks"] = 1
    with pytest.raises(RankError, match="1 ranks began a cooperative copy"):
        watch.look()
