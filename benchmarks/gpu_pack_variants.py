"""Tries other constants for the pack kernel: accesses and rounds of a warp, warps, resident blocks, cache hints.

    python benchmarks/gpu_pack_variants.py --build build/pack_variants                 # needs nvcc, and no GPU
    python benchmarks/gpu_pack_variants.py --run build/pack_variants --json out.json   # needs a GPU, and no nvcc

Each variant is a program of its own, built from benchmarks/cuda/pack_variants.cu with csrc/cuda as it is now. Every
program times its kernel and a plain copy by the device in turn; ratios are of one program's run. The table shows, for
each workload, the copy's time over the kernel's.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple, dataclass
from math import prod
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PROGRAM = ROOT / "benchmarks" / "cuda" / "pack_variants.cu"


@dataclass(frozen=True)
class Variant:
    """Constants of csrc/cuda/pack_table.h and pack_kernels.cu; `streaming` adds evict-first hints."""

    unroll: int
    rounds: int
    warps: int
    min_blocks: int
    streaming: int

    @property
    def name(self) -> str:
        return "pack_" + "_".join(map(str, astuple(self)))


# The first one is horon's own.
VARIANTS = (
    Variant(4, 1, 2, 14, 0),
    Variant(4, 1, 2, 14, 1),
    Variant(4, 1, 2, 16, 0),
    Variant(4, 1, 2, 18, 0),
    Variant(4, 1, 4, 8, 0),
    Variant(4, 1, 4, 9, 0),
    Variant(4, 1, 8, 4, 0),
    Variant(2, 1, 2, 16, 0),
    Variant(2, 1, 4, 12, 0),
    Variant(4, 2, 2, 14, 0),
)

_LOAD = "loaded[i] = loads[at + i * kWarpLanes];"
_STREAMING_LOAD = """
#if defined(__CUDA_ARCH__)
      if constexpr (sizeof(Load) == 16) {
        const uint4 hinted =
            __ldcs(reinterpret_cast<const uint4*>(loads + at + i * kWarpLanes));
        memcpy(&loaded[i], &hinted, sizeof hinted);
      } else
#endif
"""
_STORE = "stores[at + i * kWarpLanes] = converted(loaded[i]);"
_STREAMING_STORE = """
#if defined(__CUDA_ARCH__)
      if constexpr (sizeof(Store) == 16) {
        const Store value = converted(loaded[i]);
        uint4 hinted;
        memcpy(&hinted, &value, sizeof hinted);
        __stcs(reinterpret_cast<uint4*>(stores + at + i * kWarpLanes), hinted);
      } else
#endif
"""


def _replaced(text: str, old: str, new: str) -> str:
    if text.count(old) != 1:
        raise SystemExit(f"gpu_pack_variants: pack_lane.h has changed: {old!r} is there {text.count(old)} times")
    return text.replace(old, new)


def _sources(folder: Path, variant: Variant) -> Path:
    """Writes csrc's parts that the kernel needs, with the variant's constants, and returns where."""
    root = folder / f"{variant.name}.src"
    shutil.rmtree(root, ignore_errors=True)
    for part in ("cuda", "core"):
        shutil.copytree(ROOT / "csrc" / part, root / part)
    table = root / "cuda" / "pack_table.h"
    text = _replaced(table.read_text(), "kUnroll = 4;", f"kUnroll = {variant.unroll};")
    per_warp = "kBytesPerWarp = kUnroll * kWarpLanes * kAccessBytes"
    table.write_text(_replaced(text, f"{per_warp};", f"{per_warp} * {variant.rounds};"))
    lane = root / "cuda" / "pack_lane.h"
    text = lane.read_text()
    if variant.streaming:
        text = _replaced(text, _LOAD, _STREAMING_LOAD + _LOAD)
    if variant.streaming == 1:
        text = _replaced(text, _STORE, _STREAMING_STORE + _STORE)
    lane.write_text(text)
    return root


def build(folder: Path, architecture: str) -> None:
    """Builds a program for each variant; what nvcc says about registers and spills goes beside it."""
    folder.mkdir(parents=True, exist_ok=True)
    nvcc = os.environ.get("CUDACXX") or shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"

    def build_one(variant: Variant) -> None:
        sources = _sources(folder, variant)
        constants = zip(("UNROLL", "ROUNDS", "WARPS", "MIN_BLOCKS", "STREAMING"), astuple(variant), strict=True)
        files = [PROGRAM, *(sources / name for name in ("cuda/pack_plan.cc", "core/error.cc", "core/dtype.cc"))]
        command = [nvcc, "-std=c++20", "-O3", f"-arch={architecture}", "-Xptxas=-v", "-cudart=static", f"-I{sources}"]
        command += [f"-D{name}={value}" for name, value in constants]
        command += [*map(str, files), "-o", str(folder / variant.name)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        (folder / f"{variant.name}.log").write_text(done.stdout + done.stderr)
        if done.returncode != 0:
            raise SystemExit(f"gpu_pack_variants: {variant.name} does not compile:\n{done.stderr[-3000:]}")
        shutil.rmtree(sources)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(build_one, VARIANTS))
    print(f"{len(VARIANTS)} programs in {folder}")


def _workloads() -> str:
    import gpu_workloads
    from common import kKiB, kMiB

    sizes = {
        "64 MiB, one": [64 * kMiB],
        "64 MiB, skewed": [4 * n for n in gpu_workloads.skewed_sizes()],
        "161 gradients": [4 * prod(shape) for shape in gpu_workloads.resnet50_shapes()],
        "1,000 x 4 KiB": [4 * kKiB] * 1000,
        "100 x 10 KiB": [10 * kKiB] * 100,
        "50 x 2 KiB": [2 * kKiB] * 50,
    }
    return "".join(f"{name}\t{' '.join(map(str, each))}\n" for name, each in sizes.items())


def run(folder: Path, rounds: int) -> list[dict[str, Any]]:
    """Runs the programs one after the other; returns what each has measured."""
    workloads = _workloads()
    rows: list[dict[str, Any]] = []
    for variant in VARIANTS:
        command = [str(folder / variant.name), str(rounds)]
        done = subprocess.run(command, input=workloads, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            print(f"gpu_pack_variants: {variant.name}: {done.stderr.strip()}", file=sys.stderr)
        rows += [json.loads(line) for line in done.stdout.splitlines()]
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """Returns the time of a plain copy over that of each variant."""
    constants = ("unroll", "rounds", "warps", "min_blocks", "streaming")
    lines = [f"| workload | what | {', '.join(constants)} | copy (us) | kernel (us) | ratio |"]
    lines.append("|---|---|---|---|---|---|")
    for row in sorted(rows, key=lambda row: (row["workload"], row["kind"], row["us"])):
        figures = f"{row['copy_us']:.1f} | {row['us']:.1f} | {row['copy_us'] / row['us']:.3f}"
        own = ", ".join(str(row[name]) for name in constants)
        lines.append(f"| {row['workload']} | {row['kind']} | {own} | {figures} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", type=Path, metavar="FOLDER", help="build the programs there")
    parser.add_argument("--run", type=Path, metavar="FOLDER", help="run those that are there")
    parser.add_argument("--arch", default="sm_90", help="what nvcc compiles for (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if arguments.build:
        build(arguments.build, arguments.arch)
    if arguments.run:
        rows = run(arguments.run, arguments.rounds)
        if arguments.json:
            arguments.json.write_text(json.dumps(rows, indent=1) + "\n")
        print(table(rows))


if __name__ == "__main__":
    main()
