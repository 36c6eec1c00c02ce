# SPDX-License-Identifier: Apache-2.0
"""Owns the run of cooperative_copy and digest_copies on a CPU: a thread for each block of a rank.

Rows and digests are compared with the reference; a peer that the test itself plays shows that a
launch waits where it has to.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Sequence

import numpy as np
import pytest
from cooperative_cases import (
    RankCase,
    Sizes,
    append_list,
    digest_of_rows,
    expected_gpu,
    make_ranks,
    shared_rows,
)
from emulated import aligned, launch

from hotpage.kernels import _abi

PATIENT_NS = 60_000_000_000
READY, CLAIMED, REVOKED = 1, 2, 3
SALT = 5
DONE_AT = 768
WORDS_AT = DONE_AT + 4 * _abi.MAX_RANKS * _abi.MAX_COOPERATIVE_BLOCKS


class ChannelWords:
    """A channel and its words, as channel.cuh lays them out."""

    def __init__(self) -> None:
        self.memory = aligned((_abi.CHANNEL_BYTES,), np.uint8, 0)
        self.counters = self.memory[:64].view(np.uint64)
        self.epoch = self.memory[64:576].view(np.uint32)
        self.failed, self.abort = (self.memory[at : at + 4].view(np.uint32) for at in (576, 580))
        self.gate = self.memory[640:672].view(np.uint32)
        self.done = self.memory[DONE_AT:WORDS_AT].view(np.uint32).reshape(_abi.MAX_RANKS, -1)
        words = self.memory[WORDS_AT:].view(np.uint64)
        self.digest = words.reshape(_abi.MAX_RANKS, _abi.MAX_REQUESTS, 4)

    def count(self, which: int) -> int:
        return int(self.counters[which])


class Ranks:
    """Launches of all ranks of a case."""

    def __init__(self, kernels: ctypes.CDLL, sizes: Sizes, num_blocks: int = 2) -> None:
        self.kernels, self.sizes, self.num_blocks = kernels, sizes, num_blocks
        self.channels = [ChannelWords() for _ in range(sizes.ranks)]
        self.holders = [np.zeros((sizes.host_rows, 1), np.uint32) for _ in range(sizes.ranks)]
        self.state_row = np.arange(sizes.requests, dtype=np.int32)[::-1].copy()
        self.held = np.zeros(sizes.ranks, np.uint32)
        """[rank]: not 0 while the first block of the rank does not start."""

    def params(
        self, cases: Sequence[RankCase], rank: int, time_limit_ns: int
    ) -> _abi.CooperativeCopyParams:
        s = self.sizes
        params = _abi.CooperativeCopyParams(
            rank=rank,
            num_ranks=s.ranks,
            salt=SALT,
            time_limit_ns=time_limit_ns,
            num_state_rows=s.requests,
            holders=self.holders[rank].ctypes.data,
            state_row=self.state_row.ctypes.data,
        )
        own, copy = cases[rank], params.copy
        copy.num_requests, copy.copy_list_stride = own.host_row.shape
        copy.num_layers, copy.row_bytes = s.layers, s.row_bytes
        copy.block_size, copy.block_stride_rows = s.block_size, s.block_stride_rows
        copy.host_row_stride = s.row_bytes * (s.layers if s.interleaved else 1)
        copy.gpu_block_stride = own.gpu.strides[0]
        copy.copy_host_row = own.host_row.ctypes.data
        copy.copy_hot_row = own.hot_row.ctypes.data
        copy.copy_count = own.count.ctypes.data
        for other, case in enumerate(cases):
            params.channel[other] = self.channels[other].memory.ctypes.data
            params.hot_row[other] = case.hot_row.ctypes.data
            for layer in range(s.layers):
                at = other * _abi.MAX_GROUP_LAYERS + layer
                params.gpu_layer[at] = case.gpu.ctypes.data + layer * case.gpu.strides[1]
        for layer in range(s.layers):
            copy.host_layer[layer] = own.host_layer(layer, s).ctypes.data
            copy.gpu_layer[layer] = params.gpu_layer[rank * _abi.MAX_GROUP_LAYERS + layer]
        return params

    def run(
        self,
        cases: Sequence[RankCase],
        *,
        dead: Sequence[int] = (),
        delay_ms: Sequence[int] | None = None,
        time_limit_ns: int | Sequence[int] = PATIENT_NS,
        seed: int = 0,
    ) -> None:
        """One launch of each rank that is not dead."""
        n = self.sizes.ranks
        limits = [time_limit_ns] * n if isinstance(time_limit_ns, int) else list(time_limit_ns)
        params = [self.params(cases, rank, limits[rank]) for rank in range(n)]
        delays = np.repeat(delay_ms if delay_ms is not None else [0] * n, self.num_blocks)
        self._launch([None if r in dead else params[r] for r in range(n)], delays, seed)

    def run_launches(
        self, steps: Sequence[Sequence[RankCase]], delay_ms: np.ndarray, seed: int
    ) -> None:
        """A launch of each rank for every step; delays are blocks', `[step][rank][block]`."""
        n = range(self.sizes.ranks)
        params = [self.params(cases, rank, PATIENT_NS) for cases in steps for rank in n]
        self._launch(params, delay_ms.reshape(-1), seed)

    def _launch(
        self, params: Sequence[_abi.CooperativeCopyParams | None], delay_ms: np.ndarray, seed: int
    ) -> None:
        addresses = (ctypes.c_void_p * len(params))(
            *(None if one is None else ctypes.addressof(one) for one in params)
        )
        delay_us = (1000 * delay_ms).astype(np.int32)
        n = self.sizes.ranks
        status = self.kernels.emulate_cooperative(
            addresses,
            ctypes.c_void_p(delay_us.ctypes.data),
            ctypes.c_void_p(self.held.ctypes.data),
            len(params) // n,
            n,
            self.num_blocks,
            seed,
        )
        assert status == 0, "threads wait for each other for ever"


