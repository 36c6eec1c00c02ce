# SPDX-License-Identifier: Apache-2.0
"""The engine harness without an engine: digests, selection, comparison, probe and faults."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from engine import compare, controls, digests, faults, launch, models  # noqa: E402
from engine.determinism import select  # noqa: E402
from engine.forcing import Forcing, _logits_rows, is_right  # noqa: E402
from engine.launch import BLOCK  # noqa: E402
from engine.probe import Batch, Outcome, Probe  # noqa: E402
from engine.workload import (  # noqa: E402
    Scale,
    Served,
    Turn,
    _may_arrive,
    make_returning_turns,
    make_turns,
)

pytestmark = pytest.mark.vllm

ROW_BYTES, TOP_K = 16, 96


def test_digests_tell_one_bit_and_the_order_of_a_list() -> None:
    rows = torch.randint(0, 256, (5, 656), dtype=torch.uint8)
    changed = rows.clone()
    changed[3, 655] ^= 1
    differ = digests.of_rows(rows) != digests.of_rows(changed)
    assert differ.tolist() == [False, False, False, True, False]
    of_rows = digests.of_rows(rows).unsqueeze(0)
    valid = torch.ones_like(of_rows, dtype=torch.bool)
    swapped = of_rows[:, [1, 0, 2, 3, 4]]
    assert digests.of_lists(of_rows, valid) != digests.of_lists(swapped, valid)
    valid[0, 4] = False
    changed = torch.cat([of_rows[:, :4], of_rows[:, :1]], dim=1)
    assert digests.of_lists(of_rows, valid) == digests.of_lists(changed, valid)


def test_the_selection_takes_the_largest_the_earlier_of_equals_in_order() -> None:
    scores = torch.tensor([[1.0, 5.0, 5.0, 2.0, 5.0, 9.0], [3.0, 1.0, 2.0, 8.0, 8.0, 8.0]])
    chosen = select(scores, torch.tensor([5, 2]), 3)
    assert chosen.tolist() == [[1, 2, 4], [0, 1, -1]]
    assert select(scores, torch.tensor([5, 2]), 2).tolist() == [[1, 2], [0, 1]]
    wide = select(scores, torch.tensor([6, 1]), 8)
    assert wide.tolist() == [[0, 1, 2, 3, 4, 5, -1, -1], [0, *[-1] * 7]]


def test_glm_has_groups_of_one_and_of_four() -> None:
    config = models.glm_52(11)
    leads = models.leaders(config)
    assert [at for at, lead in enumerate(leads) if lead] == [0, 1, 2, 6, 10]
    assert all(models.leaders(models.deepseek_v32(8)))


def test_turns_share_prefixes_and_are_the_same_for_a_seed() -> None:
    turns = {turn.name: turn for turn in make_turns(1, Scale())}
    assert turns == {turn.name: turn for turn in make_turns(1, Scale())}
    assert turns["c0b"].tokens[: len(turns["c0"].tokens)] == turns["c0"].tokens
    assert "c0" in turns["c0b"].after
    assert sum(turn.abort_at is not None for turn in turns.values()) == 1
    assert make_turns(2, Scale())[0].tokens != turns["c0"].tokens


def test_a_turn_may_arrive_while_another_answers() -> None:
    first, returning, *others = make_returning_turns(3)
    assert returning.tokens[: len(first.tokens)] == first.tokens
    assert returning.after == (first.name,)
    assert others
    name, length = others[0].during or ("", 0)
    assert name == returning.name
    served = Served(answers={})
    assert not _may_arrive(returning, served, {})
    served.answers[first.name] = 4
    assert _may_arrive(returning, served, {})
    assert not _may_arrive(others[0], served, {name: length - 1})
    assert _may_arrive(others[0], served, {name: length})


def test_first_rows_stand_in_for_a_selection() -> None:
    logical = torch.tensor([[4, 9, 11, -1], [7, 6, 5, 4]], dtype=torch.int32)
    batch = Batch(["a", "b", "c"], [1, 7, 0], [1, 1, 6], 2, torch.zeros(3))
    controls.attend_first_rows(0, logical, batch)
    assert logical.tolist() == [[0, 1, -1, -1], [0, 1, 2, 3]]


def _outcome(history: int, value: float, attended: tuple[int, ...]) -> Outcome:
    return Outcome(history, torch.tensor([value, 0.0]), attended)


def test_a_comparison_pairs_equal_histories_and_finds_bits() -> None:
    turn = Turn("a", tuple(range(10)), 6)
    served = Served(answers={"a": 4})
    left = {("a", at): [_outcome(at, 1.0, (at,))] for at in range(5, 9)}
    same = compare.compare(left, left, [turn], (served, served))
    assert (same.num_positions, same.num_compared, same.num_decode) == (4, 4, 4)
    same.check()
    right = dict(left)
    right["a", 6] = [_outcome(6, 1.0, (7,))]
    right["a", 7] = [_outcome(7, -0.0, (7,)), _outcome(7, 1.0, (7,))]
    right["a", 8] = [_outcome(9, 2.0, (9,)), _outcome(8, 1.0, (8,))]
    found = compare.compare(left, right, [turn], (served, served))
    assert found.wrong_rows == [("a", 6)]
    assert found.wrong_logits == [("a", 7)]
    with pytest.raises(AssertionError, match="attended rows differ"):
        found.check()
    other = {key: [_outcome(-1, 1.0, ())] for key in left}
    with pytest.raises(AssertionError, match="0 of 4 comparable"):
        compare.compare(left, other, [turn], (served, served)).check()


class _ToyEngine:
    """One request, two layers of one group on the CPU: pages are resident, then host-only."""

    num_blocks, num_pages = 12, 4

    def __init__(self, *, graphs: bool = False) -> None:
        self.spec = SimpleNamespace(
            engine="upstream", graphs=graphs, mtp=0, max_num_seqs=1, max_num_batched_tokens=512
        )
        self.worker = _ToyWorker(self)
        self.connector = SimpleNamespace(start_load_kv=lambda context, **_: None)
        config = SimpleNamespace(hisparse_host_num_blocks=8)
        self.core = SimpleNamespace(scheduler=SimpleNamespace(kv_cache_config=config))
        self.runner = SimpleNamespace(
            sample=lambda hidden, batch: self.runner.model.compute_logits(hidden),
            model=SimpleNamespace(compute_logits=lambda hidden: hidden),
        )
        self.group = SimpleNamespace(
            num_layers=2,
            physical_kv_cache=lambda at: self.caches[at],
            convert_logical_to_physical_topk=self._convert,
            hisparse_group=SimpleNamespace(),
        )
        self.groups = [self.group]
        self.groups_of = lambda layers: self.groups
        self.draft_layers: list[Any] = []
        self.recapture = lambda: None
        self.caches = [self._bytes(self.num_blocks) for _ in range(2)]
        self.host = [self._bytes(8).view(-1, ROW_BYTES) for _ in range(2)]
        self.residency = torch.tensor([[[5, 6, 7, 8]]], dtype=torch.int32)
        self.source = torch.tensor([[1, 2, 3, 4]], dtype=torch.int32)
        # Hot slots are the rows of blocks 9 and 10.
        self.map = torch.full((1, 2 * BLOCK), -1, dtype=torch.int32)
        self.group.hisparse_group.device_global_indices = self.map
        self.copied: dict[int, set[int]] = {}
        self.layers = [self._layer(at) for at in range(2)]

    @staticmethod
    def _bytes(blocks: int) -> Any:
        return torch.zeros((blocks, BLOCK, ROW_BYTES), dtype=torch.uint8)

    def _layer(self, at: int) -> Any:
        handle = SimpleNamespace(
            view=SimpleNamespace(cache=self.caches[at]),
            residency=self.residency,
            block_table=self.residency[0],
            source_block_table=self.source,
            slot_mapping=torch.zeros(512, dtype=torch.int64),
            mirror_slot_mapping=torch.zeros(512, dtype=torch.int64),
            dummy_batch=False,
            runtime=SimpleNamespace(host_cache=self.host[at]),
        )
        layer = SimpleNamespace(
            layer_name=f"layer{at}",
            hisparse_cache=handle,
            impl=SimpleNamespace(index_group=self.group, index_group_index=at),
        )
        layer.update_kv_cache = lambda: self._write(at)
        return layer

    def _write(self, at: int) -> None:
        handle = self.layers[at].hisparse_cache
        for slot in handle.slot_mapping[: self.tokens].tolist():
            row = torch.randint(0, 256, (ROW_BYTES,), dtype=torch.uint8)
            self.caches[at][slot // BLOCK, slot % BLOCK] = row

    def _convert(self, at: int, logical: Any, metadata: Any) -> Any:
        """Resident rows where they are, others through hot slots; a hit copies nothing."""
        physical = torch.full_like(logical, -1)
        for k, position in enumerate(logical[0].tolist()):
            if position < 0:
                continue
            block = int(self.residency[0, 0, position // BLOCK])
            if block:
                physical[0, k] = block * BLOCK + position % BLOCK
                continue
            host = int(self.source[0, position // BLOCK]) * BLOCK + position % BLOCK
            held = (self.map[0] == host).nonzero()
            if at not in self.copied.setdefault(host, set()):
                slot = int(held[0]) if held.numel() else int((self.map[0] < 0).nonzero()[0])
                self.map[0, slot] = host
                self.caches[at][9 + slot // BLOCK, slot % BLOCK] = self.host[at][host]
                self.copied[host].add(at)
            else:
                slot = int(held[0])
            physical[0, k] = 9 * BLOCK + slot
        return physical

    def step(self, start: int, count: int, wanted: list[int] | None) -> None:
        self.tokens = count
        positions = torch.arange(start, start + count)
        for layer in self.layers:
            handle = layer.hisparse_cache
            table = handle.block_table[0].long()
            handle.slot_mapping[:count] = table[positions // BLOCK] * BLOCK + positions % BLOCK
            source = self.source[0].long()
            rows = source[positions // BLOCK] * BLOCK + positions % BLOCK
            handle.mirror_slot_mapping[:count] = rows
            handle.num_actual_tokens = count
        metadata = SimpleNamespace(
            num_decode_tokens=int(wanted is not None),
            req_id_per_token=torch.zeros(count, dtype=torch.int32),
            query_start_loc=torch.tensor([0, count], dtype=torch.int32),
            seq_lens=torch.tensor([start + count], dtype=torch.int32),
        )
        self.connector.start_load_kv(
            SimpleNamespace(attn_metadata={"layer0": metadata}),
            scheduler_output=SimpleNamespace(
                scheduled_cached_reqs=SimpleNamespace(req_ids=["r-1"], num_computed_tokens=[start]),
                scheduled_new_reqs=[],
                num_scheduled_tokens={"r-1": count},
            ),
            request_ids=["r-1"],
            request_state_indices=torch.zeros(1, dtype=torch.int32),
        )
        for at, layer in enumerate(self.layers):
            layer.update_kv_cache()
            if wanted is not None:
                logical = torch.full((1, TOP_K), -1, dtype=torch.int32)
                logical[0, : len(wanted)] = torch.tensor(wanted, dtype=torch.int32)
                self.group.convert_logical_to_physical_topk(at, logical, metadata)
        self.worker.finish_forward()
        batch = SimpleNamespace(
            req_ids=["r-1"],
            num_reqs=1,
            num_computed_tokens_np=torch.tensor([start]).numpy(),
            num_scheduled_tokens=torch.tensor([count]).numpy(),
            cu_num_logits_np=torch.tensor([0, 1]).numpy(),
        )
        self.runner.sample(torch.randn(1, 8), batch)

    def mirror(self) -> None:
        for at, layer in enumerate(self.layers):
            handle = layer.hisparse_cache
            slots = handle.slot_mapping[: self.tokens]
            rows = handle.mirror_slot_mapping[: self.tokens]
            self.host[at][rows] = self.caches[at][slots // BLOCK, slots % BLOCK]


class _ToyWorker:
    """The two steps of vLLM's worker that a planted fault reaches into."""

    def __init__(self, engine: _ToyEngine) -> None:
        self._engine = engine

    def finish_forward(self) -> None:
        self._enqueue_row_dma([0, 1])

    def _enqueue_row_dma(self, layers: list[int]) -> None:
        self._engine.mirror()


