# SPDX-License-Identifier: Apache-2.0
"""vLLM's asynchronous scheduler over our connector, under the settings that users choose."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed; make test-vllm builds its environment")

from real_drafts import RealSchedulerWithDrafts
from real_scheduler import RealScheduler, Setting

from hotpage.errors import HotPageError
from hotpage.vllm import HiSparseConnector, plugin, scheduler
from hotpage.vllm.coordinator import NativeCoordinator

pytestmark = pytest.mark.vllm

SETTINGS = {
    "vLLM's defaults": Setting(),
    "priorities": Setting(policy="priority", num_blocks=70, host_blocks=60),
    "no prefix caching": Setting(caching=False),
    "one request": Setting(max_num_seqs=1),
    "short chunks": Setting(prefill_threshold=7),
    "whole prompts": Setting(step_tokens=512, num_blocks=150),
    "the fast path": Setting(fast_path=True, num_blocks=70, host_blocks=50),
    "other weights": Setting(updates=True, num_blocks=70, host_blocks=60),
    "drafts": Setting(drafts=3, num_blocks=150),
    "many drafts, priorities": Setting(drafts=7, policy="priority", num_blocks=180, host_blocks=70),
    "a draft, other weights, the fast path": Setting(
        drafts=1, updates=True, fast_path=True, num_blocks=90, host_blocks=60
    ),
}
SEEDS = 3
MET_WITH_DRAFTS = (
    "accepted drafts", "rejected drafts", "steps behind their plan", "pages handed over",
)  # fmt: skip


@pytest.mark.parametrize("name", SETTINGS)
def test_requests_of_vllms_own_scheduler_read_their_rows_and_leave_nothing(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plugin.activate()
    setting = SETTINGS[name]
    host_only = 0
    for seed in range(SEEDS):
        kind = RealSchedulerWithDrafts if setting.drafts else RealScheduler
        served = kind(setting, seed, tmp_path, monkeypatch)
        served.run(8 if setting.max_num_seqs == 1 else 25, max_steps=1500)
        pools = (served.scheduler.kv_cache_manager.block_pool, served.coordinator.host_pool)
        for pool in pools:
            assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1
        assert not served.coordinator.has_pending_work()
        assert served.seen["rows compared"] > 300
        assert served.seen["updates"] or not setting.updates, served.seen
        if setting.drafts:
            assert all(served.seen[what] for what in MET_WITH_DRAFTS), served.seen
        host_only += served.seen["rows on the host"]
    assert host_only or setting.max_num_seqs == 1, "nothing was read from the host"


def test_a_wrong_option_is_refused_while_vllm_makes_its_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The weights of a large model take minutes to load."""
    with pytest.raises(ValueError, match="hot_steps is no option of hotpage"):
        Setting().config(tmp_path, monkeypatch, hot_steps=3)
    assert not HiSparseConnector.requires_piecewise_for_cudagraph({"host_pool_gib": 1})


def test_the_comparison_notices_pages_that_the_pool_has_handed_to_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plugin.activate()
    monkeypatch.setattr(NativeCoordinator, "_take_reused", lambda self: self._reused.clear())
    served = RealScheduler(SETTINGS["priorities"], 0, tmp_path, monkeypatch)
    with pytest.raises((AssertionError, HotPageError)):
        served.run(25, max_steps=1500)


def test_the_comparison_notices_pages_that_are_handed_over_with_guesses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens that the scheduler counts on, but nobody has verified, are taken for certain."""
    plugin.activate()
    monkeypatch.setattr(scheduler, "_NUM_TOKENS", lambda request: request.num_tokens + 8)
    served = RealSchedulerWithDrafts(SETTINGS["drafts"], 0, tmp_path, monkeypatch)
    with pytest.raises(AssertionError):
        served.run(25, max_steps=1500)
