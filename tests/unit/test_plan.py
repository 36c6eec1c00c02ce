# SPDX-License-Identifier: Apache-2.0
"""`hotpage plan`: its sources, its defaults, its answers and how it refuses what cannot be."""

from __future__ import annotations

import json
import math
import tomllib
from pathlib import Path
from typing import Any

import pytest

from hotpage import _core, cli
from hotpage.errors import CapacityError, ConfigError
from hotpage.plan import GPUS, MODELS, Request, answer, find_gpu, find_model

GLM_CONFIG: dict[str, Any] = {
    "model_type": "glm_moe_dsa",
    "num_hidden_layers": 78,
    "index_topk": 2048,
    "index_topk_freq": 4,
    "index_skip_topk_offset": 3,
    "index_head_dim": 128,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "num_nextn_predict_layers": 1,
    "max_position_embeddings": 1_048_576,
}

H200_TP8 = ["plan", "--gpu", "h200", "--tp", "8"]


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    """The JSON of a command line on 8 H200."""
    assert cli.run([*H200_TP8, *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one sentence with which a command line ends."""
    assert cli.run(["plan", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("hotpage: error: ")
    assert captured.err.count("\n") == 1
    return captured.err.removeprefix("hotpage: error: ").strip()


def write_config(folder: Path, **changes: Any) -> Path:
    """A GLM configuration with changes; None removes a field."""
    config = {name: value for name, value in (GLM_CONFIG | changes).items() if value is not None}
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    return path


def glm(**changes: Any) -> Request:
    return Request(model=MODELS["glm-5.3"], gpu=GPUS["h200"], tp=8, **changes)


def test_json_has_the_documented_shape(capsys: pytest.CaptureFixture[str]) -> None:
    found = run(capsys, "--context", "65536,131072")
    assert list(found) == ["inputs", "model", "points", "crossover_context", "notes"]
    assert [point["context"] for point in found["points"]] == [65_536, 131_072]
    for point in found["points"]:
        assert list(point) == [
            "context",
            "ordinary",
            "hotpage",
            "offload",
            "binds",
            "bytes_per_request",
            "min_host_pool_gib",
            "pcie_ms_per_step",
        ]
        assert list(point["binds"]) == ["ordinary", "hotpage", "offload"]
        assert point["bytes_per_request"]["hot"] == 209_584_128
    assert isinstance(found["crossover_context"], int)


def test_the_connector_alone_needs_nothing_but_model_machine_and_pool(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = run(capsys, "--host-pool-gib", "384")
    inputs = found["inputs"]
    assert (inputs["hot_rows"], inputs["block_size"], inputs["mtp"]) == (4096, 64, 0)
    assert (inputs["max_num_batched_tokens"], inputs["max_num_seqs"]) == (8192, 1024)
    assert [point["context"] for point in found["points"]] == [2**power for power in range(13, 21)]
    assert run(capsys, "--mtp", "3")["inputs"]["hot_rows"] == 10_240


def test_a_pool_that_cannot_hold_the_longest_context_shortens_the_default_lengths(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = run(capsys, "--host-pool-gib", "8")
    longest = found["points"][-1]["context"]
    assert longest < 1_048_576
    # One block more would be one too many for the pool.
    pages = found["inputs"]["host_blocks"] - 2
    assert longest == pages * 64
    assert "at least" in refused(capsys, *H200_TP8[1:], "--host-pool-gib", "0.003")


@pytest.mark.parametrize(
    ("text", "contexts"),
    [
        ("128K", [131_072]),
        ("4k,1M", [4096, 1_048_576]),
        ("8K, 131072,65_536", [8192, 131_072, 65_536]),
        ("128, 256", [128, 256]),
        ("128,256K", [128, 262_144]),
        ("65536,128", [65_536, 128]),
        ("64", [64]),
    ],
)
def test_lengths_may_be_written_short(
    text: str, contexts: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(capsys, "--context", text)["inputs"]["contexts"] == contexts


def test_ranks_follow_from_gpus_and_replicas(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--gpu", "b300", "--gpus", "16", "--dp", "2", "--context", "65536"]
    assert cli.run(["plan", *arguments, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["inputs"]["tp"] == 8
    text = refused(capsys, "--gpu", "h200", "--gpus", "9", "--dp", "2")
    assert text.startswith("gpus is 9, expected 8")


def test_the_pool_of_a_replica_is_counted_once_for_all_its_ranks(
    capsys: pytest.CaptureFixture[str],
) -> None:
    inputs = run(capsys, "--host-pool-gib", "384", "--context", "65536")["inputs"]
    assert inputs["host_physical_gib"] == pytest.approx(384, abs=0.01)
    assert inputs["host_registrations"] == 2
    small = run(capsys, "--host-pool-gib", "384", "--context", "65536", "--registration-gib", "32")[
        "inputs"
    ]
    assert small["host_registrations"] == 13


def test_published_figures_are_met(capsys: pytest.CaptureFixture[str]) -> None:
    # vLLM's GLM-5.3 write-up: 8 H200, TP8, FP8 KV, MTP 3, batches of 32,768, 142,000 admitted.
    # Conversations of 13 turns: 74,160 tokens, then 753 each, 220 out.
    arguments = ["--mtp", "3", "--batched-tokens", "32768", "--max-model-len", "142000"]
    arguments += ["--max-num-seqs", "256", "--host-pool-gib", "384", "--output", "220"]
    found = run(capsys, *arguments, "--context", "74160,85836")
    assert [math.floor(point["offload"]) for point in found["points"]] == [6, 5]
    for point in found["points"]:
        assert 19 <= math.floor(point["hotpage"]) <= 25
        assert point["ordinary"] == point["offload"]


def test_a_request_of_one_million_tokens_fits_only_with_hotpage(
    capsys: pytest.CaptureFixture[str],
) -> None:
    (point,) = run(capsys, "--context", "1048576")["points"]
    assert point["offload"] < 1 <= point["hotpage"]


def test_kv_memory_from_an_engines_log_replaces_the_estimate() -> None:
    found = answer(Request(model=MODELS["deepseek-v3.2"], kv_gib=40.0, tp=8, contexts=(131_072,)))
    (point,) = found["points"]
    model = found["model"]
    blocks = 40 * 2**30 // model["ordinary_bytes_per_block"]
    assert point["ordinary"] == blocks / 2048
    assert found["inputs"]["hbm_gib"] is None
    assert point["pcie_ms_per_step"] is None, "no link is known, so no time is invented"


def test_link_time_follows_misses_and_layout() -> None:
    def link_ms(**changes: Any) -> float:
        (point,) = answer(glm(contexts=(131_072,), **changes))["points"]
        return point["pcie_ms_per_step"]

    assert link_ms(hit_rate=1.0) == 0
    assert link_ms(hit_rate=0.8) == pytest.approx(2 * link_ms(hit_rate=0.9))
    # Four rows side by side are one read: 49.8 GB/s measured instead of 21.
    assert link_ms(layout="layer_major") > 2 * link_ms(layout="row_interleaved")
    assert link_ms(link_gbps=GPUS["h200"].link_gbps / 2) == pytest.approx(2 * link_ms())


def test_dense_offloading_runs_what_ordinary_residency_runs() -> None:
    for point in answer(glm(offload_gib=512.0))["points"]:
        assert point["offload"] == point["ordinary"]
        assert point["binds"]["offload"] == "gpu:kv"


@pytest.mark.parametrize(
    ("arguments", "begins"),
    [
        (["--hot-rows", "2047"], "hot_rows is 2047, expected at least 2048 "),
        (["--hot-rows", "8191", "--mtp", "3"], "hot_rows is 8191, expected at least 8192 "),
        (["--hot-rows", "32769"], "hot_rows is 32769, expected at most 32768; "),
        (["--host-pool-gib", "-1"], "host_pool_gib is -1, expected above 0; "),
        (["--host-pool-gib", "nan"], "host_pool_gib is NaN, expected above 0; "),
        (["--host-pool-gib", "inf"], "host_pool_gib is inf, expected at most 1048576; "),
        (["--host-pool-gib", "1e308"], "host_pool_gib is 1e308, expected at most 1048576; "),
        (["--weights-gib", "inf"], "weights_gib is inf, expected at most 1048576; "),
        (["--weights-gib", "-1"], "weights_gib is -1, expected above 0; "),
        (["--hbm-gib", "-80"], "hbm_gib is -80, expected above 0; "),
        (["--offload-gib", "-1"], "offload_gib is -1, expected at least 0; "),
        (["--context", "0"], "context is 0, expected at least 64 (one block); "),
        (["--context", "8192,63"], "context is 63, expected at least 64 (one block); "),
        (["--context", "2097152"], "context is 2097152, expected at most 1048576; "),
        (["--context", "64kb"], "context is '64kb', expected numbers of tokens "),
        (["--context", "1.5M"], "context is '1.5M', expected numbers of tokens "),
        (["--context", "K"], "context is 'K', expected numbers of tokens "),
        (["--context", "131,072"], "context is '131,072', expected commas between lengths "),
        (["--context", "8K,1,048,576"], "context is '8K,1,048,576', expected commas between "),
        (["--context", "2M"], "context is 2097152, expected at most 1048576; "),
        (["--output", "-1"], "output is -1, expected at least 0; "),
        (["--mtp", "-1"], "mtp is -1, expected at least 0; "),
        (["--block-size", "48"], "block_size is 48, expected a multiple of 64; "),
        (["--hit-rate", "1.5"], "hit_rate is 1.5, expected 0 to 1; "),
        (["--kv-dtype", "fp4"], "kv_dtype is 'fp4', expected fp8_ds_mla or bf16; "),
        (["--layout", "rows"], "layout is 'rows', expected one of "),
        (["--gpu-memory-utilization", "0"], "gpu_memory_utilization is 0, expected above 0; "),
        (["--gpu", "a100"], "gpu is 'a100', expected one of h100, h200, "),
        (["--model", "llama"], "model is 'llama', expected one of glm-5.3, "),
        (["--json", "--csv"], "--json and --csv are both given, expected one; "),
        (["--host-pool-gib", "6", "--context", "131072"], "host pool is 1966 pages, expected at "),
        (["--tp", "1"], "usable GPU memory is 129.2 GiB, expected above 718.8 GiB "),
        (["--plot", "plan.txt"], "plot is 'plan.txt', expected a name ending in "),
    ],
)
def test_bad_input_is_one_sentence_with_bound_and_remedy(
    arguments: list[str], begins: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if "--plot" in arguments:
        pytest.importorskip("matplotlib")
    text = refused(capsys, *H200_TP8[1:], *arguments)
    assert text.startswith(begins)
    remedy = text.rpartition("; ")[2]
    assert len(remedy) > 5


def test_what_has_no_source_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    text = refused(capsys, "--model", "deepseek-v3.2", "--gpu", "h200", "--tp", "8")
    assert "weights of deepseek-v3.2" in text
    assert "--weights-gib" in text
    assert "--max-model-len" in refused(
        capsys, "--model", "glm-5.1", "--gpu", "h200", "--tp", "8", "--weights-gib", "700"
    )
    assert "--gpu" in refused(capsys)
    assert "no draft layers" in refused(
        capsys,
        *("--model", "glm-5.1", "--gpu", "h200", "--tp", "8", "--weights-gib", "700"),
        *("--max-model-len", "131072", "--mtp", "1"),
    )


def test_every_fact_has_a_source_and_secondary_ones_say_so() -> None:
    for gpu in GPUS.values():
        assert gpu.memory_source
        assert gpu.link_source
    for model in MODELS.values():
        assert model.source
        assert (model.weights_gib is None) == (model.weights_source == "")
        assert model.secondary == model.source.startswith("secondary")
    assert GPUS["b300"].secondary
    assert MODELS["glm-5.1"].weights_gib is None


def test_names_are_found_however_they_are_written() -> None:
    assert find_gpu("RTX PRO 6000") is GPUS["rtx-pro-6000"]
    assert find_gpu("H200") is GPUS["h200"]
    assert find_model("zai-org/GLM-5.3") is MODELS["glm-5.3"]
    assert find_model("deepseek-ai/DeepSeek-V3.2") is MODELS["deepseek-v3.2"]


def test_a_configuration_and_the_profile_of_its_model_give_the_same_plan(tmp_path: Path) -> None:
    by_name = answer(glm(mtp=3))
    model = find_model(str(write_config(tmp_path)))
    by_file = answer(
        Request(
            model=model,
            gpu=GPUS["h200"],
            tp=8,
            mtp=3,
            weights_gib=MODELS["glm-5.3"].weights_gib,
        )
    )
    assert by_file["points"] == by_name["points"]
    assert find_model(str(tmp_path)) == model


def test_the_checkpoint_beside_a_configuration_gives_the_weights(tmp_path: Path) -> None:
    path = write_config(tmp_path)
    assert find_model(str(path)).weights_gib is None
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": 3 * 2**30}, "weight_map": {}}))
    assert find_model(str(path)).weights_gib == 3.0


def test_a_nested_text_configuration_is_read(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "outer", "text_config": GLM_CONFIG}))
    assert find_model(str(path)).layers == 78


@pytest.mark.parametrize(
    ("changes", "begins"),
    [
        ({"index_topk": None}, "index_topk is missing in config.json, so the model has no indexer"),
        ({"num_hidden_layers": None}, "num_hidden_layers is missing in config.json; "),
        ({"num_hidden_layers": -78}, "num_hidden_layers is -78 in config.json, expected a count; "),
        ({"kv_lora_rank": "512"}, "kv_lora_rank is '512' in config.json, expected a count; "),
        ({"index_kpool": 4}, "index_kpool is 4, expected 1: "),
        ({"index_topk_pattern": 7}, "index_topk_pattern is 7, expected letters; "),
        ({"model_type": "deepseek_v4"}, "model_type is 'deepseek_v4', expected one with "),
    ],
)
def test_a_configuration_that_cannot_be_planned_is_refused(
    changes: dict[str, Any], begins: str, tmp_path: Path
) -> None:
    path = write_config(tmp_path, **changes)
    with pytest.raises(ConfigError) as caught:
        find_model(str(path))
    assert str(caught.value).startswith(begins)


def test_numbers_of_a_configuration_are_bounded_and_cut_short(tmp_path: Path) -> None:
    assert find_model(str(write_config(tmp_path, num_hidden_layers=4096))).layers == 4096
    for layers in (4097, 100_000_000, 2**31 - 1, 10**4000):
        with pytest.raises(ConfigError, match=r"expected at most 4096; correct it$") as caught:
            find_model(str(write_config(tmp_path, num_hidden_layers=layers)))
        assert len(str(caught.value)) < 150
    with pytest.raises(ConfigError, match="num_hidden_layers is 2147483647, expected at most 4096"):
        _core.layers_with_indexer(2**31 - 1, 4, 3)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[" * 200_000, "the JSON is nested too deeply"),
        ('{"a":' * 200_000, "the JSON is nested too deeply"),
        ('{"index_topk": ' + "9" * 10_000 + "}", "not JSON that can be read"),
        ("{", "not JSON at line 1, column 2"),
        (b"\xff", "not UTF-8 at byte 0"),
    ],
    ids=["list", "object", "digits", "cut", "bytes"],
)
def test_a_configuration_that_cannot_be_read_is_one_sentence_with_its_name(
    text: str | bytes, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    found = refused(capsys, "--model", str(path), "--gpu", "h200")
    assert found.startswith(f"{path}: {reason}")


def test_a_checkpoint_of_an_impossible_size_gives_no_weights(tmp_path: Path) -> None:
    path = write_config(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    for total in ("1" + "0" * 4000, "Infinity", "NaN", "-1", '"7"'):
        index.write_text(f'{{"metadata": {{"total_size": {total}}}}}')
        assert find_model(str(path)).weights_gib is None, total


def test_weights_that_do_not_fit_at_all_are_the_reason_given(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = refused(capsys, "--gpu", "h200")
    assert text.endswith("; the weights do not fit: raise --tp (or --gpus) to 8 or more")


def test_ranks_that_are_advised_share_the_heads_of_a_configuration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--gpu", "h200", "--weights-gib", "703.8"]
    # Seven ranks hold the weights; where the heads are not known nothing is added to that.
    for heads, ranks in ((None, 7), (64, 8), (63, 7), (90, 9)):
        path = write_config(tmp_path, num_attention_heads=heads)
        text = refused(capsys, "--model", str(path), *arguments)
        assert text.endswith(f"raise --tp (or --gpus) to {ranks} or more")
    assert all(model.attention_heads in (64, 128) for model in MODELS.values())


def test_files_that_are_no_configuration_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config.json"
    for text in ("{", "[1]", "\x00"):
        path.write_text(text)
        found = refused(capsys, "--model", str(path), "--gpu", "h200")
        assert found.endswith("give the model's config.json")


def test_a_model_file_that_is_missing_is_said_to_be_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config.json"
    remedy = "give the folder of a model, or its config.json"
    assert refused(capsys, "--model", str(tmp_path)) == f"{path} is missing; {remedy}"
    for name in (str(path), str(tmp_path / "none"), "./none", "none.json"):
        text = refused(capsys, "--model", name)
        assert text.startswith(f"{Path(name)} does not exist; ")
    # An organisation's name before a model's does not make it a path.
    assert refused(capsys, "--model", "meta/llama").startswith("model is 'meta/llama', expected ")
    path.mkdir()
    assert "Is a directory" in refused(capsys, "--model", str(tmp_path))


def test_a_pipeline_stage_that_begins_without_an_indexer_is_refused(tmp_path: Path) -> None:
    # Layers 39 to 77 of GLM: the first leader is layer 42, the one before is 38.
    leaders = _core.layers_with_indexer(78, 4, 3)
    pattern = "".join("F" if leads else "S" for leads in leaders[39:])
    path = write_config(tmp_path, num_hidden_layers=39, index_topk_pattern=pattern)
    model = find_model(str(path))
    with pytest.raises(ConfigError, match="begin the stage 3 layers later or 1 earlier"):
        answer(Request(model=model, gpu=GPUS["h200"], tp=8, weights_gib=90.0))


def test_rows_of_another_width_need_another_dtype(tmp_path: Path) -> None:
    model = find_model(str(write_config(tmp_path, kv_lora_rank=256)))
    request = Request(model=model, gpu=GPUS["h200"], tp=8, weights_gib=90.0)
    with pytest.raises(ConfigError, match="rows have 320 values, expected 512"):
        answer(request)
    wide = Request(model=model, gpu=GPUS["h200"], tp=8, weights_gib=90.0, kv_dtype="bf16")
    assert answer(wide)["model"]["layer_page_bytes"] == 64 * 640


def test_sizes_pass_two_and_four_gibibytes_exactly() -> None:
    # 3,273,604 and 6,547,207 rows of 656 bytes are the first past 2^31 and 2^32.
    arguments = {
        "leaders": [True],
        "draft_layers": 0,
        "row_bytes": 656,
        "block_align_bytes": 1,
        "indexer_row_bytes": 132,
        "tokens_per_indexer_row": 1,
        "top_k": 2048,
        "max_positions": 2**40,
        "request_groups": [],
        "gpu_memory_utilization": 0.9,
        "kv_gib": 1e6,
        "runtime_gib": 0.0,
        "tp": 1,
        "dp": 1,
        "block_size": 64,
        "mtp": 0,
        "registration_gib": 256.0,
        "contexts": [3_273_604, 6_547_207, 2**33],
        "output": 0,
        "batched_tokens": 8192,
        "max_num_seqs": 1024,
        "layout": "layer_major",
    }
    # A crossover is looked for at every page: only a short range is asked for.
    arguments["max_positions"] = 2**33
    for point in _core.plan_capacity(**arguments)["points"]:
        pages = -(-point["context"] // 64)
        assert point["bytes_per_request"]["host"] == pages * 64 * 656


def test_the_binding_takes_only_what_it_knows() -> None:
    with pytest.raises(ConfigError, match="layout is missing"):
        _core.plan_capacity()
    with pytest.raises(ConfigError, match="is no setting; remove it"):
        _core.pack_layers(
            **{"leaders": [True], "draft_layers": 0, "row_bytes": 656, "block_align_bytes": 1},
            **{"indexer_row_bytes": 132, "tokens_per_indexer_row": 1, "top_k": 2048},
            **{"max_positions": 1024, "request_groups": [], "block_size": 64, "mtp": 0},
            nonsense=1,
        )
    with pytest.raises(ConfigError, match="expected a list of booleans"):
        _core.pack_layers(leaders=7, request_groups=[])
    with pytest.raises(CapacityError):
        answer(glm(registration_gib=1e-6, host_pool_gib=384.0))


def test_the_arithmetic_depends_on_nothing(root: Path) -> None:
    manifest = tomllib.loads((root / "rust/plan/Cargo.toml").read_text())
    assert manifest["dependencies"] == {}
    package = manifest["package"]
    assert (package["edition"], package["rust-version"]) == ("2021", "1.63")
    workspace = tomllib.loads((root / "Cargo.toml").read_text())["workspace"]["package"]
    assert package["version"] == workspace["version"]


def test_a_plot_is_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "plan.png"
    assert cli.run([*H200_TP8, "--host-pool-gib", "64", "--plot", str(path)]) == 0
    assert "hotpage carries more" in capsys.readouterr().out
    assert path.read_bytes().startswith(b"\x89PNG")
    assert path.stat().st_size > 20_000


@pytest.mark.filterwarnings("error")
def test_a_plot_of_a_single_length_draws_without_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "plan.png"
    assert cli.run([*H200_TP8, "--max-model-len", "64", "--plot", str(path)]) == 0
    assert path.read_bytes().startswith(b"\x89PNG")
    assert capsys.readouterr().err == ""


def test_a_plot_without_matplotlib_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("matplotlib", "matplotlib.figure", "matplotlib.backends.backend_agg"):
        monkeypatch.setitem(__import__("sys").modules, name, None)
    text = refused(capsys, *H200_TP8[1:], "--plot", str(tmp_path / "a.png"))
    assert text == "--plot needs matplotlib; pip install 'hotpage[plots]'"
