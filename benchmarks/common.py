"""What the benchmarks share: sizes, statistics, the machine's description, tables, JSON and plots."""

from __future__ import annotations

import datetime
import json
import os
import platform
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

kKiB = 1024
kMiB = 1024 * kKiB
_UNITS = {"": 1, "K": kKiB, "M": kMiB, "G": 1024 * kMiB}
_ASSUMED_L3_BYTES = 32 * kMiB


def parse_bytes(text: str) -> int:
    """Reads "4", "64K", "16M" or "1G" (powers of 1024)."""
    match = re.fullmatch(r"(\d+)\s*([KMG]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    if not match:
        raise ValueError(f"not a size: {text!r}; write for example 4, 64K or 16M")
    return int(match[1]) * _UNITS[match[2].upper()]


def format_bytes(size_bytes: int) -> str:
    for unit, bytes_per_unit in (("GiB", 1024 * kMiB), ("MiB", kMiB), ("KiB", kKiB)):
        if size_bytes >= bytes_per_unit and size_bytes % bytes_per_unit == 0:
            return f"{size_bytes // bytes_per_unit} {unit}"
    return f"{size_bytes} B"


@dataclass(frozen=True)
class Timing:
    """One cell: how long a call took, over the samples of all ranks, and the bandwidths that follow from the median.

    algbw is `size_bytes` / time. busbw is algbw times `bus_factor`, which is what the busiest link carries
    (nccl-tests, doc/PERFORMANCE.md): 2 (n - 1) / n for all-reduce, 1 for a copy.
    """

    collective: str
    size_bytes: int
    contender: str
    samples: int
    median_us: float
    p99_us: float
    p99_over_median: float
    min_us: float
    algbw_gb_per_s: float
    busbw_gb_per_s: float


def summarize(
    contender: str, size_bytes: int, bus_factor: float, durations_ns: Sequence[float], *, collective: str
) -> Timing:
    """Requires at least one duration."""
    ordered = sorted(durations_ns)
    median_ns, p99_ns = quantile(ordered, 0.5), quantile(ordered, 0.99)
    algbw = size_bytes / median_ns  # bytes per ns are GB per s
    return Timing(
        collective=collective,
        size_bytes=size_bytes,
        contender=contender,
        samples=len(ordered),
        median_us=median_ns / 1e3,
        p99_us=p99_ns / 1e3,
        p99_over_median=p99_ns / median_ns,
        min_us=ordered[0] / 1e3,
        algbw_gb_per_s=algbw,
        busbw_gb_per_s=algbw * bus_factor,
    )


def quantile(ordered: Sequence[float], fraction: float) -> float:
    """Interpolates linearly between the two nearest of the sorted values."""
    position = fraction * (len(ordered) - 1)
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def machine_info(script: str) -> dict[str, Any]:
    """Describes where and how a result was measured. `script` is the benchmark's path within the repository."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "l3_bytes": l3_bytes(),
        "load_average_before": round(os.getloadavg()[0], 2),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": _torch_version(),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": shlex.join(["python", script, *sys.argv[1:]]),
    }


def _torch_version() -> str:
    try:
        import torch
    except ImportError:
        return "none"
    return str(torch.__version__)


def l3_bytes() -> int:
    """Returns the size of the last-level cache, or an assumption where the system does not tell."""
    caches = Path("/sys/devices/system/cpu/cpu0/cache")
    sizes = [parse_bytes(path.read_text()) for path in caches.glob("index*/size") if path.read_text().strip()]
    return max(sizes, default=_ASSUMED_L3_BYTES)


def default_peers() -> Path:
    """Returns where build_peers.sh puts the peers unless told otherwise; HORON_BENCH_PEERS overrides it."""
    return Path(os.environ.get("HORON_BENCH_PEERS", Path(__file__).resolve().parents[1] / ".venv-peers"))


def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    match = re.search(r"^model name\s*:\s*(.+)$", cpuinfo.read_text(), re.MULTILINE) if cpuinfo.exists() else None
    return match[1] if match else platform.processor() or platform.machine()


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Prints with rich where it is installed, and as plain text otherwise. The first two columns are left-aligned."""
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        _print_plain_table(title, columns, rows)
        return
    table = Table()
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i < 2 else "right")
    for row in rows:
        table.add_row(*row)
    # Where nobody looks (a pipe, a log) no column is cut.
    console = Console(width=None if sys.stdout.isatty() else 160, highlight=False)
    console.print(f"\n{title}", markup=False)  # not the table's own title, which is as narrow as the table
    console.print(table)


def _print_plain_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    widths = [max(len(row[i]) for row in [columns, *rows]) for i in range(len(columns))]
    print(f"\n{title}")
    for row in [columns, ["-" * width for width in widths], *rows]:
        cells = (
            cell.ljust(width) if i < 2 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        print("  ".join(cells).rstrip())


def timing_rows(timings: Sequence[Timing], without_bandwidth: Sequence[str] = ()) -> tuple[list[str], list[list[str]]]:
    """Returns columns and rows for `print_table`; `without_bandwidth` names contenders that move no data."""
    columns = ["size", "contender", "median us", "p99 us", "p99/p50", "algbw GB/s", "busbw GB/s", "samples"]
    rows = [
        [
            format_bytes(t.size_bytes),
            t.contender,
            f"{t.median_us:,.2f}" if t.median_us < 100 else f"{t.median_us:,.1f}",
            f"{t.p99_us:,.1f}",
            f"{t.p99_over_median:.1f}",
            "-" if t.contender in without_bandwidth or not t.size_bytes else f"{t.algbw_gb_per_s:.3g}",
            "-" if t.contender in without_bandwidth or not t.size_bytes else f"{t.busbw_gb_per_s:.3g}",
            f"{t.samples:,}",
        ]
        for t in timings
    ]
    return columns, rows


def ratios(timings: Sequence[Timing], subject: str) -> dict[int, dict[str, float]]:
    """Returns, by size in bytes and other contender, its median time / the subject's: above 1 the subject wins."""
    medians = {(t.size_bytes, t.contender): t.median_us for t in timings}
    return {
        size: {
            other: median / medians[size, subject]
            for (size_of_other, other), median in medians.items()
            if size_of_other == size and other != subject
        }
        for size in sorted({t.size_bytes for t in timings if t.contender == subject})
    }


def ratios_by_collective(timings: Sequence[Timing], subject: str) -> dict[str, dict[str, dict[str, float]]]:
    """Returns `ratios` by collective, with the sizes as text, as JSON has them."""
    return {
        collective: {
            str(size): row for size, row in ratios([t for t in timings if t.collective == collective], subject).items()
        }
        for collective in dict.fromkeys(t.collective for t in timings)
    }


def format_ratio(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.3g}"


def write_json(path: Path, machine: Mapping[str, Any], timings: Sequence[Timing], **more: Any) -> None:
    document = {"machine": dict(machine), **more, "timings": [asdict(timing) for timing in timings]}
    path.write_text(json.dumps(document, indent=1) + "\n")
