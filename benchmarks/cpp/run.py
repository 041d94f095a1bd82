"""Times all_reduce of float32 between processes without PyTorch: horon's engine and MPI_Allreduce, side by side.

    cmake -S . -B build/benchmarks/cpp -DHORON_BENCHMARKS=ON -DHORON_BUILD_TESTS=OFF
    cmake --build build/benchmarks/cpp --parallel 2
    python benchmarks/cpp/run.py --ranks 2,4,8 --json out.json

The two programs run the same loop (loop.h) and take turns: short runs of one and the other, `--turns` of each. A figure
is the median over the turns of the run's median (or p99), where a run pools the calls of all ranks; a ratio is the
median over the turns of MPI's median / horon's.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_FOLDER = Path(__file__).resolve().parent
sys.path.insert(0, str(_FOLDER.parent))

import common  # noqa: E402  (of the folder above)
from busy import busy_processes  # noqa: E402

kPrograms = ("horon", "mpi")
kRunSeconds = 600.0
Run = dict[int, dict[str, float]]
"""One run of a program: what loop.h reports, by size in bytes."""


def command(program: str, build: Path, n_ranks: int, mpi_args: Sequence[str], options: Sequence[str]) -> list[str]:
    """Returns the command line of one run; pure but for the user id."""
    executable = str(build / "benchmarks" / "cpp" / f"{program}_allreduce")
    if program == "horon":
        return [executable, "--ranks", str(n_ranks), *options]
    as_root = ["--allow-run-as-root"] if os.getuid() == 0 else []
    return ["mpirun", *as_root, "--oversubscribe", *mpi_args, "-np", str(n_ranks), executable, *options]


def run(arguments: Sequence[str]) -> Run:
    finished = subprocess.run(arguments, stdout=subprocess.PIPE, text=True, timeout=kRunSeconds, check=False)
    if finished.returncode != 0:
        raise RuntimeError(f"exit code {finished.returncode} of: {' '.join(arguments)}")
    lines = [json.loads(line) for line in finished.stdout.splitlines() if line.startswith("{")]
    return {line["bytes"]: line for line in lines}


def measure(n_ranks: int, programs: Sequence[str], arguments: argparse.Namespace) -> dict[str, list[Run]]:
    """Returns each program's runs, in order."""
    options = ["--sizes", ",".join(str(size) for size in arguments.sizes_bytes), "--seconds", str(arguments.seconds)]
    options += ["--pool-bytes", str(2 * common.l3_bytes())]
    runs: dict[str, list[Run]] = {program: [] for program in programs}
    for turn in range(arguments.turns):
        order = programs if turn % 2 == 0 else programs[::-1]
        for program in order:
            runs[program].append(run(command(program, arguments.build, n_ranks, arguments.mpi_args.split(), options)))
    return runs


def summarize(runs: dict[str, list[Run]], n_ranks: int) -> list[dict[str, Any]]:
    """Returns one row for each size. Pure."""
    rows: list[dict[str, Any]] = []
    for size in runs["horon"][0]:
        row: dict[str, Any] = {"ranks": n_ranks, "bytes": size}
        for program, turns in runs.items():
            for figure in ("median_us", "p99_us"):
                row[f"{program}_{figure}"] = statistics.median(turn[size][figure] for turn in turns)
        if "mpi" in runs:
            pairs = zip(runs["mpi"], runs["horon"], strict=True)
            row["times_faster"] = statistics.median(m[size]["median_us"] / h[size]["median_us"] for m, h in pairs)
        rows.append(row)
    return rows


def report(rows: Sequence[dict[str, Any]], programs: Sequence[str], title: str) -> None:
    columns = [
        "size",
        "",
        *(f"{program} {figure}" for program in programs for figure in ("median us", "p99", "p99/p50")),
    ]
    cells = []
    for row in rows:
        line = [common.format_bytes(row["bytes"]), ""]
        for program in programs:
            median, p99 = row[f"{program}_median_us"], row[f"{program}_p99_us"]
            line += [f"{median:,.2f}", f"{p99:,.2f}", f"{p99 / median:.1f}"]
        line += [f"{row['times_faster']:.3g}"] if "times_faster" in row else []
        cells.append(line)
    if "mpi" in programs:
        columns.append("horon is faster by")
    common.print_table(title, columns, cells)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--ranks", default="2,4,8", help="numbers of ranks, one table each")
    add("--sizes", default="4,1K,4K,64K,1M,16M,64M", help="bytes of the tensor")
    add("--turns", type=int, default=5, help="runs of each program")
    add("--seconds", type=float, default=0.3, help="time for one size in one run")
    add("--busy", type=int, default=0, metavar="K", help="measure beside K processes that only compute")
    add("--build", type=Path, default=_FOLDER.parents[1] / "build/benchmarks/cpp", help="the CMake build folder")
    add("--mpi-args", default="", help='more arguments for mpirun, for example "--bind-to none"')
    add("--json", type=Path)
    arguments = parser.parse_args()
    try:
        arguments.sizes_bytes = [common.parse_bytes(size) for size in arguments.sizes.split(",")]
        arguments.rank_counts = [int(count) for count in arguments.ranks.split(",")]
    except ValueError as error:
        parser.error(str(error))
    return arguments


def main() -> int:
    arguments = parse_arguments()
    built = [p for p in kPrograms if (arguments.build / "benchmarks" / "cpp" / f"{p}_allreduce").exists()]
    if "horon" not in built:
        print(f"cpp/run.py: nothing is built in {arguments.build}; see the head of this file", file=sys.stderr)
        return 1
    if "mpi" in built and shutil.which("mpirun") is None:
        built.remove("mpi")
    if "mpi" not in built:
        print("skipped: mpi: Debian, Ubuntu: apt-get install openmpi-bin libopenmpi-dev, then build again")
    machine = common.machine_info("benchmarks/cpp/run.py")
    rows: list[dict[str, Any]] = []
    with busy_processes(arguments.busy):
        for n_ranks in arguments.rank_counts:
            rows += summarize(measure(n_ranks, built, arguments), n_ranks)
            busy = f" beside {arguments.busy} busy processes" if arguments.busy else ""
            title = f"all_reduce without PyTorch, float32, {n_ranks} ranks on {machine['cores']} cores{busy}"
            report([row for row in rows if row["ranks"] == n_ranks], built, title)
    if arguments.json:
        document = {"machine": machine, "benchmark": "cpp", "busy_processes": arguments.busy, "rows": rows}
        arguments.json.write_text(json.dumps(document, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
