# SPDX-License-Identifier: Apache-2.0
"""Owns the build of libhotpage_cuda.so: every src/*.cu, for every architecture, checked.

Run `python cuda/build.py --help`. Objects are kept in build/cuda and compiled again only when the
source, a header, the flags or the compiler changed.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from fatbin import FatbinError, list_images
from toolkit import PYPI_REQUIREMENTS, BuildError, Toolkit, find_toolkit, glibc_target

ROOT = Path(__file__).resolve().parent
LIBRARY = ROOT.parent / "python" / "hotpage" / "lib" / "libhotpage_cuda.so"
BUILD_DIR = ROOT.parent / "build" / "cuda"

# Image -> nvcc's target. sm_90a is Hopper alone, with its own instructions; compute_90 lets a
# driver compile for what the machine code does not cover.
IMAGES = {
    "sm_90a": "arch=compute_90a,code=sm_90a",
    "sm_100": "arch=compute_100,code=sm_100",
    "sm_120": "arch=compute_120,code=sm_120",
    "compute_90": "arch=compute_90,code=compute_90",
}

# No C++ runtime beyond the guards that nvcc's own stubs use.
HOST_FLAGS = "-fPIC,-fvisibility=hidden,-fvisibility-inlines-hidden,-fno-exceptions,-fno-rtti,-Wall"


@dataclass(frozen=True)
class Options:
    """What to build and where."""

    images: tuple[str, ...]
    output: Path
    build_dir: Path
    debug: bool
    line_info: bool
    glibc: str | None


def compile_flags(options: Options) -> list[str]:
    """nvcc's arguments other than the files."""
    targets = [arg for image in options.images for arg in ("-gencode", IMAGES[image])]
    names = ",".join(options.images)
    return [
        "-std=c++17",
        "-O3",
        *targets,
        "-Xptxas=-v",
        f"-Xcompiler={HOST_FLAGS}",
        f'-DHOTPAGE_ARCHITECTURES="{names}"',
        *(["-DHOTPAGE_DEBUG"] if options.debug else []),
        *(["-lineinfo"] if options.line_info else []),
    ]


def _digest(parts: Sequence[str], files: Sequence[Path]) -> str:
    state = hashlib.sha256("\0".join(parts).encode())
    for path in files:
        state.update(path.name.encode() + b"\0")
        state.update(hashlib.sha256(path.read_bytes()).digest())
    return state.hexdigest()


def _is_current(product: Path, digest: str) -> bool:
    stamp = product.with_suffix(".digest")
    return product.exists() and stamp.exists() and stamp.read_text() == digest


