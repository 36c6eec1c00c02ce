# SPDX-License-Identifier: Apache-2.0
"""Owns the life of the shared host pool: processes, a stand-in driver, failures at every step."""

from __future__ import annotations

import functools
import logging
import os
import re
from pathlib import Path

import pytest
from ranks import Outcome, die, run_ranks

from hotpage.memory import PoolLayout, SharedHostPool, _host, open_host_pool, shared
from hotpage.runtime.rendezvous import Rendezvous

LAYOUT = PoolLayout((1, 2), 16, 656, 257)
SOON_S = 1.0


class StandIn:
    """A driver that keeps a list; `fail_at` refuses that registration."""

    def __init__(self, fail_at: int | None = None) -> None:
        self.ranges: dict[int, int] = {}
        self.fail_at, self.registered = fail_at, 0

    def register(self, address: int, num_bytes: int) -> int:
        self.registered += 1
        if self.fail_at == self.registered - 1:
            return 2
        self.ranges[address] = num_bytes
        return 0

    def unregister(self, address: int) -> int:
        del self.ranges[address]
        return 0

    def status_text(self, status: int) -> str:
        return f"status {status}"

    def pci_bus_id(self) -> str | None:
        return None


def _inodes() -> list[str]:
    """Inodes of the pools that this process maps."""
    maps = Path("/proc/self/maps").read_text()
    return re.findall(r"(\d+)\s+/memfd:hotpage-pool \(deleted\)", maps)


def _left_over() -> list[str]:
    return [name for name in os.listdir("/dev/shm") if "hotpage" in name]


def _share(name: str, rank: int, n: int) -> dict:
    driver = StandIn()
    # One pool fits this RAM, two do not.
    ram = int(LAYOUT.num_bytes * 1.5)
    with Rendezvous(name, rank, n) as ranks:
        pool = SharedHostPool(LAYOUT, ranks, driver=driver, chunk_bytes=1 << 20, ram_bytes=ram)
        inodes = _inodes()
        before = memoryview(pool._buffer)[-8:].tobytes()
        ranks.barrier()
        if rank == 0:
            memoryview(pool._buffer)[-8:] = b"by rank0"
        ranks.barrier()
        seen = memoryview(pool._buffer)[-8:].tobytes()
        pinned = sum(driver.ranges.values())
        is_writer = pool.is_writer
        left_over = _left_over()
        pool.close()
        pool.close()
        return {
            "inodes": inodes, "before": before, "seen": seen, "pinned": pinned,
            "is_writer": is_writer, "left_over": left_over,
            "after": (driver.ranges, _inodes(), pool.is_open),
        }  # fmt: skip


def test_all_ranks_map_one_memory_that_rank_0_writes_and_that_counts_once() -> None:
    outcomes = run_ranks(_share, 3)
    assert [outcome.error for outcome in outcomes] == ["", "", ""]
    values = [outcome.value for outcome in outcomes]
    assert len({inode for value in values for inode in value["inodes"]}) == 1
    for rank, value in enumerate(values):
        assert value["before"] == bytes(8)
        assert value["seen"] == b"by rank0"
        assert value["pinned"] == LAYOUT.num_bytes, "every rank pins its own mapping"
        assert value["is_writer"] == (rank == 0)
        assert value["left_over"] == []
        assert value["after"] == ({}, [], False)


def _fail(where: str, failing: int, name: str, rank: int, n: int) -> list:
    """One rank fails at a place; returns what is left after the error, and its text."""
    driver = StandIn(fail_at=2 if (where, rank) == ("pin", failing) else None)
    layout, ram = LAYOUT, None
    if rank == failing:
        if where == "RAM":
            ram = 1
        elif where == "layout":
            layout = PoolLayout((1, 2), 16, 656, 258)
        elif where == "die at touch":
            _host.touch = lambda *_: die()
        elif where == "die at pin":
            driver.register = lambda *_: die()
        elif where == "touch":
            _host.touch = _no_memory
        elif where == "map":
            shared.mmap.mmap = _no_memory
    ranks = Rendezvous(name, rank, n)
    try:
        SharedHostPool(layout, ranks, driver=driver, chunk_bytes=1 << 20, ram_bytes=ram)
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        return [text, driver.ranges, _inodes(), _left_over()]
    return ["no error", driver.ranges, _inodes(), _left_over()]


