# SPDX-License-Identifier: Apache-2.0
"""Random traces through vLLM's coordinator and ours, each on a real `KVCacheManager`.

Where there is room the two must look alike to a user: same admissions, same readable pages, same
published hashes. Under pressure they choose differently on purpose, so each must be right by
itself: what attention reads is what was written, all requests end with the same output, and
nothing leaks.
"""

from __future__ import annotations

from collections import Counter

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed; make test-vllm builds its environment")

from serving import Serving, Traffic
from sides import HOTPAGE, VLLM, Shape, make_side

pytestmark = pytest.mark.vllm

BLOCK = 4


def shape(groups: int, drafts: int, num_blocks: int, host_blocks: int) -> Shape:
    return Shape(
        num_groups=groups,
        block_size=BLOCK,
        hot_blocks=2 * (1 + drafts),
        num_blocks=num_blocks,
        host_blocks=host_blocks,
        max_model_len=64,
        max_in_flight_tokens=16,
        num_speculative_tokens=drafts,
    )


def serve(side_name: str, shape: Shape, traffic: Traffic, *, fast_path: bool = False) -> Serving:
    serving = Serving(make_side(side_name, shape, fast_path=fast_path), traffic)
    serving.run(max_steps=3000)
    return serving


def assert_nothing_leaks(serving: Serving) -> None:
    side = serving.side
    gpu, host = side.manager.block_pool, side.coordinator.get_host_block_pool()
    assert gpu.get_num_free_blocks() == gpu.num_gpu_blocks - 1
    assert host.get_num_free_blocks() == host.num_gpu_blocks - 1
    assert all(block.ref_cnt == 0 for pool in (gpu, host) for block in pool.blocks[1:])
    assert not side.coordinator.pending_spills
    for manager in side.manager.coordinator.single_type_managers:
        assert not any(manager.req_to_blocks.values())


def assert_published_alike(one: Serving, other: Serving) -> None:
    """What one side publishes the other does within two steps, or both forget it in a reset.

    vLLM plans no copy of a page while it is being restored, so a page that fills up in that very
    step is published one step later there.
    """
    resets = {entry[1] for entry in one.log if entry[0] == "reset"}
    states = {entry[1]: set(entry[3]) for entry in other.log if entry[0] == "state"}
    for entry in one.log:
        if entry[0] == "state":
            later = entry[1] + 2
            if later in states and not resets & {later - 1, later}:
                assert set(entry[3]) <= states[later], entry[:2]


def published(serving: Serving) -> dict[int, set]:
    """Hashes that a later request could hit, by step."""
    return {entry[1]: set(entry[3]) for entry in serving.log if entry[0] == "state"}


def assert_imports_are_published_when_their_last_page_is_confirmed(
    ours: Serving, theirs: Serving
) -> int:
    """The one intended difference: vLLM publishes an import at once, we when the restore of its
    last page has been confirmed, one step later. Returns the pages that show it."""
    mine, other = published(ours), published(theirs)
    num_pages = 0
    for entry in ours.log:
        if entry[0] == "import":
            _, step, _, hashes = entry
            assert set(hashes) <= other[step + 1]
            assert not set(hashes) & mine[step + 1]
            # The last page is written again where the import ends with it, for its last token.
            assert set(hashes[:-1]) <= mine[step + 2]
            assert set(hashes) <= mine[step + 3]
            num_pages += len(hashes)
    return num_pages


@pytest.mark.parametrize("seed", range(25))
@pytest.mark.parametrize(("groups", "drafts"), [(1, 0), (3, 0), (2, 3)])
@pytest.mark.parametrize("imports", [0, 40])
def test_with_room_both_admit_read_and_publish_alike(
    seed: int, groups: int, drafts: int, imports: int
) -> None:
    traffic = Traffic(
        seed=seed,
        num_requests=40,
        max_prompt=40,
        max_output=12,
        chunk=16,
        max_lag=0,
        imports=imports,
        # Meanwhile a hit would find an import's pages on one side only, and an end would keep ours
        # from publishing them.
        settle=3,
        min_import_output=4 * (1 + drafts),
    )
    roomy = shape(groups, drafts, num_blocks=2000, host_blocks=1000)
    theirs = serve(VLLM, roomy, traffic)
    ours = serve(HOTPAGE, roomy, traffic)
    assert ours.finished == theirs.finished
    for mine, other in zip(ours.log, theirs.log, strict=True):
        assert mine[:3] == other[:3]
        assert mine[0] == "state" or mine == other
    assert_published_alike(ours, theirs)
    assert_published_alike(theirs, ours)
    assert assert_imports_are_published_when_their_last_page_is_confirmed(ours, theirs) or (
        not imports
    )
    for serving in (ours, theirs):
        assert serving.num_preemptions == 0
        assert_nothing_leaks(serving)


@pytest.mark.parametrize("seed", range(25))
@pytest.mark.parametrize(("groups", "drafts"), [(1, 0), (2, 3)])
def test_under_pressure_each_reads_what_was_written_and_leaks_nothing(
    seed: int, groups: int, drafts: int
) -> None:
    traffic = Traffic(seed=100 + seed, num_requests=40, max_prompt=40, max_output=12, chunk=16)
    blocks = 16 * (1 + groups) + 6 * (1 + drafts) * groups
    tight = shape(groups, drafts, num_blocks=blocks, host_blocks=40)
    theirs = serve(VLLM, tight, traffic)
    ours = serve(HOTPAGE, tight, traffic)
    assert ours.finished.keys() == theirs.finished.keys()
    for serving in (ours, theirs):
        assert_nothing_leaks(serving)


def test_the_traces_under_pressure_reach_what_they_are_there_for() -> None:
    seen: Counter[str] = Counter()
    for seed in range(6):
        traffic = Traffic(seed=100 + seed, num_requests=40, max_prompt=40, max_output=12, chunk=16)
        ours = serve(HOTPAGE, shape(2, 3, num_blocks=96, host_blocks=40), traffic)
        seen.update(ours.side.coordinator.core.stats())
        seen["engine preemptions"] += ours.num_preemptions
    for name in (
        "pages_lost",
        "pages_adopted",
        "pages_released",
        "hot_regions_granted",
        "restores_planned",
        "rows_rejected",
        "engine preemptions",
    ):
        assert seen[name] > 0, name
