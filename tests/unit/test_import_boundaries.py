# SPDX-License-Identifier: Apache-2.0
"""Owns the dependency rules between the layers, as far as source text can show them.

Each rule is a function from sources to complaints, run on the tree and on a planted violation. That
one crossing per step carries everything (rule 7) is not visible in the text and has no check here.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import textwrap
import tomllib
from collections.abc import Iterable
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

Sources = dict[str, str]
"""Path relative to the folder in question -> text."""

# A module uses only earlier levels; within a level there is no cycle.
LEVELS: dict[str, int] = {
    name: level
    for level, names in enumerate(
        [
            ["ids", "error"],
            ["interner", "geometry", "config", "page"],
            ["lease", "pool", "lru"],
            ["residency", "spill", "hot", "index_group", "replay"],
            ["step", "request", "stats"],
            ["coordinator"],
            ["dataplane", "sim", "testing"],
        ]
    )
    for name in names
}
TOP = LEVELS["dataplane"]
REEXPORTS = {"Error": "error", "Result": "error", "Coordinator": "coordinator"}

OUTSIDE_WORLD = re.compile(
    r"\b(?:std::(?:time|thread|env|fs|net|io|process|os|sync)\b|e?println!|dbg!|log::|tracing::"
    r"|pyo3\b|cuda)"
)
CORE_DEPENDENCIES_BANNED = {"pyo3", "log", "tracing", "tokio", "rayon", "libc", "cudarc", "chrono"}
CUDA_INCLUDES_BANNED = re.compile(r"torch|ATen|c10|pybind|tvm|Python\.h|nanobind")


def read(folder: Path, *patterns: str) -> Sources:
    files = {path for pattern in patterns for path in folder.rglob(pattern)}
    return {str(path.relative_to(folder)): path.read_text() for path in sorted(files)}


def rust_code(text: str) -> str:
    """The text without comments and without what follows the first test-only item."""
    text = re.split(r"^\s*#\[cfg\(test\)\]", text, maxsplit=1, flags=re.MULTILINE)[0]
    return re.sub(r"//[^\n]*", "", text)


def used_modules(text: str) -> set[str]:
    """First path segments after `crate::` in code, re-exports resolved."""
    code = rust_code(text)
    names = set(re.findall(r"\bcrate::(\w+)", code))
    for group in re.findall(r"\bcrate::\{([^;]*)\}", code):
        flat = re.sub(r"\{[^{}]*\}", "", group)
        names |= {name.strip().split("::")[0] for name in flat.split(",") if name.strip()}
    return {REEXPORTS.get(name, name) for name in names}


def level_complaints(sources: Sources) -> list[str]:
    complaints, graph = [], dict[str, set[str]]()
    for path, text in sources.items():
        module = path.removesuffix(".rs").split("/")[0]
        if module in ("lib", "main"):
            continue
        for used in used_modules(text) - {module}:
            graph.setdefault(module, set()).add(used)
            unknown = {module, used} - LEVELS.keys()
            if unknown:
                complaints.append(f"{path}: {sorted(unknown)} has no level; add it to the table")
            elif LEVELS[used] > LEVELS[module]:
                complaints.append(f"{path} uses {used}, which is of a later level")
            elif used in ("dataplane", "sim") and LEVELS[module] < TOP:
                complaints.append(f"{path} uses {used}")
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        complaints.append(f"modules use each other: {' -> '.join(error.args[1])}")
    return complaints


def outside_complaints(sources: Sources) -> list[str]:
    return [
        f"{path} mentions {found[0]}"
        for path, text in sources.items()
        for found in OUTSIDE_WORLD.finditer(rust_code(text))
    ]


def binding_complaints(sources: Sources) -> list[str]:
    """A binding that names page states or events decides about paging."""
    named = re.compile(r"\b(?:PageState|PageEvent)\b")
    return [
        f"{path} names {m[0]}" for path, t in sources.items() for m in named.finditer(rust_code(t))
    ]


def include_complaints(sources: Sources) -> list[str]:
    return [
        f"{path} includes {name}"
        for path, text in sources.items()
        for name in re.findall(r'^\s*#\s*include\s*[<"]([^>"]+)', text, re.MULTILINE)
        if CUDA_INCLUDES_BANNED.search(name)
    ]


def imports(text: str) -> set[str]:
    """Dotted names that the module imports anywhere in it."""
    names = set[str]()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def vllm_complaints(sources: Sources) -> list[str]:
    complaints = []
    for path, text in sources.items():
        inside = path.startswith("vllm/")
        if not inside and any(name.split(".")[0] == "vllm" for name in imports(text)):
            complaints.append(f"{path} imports vllm")
        asks = re.search(r"""vllm\.__version__|\bversion\(\s*["']vllm["']""", text)
        if asks and path != "vllm/_compat.py":
            complaints.append(f"{path} asks for vLLM's version")
    return complaints


def side_complaints(sources: Sources) -> list[str]:
    complaints = []
    for path, text in sources.items():
        if not path.startswith("vllm/"):
            continue
        if "scheduler" in path and "torch.cuda" in text:
            complaints.append(f"{path} touches torch.cuda on the scheduler side")
        if "worker" in path and "hotpage._core" in imports(text):
            complaints.append(f"{path} reaches the Coordinator on the worker side")
    return complaints


def docstring_complaints(sources: Sources) -> list[str]:
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)

    def missing(body: Iterable[ast.stmt], prefix: str) -> Iterable[str]:
        for node in body:
            if not isinstance(node, kinds) or node.name.startswith("_"):
                continue
            if ast.get_docstring(node) is None:
                yield f"{prefix}{node.name} has no docstring"
            if isinstance(node, ast.ClassDef):
                yield from missing(node.body, f"{prefix}{node.name}.")

    return [
        complaint
        for path, text in sources.items()
        for complaint in missing(ast.parse(text).body, f"{path}: ")
    ]


def test_core_modules_use_only_earlier_levels(root: Path) -> None:
    assert level_complaints(read(root / "rust/core/src", "*.rs")) == []


def test_a_module_of_a_later_level_is_noticed() -> None:
    assert level_complaints({"page.rs": "use crate::spill::Spill;"}) != []
    assert level_complaints({"lru.rs": "use crate::{ids::BlockId, sim::{A, B}};"}) != []
    assert level_complaints(
        {"hot.rs": "let x = crate::spill::f();", "spill.rs": "crate::hot::g();"}
    )
    assert level_complaints({"novel.rs": "use crate::ids::BlockId;"}) != []
    assert level_complaints({"coordinator/plan.rs": "use crate::dataplane::copy;"}) != []


def test_comments_and_test_code_are_not_taken_for_dependencies() -> None:
    text = "// crate::sim\nuse crate::Result;\n#[cfg(test)]\nmod tests { use crate::testing::A; }"
    assert level_complaints({"page.rs": text}) == []


def test_the_core_reaches_nothing_outside_itself(root: Path) -> None:
    core = root / "rust/core"
    assert outside_complaints(read(core / "src", "*.rs")) == []
    manifest = tomllib.loads((core / "Cargo.toml").read_text())
    assert manifest["dependencies"].keys() & CORE_DEPENDENCIES_BANNED == set()
    assert "#![forbid(unsafe_code)]" in (core / "src/lib.rs").read_text()


def test_a_clock_in_the_core_is_noticed() -> None:
    assert outside_complaints({"step.rs": "use std::time::Instant;"}) != []


def test_the_bindings_take_no_decision_about_pages(root: Path) -> None:
    assert binding_complaints(read(root / "rust/python/src", "*.rs")) == []
    assert binding_complaints({"lib.rs": "if state == PageState::Clean {}"}) != []


def test_device_code_includes_no_framework(root: Path) -> None:
    sources = read(root / "cuda", "*.cu", "*.cuh", "*.h")
    assert sources
    assert include_complaints(sources) == []
    assert include_complaints({"a.cu": "#include <torch/extension.h>"}) != []


def test_kernels_import_without_core_torch_and_vllm() -> None:
    code = textwrap.dedent(
        """
        import sys
        for name in ("hotpage._core", "torch", "vllm"):
            sys.modules[name] = None
        import hotpage.kernels
        import hotpage.kernels._library
        """
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_importing_the_package_loads_nothing_heavy() -> None:
    code = (
        "import sys, hotpage; "
        "print(*{'hotpage._core', 'torch', 'vllm', 'numpy', 'typer'} & sys.modules.keys())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_only_the_adapter_imports_vllm(root: Path) -> None:
    assert vllm_complaints(read(root / "python/hotpage", "*.py")) == []


def test_a_stray_vllm_import_or_version_question_is_noticed() -> None:
    assert vllm_complaints({"memory.py": "from vllm.v1 import core"}) != []
    assert vllm_complaints({"vllm/worker.py": "ok = vllm.__version__ == '0.33.0'"}) != []
    assert vllm_complaints({"vllm/_compat.py": "import vllm\nv = version('vllm')"}) == []


def test_scheduler_and_worker_keep_to_their_sides(root: Path) -> None:
    assert side_complaints(read(root / "python/hotpage", "*.py")) == []
    assert side_complaints({"vllm/scheduler.py": "torch.cuda.synchronize()"}) != []
    assert side_complaints({"vllm/worker.py": "from hotpage import _core"}) != []


def test_public_functions_and_classes_have_docstrings(root: Path) -> None:
    assert docstring_complaints(read(root / "python/hotpage", "*.py")) == []
    assert docstring_complaints({"a.py": "class A:\n  'text'\n  def b(self): ..."}) != []
