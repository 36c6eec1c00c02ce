# SPDX-License-Identifier: Apache-2.0
"""Owns cooperative_copy on a GPU: ranks are streams of one device, which run at the same time."""

from __future__ import annotations

import time

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from cooperative_cases import (  # noqa: E402
    Sizes,
    append_list,
    digest_of_rows,
    expected_gpu,
    make_ranks,
    shared_rows,
)
from cooperative_device import DEVICE, load_all, make_device_ranks  # noqa: E402
from reference import resolve_batch  # noqa: E402
from resolve_cases import Shape, Workload, empty_states  # noqa: E402
from resolve_device import DeviceResolve  # noqa: E402

from hotpage.errors import ConfigError  # noqa: E402
from hotpage.kernels.cooperative_copy import (  # noqa: E402
    Channel,
    CooperativeCopy,
    HolderWords,
    RankMemory,
)
from hotpage.kernels.digest_copies import (  # noqa: E402
    DigestCopies,
    DivergenceCheck,
    read_digest,
)
from hotpage.kernels.replay_copy import ReplayCopy  # noqa: E402

pytestmark = pytest.mark.gpu

SALT = 3
# Places in a channel in 4-byte words, as channel.cuh has them.
GATES_AT, DONE_AT, DIGESTS_AT = 640 // 4, 768 // 4, 4864 // 4
SHAPES = {
    "two ranks, four layers": Sizes(
        requests=16, length=128, row_bytes=656, block_size=64, host_rows=4096, hot_blocks=40
    ),
    "two ranks, one layer": Sizes(
        requests=40, length=64, layers=1, row_bytes=656, host_rows=9000, hot_blocks=400
    ),
    "four ranks, layer-major": Sizes(
        ranks=4, requests=9, length=70, layers=3, row_bytes=1152, interleaved=False, hot_blocks=90
    ),
    "eight ranks, eight layers": Sizes(ranks=8, requests=6, length=33, layers=8, hot_blocks=30),
    "rows of one unit": Sizes(requests=200, length=8, row_bytes=16, hot_blocks=210),
    "rows wider than a warp holds at once": Sizes(requests=2, length=40, row_bytes=4096),
}


@pytest.mark.parametrize("name", SHAPES)
def test_every_row_arrives_on_every_rank_and_is_fetched_by_one(name: str) -> None:
    sizes = SHAPES[name]
    rng = np.random.default_rng(len(name))
    ranks = make_device_ranks(sizes)
    before = [rank.channel.counts() for rank in ranks]
    rows, digest = [0] * sizes.ranks, before[0].digest
    for step in range(4):
        different = (1,) if step == 2 else ()
        same_hot = ((), (0,), (0, 1), tuple(range(sizes.requests)))[step]
        cases = make_ranks(sizes, rng, different=different, same_hot=same_hot)
        load_all(ranks, cases)
        for rank in ranks:
            rank.launch()
        torch.cuda.synchronize()
        digest = append_list(digest, cases[0], SALT)
        for number, rank in enumerate(ranks):
            np.testing.assert_array_equal(rank.rows(), expected_gpu(sizes, cases, number))
            rows[number] += shared_rows(sizes, cases, number)
    for number, rank in enumerate(ranks):
        counts = rank.channel.counts()
        assert counts.shared_launches == before[number].shared_launches + 4
        assert counts.shared_rows == rows[number]
        assert (counts.different_requests, counts.failed_launches, counts.lost_ranks) == (1, 0, 0)
        assert counts.digested_launches == counts.shared_launches
    assert ranks[0].channel.counts().digest == digest
    assert ranks[-1].channel.counts().digest != digest


def test_captured_graphs_of_all_ranks_replay_with_other_lists() -> None:
    sizes = SHAPES["two ranks, four layers"]
    rng = np.random.default_rng(1)
    ranks = make_device_ranks(sizes, blocks=16)
    graphs = []
    for rank in ranks:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=rank.stream):
            rank.launch()
            rank.launch()
        graphs.append(graph)
    for step in range(6):
        cases = make_ranks(sizes, rng, different=(3,) if step == 4 else ())
        load_all(ranks, cases)
        for rank, graph in zip(ranks, graphs, strict=True):
            with torch.cuda.stream(rank.stream):
                graph.replay()
        torch.cuda.synchronize()
        for number, rank in enumerate(ranks):
            np.testing.assert_array_equal(rank.rows(), expected_gpu(sizes, cases, number))
    assert [rank.channel.counts().shared_launches for rank in ranks] == [13, 13]


