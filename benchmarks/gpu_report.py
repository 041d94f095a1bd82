"""From the cells of benchmarks/gpu.py to docs/gpu-results.md. Needs no GPU."""

from __future__ import annotations

import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import format_bytes
from gpu_timing import Cell

BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"
COMMAND = "python benchmarks/gpu.py"
_NCCL = ("nccl", "nccl-legacy")
_GRADIENTS, _LARGE = "161 gradients of ResNet-50", "one of 64 MiB"
_STEPS = ("step of a ResNet-50, 32 images", "step of a ResNet-50, 128 images")
_NOT_MEASURED = "not measured"


@dataclass(frozen=True)
class Goal:
    """A line of the table of what must be reached: a ratio, and the bound that it has to keep."""

    line: str
    bound: float
    at_most: bool
    ratio: float | None
    interval: tuple[float, float] | None = None  # 95 %, of the median

    @property
    def asked(self) -> str:
        return f"{'at most' if self.at_most else 'at least'} {self.bound:g}"

    @property
    def met(self) -> str:
        if self.ratio is None:
            return "-"
        if self.interval is not None and self.interval[0] <= self.bound <= self.interval[1]:
            return "no difference seen"
        return "yes" if (self.ratio <= self.bound if self.at_most else self.ratio >= self.bound) else "**no**"

    @property
    def measured(self) -> str:
        if self.ratio is None:
            return _NOT_MEASURED
        return f"{self.ratio:.3f}" + (" ({:.3f} to {:.3f})".format(*self.interval) if self.interval else "")


class Lookup:
    """Medians by table, contender and number of ranks; None where something was not measured."""

    def __init__(self, cells: Sequence[Cell]) -> None:
        self._cells = {(cell.table, cell.contender, cell.n_ranks): cell for cell in cells}

    def of(self, table: str, contender: str, n_ranks: int, kind: str) -> float | None:
        """Returns a median in us; `kind` is host, total or device."""
        cell = self._cells.get((table, contender, n_ranks))
        return None if cell is None else getattr(cell, f"{kind}_us")

    def pairs(self, table: str, contender: str, other: str, n_ranks: int) -> list[float] | None:
        """Returns what the contender took, divided by what the other took in the same round; of rank 0."""
        mine, theirs = (self._cells.get((table, name, n_ranks)) for name in (contender, other))
        if mine is None or theirs is None or not mine.totals_us or not theirs.totals_us:
            return None
        return [a / b for a, b in zip(mine.totals_us, theirs.totals_us, strict=True)]

    def best(self, table: str, contenders: Sequence[str], n_ranks: int, kind: str) -> float | None:
        """Returns the least of what was measured."""
        found = [self.of(table, contender, n_ranks, kind) for contender in contenders]
        return min((us for us in found if us is not None), default=None)


def _ratio(a: float | None, b: float | None) -> float | None:
    return None if a is None or b is None else a / b


def median_with_interval(values: Sequence[float]) -> tuple[float, tuple[float, float] | None]:
    """Returns the median and its 95 % interval by order statistics, whatever the distribution; None: too few values.

    The number of values below the true median is binomial; its normal approximation holds from ten values on.
    """
    ordered = sorted(values)
    n = len(ordered)
    if n < _FEWEST_FOR_INTERVAL:
        return statistics.median(ordered), None
    low = max(int((n - 1.96 * n**0.5) / 2) - 1, 0)
    return statistics.median(ordered), (ordered[low], ordered[n - 1 - low])


_FEWEST_FOR_INTERVAL = 10


def _step_goal(find: Lookup, table: str, n_ranks: int, view: str, at: str) -> Goal:
    """Compares round by round: what slows the machine down for a while slows both."""
    line = f"DDP {table}, {at}{view}: horon / nccl"
    backends = [b for b in _NCCL if find.of(table, f"DDP on {b}{view}", n_ranks, "total") is not None]
    if not backends:
        return Goal(line, 1.0, True, None)
    fastest = min(backends, key=lambda b: find.of(table, f"DDP on {b}{view}", n_ranks, "total") or 0.0)
    pairs = find.pairs(table, f"DDP on horon{view}", f"DDP on {fastest}{view}", n_ranks)
    if pairs is None:
        return Goal(line, 1.0, True, None)
    ratio, interval = median_with_interval(pairs)
    return Goal(line, 1.0, True, ratio, interval)


