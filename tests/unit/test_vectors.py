# SPDX-License-Identifier: Apache-2.0
"""Owns the check that the numpy reference agrees with the golden vectors."""

from __future__ import annotations

import importlib.util
import json
import sys
import zlib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

np = pytest.importorskip("numpy")

TESTS = Path(__file__).resolve().parents[1]
VECTORS = TESTS / "vectors"


def _load_reference() -> ModuleType:
    spec = importlib.util.spec_from_file_location("reference", TESTS / "gpu" / "reference.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # dataclasses look their module up by name while the class is built.
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


reference = _load_reference()


def _cases(name: str) -> list[Any]:
    cases = json.loads((VECTORS / name).read_text())["cases"]
    return [pytest.param(case, id=case["name"]) for case in cases]


def _first_difference(got: Any, expected: Any, where: str) -> str | None:
    """The path of the first element that differs, as (row, k, field) would be named."""
    if isinstance(expected, list) and isinstance(got, list) and len(got) == len(expected):
        for i, pair in enumerate(zip(got, expected, strict=True)):
            if difference := _first_difference(*pair, f"{where}[{i}]"):
                return difference
        return None
    return None if got == expected else f"{where}: got {got}, expected {expected}"


def _check(got: dict[str, Any], expected: dict[str, Any], where: str) -> None:
    assert got.keys() == expected.keys(), where
    for key, value in expected.items():
        ours = got[key].tolist() if isinstance(got[key], np.ndarray) else got[key]
        assert (d := _first_difference(ours, value, f"{where}: {key}")) is None, d


def test_every_file_stays_small_and_has_the_known_schema() -> None:
    names = sorted(path.name for path in VECTORS.glob("*.json"))
    assert names == ["copy.json", "invalidate.json", "mirror.json", "pages.json", "resolve.json"]
    for name in names:
        text = (VECTORS / name).read_text()
        assert len(text) < 200_000, name
        document = json.loads(text)
        assert document["schema"] == 1
        case_names = [case["name"] for case in document["cases"]]
        assert len(set(case_names)) == len(case_names), name


@pytest.mark.parametrize("case", _cases("resolve.json"))
def test_resolve(case: dict[str, Any]) -> None:
    states = [reference.HotState(case["hot_rows"]) for _ in range(case["state_rows"])]
    for number, step in enumerate(case["steps"]):
        for state_row in step["reset_state_rows"]:
            states[state_row].reset()
        freed = reference.invalidate(
            states, step["rewritten_host_rows"], step["recycled_host_blocks"], case["block_size"]
        )
        keys = ["logical_topk", "row_request", "num_valid_rows", "seq_len", "state_row"]
        keys += ["residency", "source_block_table", "hot_block_table"]
        batch = reference.Batch(
            **{key: step[key] for key in keys},
            block_size=case["block_size"],
            block_stride_rows=case["block_stride_rows"],
        )
        out = reference.resolve_batch(batch, states)
        got = {
            "invalidated": freed,
            "physical_topk": out.physical_topk,
            "valid_counts": out.valid_counts,
            "copy_count": [len(rows) for rows in out.copy_host_row],
            "copy_host_row": [rows.tolist() for rows in out.copy_host_row],
            "copy_hot_row": [rows.tolist() for rows in out.copy_hot_row],
            "hits": out.hits,
            "misses": out.misses,
            "overflow": out.overflow,
            "row_map": [state.row_map.tolist() for state in states],
            "last_used": [state.last_used.tolist() for state in states],
            "epoch": [state.epoch for state in states],
        }
        _check(got, step["expect"], f"step {number}")


def _run_pool_step(pools: Any, step: dict[str, Any]) -> dict[str, Any]:
    op = step["op"]
    if op in ("copy_rows", "replay_copy"):
        layers = [step["layer"]] if op == "replay_copy" else None
        layers = layers or pools.layers_of_index_group[step["index_group"]]
        lists = step["copy_host_row"], step["copy_hot_row"]
        return {"bytes": pools.copy_misses(layers, *lists, step["block_stride_rows"])}
    if op == "spill_page":
        pages = step["host_block"], step["resident_blocks"], step["num_rows"]
        return {"bytes": pools.spill_page(*pages)}
    if op == "restore_page":
        pages = step["host_block"], step["resident_blocks"], step["num_rows"]
        return {"bytes": pools.restore_page(*pages)}
    if op == "copy_host_page":
        pages = step["source_host_block"], step["host_block"], step["num_rows"]
        return {"bytes": pools.copy_host_page(*pages)}
    if op == "recycle":
        pools.mask[step["host_blocks"]] = False
        return {"mask_words": pools.mask_words(), "full_blocks": pools.full_blocks()}
    assert op == "mirror_rows", op
    counts = pools.mirror_rows(step["layers"], step["resident_slot"], step["host_row"])
    return {
        **dict(zip(("copied", "skipped", "lost"), counts, strict=True)),
        "mask_words": pools.mask_words(),
        "full_blocks": pools.full_blocks(),
    }


@pytest.mark.parametrize(
    "case", [*_cases("copy.json"), *_cases("mirror.json"), *_cases("pages.json")]
)
def test_pool_operations(case: dict[str, Any]) -> None:
    sizes = ["packing", "block_size", "row_bytes", "gpu_blocks", "host_blocks", "host_layout"]
    pools = reference.Pools(**{key: case[key] for key in sizes})
    pools.gpu[:] = reference.filled_bytes(pools.gpu.size, case["gpu_salt"])
    pools.host[:] = reference.filled_bytes(pools.host.size, case["host_salt"])
    for number, step in enumerate(case["steps"]):
        got = _run_pool_step(pools, step)
        got["gpu_crc32"] = zlib.crc32(pools.gpu.data)
        got["host_crc32"] = zlib.crc32(pools.host.data)
        _check(got, step["expect"], f"step {number} ({step['op']})")


@pytest.mark.parametrize("case", _cases("invalidate.json"))
def test_invalidate(case: dict[str, Any]) -> None:
    states = []
    for row_map, last_used in zip(case["row_map"], case["last_used"], strict=True):
        state = reference.HotState(len(row_map))
        state.row_map[:], state.last_used[:] = row_map, last_used
        states.append(state)
    freed = reference.invalidate(
        states, case["rewritten_host_rows"], case["recycled_host_blocks"], case["block_size"]
    )
    got = {
        "freed": freed,
        "row_map": [state.row_map.tolist() for state in states],
        "last_used": [state.last_used.tolist() for state in states],
    }
    _check(got, case["expect"], case["name"])