@pytest.mark.parametrize("late", [0, 1])
def test_nothing_is_written_to_a_late_rank_and_the_other_waits_for_it(late: int) -> None:
    sizes = SHAPES["two ranks, four layers"]
    ranks = make_device_ranks(sizes)
    cases = make_ranks(sizes, np.random.default_rng(late))
    load_all(ranks, cases)
    expected = [expected_gpu(sizes, cases, number) for number in range(2)]
    early = 1 - late
    side = torch.cuda.Stream()
    seen = torch.empty_like(ranks[late].gpu, device="cpu", pin_memory=True)
    with torch.cuda.stream(ranks[late].stream):
        torch.cuda._sleep(300_000_000)
    ended = torch.cuda.Event()
    ranks[early].launch()
    ended.record(ranks[early].stream)
    ranks[late].launch()
    time.sleep(0.05)
    with torch.cuda.stream(side):
        seen.copy_(ranks[late].gpu, non_blocking=True)
    side.synchronize()
    assert not ended.query(), "the rank did not wait for the late one"
    np.testing.assert_array_equal(seen.numpy(), cases[late].gpu)
    torch.cuda.synchronize()
    for number, rank in enumerate(ranks):
        np.testing.assert_array_equal(rank.rows(), expected[number])


class PlayedPeer:
    """Rank 1 as played by the test, on a stream of its own, beside one launch of rank 0."""

    def __init__(self, time_limit_s: float = 20.0) -> None:
        self.sizes = SHAPES["two ranks, four layers"]
        self.ranks = make_device_ranks(self.sizes, time_limit_s=time_limit_s)
        self.cases = make_ranks(self.sizes, np.random.default_rng(5))
        load_all(self.ranks, self.cases)
        self.epoch = 2
        self.side = torch.cuda.Stream()
        self.theirs = self.ranks[0].channel.memory.view(torch.int32)
        self.mine = self.ranks[1].channel.memory.view(torch.int32)
        n = self.sizes.requests
        words = np.zeros((n, 8), np.uint32)
        words[:, 1::2] = self.epoch
        case = self.cases[1]
        for request, count in enumerate(case.count):
            for i, rows in enumerate((case.host_row, case.hot_row)):
                digest = digest_of_rows(rows[request, :count], SALT)
                words[request, 4 * i], words[request, 4 * i + 2] = digest & 0xFFFFFFFF, digest >> 32
        # Everything is on the device before the launch, which must not be waited for.
        self.words = torch.from_numpy(words.view(np.int32).reshape(-1)).to(DEVICE)
        ready, claimed, done, failed = (
            torch.full((8,), value, dtype=torch.int32, device=DEVICE)
            for value in (
                self.epoch << 2 | 1,
                self.epoch << 2 | 2,
                self.epoch << 1,
                self.epoch << 1 | 1,
            )
        )
        self.values = {"ready": ready, "claimed": claimed, "done": done, "failed": failed}
        self.rows = torch.from_numpy(expected_gpu(self.sizes, self.cases, 0)).to(DEVICE)
        self.pinned = torch.zeros(8, dtype=torch.int32, pin_memory=True)
        self.ended = torch.cuda.Event()
        self._put(self.mine[1100:1108], ready)
        self._look(self.mine[1100:1108])
        self._put(self.mine[1100:1108], torch.zeros_like(ready))

    def _put(self, at, value) -> None:
        with torch.cuda.stream(self.side):
            at.copy_(value)
        self.side.synchronize()

    def _look(self, at) -> list[int]:
        with torch.cuda.stream(self.side):
            self.pinned[: at.numel()].copy_(at, non_blocking=True)
        self.side.synchronize()
        return self.pinned[: at.numel()].tolist()

    def launch(self) -> None:
        self.ranks[0].launch()
        self.ended.record(self.ranks[0].stream)

    def say_ready(self) -> None:
        """Gate and digests."""
        first = DIGESTS_AT + 1024 * 8
        self._put(self.theirs[first : first + self.words.numel()], self.words)
        self._put(self.theirs[GATES_AT + 1 : GATES_AT + 2], self.values["ready"][:1])

    def say_done(self, word: str, first: int, end: int) -> None:
        self._put(
            self.theirs[DONE_AT + 128 + first : DONE_AT + 128 + end],
            self.values[word][: end - first],
        )

    def wait_until_written(self) -> None:
        deadline = time.monotonic() + 10
        while self._look(self.mine[DONE_AT : DONE_AT + 8]) != [self.epoch << 1] * 8:
            assert time.monotonic() < deadline, "rank 0 does not end its writes"

    def write_rows(self) -> None:
        with torch.cuda.stream(self.side):
            self.ranks[0].gpu.copy_(self.rows)
        self.side.synchronize()