SHAPES = {
    "two ranks, four layers": Sizes(),
    "two ranks, one layer": Sizes(layers=1, requests=3),
    "three ranks, layer-major": Sizes(ranks=3, layers=2, interleaved=False),
    "eight ranks": Sizes(ranks=8, requests=2, layers=2, length=12),
    "rows wider than a warp holds at once": Sizes(row_bytes=1152, requests=2, layers=2, length=9),
    "odd rows": Sizes(row_bytes=656, requests=3, layers=4, length=7),
    "rows of one unit": Sizes(row_bytes=16, requests=34, length=6, hot_blocks=60),
    "one request": Sizes(requests=1, length=60),
}


@pytest.mark.parametrize("name", SHAPES)
def test_every_row_arrives_on_every_rank_and_is_fetched_by_one(
    name: str, kernels: ctypes.CDLL
) -> None:
    sizes = SHAPES[name]
    rng = np.random.default_rng(len(name))
    ranks = Ranks(kernels, sizes, num_blocks=2 if sizes.ranks < 8 else 1)
    rows, digest = [0] * sizes.ranks, 0
    for step in range(3):
        # Hot rows differ in all requests, in all but the first, and in none.
        same_hot = ((), (0,), tuple(range(sizes.requests)))[step]
        cases = make_ranks(sizes, rng, same_hot=same_hot)
        expected = [expected_gpu(sizes, cases, rank) for rank in range(sizes.ranks)]
        ranks.run(cases, seed=step)
        digest = append_list(digest, cases[0], SALT)
        for rank, (case, channel) in enumerate(zip(cases, ranks.channels, strict=True)):
            np.testing.assert_array_equal(case.gpu, expected[rank], f"rank {rank}, step {step}")
            rows[rank] += shared_rows(sizes, cases, rank)
            counts = [step + 1, 0, rows[rank], 0, 0, 0, digest, step + 1]
            assert channel.counters.tolist() == counts