def goals(cells: Sequence[Cell]) -> list[Goal]:
    """Returns the table of what must be reached. Where PyTorch has two NCCL backends, the faster one counts."""
    find = Lookup(cells)
    rows: list[Goal] = []
    for direction in ("pack", "unpack"):
        table = f"{direction}, float32"
        mine = find.of(table, "horon", 1, "device")
        plain, foreach = (find.of(table, name, 1, "device") for name in ("plain copy", "_foreach_copy_"))
        rows.append(Goal(f"{direction} of 64 MiB: plain copy / horon, GPU", 0.9, False, _ratio(plain, mine)))
        rows.append(Goal(f"{direction} of 64 MiB: `_foreach_copy_` / horon, GPU", 1.0, False, _ratio(foreach, mine)))
    for n in (1, 2):
        at = f"{n} rank" + ("s" if n > 1 else "")
        calls = find.best(_GRADIENTS, [f"{b} {way}" for b in _NCCL for way in ("direct", "synchronous")], n, "host")
        best = find.best(_GRADIENTS, [f"{b} {way}" for b in _NCCL for way in _WAYS], n, "total")
        coalesced = "horon one call"
        one_call = _ratio(find.of(_GRADIENTS, coalesced, n, "host"), calls)
        rows.append(Goal(f"161 gradients, {at}, one call: host / 161 calls of nccl", 0.1, True, one_call))
        optimizer = _ratio(_optimizer_host(find, n), calls)
        rows.append(Goal(f"161 gradients, {at}, DistributedOptimizer: host / 161 calls of nccl", 0.1, True, optimizer))
        end = _ratio(find.of(_GRADIENTS, coalesced, n, "total"), best)
        rows.append(Goal(f"161 gradients, {at}, one call: end to end / nccl's best way", 1.0, True, end))
        for kind, bound, text in (("total", 1.02, "end to end"), ("host", 1.0, "host")):
            theirs = find.best(_LARGE, [f"{b} direct" for b in _NCCL], n, kind)
            mine = find.of(_LARGE, "horon direct", n, kind)
            rows.append(Goal(f"64 MiB, {at}: {text} / nccl", bound, True, _ratio(mine, theirs)))
        rows += [_step_goal(find, table, n, view, at) for table in _STEPS for view in ("", ", gradient_as_bucket_view")]
    return rows


_WAYS = ("direct", "synchronous", "coalesced", "one call", "bucketed")


def _optimizer_host(find: Lookup, n_ranks: int) -> float | None:
    """What the optimizer adds to the accumulation of gradients, which is PyTorch's."""
    both = find.of(_GRADIENTS, "horon DistributedOptimizer", n_ranks, "host")
    alone = find.of(_GRADIENTS, "accumulation alone", n_ranks, "host")
    return None if both is None or alone is None else both - alone


def render(machine: Mapping[str, Any] | None, cells: Sequence[Cell], fit: Mapping[str, Any] | None) -> str:
    """Returns the measured part of the report. Without a machine, it says that nothing was measured."""
    lines: list[str] = []
    if machine is None:
        lines.append(f"**Not measured yet.** `{COMMAND}` on a machine with a GPU measures every line of this part.")
    else:
        lines += [f"- {name}: {value}" for name, value in machine.items()]
    lines += ["", "## Must reach", "", _HOW_STEPS_COMPARE, "", "| | asked | measured | met |", "|---|---|---|---|"]
    lines += [f"| {goal.line} | {goal.asked} | {goal.measured} | {goal.met} |" for goal in goals(cells)]
    lines += ["", "## Tables", ""]
    if cells:
        lines.append("Medians and 99th percentiles in microseconds, all ranks pooled; ratios are to the first line.")
    for table, n_ranks in dict.fromkeys((cell.table, cell.n_ranks) for cell in cells):
        lines += _table(table, n_ranks, [c for c in cells if (c.table, c.n_ranks) == (table, n_ranks)])
    if not cells:
        lines += ["| table | ranks | contenders | |", "|---|---|---|---|"]
        lines += [f"| {table} | {at} | {who} | {_NOT_MEASURED}: `{COMMAND}` |" for table, at, who in _PLANNED]
    lines += ["", "## The constants of csrc/cuda/fusion_policy.h", ""]
    lines += _fit_lines(fit)
    return "\n".join(lines)