def test_a_launch_does_not_end_before_every_block_of_the_other_rank_is_done() -> None:
    peer = PlayedPeer()
    peer.launch()
    time.sleep(0.05)
    assert peer._look(peer.mine[DONE_AT : DONE_AT + 8]) == [2] * 8, (
        "rank 0 has written before rank 1 was ready"
    )
    peer.say_ready()
    peer.wait_until_written()
    assert peer._look(peer.theirs[GATES_AT + 1 : GATES_AT + 2]) == [peer.epoch << 2 | 2]
    peer.write_rows()
    peer.say_done("done", 0, 7)
    time.sleep(0.05)
    assert not peer.ended.query(), "rank 0 ended before the last block of rank 1"
    peer.say_done("done", 7, 8)
    torch.cuda.synchronize()
    np.testing.assert_array_equal(peer.ranks[0].rows(), expected_gpu(peer.sizes, peer.cases, 0))
    assert peer.ranks[0].channel.counts().failed_launches == 0


@pytest.mark.parametrize("ends", ["never ready", "failed", "lost"])
def test_a_rank_that_fails_leaves_the_other_with_all_its_rows_in_bounded_time(ends: str) -> None:
    peer = PlayedPeer(time_limit_s=0.2)
    start = time.monotonic()
    peer.launch()
    if ends != "never ready":
        peer.say_ready()
        peer.wait_until_written()
        # As if rank 1 had begun to write: its leave cannot be taken back.
        peer._put(peer.mine[GATES_AT : GATES_AT + 1], peer.values["claimed"][:1])
    if ends == "failed":
        peer.say_done("failed", 0, 8)
    torch.cuda.synchronize()
    assert time.monotonic() - start < 3
    alone = expected_gpu(peer.sizes, peer.cases, 0, alone=True)
    np.testing.assert_array_equal(peer.ranks[0].rows(), alone)
    counts = peer.ranks[0].channel.counts()
    assert counts.failed
    assert counts.lost_ranks == (1 if ends == "lost" else 0)
    # Afterwards nobody is waited for.
    cases = make_ranks(peer.sizes, np.random.default_rng(6))
    peer.ranks[0].load(cases[0])
    start = time.monotonic()
    peer.ranks[0].launch()
    torch.cuda.synchronize()
    assert time.monotonic() - start < 0.1
    alone = expected_gpu(peer.sizes, cases, 0, alone=True)
    np.testing.assert_array_equal(peer.ranks[0].rows(), alone)
    assert peer.ranks[0].channel.counts().private_launches == 1


def test_behind_a_resolve_hot_regions_are_those_of_a_private_fetch() -> None:
    shape = Shape(num_requests=6, rows_per_request=2, hot_rows=256, num_layers=4, row_bytes=656)
    torch.manual_seed(1)
    private = DeviceResolve(shape)
    ranks = []
    for _ in range(2):
        torch.manual_seed(1)
        ranks.append(DeviceResolve(shape, copy="none"))
    # Both ranks and the private one see equal pools from the start.
    assert all(torch.equal(rank.gpu_pool, private.gpu_pool) for rank in ranks)
    words = (shape.num_state_rows + 31) // 32
    holders = [
        torch.zeros((shape.num_host_blocks, words), dtype=torch.int32, device=DEVICE)
        for _ in range(2)
    ]
    channels = [Channel(DEVICE) for _ in range(2)]
    memories = [
        RankMemory.of(channel, rank.copies, rank.layers)
        for channel, rank in zip(channels, ranks, strict=True)
    ]
    copies = [
        CooperativeCopy(
            rank.copies, rank.layers, channels[i], i, memories, after_resolve=True,
            holders=HolderWords(holders[i], rank.inputs.state_row, shape.num_state_rows),
            max_copy_blocks=16, time_limit_s=10,
        )
        for i, rank in enumerate(ranks)
    ]  # fmt: skip
    streams = [torch.cuda.Stream() for _ in range(2)]
    work, states = Workload(shape, 4), empty_states(shape)
    for _ in range(8):
        batch = work.step()
        expected = resolve_batch(batch, states)
        for rank in (private, *ranks):
            rank.load(batch)
        torch.cuda.synchronize()
        private.run()
        torch.cuda.synchronize()
        for rank, copy, stream in zip(ranks, copies, streams, strict=True):
            rank.resolve(stream.cuda_stream)
            copy(stream.cuda_stream)
        torch.cuda.synchronize()
        private.check(expected, states, "private")
        for rank in ranks:
            rank.check(expected, states, "rank")
            assert torch.equal(rank.gpu_pool, private.gpu_pool)
    assert torch.equal(holders[0], holders[1])
    assert int(holders[0].count_nonzero()) > 0
    assert [channel.counts().shared_launches for channel in channels] == [8, 8]


