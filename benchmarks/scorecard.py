"""Measures horon against what it is meant to reach, line by line, each beside the best that anybody could reach here.

    python benchmarks/scorecard.py --json scorecard.json --plot scorecard.png
    python benchmarks/scorecard.py --only two-ranks,ddp
    python benchmarks/scorecard.py --from FOLDER        # what an earlier run with --keep FOLDER has measured

Runs the other benchmarks, one after the other (about a quarter of an hour), and judges their figures. A line says what
was asked, what was measured, and, where there is one, what a yardstick of the same run has there: a contender that does
less than any implementation has to do. Where the yardstick misses the line, too, nobody can reach it on this machine.
The yardsticks:

    meet    a backend of torch.distributed that moves nothing: its ranks count up in shared memory and wait for each
            other (noop-meet). With more ranks than cores one that places its ranks may be faster: "meet, not strict" is
            for comparison, and puts nothing out of reach.
    noop    a backend that returns at once
    pass    all ranks read and rewrite their tensor once, in place, at the same time: so much memory has to move
    waits   the model without DDP, whose ranks wait for each other after each backward pass

Verdicts: reached; missed; out of reach (missed, and the yardstick misses it, too). A single run of a noisy machine:
figures near a line fall on either side of it.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import common

_FOLDER = Path(__file__).resolve().parent
_KIB, _MIB = 1024, common.kMiB
_LONGEST_S = 500
_CPP_BUILD = _FOLDER.parent / "build" / "benchmarks" / "cpp"

kRuns: dict[str, list[str]] = {
    "two-ranks": [
        *("collectives.py", "--collective", "all_reduce", "--sizes", "4,1K,4K,64K,1M,16M,64M", "--against"),
        "horon-arena,horon-op,gloo,mpi,deepspeed,noop,noop-work,noop-meet,memcpy,pass",
    ],
    "async": ["collectives.py", "--async", "1000", "--sizes", "4K", "--against", "gloo,noop"],
    "moving": [
        *("collectives.py", "--collective", "broadcast,all_gather,reduce_scatter,all_to_all"),
        *("--sizes", "16M,64M", "--against", "gloo,memcpy,pass"),
    ],
    "messages": [
        *("collectives.py", "--collective", "send_recv,barrier", "--sizes", "4,16M", "--against", "gloo,noop-meet"),
    ],
    "window": ["window.py", "--sizes", "4,16M"],
    **{
        f"{n}-ranks": [
            *("collectives.py", "--ranks", str(n), "--sizes", "4,1K,64K,1M,16M", "--against", "gloo,mpi,noop-meet"),
        ]
        for n in (4, 8)
    },
    "busy": ["collectives.py", "--ranks", "4", "--busy", "2", "--sizes", "4", "--against", "gloo"],
    "cpp": ["cpp/run.py", "--ranks", "4,8", "--sizes", "4,1K,64K,1M,16M", "--turns", "3"],
    "ddp": ["ddp_step.py", "--rounds", "20", "--variants", "bare,meet,noop,gloo,horon,horon-arena"],
}


@dataclass(frozen=True)
class Line:
    """One figure that is asked for. `measured` and `yardstick` take it from what was measured; KeyError: not there."""

    run: str
    what: str
    measured: Callable[[Results], float]
    at_least: float | None = None
    at_most: float | None = None
    yardstick: Callable[[Results], float] | None = None
    yardstick_name: str = ""
    is_strict: bool = True  # nobody can be better than the yardstick

    def holds(self, value: float) -> bool:
        return not (
            (self.at_least is not None and value < self.at_least) or (self.at_most is not None and value > self.at_most)
        )

    def share(self, value: float) -> float:
        """Returns how much of what is asked that is; from 1 on the line holds."""
        if self.at_least is not None:
            return value / self.at_least
        assert self.at_most is not None
        return self.at_most / value

    @property
    def asked(self) -> str:
        return f">= {self.at_least:g}" if self.at_least is not None else f"<= {self.at_most:g}"


@dataclass(frozen=True)
class Verdict:
    """A line's figures; `verdict` is one of reached, missed, out of reach, not measured."""

    run: str
    what: str
    asked: str
    measured: float | None
    yardstick_name: str
    yardstick: float | None
    verdict: str


