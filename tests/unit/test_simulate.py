# SPDX-License-Identifier: Apache-2.0
"""`hotpage simulate`: its answers, their agreement with `hotpage plan`, and how it refuses."""

from __future__ import annotations

import ast
import csv
import io
import json
import math
from pathlib import Path
from typing import Any

import pytest

from hotpage import _core, cli, simulate
from hotpage.errors import CapacityError, ConfigError
from hotpage.plan import GPUS, MODELS, Request
from hotpage.simulate import Simulated, constants
from hotpage.simulate.request import prepare

H200_TP8 = ["simulate", "--gpu", "h200", "--tp", "8"]
SMALL = [*H200_TP8, "--first", "9000", "--turns", "3", "--out", "20", "--concurrency", "2,4"]


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    """The JSON of a command line."""
    assert cli.run([*arguments, "--json"]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    found: dict[str, Any] = json.loads(captured.out)
    return found


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one sentence with which a command line ends."""
    assert cli.run(["simulate", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("hotpage: error: ")
    assert captured.err.count("\n") == 1
    return captured.err.removeprefix("hotpage: error: ").strip()


def by_policy(answer: dict[str, Any], concurrency: int) -> dict[str, dict[str, Any]]:
    return {run["policy"]: run for run in answer["runs"] if run["concurrency"] == concurrency}


def asked(**changes: Any) -> Simulated:
    machine = Request(model=MODELS["glm-5.3"], gpu=GPUS["h200"], tp=8)
    base: dict[str, Any] = {
        "machine": machine,
        "conversations": (((9_000, 20), (753, 20)),),
        "concurrency": (4,),
    }
    return Simulated(**(base | changes))


def test_the_answer_has_a_run_for_each_policy_and_number_of_users(
    capsys: pytest.CaptureFixture[str],
) -> None:
    answer = run(capsys, *SMALL)
    assert list(answer) == ["inputs", "constants", "plan", "runs", "notes"]
    points = [(one["policy"], one["concurrency"]) for one in answer["runs"]]
    assert points == [(p, n) for p in ("hotpage", "preempt", "offload") for n in (2, 4)]
    for one in answer["runs"]:
        conversations = 2 * one["concurrency"]
        assert (one["conversations"], one["turns"]) == (conversations, 3 * conversations)
        assert one["output_tokens"] == conversations * 60
        assert one["prompt_tokens"] == conversations * (9_000 + 2 * 753)
        assert one["leaked_blocks"] == 0
        parts = sum(seconds for name, seconds in one["time"].items() if name != "steps")
        assert parts == pytest.approx(one["time"]["steps"])
        assert min(one["time"].values()) >= -1e-9
        to_gpu = one["missed_bytes"] + one["staged_bytes"] + one["restored_bytes"]
        assert one["bytes_host_to_gpu"] == pytest.approx(to_gpu)
        out = one["output_tokens"] / one["seconds"] / 8
        assert one["output_tokens_per_second_per_gpu"] == pytest.approx(out)
    assert "a model and no forecast" in answer["notes"][0]


def test_the_core_reports_what_the_stub_says() -> None:
    tree = ast.parse(Path(cli.__file__).parent.with_name("_core.pyi").read_text())
    [stub] = [n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == "SimulationReport"]
    names = {ast.unparse(n.target) for n in stub.body if isinstance(n, ast.AnnAssign)}
    settings = prepare(asked()).settings
    core = _core.Simulation(
        policy="hotpage", num_users=1, num_conversations=1, max_running=1, **settings
    )
    assert set(core.report()) == names


@pytest.mark.parametrize("more", [["--context", "131072"], []], ids=["long", "mtp"])
def test_as_many_run_at_once_as_the_planner_says(
    capsys: pytest.CaptureFixture[str], more: list[str]
) -> None:
    mtp = [] if more else ["--mtp", "3"]
    first, out = ("130000", "1072") if more else ("32000", "768")
    shape = ["--turns", "1", "--first", first, "--out", out, *mtp]
    users = ["--concurrency", "60", "--conversations", "60"]
    answer = run(capsys, *H200_TP8, *shape, *users)
    runs = by_policy(answer, 60)
    total = int(first) + int(out)
    plan = ["plan", "--gpu", "h200", "--tp", "8", *mtp, "--context", f"{first},{total}", "--json"]
    assert cli.run(plan) == 0
    shorter, longer = json.loads(capsys.readouterr().out)["points"]
    assert answer["plan"]["hotpage"] == longer["hotpage"]
    # All are long when most of them run; with ordinary residency a new one is as long as its
    # prompt.
    assert runs["hotpage"]["running_max"] == math.floor(longer["hotpage"])
    # A verification row misses what the planner counts for it, but for its resident pages; before
    # the region has filled it misses more.
    expected = (1 - answer["plan"]["hit_rate"]) * 2_048
    rows = runs["hotpage"]["output_tokens"] + runs["hotpage"]["rejected_rows"]
    assert runs["hotpage"]["misses"] / rows == pytest.approx(expected, rel=0.15)
    for policy in ("preempt", "offload"):
        most = runs[policy]["running_max"]
        assert math.floor(longer["ordinary"]) <= most <= math.floor(shorter["ordinary"])


def test_what_presses_the_gpu_shows_in_every_policy(capsys: pytest.CaptureFixture[str]) -> None:
    shape = ["--turns", "3", "--first", "60000", "--out", "100", "--concurrency", "24"]
    runs = by_policy(run(capsys, *H200_TP8, *shape), 24)
    hotpage, preempt, offload = (runs[name] for name in ("hotpage", "preempt", "offload"))
    assert hotpage["running_mean"] > 1.5 * max(preempt["running_mean"], offload["running_mean"])
    assert preempt["recomputed_tokens"] > 24 * 60_000 > 10 * hotpage["recomputed_tokens"]
    assert (preempt["bytes_host_to_gpu"], preempt["bytes_gpu_to_host"]) == (0, 0)
    assert hotpage["missed_bytes"] > 0 < hotpage["staged_bytes"]
    assert offload["missed_bytes"] == offload["staged_bytes"] == 0 < offload["restored_bytes"]
    # A row of all layers crosses once, when it is written; 24 conversations x 2, and the indexer's.
    row = 78 * 656 + 21 * 132
    computed = hotpage["prefilled_tokens"] + hotpage["output_tokens"] - hotpage["turns"]
    assert hotpage["bytes_gpu_to_host"] == computed * row


def test_equal_calls_give_equal_answers_and_the_seed_moves_drafts(
    capsys: pytest.CaptureFixture[str],
) -> None:
    drafts = [*SMALL, "--mtp", "2", "--policy", "hotpage"]
    one = run(capsys, *drafts)
    assert run(capsys, *drafts) == one
    assert run(capsys, *drafts, "--seed", "2")["runs"] != one["runs"]
    assert one["constants"]["acceptance"]["value"] == 0.7
    all_right = run(capsys, *drafts, "--acceptance", "1")["runs"]
    assert [this["rejected_rows"] for this in all_right] == [0, 0]
    assert [this["policy"] for this in one["runs"]] == ["hotpage"] * 2


def test_replicas_share_the_users(capsys: pytest.CaptureFixture[str]) -> None:
    shape = ["--first", "9000", "--turns", "2", "--out", "20", "--policy", "hotpage"]
    [alone] = run(capsys, *H200_TP8, *shape, "--concurrency", "3")["runs"]
    [two] = run(capsys, *H200_TP8, *shape, "--concurrency", "6", "--dp", "2")["runs"]
    assert two["turns"] == 2 * alone["turns"]
    assert two["running_mean"] == pytest.approx(2 * alone["running_mean"])
    same = "tokens_per_second_per_gpu"
    assert two[same] == alone[same]
    assert two["seconds"] == alone["seconds"]


def test_replicas_that_share_experts_read_fewer_weights(
    capsys: pytest.CaptureFixture[str],
) -> None:
    shape = ["--first", "9000", "--turns", "2", "--out", "20", "--policy", "hotpage"]
    spread = ["simulate", "--gpu", "h200", "--tp", "1", "--dp", "8", "--kv-gib", "30"]
    own = run(capsys, *spread, *shape, "--concurrency", "16")
    shared = run(capsys, *spread, *shape, "--concurrency", "16", "--expert-parallel")
    [own_run], [shared_run] = own["runs"], shared["runs"]
    # Two tokens of each of 8 replicas touch 2 / 5 of the experts, and each reads 1 / 8 of them.
    assert shared_run["steps"] == own_run["steps"]
    assert shared_run["between_tokens"]["p50"] < own_run["between_tokens"]["p50"]
    assert any("share the experts" in note for note in shared["notes"])
    alone = ["--gpu", "h200", "--tp", "8", "--expert-parallel"]
    assert refused(capsys, *alone).startswith("--expert-parallel is given, expected --dp of 2")


def test_a_cost_that_is_given_is_paid(capsys: pytest.CaptureFixture[str]) -> None:
    base = by_policy(run(capsys, *SMALL), 4)
    slow = by_policy(run(capsys, *SMALL, "--overhead-ms", "100"), 4)
    for policy, one in base.items():
        assert slow[policy]["steps"] == one["steps"]
        overhead = slow[policy]["between_tokens"]["p50"] - one["between_tokens"]["p50"]
        assert overhead == pytest.approx(0.1)
    pressed = [*H200_TP8, "--first", "60000", "--turns", "2", "--out", "50"]
    pressed += ["--concurrency", "24", "--policy", "hotpage"]
    [alone] = run(capsys, *pressed)["runs"]
    [together] = run(capsys, *pressed, "--cooperative")["runs"]
    assert together["missed_bytes"] == alone["missed_bytes"]
    # Eight links, and a meeting that takes longer than a launch.
    assert together["time"]["misses"] < alone["time"]["misses"] / 3
    assert together["time"]["staging"] == alone["time"]["staging"]


def test_a_policy_that_cannot_hold_a_conversation_does_not_end_the_others(
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = [*H200_TP8, "--kv-gib", "3", "--turns", "1", "--concurrency", "2"]
    answer = run(capsys, *arguments)
    runs = by_policy(answer, 2)
    assert set(runs["preempt"]) == {"policy", "concurrency", "refused"}
    assert runs["preempt"]["refused"].startswith("the GPU pool has ")
    assert runs["hotpage"]["turns"] == 4
    assert cli.run(arguments) == 0
    out = capsys.readouterr().out
    assert "preempt cannot serve this: the GPU pool has " in out
    with pytest.raises(CapacityError):
        simulate.answer(asked(machine=Request(**_tiny()), policies=("preempt",)))


def _tiny() -> dict[str, Any]:
    return {"model": MODELS["glm-5.3"], "gpu": GPUS["h200"], "tp": 8, "kv_gib": 0.1}


def test_the_report_names_its_constants_and_fits_a_terminal(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.run(SMALL) == 0
    out = capsys.readouterr().out
    assert max(len(line) for line in out.splitlines()) <= 100
    for said in ("a model and no forecast", "hbm_gbps 4800 GB/s: NVIDIA's data sheet", "MTP"):
        assert said in out
    assert "give --overhead-ms" in out
    assert cli.run([*SMALL, "--overhead-ms", "5"]) == 0
    assert "give --overhead-ms" not in capsys.readouterr().out
    assert cli.run([*SMALL, "--mtp", "1", "--cooperative"]) == 0
    out = capsys.readouterr().out
    for said in ("Drafting takes no time", "measured on two GPUs, not on more", "acceptance 0.7:"):
        assert said in out


def test_csv_has_a_line_for_each_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run([*SMALL, "--csv"]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [row["policy"] for row in rows] == ["hotpage"] * 2 + ["preempt"] * 2 + ["offload"] * 2
    assert all(float(row["between_tokens.p50"]) > 0 for row in rows)


@pytest.mark.parametrize("suffix", ["png", "svg", "pdf"])
def test_a_picture_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], suffix: str
) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / f"sweep.{suffix}"
    assert cli.run([*SMALL, "--plot", str(path)]) == 0
    assert path.stat().st_size > 1_000
    assert "Constants:" in capsys.readouterr().out


def test_conversations_of_a_file_are_served(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    messages = [
        {"role": "user", "content": "x" * 8_000},
        {"role": "assistant", "content": "y" * 400},
        {"role": "user", "content": "z" * 40},
        {"role": "assistant", "content": "w" * 80},
    ]
    path = tmp_path / "talk.json"
    path.write_text(json.dumps([{"messages": messages}, {"messages": messages[:2]}] * 3))
    arguments = [*H200_TP8, "--workload", str(path), "--concurrency", "2", "--policy", "preempt"]
    [one] = run(capsys, *arguments)["runs"]
    assert (one["conversations"], one["turns"]) == (6, 9)
    assert one["output_tokens"] == 6 * 100 + 3 * 20
    assert one["prompt_tokens"] == 6 * 2_000 + 3 * 10
    [again] = run(capsys, *arguments, "--conversations", "8")["runs"]
    assert again["conversations"] == 8


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "the GPU is missing; give --gpu, --hbm-gib or --kv-gib"),
        (["--gpu", "h200"], "usable GPU memory is "),
        (["--gpu", "b200", "--tp", "8"], "the prefill rate of b200 is not known; give --prefill-"),
        (
            ["--gpu", "rtx-pro-6000", "--tp", "16"],
            "the memory rate of rtx-pro-6000 is not known; give --hbm-gbps",
        ),
        (["--kv-gib", "30"], "the host link is not known; give --link-gbps"),
        (
            ["--gpu", "h200", "--model", "deepseek-v3.2", "--kv-gib", "30"],
            "the size of the weights is not known, and a step reads them; give --weights-gib",
        ),
    ],
    ids=str,
)
def test_what_is_missing_is_asked_for(
    capsys: pytest.CaptureFixture[str], arguments: list[str], sentence: str
) -> None:
    assert refused(capsys, *arguments).startswith(sentence)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--concurrency", "8,x"], "--concurrency is '8,x', expected whole numbers with commas "),
        (["--concurrency", "0"], "--concurrency is 0, expected at least 1"),
        (["--concurrency", "9", "--dp", "2"], "--concurrency is 9, expected a multiple of 2 (dp)"),
        (["--policy", "lru"], "--policy is 'lru', expected some of hotpage, preempt, offload"),
        (["--turns", "0"], "--turns is 0, expected at least 1"),
        (["--turns", "20000"], "--turns is 20000, expected at most 10000"),
        (["--first", "-1"], "--first is -1, expected at least 1"),
        (["--first", "2000000"], "the longest conversation has 2011896 tokens, expected at most "),
        (
            ["--max-model-len", "50000"],
            "the longest conversation has 86056 tokens, expected at most 50000 (--max-model-len)",
        ),
        (["--conversations", "0"], "--conversations is 0, expected at least 1"),
        (["--conversations", "200000"], "conversations is 200000, expected at most 100000"),
        (["--conversations", "90000"], "answer tokens is 257400000, expected at most 50000000"),
        (["--acceptance", "2"], "--acceptance is 2, expected 0 to 1"),
        (["--seed", "-1"], "--seed is -1, expected 0 to 2^64-1"),
        (["--overhead-ms", "-1"], "--overhead-ms is -1, expected 0 or more"),
        (["--hbm-gbps", "0"], "--hbm-gbps is 0, expected a number above 0"),
        (["--expert-share", "0.5"], "--expert-share is 0.5, expected at most 0.0537634"),
        (["--active-params-b", "900"], "--active-params-b is 900, expected at most 744 (all)"),
        (["--host-pool-gib", "1"], "host pool is "),
        (["--tokenizer", "x"], "--tokenizer counts the tokens of a file"),
        (["--workload", ""], "--workload is empty"),
        (["--workload", "x.json", "--out", "3"], "--workload is given beside --turns"),
        (["--json", "--csv"], "--json and --csv are both given"),
        (["--plot", "x.txt"], "plot is 'x.txt', expected a name ending in"),
    ],
    ids=str,
)
def test_what_cannot_work_is_one_sentence(
    capsys: pytest.CaptureFixture[str], arguments: list[str], sentence: str
) -> None:
    assert refused(capsys, *H200_TP8[1:], *arguments).startswith(sentence)


def test_cooperation_needs_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--gpu", "h200", "--kv-gib", "60", "--cooperative"]
    assert refused(capsys, *arguments).startswith("--cooperative is given, expected --tp of 2")


def test_a_model_without_experts_reads_all_weights_and_says_so() -> None:
    model = MODELS["glm-5.3"]
    unknown = {"experts": None, "params_b": None, "active_params_b": None}
    bare = type(model)(**(vars(model) | unknown))
    machine = Request(model=bare, gpu=GPUS["h200"], tp=8)
    found = prepare(asked(machine=machine, params_b=700.0, active_params_b=70.0))
    assert found.settings["expert_share"] == 1.0
    assert found.constants["expert_share"].source.startswith("experts are not known")
    assert found.settings["active_bytes"] == pytest.approx(found.settings["weight_bytes"] / 10)
    assert found.settings["active_params"] == 70e9
    spread = asked(
        machine=Request(model=bare, gpu=GPUS["h200"], tp=8, dp=2),
        params_b=700.0,
        active_params_b=70.0,
        expert_parallel=True,
    )
    with pytest.raises(ConfigError, match="give --expert-share beside"):
        prepare(spread)


def test_links_that_were_not_measured_get_the_measured_share() -> None:
    pcie5 = constants.of_link(GPUS["h200"].link_gbps, cooperative=False)
    double = constants.of_link(2 * GPUS["h200"].link_gbps, cooperative=True)
    assert pcie5["stage_gbps"].value == 49.0
    assert double["stage_gbps"].value == pytest.approx(98.0)
    assert double["mirror_gbps"].source.endswith("by the share of the link's rate")
    assert (pcie5["peers"].value, double["peers"].value) == (None, (355.0, 10.0))


def test_the_prefill_rate_is_that_of_the_published_figures() -> None:
    rate = constants.of_gpu(GPUS["h200"], None, None)["compute_tflops"]
    # 73,700 tokens/s of 8 GPUs, 43.7% computed, 2 x 37 x 10^9 FLOP each.
    assert rate.value == 298
    assert constants.of_gpu(GPUS["h200"], None, 500.0)["compute_tflops"].source == "given"