def test_requests_that_differ_are_fetched_by_each_rank_for_itself(kernels: ctypes.CDLL) -> None:
    for sizes in (Sizes(requests=6), Sizes(ranks=3, requests=5, layers=1)):
        rng = np.random.default_rng(sizes.ranks)
        ranks = Ranks(kernels, sizes)
        for step, different in enumerate(((1, 4), (), (0, 1, 2, 3, 4))):
            cases = make_ranks(sizes, rng, different=different)
            expected = [expected_gpu(sizes, cases, rank) for rank in range(sizes.ranks)]
            ranks.run(cases, seed=step)
            for case, gpu in zip(cases, expected, strict=True):
                np.testing.assert_array_equal(case.gpu, gpu)
        for channel in ranks.channels:
            assert channel.count(_abi.CHANNEL_DIFFERENT_REQUESTS) == 7
            assert channel.count(_abi.CHANNEL_SHARED_LAUNCHES) == 3
            assert channel.count(_abi.CHANNEL_FAILED_LAUNCHES) == 0
        digests = {channel.count(_abi.CHANNEL_DIGEST) for channel in ranks.channels}
        assert len(digests) == 2, "the last rank's digest differs, the others' are equal"


def test_holders_of_all_rows_are_marked_whoever_fetches_them(kernels: ctypes.CDLL) -> None:
    sizes = Sizes(requests=7)
    cases = make_ranks(sizes, np.random.default_rng(3), different=(2,))
    ranks = Ranks(kernels, sizes)
    ranks.run(cases)
    for case, holders in zip(cases, ranks.holders, strict=True):
        expected = np.zeros_like(holders)
        for request, n in enumerate(case.count):
            blocks = case.host_row[request, :n] // sizes.block_size
            expected[blocks, 0] |= np.uint32(1 << ranks.state_row[request])
        np.testing.assert_array_equal(holders, expected)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_a_rank_that_never_comes_leaves_the_others_with_all_their_rows(
    num_ranks: int, kernels: ctypes.CDLL
) -> None:
    sizes = Sizes(ranks=num_ranks)
    rng = np.random.default_rng(num_ranks)
    ranks = Ranks(kernels, sizes)
    dead = num_ranks - 1
    ranks.run(make_ranks(sizes, rng))
    cases = make_ranks(sizes, rng)
    untouched = cases[dead].gpu.copy()
    expected = [expected_gpu(sizes, cases, rank, alone=True) for rank in range(dead)]
    ranks.run(cases, dead=[dead], time_limit_ns=500_000_000)
    np.testing.assert_array_equal(cases[dead].gpu, untouched)
    for rank in range(dead):
        np.testing.assert_array_equal(cases[rank].gpu, expected[rank])
        assert ranks.channels[dead].gate[rank] & 3 == REVOKED
        assert ranks.channels[rank].count(_abi.CHANNEL_FAILED_LAUNCHES) == 1
        assert ranks.channels[rank].count(_abi.CHANNEL_LOST_RANKS) == 0
    # From now on nobody waits.
    cases = make_ranks(sizes, rng)
    expected = [expected_gpu(sizes, cases, rank, alone=True) for rank in range(dead)]
    ranks.run(cases, dead=[dead])
    for rank in range(dead):
        np.testing.assert_array_equal(cases[rank].gpu, expected[rank])
        assert ranks.channels[rank].count(_abi.CHANNEL_PRIVATE_LAUNCHES) == 1


def test_a_rank_that_comes_after_the_others_gave_up_writes_nothing_to_them(
    kernels: ctypes.CDLL,
) -> None:
    sizes = Sizes(ranks=3)
    ranks = Ranks(kernels, sizes)
    cases = make_ranks(sizes, np.random.default_rng(8))
    expected = [expected_gpu(sizes, cases, rank, alone=True) for rank in range(3)]
    # Bytes tell the pools apart, so a row of the late rank would show.
    limits = [30_000_000, 30_000_000, PATIENT_NS]
    ranks.run(cases, delay_ms=[0, 0, 400], time_limit_ns=limits)
    for case, gpu, channel in zip(cases, expected, ranks.channels, strict=True):
        np.testing.assert_array_equal(case.gpu, gpu)
        assert channel.count(_abi.CHANNEL_FAILED_LAUNCHES) == 1