def _run(command: Sequence[str | Path], what: str) -> str:
    """Output of a command (both streams).

    Raises:
        BuildError: it failed; its output went to stderr.
    """
    done = subprocess.run(
        [str(part) for part in command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if done.returncode != 0:
        sys.stderr.write(done.stdout)
        raise BuildError(f"{what} failed with exit code {done.returncode}; its output is above")
    return done.stdout


def _compile(source: Path, kit: Toolkit, options: Options) -> tuple[Path, bool]:
    """Object of one source, and whether it had to be compiled."""
    product = options.build_dir / f"{source.stem}.o"
    headers = sorted((ROOT / "include").rglob("*.[hc]*"))
    flags = compile_flags(options)
    digest = _digest([str(kit.version), *flags], [source, *headers])
    if _is_current(product, digest):
        return product, False
    report = _run(
        [kit.nvcc, *flags, f"-I{ROOT / 'include'}", "-c", source, "-o", product],
        f"compiling cuda/src/{source.name}",
    )
    product.with_suffix(".ptxas").write_text(report)
    product.with_suffix(".digest").write_text(digest)
    for line in report.splitlines():
        if "warning" in line:
            print(line, file=sys.stderr)
    return product, True


def _linker(glibc: str | None) -> list[str]:
    """The linker driver, up to where the objects go."""
    cxx = os.environ.get("CXX") or shutil.which("g++")
    if not cxx:
        raise BuildError("no C++ compiler was found; install g++ (apt-get install g++)")
    if glibc is None:
        return [cxx]
    try:
        import ziglang  # noqa: F401
    except ImportError:
        raise BuildError(
            "HOTPAGE_GLIBC needs zig as the linker; run pip install ziglang or unset it"
        ) from None
    # zig brings stubs of every glibc but not the compiler's C++ runtime, which is named as a file.
    runtime = _run([cxx, "-print-file-name=libstdc++.so"], "asking for libstdc++.so").strip()
    target = f"{platform.machine()}-linux-gnu.{glibc}"
    zig = [sys.executable, "-m", "ziglang", "cc", "-target", target]
    # OK because libstdc++ itself may need a newer glibc here; only its symbol names are used.
    return [*zig, runtime, "-Wl,--allow-shlib-undefined"]


def _link(objects: Sequence[Path], kit: Toolkit, options: Options) -> bool:
    """Writes the library; False if it was current."""
    script = ROOT / "exports.map"
    command: list[str | Path] = [
        *_linker(options.glibc),
        "-shared",
        "-s",
        *objects,
        f"-L{kit.library_dir}",
        *("-lcudart_static", "-ldl", "-lrt", "-lpthread"),
        f"-Wl,--version-script={script}",
        *("-Wl,-z,defs", "-Wl,--gc-sections", "-Wl,-soname,libhotpage_cuda.so"),
    ]
    digest = _digest([str(kit.version), *map(str, command)], [script, *objects])
    staged = options.build_dir / options.output.name
    fresh = not _is_current(staged, digest)
    if fresh:
        _run([*command, "-o", staged], "linking libhotpage_cuda.so")
        verify(staged, options.images, len(objects))
        staged.with_suffix(".digest").write_text(digest)
    if options.output.resolve() != staged.resolve():
        options.output.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(staged, options.output)
    return fresh


def verify(library: Path, images: Sequence[str], num_sources: int) -> None:
    """Checks that every compiled source is in the library for every image.

    Raises:
        BuildError: a source or an image is missing, or one too many is there.
    """
    try:
        containers = list_images(library)
    except FatbinError as error:
        raise BuildError(f"the images in {library.name} cannot be listed: {error}") from error
    if len(containers) != num_sources:
        raise BuildError(f"{library.name} holds {len(containers)} sources, expected {num_sources}")
    for found in containers:
        if found != set(images):
            got, expected = ", ".join(sorted(found)), ", ".join(sorted(images))
            raise BuildError(f"{library.name} holds a source for {got}, expected {expected}")


def _num_jobs() -> int:
    text = os.environ.get("HOTPAGE_BUILD_JOBS", "2")
    if not text.isdecimal() or int(text) == 0:
        raise BuildError(f"HOTPAGE_BUILD_JOBS is {text!r}, expected a positive number")
    return int(text)


def build(options: Options) -> None:
    """Compiles what changed, links, verifies and puts the library in its place.

    Raises:
        BuildError: no compiler, or a step failed.
    """
    kit = find_toolkit()
    if kit is None:
        raise BuildError(
            "no usable nvcc was found; run pip install "
            + " ".join(PYPI_REQUIREMENTS)
            + ", or set HOTPAGE_CUDA=0 to build without the kernels"
        )
    sources = sorted((ROOT / "src").glob("*.cu"))
    options.build_dir.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(max_workers=_num_jobs()) as pool:
        results = list(pool.map(lambda source: _compile(source, kit, options), sources))
    objects = [product for product, _ in results]
    reports = [f"# {path.stem}\n{path.with_suffix('.ptxas').read_text()}" for path in objects]
    (options.build_dir / "ptxas.txt").write_text("\n".join(reports))
    linked = _link(objects, kit, options)
    compiled = sum(was_compiled for _, was_compiled in results)
    print(
        f"libhotpage_cuda.so: {compiled} of {len(objects)} sources compiled, "
        f"{'linked' if linked else 'up to date'} (nvcc {kit.version[0]}.{kit.version[1]}, "
        f"{', '.join(options.images)})"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(description="Builds libhotpage_cuda.so.")
    parser.add_argument("--image", action="append", choices=IMAGES, help="default: all of them")
    parser.add_argument("--output", type=Path, default=LIBRARY)
    parser.add_argument("--build-dir", type=Path, default=BUILD_DIR)
    parser.add_argument("--debug", action="store_true", help="compile the device traps in")
    parser.add_argument("--line-info", action="store_true", help="source lines for profilers")
    parser.add_argument("--remove", action="store_true", help="remove the built library and stop")
    args = parser.parse_args(argv)
    if args.remove:
        args.output.unlink(missing_ok=True)
        return 0
    try:
        images = tuple(args.image or IMAGES)
        options = Options(
            images, args.output, args.build_dir, args.debug, args.line_info, glibc_target()
        )
        build(options)
    except BuildError as error:
        print(f"cuda/build.py: error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