def test_digests_equal_the_reference_and_an_altered_rank_is_reported(
    caplog: pytest.LogCaptureFixture,
) -> None:
    sizes = Sizes(requests=70, length=90, host_rows=5000, hot_blocks=900)
    digests = [torch.zeros(4, dtype=torch.int64, device=DEVICE) for _ in range(2)]
    ranks = make_device_ranks(sizes)
    ops = [
        DigestCopies(rank.copies, digest, index_group=SALT)
        for rank, digest in zip(ranks, digests, strict=True)
    ]
    rng = np.random.default_rng(0)
    expected = 0
    stream = torch.cuda.current_stream().cuda_stream

    def step(different: tuple[int, ...] = ()) -> None:
        cases = make_ranks(sizes, rng, different=different)
        load_all(ranks, cases)
        for op in ops:
            op(stream)
        nonlocal expected
        expected = append_list(expected, cases[0], SALT)

    checks = [
        DivergenceCheck(
            lambda digest=digest: read_digest(digest),
            lambda own: [read_digest(digest) for digest in digests],
            rank,
        )
        for rank, digest in enumerate(digests)
    ]
    for _ in range(3):
        step()
    assert read_digest(digests[0]) == (3, expected)
    assert [check.compare() for check in checks] == [False, False]
    step(different=(41,))
    step()
    assert read_digest(digests[0]) == (5, expected)
    for _ in range(2):
        assert [check.compare() for check in checks] == [True, True]
    assert caplog.text.count("the copy lists of rank 0 differ from those of rank 1") == 1
    assert digests[0][2:].tolist() == [0, 0]


def test_a_channel_is_zero_before_another_rank_can_learn_of_it() -> None:
    torch.cuda._sleep(200_000_000)
    slept = torch.cuda.Event()
    slept.record()
    channel = Channel(DEVICE)
    assert slept.query(), "zeros that are still enqueued would erase another rank's words"
    assert channel.counts().shared_launches == 0


def test_what_a_cooperative_copy_refuses() -> None:
    sizes = Sizes()
    ranks = make_device_ranks(sizes)
    own, memories = ranks[0], [rank.memory for rank in ranks]

    def bind(rank: int = 0, others=memories, **options) -> None:
        CooperativeCopy(own.copies, own.layers, own.channel, rank, others, **options)

    with pytest.raises(ConfigError, match="1 ranks, expected 2 to 8"):
        bind(others=memories[:1])
    with pytest.raises(ConfigError, match="rank is 2"):
        bind(rank=2)
    with pytest.raises(ConfigError, match="not this rank's own"):
        bind(rank=1)
    with pytest.raises(ConfigError, match="max_copy_blocks is 129"):
        bind(max_copy_blocks=129)
    with pytest.raises(ConfigError, match="time_limit_s"):
        bind(time_limit_s=0)
    short = RankMemory(memories[1].channel, memories[1].hot_row, memories[1].gpu_layers[:1])
    with pytest.raises(ConfigError, match="rank 1 has 1 layers, expected 4"):
        bind(others=[memories[0], short])
    words = HolderWords(torch.zeros((10, 2), dtype=torch.int32, device=DEVICE), own.copies.count, 5)
    with pytest.raises(ConfigError, match="holders"):
        bind(holders=words)
    ReplayCopy(own.copies, own.layers)