def test_a_rank_that_is_late_but_within_the_limit_is_waited_for(kernels: ctypes.CDLL) -> None:
    sizes = Sizes(ranks=3)
    for late in range(3):
        ranks = Ranks(kernels, sizes)
        cases = make_ranks(sizes, np.random.default_rng(late))
        expected = [expected_gpu(sizes, cases, rank) for rank in range(3)]
        ranks.run(cases, delay_ms=[100 * (rank == late) for rank in range(3)])
        for case, gpu, channel in zip(cases, expected, ranks.channels, strict=True):
            np.testing.assert_array_equal(case.gpu, gpu)
            assert channel.count(_abi.CHANNEL_SHARED_LAUNCHES) == 1


@pytest.mark.parametrize("num_requests", [1, 4])
def test_a_rank_at_its_next_launch_leaves_alone_what_another_still_reads_in_this_one(
    num_requests: int, kernels: ctypes.CDLL
) -> None:
    sizes = Sizes(ranks=3, requests=num_requests, layers=1, length=9)
    rng = np.random.default_rng(num_requests)
    ranks = Ranks(kernels, sizes)
    steps = [make_ranks(sizes, rng, different=(0,) if step % 3 == 2 else ()) for step in range(12)]
    expected = [[expected_gpu(sizes, cases, rank) for rank in range(3)] for cases in steps]
    # Blocks are late by turns. One request is the first block's, so nobody waits for what another
    # block says before it ends.
    ranks.run_launches(steps, rng.choice([0, 0, 20], (12, 3, ranks.num_blocks)), seed=1)
    for step, cases in enumerate(steps):
        for rank, case in enumerate(cases):
            what = f"rank {rank}, step {step}"
            np.testing.assert_array_equal(case.gpu, expected[step][rank], what)
    for channel in ranks.channels:
        assert channel.count(_abi.CHANNEL_SHARED_LAUNCHES) == 12
        assert channel.count(_abi.CHANNEL_FAILED_LAUNCHES) == 0


class PlayedPeer:
    """Rank 1 as played by the test, word by word, beside one launch of rank 0."""

    def __init__(
        self, kernels: ctypes.CDLL, time_limit_ns: int = PATIENT_NS, *, is_held: bool = False
    ) -> None:
        self.sizes = Sizes()
        self.cases = make_ranks(self.sizes, np.random.default_rng(11))
        self.before = [case.gpu.copy() for case in self.cases]
        self.ranks = Ranks(kernels, self.sizes)
        self.ranks.held[0] = is_held
        self.mine, self.theirs = self.ranks.channels[1], self.ranks.channels[0]
        self.thread = threading.Thread(
            target=lambda: self.ranks.run(self.cases, dead=[1], time_limit_ns=time_limit_ns)
        )
        self.thread.start()

    def wait_for(self, what: str, condition) -> None:
        deadline = time.monotonic() + 30
        while not condition():
            assert time.monotonic() < deadline, f"{what} never came"
            time.sleep(0.001)

    def say_ready(self) -> None:
        """Gate and digests of epoch 1."""
        self.theirs.gate[1] = 1 << 2 | READY
        case = self.cases[1]
        for request, n in enumerate(case.count):
            for i, rows in enumerate((case.host_row, case.hot_row)):
                digest = digest_of_rows(rows[request, :n], SALT)
                for half in range(2):
                    word = np.uint64(1 << 32 | digest >> 32 * half & 0xFFFFFFFF)
                    self.theirs.digest[1, request, 2 * i + half] = word

    def say_done(self, ok: bool = True) -> None:
        for block in range(self.ranks.num_blocks):
            self.theirs.done[1, block] = 1 << 1 | (not ok)

    def write_rows(self) -> None:
        """Rank 1's part to rank 0."""
        case, gpu = self.cases[0], expected_gpu(self.sizes, self.cases, 0)
        for request, n in enumerate(case.count):
            for i in range(n):
                if (i + request) % 2 == 1:
                    block, token = divmod(case.hot_row[request, i], self.sizes.block_stride_rows)
                    case.gpu[block, :-1, token] = gpu[block, :-1, token]

    def end(self) -> None:
        self.thread.join(30)
        assert not self.thread.is_alive(), "the launch never ended"