class Results:
    """What the benchmarks have written, by name of the run. Pure."""

    def __init__(self, documents: dict[str, Any]) -> None:
        self._documents = documents

    def timing(self, run: str, collective: str, size_bytes: int, contender: str) -> dict[str, Any]:
        for timing in self._documents[run]["timings"]:
            if (timing["collective"], timing["size_bytes"], timing["contender"]) == (collective, size_bytes, contender):
                found: dict[str, Any] = timing
                return found
        raise KeyError(f"{run}: {collective} of {size_bytes} bytes by {contender}")

    def us(self, run: str, collective: str, size_bytes: int, contender: str) -> float:
        return float(self.timing(run, collective, size_bytes, contender)["median_us"])

    def times_mpi(self, n_ranks: int, size_bytes: int) -> float:
        """Returns how many times faster than MPI_Allreduce the engine is without PyTorch."""
        for row in self._documents["cpp"]["rows"]:
            if (row["ranks"], row["bytes"]) == (n_ranks, size_bytes):
                return float(row["times_faster"])
        raise KeyError(f"cpp: {n_ranks} ranks, {size_bytes} bytes")

    def speed(self, model: str, variant: str) -> float:
        """Returns a training step's speed in per cent of the bare model's."""
        for row in self._documents["ddp"]["results"]:
            if (row["model"], row["variant"]) == (model, variant):
                return 100 * float(row["speed_of_bare"])
        raise KeyError(f"ddp: {model}, {variant}")


def _times(run: str, collective: str, size_bytes: int, slower: str, faster: str) -> Callable[[Results], float]:
    """How many times longer `slower` takes."""
    return lambda r: r.us(run, collective, size_bytes, slower) / r.us(run, collective, size_bytes, faster)


def _least_us(r: Results, size_bytes: int) -> float:
    """What two ranks need at least that wait for each other and then go through a tensor once."""
    return r.us("two-ranks", "all_reduce", 4, "noop-meet") + r.us("two-ranks", "all_reduce", size_bytes, "pass")


def _two_ranks() -> Iterator[Line]:
    run, op = "two-ranks", "all_reduce"

    def above_noop(size_bytes: int, contender: str) -> Callable[[Results], float]:
        return lambda r: r.us(run, op, size_bytes, contender) - r.us(run, op, size_bytes, "noop")

    def at_best(size_bytes: int, other: str) -> Callable[[Results], float]:
        return lambda r: r.us(run, op, size_bytes, other) / _least_us(r, size_bytes)

    for size in (4, _KIB):
        label = common.format_bytes(size)
        yield Line(
            run,
            f"all_reduce {label}: us above a do-nothing backend",
            above_noop(size, "horon"),
            at_most=1,
            yardstick=above_noop(size, "noop-meet"),
            yardstick_name="meet",
        )
        best = _times(run, op, size, "gloo", "noop-meet")
        yield Line(run, f"{label}: x Gloo", _times(run, op, size, "gloo", "horon"), 30, None, best, "meet")
    for size in (4, _KIB, 4 * _KIB, 64 * _KIB):
        label = common.format_bytes(size)
        yield Line(run, f"the operator, {label}: x DeepSpeed", _times(run, op, size, "deepspeed", "horon-op"), 1)
    for other, asked in (("mpi", 1.0), ("gloo", 50.0)):
        best = _times(run, op, 64 * _KIB, other, "noop-meet")
        measured = _times(run, op, 64 * _KIB, other, "horon")
        yield Line(run, f"64 KiB: x {_kNames[other]}", measured, asked, None, best, "meet")
    for other, asked in (("mpi", 1.5), ("gloo", 10.0), ("deepspeed", 1.0)):
        measured = _times(run, op, _MIB, other, "horon")
        yield Line(run, f"1 MiB: x {_kNames[other]}", measured, asked, None, at_best(_MIB, other), "meet, pass")
    for size in (16 * _MIB, 64 * _MIB):
        label = common.format_bytes(size)
        best = _times(run, op, size, "pass", "memcpy")
        yield Line(run, f"{label}: memcpys", _times(run, op, size, "horon", "memcpy"), None, 1.6, best, "pass")
        for other, asked in (("gloo", 6.0), ("deepspeed", 2.0)):
            measured = _times(run, op, size, other, "horon")
            yield Line(run, f"{label}: x {_kNames[other]}", measured, asked, None, at_best(size, other), "meet, pass")
        measured = _times(run, op, size, "horon-arena", "memcpy")
        yield Line(run, f"{label}, arena: memcpys", measured, None, 0.7, best, "pass")
        measured = _times(run, op, size, "gloo", "horon-arena")
        yield Line(run, f"{label}, arena: x Gloo", measured, 12, None, at_best(size, "gloo"), "meet, pass")