_HOW_STEPS_COMPARE = """\
Ratios are of medians; those of steps are medians of the rounds' ratios, with 95 % intervals, and where 1 lies in the
interval no difference was seen. Of "DistributedOptimizer" and "one call" one is asked for."""

_PLANNED = (
    ("pack, unpack of 64 MiB; bfloat16; scaled", "1", "horon, `_foreach_copy_`, `cat`, plain copy"),
    (
        "161 gradients of ResNet-50",
        "1, 2",
        "horon, nccl (both of torch 2.15): direct, synchronous, coalesced, one call, bucketed",
    ),
    ("161 gradients of ResNet-50", "1, 2", "horon named, named in one group, DistributedOptimizer"),
    ("1,000 x 4 KiB", "1, 2", "as above"),
    ("one of 64 MiB", "1, 2", "as above, not bucketed"),
    (
        "step of a ResNet-50, 32 and 128 images",
        "1, 2",
        "no communication, DDP on horon and nccl, hvd.DistributedOptimizer",
    ),
)


def _table(table: str, n_ranks: int, cells: Sequence[Cell]) -> list[str]:
    with_device = cells[0].device_us is not None
    size = format_bytes(cells[0].n_bytes) if cells[0].n_bytes >= 1024 else ""
    head = ["", f"### {table}, {n_ranks} rank{'s' if n_ranks > 1 else ''}", ""]
    if size:
        head[1] += f" ({cells[0].n_bytes / (1 << 20):.1f} MiB)"
    on_device = ["GPU", "p99"] if with_device else []
    columns = ["contender", "host", "p99", "end to end", "p99", *on_device, "ratio", "samples"]
    head += ["| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]

    def main_figure(cell: Cell) -> float:
        return cell.device_us if with_device and cell.device_us is not None else cell.total_us

    for cell in cells:
        figures = [cell.host_us, cell.host_p99_us, cell.total_us, cell.total_p99_us]
        if with_device:
            figures += [cell.device_us or 0.0, cell.device_p99_us or 0.0]
        ratio = main_figure(cell) / main_figure(cells[0])
        row = [cell.contender, *(f"{us:,.1f}" for us in figures), f"{ratio:.3f}", str(cell.samples)]
        head.append("| " + " | ".join(row) + " |")
    return head


def _constants() -> dict[str, str]:
    """What the fusion policy is built with."""
    text = (Path(__file__).resolve().parents[1] / "csrc" / "cuda" / "fusion_policy.h").read_text()
    return dict(re.findall(r"^  double (\w+) = ([\d.e-]+);", text, re.MULTILINE))


def _fit_lines(fit: Mapping[str, Any] | None) -> list[str]:
    head = ["| constant | used | measured, 1 rank | measured, 2 ranks |", "|---|---|---|---|"]
    assumed = _constants()
    if not fit:
        command = f"{_NOT_MEASURED}: `{COMMAND} --fit-cost`"
        return head + [f"| `{name}` | {value} | {command} | {command} |" for name, value in assumed.items()]
    lines = head
    for name, value in assumed.items():
        found = [f"{one[name]:.3g}" if one.get(name) else "-" for one in fit["costs"]]
        lines.append(f"| `{name}` | {value} | " + " | ".join(found) + " |")
    lines += ["", "Blocking and non-blocking communicators, in turns:"]
    cells = [Cell(**cell) for cell in fit["communicators"]]
    for table, n_ranks in dict.fromkeys((cell.table, cell.n_ranks) for cell in cells):
        lines += _table(table, n_ranks, [c for c in cells if (c.table, c.n_ranks) == (table, n_ranks)])
    return lines


def write(path: Path, machine: Mapping[str, Any] | None, cells: Sequence[Cell], fit: Mapping[str, Any] | None) -> None:
    """Rewrites what is between the markers; the rest of the file stays."""
    text = path.read_text()
    before, rest = text.split(BEGIN, 1)
    _, after = rest.split(END, 1)
    path.write_text(f"{before}{BEGIN}\n{render(machine, cells, fit)}\n{END}{after}")