def test_nothing_is_written_to_a_rank_before_it_says_that_it_is_ready(
    kernels: ctypes.CDLL,
) -> None:
    peer = PlayedPeer(kernels)
    words = peer.mine.digest[0, : peer.sizes.requests]
    peer.wait_for("the digests of rank 0", lambda: (words >> np.uint64(32) == 1).all())
    time.sleep(0.2)
    np.testing.assert_array_equal(peer.cases[1].gpu, peer.before[1])
    assert peer.theirs.gate[1] == 0
    peer.say_ready()
    peer.wait_for("the end of rank 0's writes", lambda: peer.mine.done[0, :2].tolist() == [2, 2])
    assert peer.theirs.gate[1] == 1 << 2 | CLAIMED
    peer.write_rows()
    peer.say_done()
    peer.end()
    expected = expected_gpu(peer.sizes, peer.cases, 0)
    np.testing.assert_array_equal(peer.cases[0].gpu, expected)


def test_a_launch_does_not_end_before_the_other_rank_has_written_everything(
    kernels: ctypes.CDLL,
) -> None:
    peer = PlayedPeer(kernels)
    peer.say_ready()
    peer.wait_for("the end of rank 0's writes", lambda: peer.mine.done[0, :2].tolist() == [2, 2])
    time.sleep(0.2)
    assert peer.thread.is_alive(), "rank 0 ended without rank 1's rows"
    peer.write_rows()
    peer.theirs.done[1, 0] = 1 << 1
    time.sleep(0.2)
    assert peer.thread.is_alive(), "one block of rank 1 is not done"
    peer.theirs.done[1, 1] = 1 << 1
    peer.end()
    np.testing.assert_array_equal(peer.cases[0].gpu, expected_gpu(peer.sizes, peer.cases, 0))
    assert peer.theirs.count(_abi.CHANNEL_SHARED_LAUNCHES) == 1


@pytest.mark.parametrize("ends", ["says that it failed", "is lost"])
def test_a_rank_that_fails_while_it_writes_leaves_the_other_with_its_own_rows(
    ends: str, kernels: ctypes.CDLL
) -> None:
    peer = PlayedPeer(kernels, time_limit_ns=1_000_000_000)
    peer.say_ready()
    # As if this rank had gone on to write: its leave cannot be taken back.
    peer.wait_for("rank 0's gate", lambda: peer.mine.gate[0] == 1 << 2 | READY)
    peer.mine.gate[0] = 1 << 2 | CLAIMED
    if ends == "says that it failed":
        peer.wait_for("rank 0's end", lambda: peer.mine.done[0, :2].tolist() == [2, 2])
        peer.say_done(ok=False)
    peer.end()
    np.testing.assert_array_equal(
        peer.cases[0].gpu, expected_gpu(peer.sizes, peer.cases, 0, alone=True)
    )
    assert peer.theirs.count(_abi.CHANNEL_FAILED_LAUNCHES) == 1
    assert peer.theirs.count(_abi.CHANNEL_LOST_RANKS) == (1 if ends == "is lost" else 0)
    assert peer.mine.abort[0] == 1, "rank 1 is told that rank 0 gave up"