def _run(
    fault: str | None, monkeypatch: pytest.MonkeyPatch, *, graphs: bool = False
) -> tuple[Probe, Any, Any]:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    torch.manual_seed(3)
    engine: Any = _ToyEngine(graphs=graphs)
    probe = Probe(engine, {"r": (0,) * 400})
    planted = faults.FAULTS[fault](engine) if fault else None
    if planted is not None:
        probe.before_forward = planted.before_forward
        probe.before_resolve = planted.before_resolve
    engine.step(0, 160, None)
    # Two pages become host-only; decode rows meet them as misses, then as hits.
    engine.residency[0, 0, :2] = 0
    for at in range(160, 164):
        engine.step(at, 1, [*range(20, 20 + TOP_K - 1), at])
    outcomes, wrong = probe.take()
    return probe, (outcomes, wrong), planted


def test_a_faultless_run_has_no_wrong_row(monkeypatch: pytest.MonkeyPatch) -> None:
    _, (outcomes, wrong), _ = _run(None, monkeypatch)
    assert not wrong
    assert sorted(position for _, position in outcomes) == [159, *range(160, 164)]
    decoded = [rows[0] for (_, at), rows in outcomes.items() if at >= 160]
    assert all(len(row.attended) == 2 for row in decoded)
    assert len({row.history for row in decoded}) == 4


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize(
    ("fault", "layers", "first"),
    [("wrong row", {1}, 160), ("skipped mirror", {0, 1}, 160), ("stale slot", {0, 1}, 161)],
)
def test_each_planted_fault_is_found(
    fault: str, layers: set[int], first: int, graphs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, (_, wrong), planted = _run(fault, monkeypatch, graphs=graphs)
    assert planted.planted is not None
    found = Counter(entry.layer for entry in wrong)
    assert set(found) == layers
    assert min(entry.position for entry in wrong) == first


def test_a_short_selection_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    engine: Any = _ToyEngine()
    probe = Probe(engine)
    engine.step(0, 160, None)
    engine.step(160, 1, list(range(TOP_K - 1)))
    assert probe.num_wrong() == 2


def test_rows_of_a_batch_are_named_by_request_and_position() -> None:
    batch = Batch(["a", "b", "c"], [7, 3, 0], [3, 1, 2], 4, torch.zeros(3))
    assert batch.decode_rows == [(0, 7), (0, 8), (0, 9), (1, 3)]
    assert batch.num_decoding == 2
    how = batch.how()
    assert how[4:] == [1, 1]
    # Which row of how many: another kernel's last bits may differ.
    assert len(set(how[:4])) == 4


def test_what_follows_a_wrong_draft_does_not_count() -> None:
    wrong = next(at for at in range(20, 40) if not is_right("r", at))
    start = wrong - 2
    batch = SimpleNamespace(
        req_ids=["r-1", "s-1"],
        num_reqs=2,
        num_computed_tokens_np=torch.tensor([start, 0]).numpy(),
        num_scheduled_tokens=torch.tensor([4, 64]).numpy(),
        cu_num_logits_np=torch.tensor([0, 4, 5]).numpy(),
    )
    rows = _logits_rows(batch)
    assert [row.position for row in rows] == [start, start + 1, wrong, wrong + 1, 63]
    right_before = is_right("r", start + 1)
    assert [row.counts for row in rows] == [True, right_before, False, False, True]
    assert [row.request for row in rows] == [0, 0, 0, 0, 1]


def test_drafts_are_right_and_wrong_by_their_places() -> None:
    assert {is_right("c0", at) for at in range(9)} == {True, False}
    engine: Any = _ToyEngine()
    engine.spec.mtp = 3
    proposed = torch.full((1, 3), 9)
    engine.runner.speculator = SimpleNamespace(propose=lambda batch, *more, **named: proposed)
    script = tuple(range(100, 200))
    forcing = Forcing(engine, lambda: {"r": script})
    forcing.attach(lambda rows, logits: None)
    batch = SimpleNamespace(
        req_ids=["r-1"],
        num_reqs=1,
        num_computed_tokens_np=torch.tensor([20]).numpy(),
        num_scheduled_tokens=torch.tensor([4]).numpy(),
        cu_num_logits_np=torch.tensor([0, 4]).numpy(),
    )
    # One of the three drafts was accepted: tokens 21 and 22 are known, 23 is drafted next.
    drafts = engine.runner.speculator.propose(
        batch, None, None, None, None, torch.tensor([2]), torch.tensor([2])
    )
    expected = [script[at] if is_right("r", at) else script[at] + 1 for at in (23, 24, 25)]
    assert drafts.tolist() == [expected]
    assert (forcing.num_accepted, forcing.num_rejected) == (1, 2)


def test_the_scripts_token_is_sampled() -> None:
    engine: Any = _ToyEngine()
    probe = Probe(engine, {"r": (1, 2, 3, 4)})
    seen = []
    compute = engine.runner.model.compute_logits
    engine.runner.model.compute_logits = lambda hidden: seen.append(compute(hidden)) or seen[-1]
    engine.step(0, 3, None)
    assert int(seen[0].argmax()) == 4
    (outcome,) = probe.take()[0]["r", 2]
    assert outcome.logits.shape == (8,)
    assert not outcome.attended


def test_without_a_gpu_the_commands_end_with_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match=r"^no CUDA device: nothing was run$"):
        launch.require_gpu()