def _no_memory(*_: object, **__: object) -> None:
    raise OSError(12, "Cannot allocate memory")


@pytest.mark.parametrize(
    ("where", "failing", "own", "others"),
    [
        ("RAM", 0, "CapacityError: .*95% of the RAM", "rank 0: .*95% of the RAM"),
        ("map", 0, "CapacityError: .*cannot be mapped", "rank 0: .*cannot be mapped"),
        ("map", 2, "CapacityError: .*cannot be mapped", "rank 2: .*cannot be mapped"),
        ("touch", 0, "CapacityError: .*cannot be had", "rank 0: .*cannot be had"),
        ("touch", 1, "CapacityError: .*cannot be had", "rank 1: .*cannot be had"),
        ("pin", 0, "CapacityError: chunk 3 .*pinned", "rank 0: chunk 3 .*pinned"),
        ("pin", 2, "CapacityError: chunk 3 .*pinned", "rank 2: chunk 3 .*pinned"),
    ],
)
def test_a_rank_that_fails_ends_the_set_up_of_all_with_its_reason(
    where: str, failing: int, own: str, others: str
) -> None:
    outcomes = run_ranks(functools.partial(_fail, where, failing), 3)
    for rank, outcome in enumerate(outcomes):
        _check_nothing_left(outcome)
        expected = own if rank == failing else f"RankError: {others}"
        assert re.match(expected, outcome.value[0]), outcome.value[0]
    assert _left_over() == []


def _check_nothing_left(outcome: Outcome | None) -> None:
    assert outcome is not None
    assert outcome.error == ""
    assert outcome.seconds < SOON_S
    assert outcome.value[1:] == [{}, [], []]


@pytest.mark.parametrize("where", ["die at touch", "die at pin"])
@pytest.mark.parametrize("dying", [0, 1])
def test_a_rank_that_dies_ends_the_set_up_of_the_others_within_a_second(
    where: str, dying: int
) -> None:
    outcomes = run_ranks(functools.partial(_fail, where, dying), 3)
    assert outcomes[dying] is None
    for rank in {0, 1, 2} - {dying}:
        _check_nothing_left(outcomes[rank])
        assert f"rank {dying} has ended" in outcomes[rank].value[0]
    assert _left_over() == []


def test_ranks_with_different_layouts_are_refused_on_all_of_them() -> None:
    for outcome in run_ranks(functools.partial(_fail, "layout", 1), 2):
        assert outcome.value[0].startswith("ConfigError: the ranks have different layouts")
        _check_nothing_left(outcome)


class Lines(logging.Handler):
    """Keeps log lines."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def _fall_back(ram_pools: float, name: str, rank: int, n: int) -> list:
    log = Lines()
    logging.getLogger("hotpage").addHandler(log)
    if rank == 1:
        os.memfd_create = _no_memory
    driver = StandIn()
    ram = int(LAYOUT.num_bytes * ram_pools)
    with Rendezvous(name, rank, n) as ranks:
        pool = open_host_pool(LAYOUT, ranks, driver=driver, ram_bytes=ram)
        is_shared = isinstance(pool, SharedHostPool)
        pinned = sum(driver.ranges.values())
        pool.close()
    return [is_shared, pinned, log.lines]


def test_where_one_rank_cannot_share_all_have_private_pools_and_one_line_says_so() -> None:
    outcomes = run_ranks(functools.partial(_fall_back, 2.5), 2)
    for rank, outcome in enumerate(outcomes):
        assert outcome.error == ""
        is_shared, pinned, lines = outcome.value
        assert not is_shared
        assert pinned == LAYOUT.num_bytes
        assert len(lines) == (1 if rank == 0 else 0)
    assert "do not share the host pool (no memfd" in outcomes[0].value[2][0]


def test_private_pools_of_all_ranks_are_counted_together() -> None:
    for outcome in run_ranks(functools.partial(_fall_back, 1.9), 2):
        assert "95% of the RAM" in outcome.error


def test_a_single_rank_has_an_ordinary_pool() -> None:
    with open_host_pool(LAYOUT, None, driver=StandIn()) as pool:
        assert not isinstance(pool, SharedHostPool)