def test_a_block_that_gives_up_before_its_rank_was_ready_waits_for_those_who_write_nevertheless(
    kernels: ctypes.CDLL,
) -> None:
    peer = PlayedPeer(kernels, is_held=True)
    peer.theirs.abort[0] = 1
    peer.wait_for("the second block's end", lambda: peer.mine.done[0, 1] == (1 << 1 | 1))
    peer.wait_for("its abort", lambda: peer.mine.abort[0] == 1)
    time.sleep(0.2)
    # The first block starts late and does not look at the abort word before rank 1 has come.
    peer.theirs.abort[0] = 0
    peer.ranks.held[0] = 0
    peer.wait_for("rank 0's gate", lambda: peer.mine.gate[0] == 1 << 2 | READY)
    peer.mine.gate[0] = 1 << 2 | CLAIMED
    peer.say_ready()
    peer.wait_for("the first block's end", lambda: peer.mine.done[0, 0] == 1 << 1)
    peer.write_rows()
    peer.theirs.done[1, 0] = 1 << 1
    time.sleep(0.2)
    assert peer.thread.is_alive(), "rank 0 ended while a block of rank 1 may write to it"
    peer.theirs.done[1, 1] = 1 << 1
    peer.end()
    np.testing.assert_array_equal(
        peer.cases[0].gpu, expected_gpu(peer.sizes, peer.cases, 0, alone=True)
    )
    assert peer.theirs.count(_abi.CHANNEL_SHARED_LAUNCHES) == 1
    assert peer.theirs.count(_abi.CHANNEL_FAILED_LAUNCHES) == 1
    assert peer.theirs.count(_abi.CHANNEL_LOST_RANKS) == 0


def test_epochs_go_on_after_the_last_one(kernels: ctypes.CDLL) -> None:
    sizes = Sizes()
    ranks = Ranks(kernels, sizes)
    for channel in ranks.channels:
        channel.epoch[:] = 2**30 - 2
    for step in range(3):
        cases = make_ranks(sizes, np.random.default_rng(step))
        expected = [expected_gpu(sizes, cases, rank) for rank in range(2)]
        ranks.run(cases, seed=step)
        for case, gpu in zip(cases, expected, strict=True):
            np.testing.assert_array_equal(case.gpu, gpu)
    # Blocks that took no part count, too: another launch may have more of them.
    assert all((channel.epoch == 2).all() for channel in ranks.channels)


def test_the_running_digest_equals_the_reference_and_the_channels(kernels: ctypes.CDLL) -> None:
    sizes = Sizes(requests=37, length=300, host_rows=4000, hot_blocks=1)
    digest = aligned((4,), np.uint64, 0)
    expected = 0
    for step in range(3):
        case = list_only(sizes, np.random.default_rng(step))
        params = _abi.DigestCopiesParams(
            num_requests=sizes.requests,
            copy_list_stride=sizes.length,
            salt=SALT,
            copy_host_row=case.host_row.ctypes.data,
            copy_count=case.count.ctypes.data,
            digest=digest.ctypes.data,
            scratch=digest[2:].ctypes.data,
        )
        assert launch(kernels, "hotpage_digest_copies", params, seed=step) == _abi.OK
        expected = append_list(expected, case, SALT)
        assert digest.tolist() == [expected, step + 1, 0, 0]


def list_only(sizes: Sizes, rng: np.random.Generator) -> RankCase:
    """A copy list without pools."""
    host_row = np.sort(rng.integers(0, sizes.host_rows, (sizes.requests, sizes.length)), axis=1)
    count = rng.integers(0, sizes.length + 1, sizes.requests).astype(np.int32)
    nothing = np.zeros((0,), np.uint8)
    return RankCase(nothing, nothing, host_row.astype(np.int32), nothing, count)


def test_any_other_row_order_count_request_or_group_has_another_digest() -> None:
    rows = np.array([3, 5, 9, 12], np.int32)
    others = [rows[:3], rows[::-1], np.append(rows, 13), np.array([3, 5, 9, 13]), rows[:0]]
    digests = {digest_of_rows(other, 0) for other in (rows, *others)} | {digest_of_rows(rows, 1)}
    assert len(digests) == 7
    one = RankCase(rows, rows, np.stack([rows, rows + 1]), rows, np.array([4, 4]))
    swapped = RankCase(rows, rows, np.stack([rows + 1, rows]), rows, np.array([4, 4]))
    assert append_list(0, one, 0) != append_list(0, swapped, 0)