def _other_calls() -> Iterator[Line]:
    def us(run: str, op: str, size_bytes: int, contender: str) -> Callable[[Results], float]:
        return lambda r: r.us(run, op, size_bytes, contender)

    run, op, size = "async", "all_reduce", 4 * _KIB
    best = _times(run, op, size, "gloo", "noop")
    yield Line(run, "1000 x 4 KiB: x Gloo", _times(run, op, size, "gloo", "horon"), 100, None, best, "noop")
    yield Line(run, "1000 x 4 KiB: us each", us(run, op, size, "horon"), None, 6, us(run, op, size, "noop"), "noop")

    # Of a broadcast, both ranks' cores may do half.
    def of_pass(op: str, size_bytes: int, share: float) -> Callable[[Results], float]:
        return lambda r: r.us("moving", op, size_bytes, "gloo") / (share * r.us("moving", op, size_bytes, "pass"))

    run = "moving"
    for size in (16 * _MIB, 64 * _MIB):
        label = common.format_bytes(size)
        for op, share in (("broadcast", 0.5), ("all_gather", 1.0)):
            yield Line(run, f"{op} {label}: memcpys", _times(run, op, size, "horon", "memcpy"), None, 1.4)
            measured, best = _times(run, op, size, "gloo", "horon"), of_pass(op, size, share)
            yield Line(run, f"{op} {label}: x Gloo", measured, 4, None, best, "pass")
        yield Line(run, f"reduce_scatter {label}: x Gloo", _times(run, "reduce_scatter", size, "gloo", "horon"), 4)
        measured, best = _times(run, "all_to_all", size, "gloo", "horon"), of_pass("all_to_all", size, 1)
        yield Line(run, f"all_to_all {label}: x Gloo", measured, 3, None, best, "pass")

    run = "messages"
    for op, size, asked in (("send_recv", 4, 10.0), ("send_recv", 16 * _MIB, 3.0), ("barrier", 0, 20.0)):
        what = f"{op} {common.format_bytes(size)}" if size else op
        best = None if size > _KIB else _times(run, op, size, "gloo", "noop-meet")
        name = "" if best is None else "meet"
        yield Line(run, f"{what}: x Gloo", _times(run, op, size, "gloo", "horon"), asked, None, best, name)

    run = "window"
    yield Line(run, "window: put and wait_signal of 4 B: us", us(run, "window", 4, "one way"), None, 2)
    measured = _times(run, "window", 16 * _MIB, "memcpy", "put")
    yield Line(run, "window: put of 16 MiB: of a memcpy's speed", measured, 0.8)


def _many_ranks() -> Iterator[Line]:
    op, loose = "all_reduce", "meet, not strict"

    def spread(run: str, size_bytes: int) -> Callable[[Results], float]:
        return lambda r: float(r.timing(run, op, size_bytes, "horon")["p99_over_median"])

    def of_mpi(n_ranks: int, size_bytes: int) -> Callable[[Results], float]:
        return lambda r: r.times_mpi(n_ranks, size_bytes)

    for n in (4, 8):
        run = f"{n}-ranks"
        for size in (4, _KIB, 64 * _KIB, _MIB, 16 * _MIB):
            label = f"{n} ranks, {common.format_bytes(size)}"
            measured = of_mpi(n, size)
            yield Line("cpp", f"{label}, without PyTorch: x Open MPI", measured, 2 if size == 16 * _MIB else 1)
            if size <= _KIB:
                measured, best = _times(run, op, size, "horon", "mpi"), _times(run, op, size, "noop-meet", "mpi")
                yield Line(run, f"{label}: Open MPI's time, times", measured, None, 3, best, loose, False)
            else:
                measured = _times(run, op, size, "mpi", "horon")
                best = None if size > 64 * _KIB else _times(run, op, size, "mpi", "noop-meet")
                name = "" if best is None else loose
                yield Line(run, f"{label}: x Open MPI", measured, 1, None, best, name, False)
            if size <= 64 * _KIB:
                measured, best = _times(run, op, size, "gloo", "horon"), _times(run, op, size, "gloo", "noop-meet")
                yield Line(run, f"{label}: x Gloo", measured, 50, None, best, loose, False)
            yield Line(run, f"{label}: p99 / p50", spread(run, size), None, 5)
    yield Line(
        "busy", "4 ranks beside two busy processes, 4 B: us", lambda r: r.us("busy", op, 4, "horon"), at_most=100
    )


def _training() -> Iterator[Line]:
    def speed(model: str, variant: str) -> Callable[[Results], float]:
        return lambda r: r.speed(model, variant)

    for model, plain, arena in (("mlp", 92, 97), ("small-layers", 85, 90)):
        what = f"DDP, {model}: % of the bare model's speed"
        for variant, asked in (("horon", plain), ("horon-arena", arena)):
            label = f"{what}, arena" if variant == "horon-arena" else what
            yield Line("ddp", label, speed(model, variant), asked, None, speed(model, "meet"), "waits")


_kNames = {"mpi": "Open MPI", "gloo": "Gloo", "deepspeed": "DeepSpeed"}
kLines: tuple[Line, ...] = (*_two_ranks(), *_other_calls(), *_many_ranks(), *_training())


