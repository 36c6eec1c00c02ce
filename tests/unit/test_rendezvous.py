# SPDX-License-Identifier: Apache-2.0
"""Owns the meetings of a host's ranks: real processes, one of which may fail, die or be late."""

from __future__ import annotations

import os
import time

import pytest
from ranks import die, run_ranks

from hotpage.errors import ConfigError, RankError
from hotpage.runtime.rendezvous import Rendezvous

SOON_S = 1.0


def _gather_and_share(name: str, rank: int, n: int) -> list:
    with Rendezvous(name, rank, n) as ranks:
        gathered = [ranks.all_gather({"rank": rank, "round": i}) for i in range(20)]
        fd = None
        if rank == 0:
            fd = os.memfd_create("test")
            os.write(fd, b"rank 0's bytes")
        fd = ranks.share_fd(fd)
        text = os.pread(fd, 100, 0).decode()
        os.close(fd)
        ranks.barrier()
        return [gathered, text]


@pytest.mark.parametrize("n", [1, 2, 4])
def test_every_rank_gets_all_values_in_the_order_of_ranks_and_rank_0s_file(n: int) -> None:
    expected = [[{"rank": r, "round": i} for r in range(n)] for i in range(20)]
    for outcome in run_ranks(_gather_and_share, n):
        assert outcome.error == ""
        assert outcome.value == [expected, "rank 0's bytes"]


def _one_fails(failing: int, name: str, rank: int, n: int) -> None:
    with Rendezvous(name, rank, n) as ranks:
        ranks.barrier()
        if rank == failing:
            raise ValueError("out of pencils")
        ranks.barrier()


def _rank_0_fails(name: str, rank: int, n: int) -> None:
    _one_fails(0, name, rank, n)


def _rank_2_fails(name: str, rank: int, n: int) -> None:
    _one_fails(2, name, rank, n)


@pytest.mark.parametrize(("function", "failing"), [(_rank_0_fails, 0), (_rank_2_fails, 2)])
def test_a_rank_that_fails_tells_the_others_why_at_once(function, failing: int) -> None:
    outcomes = run_ranks(function, 3)
    assert outcomes[failing].error == "ValueError: out of pencils"
    for rank in {0, 1, 2} - {failing}:
        assert outcomes[rank].error.startswith("RankError")
        assert f"rank {failing}: out of pencils" in outcomes[rank].error
        assert outcomes[rank].seconds < SOON_S


def _one_dies(dying: int, name: str, rank: int, n: int) -> None:
    with Rendezvous(name, rank, n) as ranks:
        ranks.barrier()
        if rank == dying:
            die()
        ranks.barrier()


def _rank_0_dies(name: str, rank: int, n: int) -> None:
    _one_dies(0, name, rank, n)


def _rank_1_dies(name: str, rank: int, n: int) -> None:
    _one_dies(1, name, rank, n)


@pytest.mark.parametrize(("function", "dying"), [(_rank_0_dies, 0), (_rank_1_dies, 1)])
def test_nobody_waits_for_a_rank_that_died(function, dying: int) -> None:
    outcomes = run_ranks(function, 3)
    assert outcomes[dying] is None
    for rank in {0, 1, 2} - {dying}:
        assert f"rank {dying} has ended" in outcomes[rank].error
        assert outcomes[rank].seconds < SOON_S


def _rank_1_stays_away(name: str, rank: int, n: int) -> None:
    if rank == 1:
        time.sleep(1.5)
        return
    Rendezvous(name, rank, n, join_s=0.3)


def test_a_rank_that_never_joins_is_named_when_the_time_is_up() -> None:
    outcomes = run_ranks(_rank_1_stays_away, 3)
    for rank in (0, 2):
        assert "RankError" in outcomes[rank].error
        assert "rank 1 did not join in time" in outcomes[rank].error
        assert outcomes[rank].seconds < SOON_S


def _rank_1_is_slow(name: str, rank: int, n: int) -> None:
    with Rendezvous(name, rank, n, call_s=0.3) as ranks:
        if rank == 1:
            time.sleep(0.8)
        ranks.barrier()


def test_a_rank_that_does_not_call_in_time_ends_the_call_of_all() -> None:
    for outcome in run_ranks(_rank_1_is_slow, 2):
        assert "rank 1 did not come in time" in outcome.error


def _calls_differ(name: str, rank: int, n: int) -> None:
    with Rendezvous(name, rank, n) as ranks:
        if rank == 0:
            ranks.share_fd(os.memfd_create("test"))
            ranks.barrier()
        else:
            ranks.barrier()


def test_ranks_that_make_different_calls_are_told_so() -> None:
    outcomes = run_ranks(_calls_differ, 2)
    assert "makes another call" in outcomes[1].error
    assert outcomes[0].error.startswith("RankError")
    assert all(outcome.seconds < SOON_S for outcome in outcomes)


def test_two_groups_of_one_name_and_ranks_outside_the_group_are_refused() -> None:
    with pytest.raises(ConfigError, match="rank is 2"):
        Rendezvous("anything", 2, 2)
    name = f"taken-{os.getpid()}"
    with pytest.raises(RankError, match="rank 1 did not join"):
        Rendezvous(name, 0, 2, join_s=0.01)
    # The name is free again after a failure.
    with pytest.raises(RankError, match="rank 1 did not join"):
        Rendezvous(name, 0, 2, join_s=0.01)