def judge(line: Line, results: Results) -> Verdict:
    """Pure."""

    def figure(take: Callable[[Results], float] | None) -> float | None:
        try:
            return None if take is None else take(results)
        except KeyError:
            return None

    yardstick, measured = figure(line.yardstick), figure(line.measured)
    if measured is None:
        return Verdict(line.run, line.what, line.asked, None, line.yardstick_name, yardstick, "not measured")
    if line.holds(measured):
        verdict = "reached"
    elif line.is_strict and yardstick is not None and not line.holds(yardstick):
        verdict = "out of reach"
    else:
        verdict = "missed"
    return Verdict(line.run, line.what, line.asked, measured, line.yardstick_name, yardstick, verdict)


def build_cpp() -> None:
    """Builds the benchmarks that need no PyTorch."""
    root = str(_FOLDER.parent)
    configure = ["cmake", "-S", root, "-B", str(_CPP_BUILD), "-DHORON_BENCHMARKS=ON", "-DHORON_BUILD_TESTS=OFF"]
    subprocess.run(configure, check=True, stdout=subprocess.DEVNULL)
    subprocess.run(["cmake", "--build", str(_CPP_BUILD), "--parallel", "2"], check=True, stdout=subprocess.DEVNULL)


def measure(names: Sequence[str], folder: Path) -> None:
    """Runs the benchmarks; each leaves a file in the folder. Of one that fails, the lines are not measured."""
    for name in names:
        script, *arguments = kRuns[name]
        path = folder / f"{name}.json"
        print(f"\n=== {name}: python benchmarks/{script} {' '.join(arguments)}", flush=True)
        try:
            if script.startswith("cpp/"):
                build_cpp()
            limit = [] if script.startswith("cpp/") else ["--timeout", str(_LONGEST_S)]
            command = [sys.executable, str(_FOLDER / script), *arguments, *limit, "--json", str(path)]
            subprocess.run(command, check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            print(f"scorecard: {name}: {error}", file=sys.stderr)


def report(verdicts: Sequence[Verdict], machine: dict[str, Any]) -> None:
    def number(value: float | None) -> str:
        return "-" if value is None else f"{value:.3g}"

    rows = [
        [
            v.what,
            v.verdict,
            v.asked,
            number(v.measured),
            number(v.yardstick),
            v.yardstick_name if v.yardstick is not None else "",
        ]
        for v in verdicts
    ]
    title = f"scorecard, {machine['cores']} cores of {machine['cpu']}, torch {machine['torch']}"
    common.print_table(title, ["", "", "asked", "measured", "at best here", "(yardstick)"], rows)
    counts = {word: sum(v.verdict == word for v in verdicts) for word in dict.fromkeys(v.verdict for v in verdicts)}
    print(", ".join(f"{count} {word}" for word, count in counts.items()))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--only", default=",".join(kRuns), help=f"comma-separated runs: {', '.join(kRuns)}")
    add("--keep", type=Path, help="a folder for the runs' own results")
    add("--from", dest="earlier", type=Path, help="judge what is in that folder, and measure nothing")
    add("--json", type=Path)
    add("--plot", type=Path, help="an image: how much of each line was reached")
    arguments = parser.parse_args()
    arguments.names = [name for name in arguments.only.split(",") if name]
    if unknown := set(arguments.names) - set(kRuns):
        parser.error(f"--only: unknown: {', '.join(sorted(unknown))}; choose from {', '.join(kRuns)}")
    return arguments


def main() -> int:
    arguments = parse_arguments()
    machine = common.machine_info("benchmarks/scorecard.py")
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.earlier or arguments.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        if arguments.earlier is None:
            measure(arguments.names, folder)
        documents = {
            name: json.loads((folder / f"{name}.json").read_text())
            for name in arguments.names
            if (folder / f"{name}.json").exists()
        }
    if arguments.earlier is not None and documents:
        machine = next(iter(documents.values()))["machine"]
    lines = [line for line in kLines if line.run in arguments.names]
    verdicts = [judge(line, Results(documents)) for line in lines]
    report(verdicts, machine)
    if arguments.plot:
        from plots import plot_shares

        shares = [
            (v.what, line.share(v.measured), None if v.yardstick is None else line.share(v.yardstick))
            for line, v in zip(lines, verdicts, strict=True)
            if v.measured is not None
        ]
        plot_shares(arguments.plot, f"scorecard: {machine['cpu']}, torch {machine['torch']}", shares)
    if arguments.json:
        document = {"machine": machine, "lines": [asdict(verdict) for verdict in verdicts]}
        arguments.json.write_text(json.dumps(document, indent=1) + "\n")
    print(f"in {time.monotonic() - started:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
