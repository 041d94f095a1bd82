"""Times collectives of float32 on one host against other backends and libraries, all in one run.

    python benchmarks/collectives.py --collective all_reduce --against gloo,noop,memcpy --json out.json --plot out.png
    python benchmarks/collectives.py --collective all --sizes 4,16M --against gloo,mpi,memcpy
    python benchmarks/collectives.py --async 1000 --sizes 4K --against gloo,mpi

The contenders take turns, batch by batch; those of one torch share processes and tensors, the peers with launchers of
their own sleep in between. So what the machine does meanwhile falls on all of them. Before each batch the inputs are
rewritten and all ranks start together; a few tiny calls, not counted, take up what is left of their skew. Large tensors
rotate over more than twice the last-level cache. A call's duration is the time between two stamps on one rank; medians
and p99 are over all calls of all ranks. Every contender's result is checked once for each size.

Contenders: horon; horon-arena (tensors from horon.empty); horon-op (torch.ops.horon.all_reduce_); gloo; mpi (Open MPI
through mpi4py on NumPy views), horovod, deepspeed (its shared-memory all-reduce): see build_peers.sh; fake (PyTorch's
backend that does nothing, without a flight recorder); noop (a third-party backend that does nothing: the floor of a
call); noop-work (the same, but it tells the flight recorder that operations have ended, as horon does); noop-meet (the
same, but all-reduces, barriers and messages wait for the other ranks' counters, and for nothing else: the floor of a
call that depends on the others); memcpy (each rank copies what it would receive); memcpy-all (each rank copies the
larger side of the call); pass (each rank reads and rewrites the larger side once, in place).
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import common
import noop
from busy import busy_processes
from families import Family, RankFailed, environment, family_of, kPeerModules, launch_commands, peer_python, why_missing
from operations import bus_factor, calls_per_sample, kCollectives, kElementBytes

kLargeBytes = common.kMiB  # from here on the tensors rotate through more memory than the caches hold
kSmallPool = 8
kTrialCalls = 4
kBatchSeconds = 0.02
kBatchCalls = (8, 1000)  # least and most calls of a small batch
kLeastRounds = 5
kDividesTensor = ("all_gather", "reduce_scatter", "all_to_all", "gather", "scatter")
kReferences = (*noop.kMovesNothing, "memcpy", "memcpy-all", "pass")


@dataclass(frozen=True)
class Effort:
    """How long is measured."""

    rounds: int
    cell_seconds: float
    async_calls: int  # 0: synchronous


@dataclass(frozen=True)
class CellPlan:
    """How one contender is measured at one size: `rounds` batches of `calls` calls."""

    calls: int
    rounds: int


def plan_cell(size_bytes: int, pool: int, call_seconds: float, rewrite_seconds: float, effort: Effort) -> CellPlan:
    """Decides from one call's estimated duration. Pure."""
    if effort.async_calls or size_bytes >= kLargeBytes:
        calls = pool
    else:
        least, most = kBatchCalls
        calls = max(least, min(most, int(kBatchSeconds / call_seconds)))
    batch_seconds = calls * call_seconds + rewrite_seconds
    return CellPlan(calls, max(kLeastRounds, min(effort.rounds, int(effort.cell_seconds / batch_seconds))))


def pool_size(size_bytes: int, effort: Effort, l3_bytes: int) -> int:
    """Returns over how many buffers the calls rotate. Pure."""
    if effort.async_calls:
        return effort.async_calls
    return max(2, 2 * l3_bytes // size_bytes + 1) if size_bytes >= kLargeBytes else kSmallPool


def rounded_size(collective: str, size_bytes: int, n_ranks: int) -> int:
    """Returns the size that divides among the ranks where it has to. Pure."""
    if collective == "barrier":
        return 0
    unit = kElementBytes * (n_ranks if collective in kDividesTensor else 1)
    return -(-size_bytes // unit) * unit


def takes_part(round_index: int, rounds: int, plan: CellPlan) -> bool:
    """Spreads a contender's batches evenly over the rounds. Pure."""
    return (round_index * plan.rounds) // rounds != ((round_index + 1) * plan.rounds) // rounds


class Driver:
    """Gives the ranks their work. Ownership: owns the families."""

    def __init__(self, n_ranks: int, timeout_seconds: float) -> None:
        self._n_ranks = n_ranks
        self._deadline = time.monotonic() + timeout_seconds
        self._families: dict[str, Family] = {}
        self._order: list[str] = []
        self.versions: dict[str, str] = {}
        self.skipped: dict[str, str] = {}

    def start(self, names: Sequence[str], folder: Path, peers: Path, mpi_args: Sequence[str]) -> None:
        """Starts the processes that the contenders need; those that cannot run go to `skipped`."""
        by_family: dict[str, list[str]] = {}
        for name in names:
            by_family.setdefault(family_of(name), []).append(name)
        for family_name, members in by_family.items():
            is_peer = family_name in kPeerModules
            missing = why_missing(family_name, peers) if is_peer else None
            if missing is None:
                python = peer_python(peers) if is_peer else Path(sys.executable)
                extra = noop.environment() if any(name in noop.kNames for name in members) else {}
                family = self._families[family_name] = Family(family_name, self._n_ranks)
                commands = launch_commands(family_name, self._n_ranks, python, mpi_args)
                try:
                    family.start(folder, commands, environment(family_name, extra))
                    with family.awake():
                        made = family.ask(self._deadline, {"do": "make", "names": members})[0]
                    self.skipped |= made["skipped"]
                    self.versions |= made["versions"]
                except RankFailed as error:
                    if not is_peer:
                        raise
                    self._families.pop(family_name).kill()
                    missing = str(error)
            if missing is not None:
                self.skipped |= dict.fromkeys(members, missing)
        self._order = [name for name in names if name not in self.skipped]

    def end(self) -> None:
        for family in self._families.values():
            family.end()

    def kill(self) -> None:
        for family in self._families.values():
            family.kill()

    def measure(self, collective: str, size_bytes: int, effort: Effort, l3_bytes: int) -> list[common.Timing]:
        """Times all contenders that have the collective at one size.

        Raises:
            RankFailed: A rank ended, was too slow, or has a wrong result.
        """
        pool = pool_size(size_bytes, effort, l3_bytes)
        supported = self._prepare(collective, size_bytes, pool, effort)
        contenders = [name for name in self._order if name in supported]
        plans: dict[str, CellPlan] = {}
        for name in contenders:
            self._check(name)
            trial, rewrite_seconds = self._batch(name, min(kTrialCalls, pool))
            call_seconds = max(min(ns, default=0) for ns in trial) / 1e9
            plans[name] = plan_cell(size_bytes, pool, max(call_seconds, 1e-7), rewrite_seconds, effort)

        durations_ns: dict[str, list[int]] = {name: [] for name in contenders}
        rounds = max(plan.rounds for plan in plans.values())
        for round_index in range(rounds):
            first = round_index % len(contenders)  # nobody always follows the same one
            for name in contenders[first:] + contenders[:first]:
                if takes_part(round_index, rounds, plans[name]):
                    for one in self._batch(name, plans[name].calls)[0]:
                        durations_ns[name] += one
        parts = calls_per_sample(collective)
        factor = bus_factor(collective, self._n_ranks)
        return [
            common.summarize(
                name,
                size_bytes,
                1.0 if name in kReferences else factor,
                [ns / parts for ns in durations_ns[name]],
                collective=collective,
            )
            for name in contenders
            if durations_ns[name]
        ]

    def _prepare(self, collective: str, size_bytes: int, pool: int, effort: Effort) -> set[str]:
        supported: set[str] = set()
        for family in self._families.values():
            with family.awake():
                replies = family.ask(
                    self._deadline,
                    {
                        "do": "prepare",
                        "collective": collective,
                        "size_bytes": size_bytes,
                        "pool": pool,
                        "is_async": effort.async_calls > 0,
                    },
                )
            supported |= set.intersection(*(set(reply["supported"]) for reply in replies))
        return supported

    def _check(self, name: str) -> None:
        family = self._families[family_of(name)]
        with family.awake():
            for rank, reply in enumerate(family.ask(self._deadline, {"do": "check", "name": name})):
                if "wrong" in reply:
                    raise RankFailed(f"rank {rank}: {reply['wrong']}")

    def _batch(self, name: str, calls: int) -> tuple[list[list[int]], float]:
        """Returns each rank's durations, and how long the slowest rewrote."""
        family = self._families[family_of(name)]
        with family.awake():
            family.ask(self._deadline, {"do": "batch", "name": name, "calls": calls})  # all are ready
            replies = family.ask(self._deadline, {"go": True})
        return [reply["ns"] for reply in replies], max(reply["rewrite_seconds"] for reply in replies)


def report(timings: list[common.Timing], arguments: argparse.Namespace, machine: dict[str, Any]) -> None:
    """Prints one collective's tables and writes its plot."""
    collective = timings[0].collective
    title = describe(collective, arguments, machine)
    common.print_table(title, *common.timing_rows(timings, noop.kMovesNothing))
    names = list(dict.fromkeys(t.contender for t in timings))
    subjects = [name for name in names if name.split("-")[0] == arguments.subject.split("-")[0]]
    others = [name for name in names if name not in subjects]
    medians = {(t.size_bytes, t.contender): t.median_us for t in timings}
    has_floor = "noop" in names
    rows = [
        [
            common.format_bytes(size),
            subject,
            *(common.format_ratio(by_other.get(other)) for other in others),
            *([f"{medians[size, subject] - medians[size, 'noop']:,.2f}"] if has_floor else []),
        ]
        for subject in subjects
        for size, by_other in common.ratios(timings, subject).items()
    ]
    if others:
        columns = ["size", "", *others, *(["us above noop"] if has_floor else [])]
        how = "median of the column / median of the row: above 1 the row is faster"
        common.print_table(f"{how} (fake and noop do nothing, memcpy is a scale)", columns, rows)
    if arguments.plot and collective != "barrier":  # which has no size
        from plots import plot_by_size

        path = arguments.plot
        if len(arguments.collectives) > 1:
            path = path.with_stem(f"{path.stem}_{collective}")
        plot_by_size(
            path, f"{title}, {machine['cpu']}", timings, arguments.subject, without_bandwidth=noop.kMovesNothing
        )


def describe(collective: str, arguments: argparse.Namespace, machine: dict[str, Any]) -> str:
    how = f"{arguments.async_calls} asynchronous calls, then wait" if arguments.async_calls else "synchronous"
    busy = f" beside {arguments.busy} busy processes" if arguments.busy else ""
    where = f"{arguments.ranks} ranks on {machine['cores']} cores{busy}, torch {machine['torch']}"
    return f"{collective}, float32, {how}, {where}"


def parse_arguments(default_collective: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--collective", default=default_collective, help=f"comma-separated, or all: {', '.join(kCollectives)}")
    add("--subject", default="horon", help="the contender that the others are compared with")
    add("--against", default="gloo,fake,memcpy", help="the other contenders, comma-separated")
    add("--ranks", type=int, default=2)
    add("--sizes", default="4,1K,4K,64K,1M,16M,64M", help="bytes; see benchmarks/operations.py for what they mean")
    add("--async", type=int, default=0, dest="async_calls", metavar="N", help="start N operations, then wait for all")
    add("--busy", type=int, default=0, metavar="K", help="measure beside K processes that only compute")
    add("--rounds", type=int, default=40, help="most batches of a cell")
    add("--cell-seconds", type=float, default=2.0, help="time for one contender at one size")
    add("--timeout", type=float, default=1800, help="seconds until the ranks are killed")
    add("--peers", type=Path, default=common.default_peers(), help="the environment that build_peers.sh made")
    add("--mpi-args", default="", help='more arguments for mpirun, for example "--bind-to none"')
    add("--json", type=Path)
    add("--plot", type=Path, help="an image; with several collectives, one each with the name added")
    arguments = parser.parse_args()
    names = arguments.collective.split(",")
    arguments.collectives = list(kCollectives) if names == ["all"] else names
    if unknown := set(arguments.collectives) - set(kCollectives):
        parser.error(f"--collective: unknown: {', '.join(sorted(unknown))}; choose from {', '.join(kCollectives)}")
    try:
        arguments.sizes_bytes = tuple(common.parse_bytes(size) for size in arguments.sizes.split(","))
    except ValueError as error:
        parser.error(str(error))
    if any(size < 4 or size % 4 for size in arguments.sizes_bytes):
        parser.error("--sizes: a size is a multiple of 4 bytes, the size of a float32")
    if "send_recv" in arguments.collectives and arguments.ranks % 2:
        parser.error("--ranks: send_recv is between pairs, so the number of ranks is even")
    return arguments


def run(arguments: argparse.Namespace, driver: Driver, machine: dict[str, Any]) -> list[common.Timing]:
    effort = Effort(arguments.rounds, arguments.cell_seconds, arguments.async_calls)
    timings: list[common.Timing] = []
    for collective in arguments.collectives:
        sizes = dict.fromkeys(rounded_size(collective, size, arguments.ranks) for size in arguments.sizes_bytes)
        ours: list[common.Timing] = []
        for size_bytes in sizes:
            ours += driver.measure(collective, size_bytes, effort, machine["l3_bytes"])
        if ours:
            report(ours, arguments, machine)
        timings += ours
    return timings


def main(benchmark: str = "collectives", default_collective: str = "all_reduce") -> int:
    arguments = parse_arguments(default_collective)
    against = [name for name in arguments.against.split(",") if name]
    names = list(dict.fromkeys([arguments.subject, *against]))
    machine = common.machine_info(f"benchmarks/{benchmark}.py")
    started = time.monotonic()
    driver = Driver(arguments.ranks, arguments.timeout)
    try:
        with tempfile.TemporaryDirectory() as folder:
            driver.start(names, Path(folder), arguments.peers.absolute(), arguments.mpi_args.split())
            for name, reason in driver.skipped.items():
                print(f"skipped: {name}: {reason}")
            with busy_processes(arguments.busy):
                timings = run(arguments, driver, machine)
            driver.end()
    except RankFailed as error:
        print(f"{benchmark}: {error}; all ranks are being ended", file=sys.stderr)
        return 1
    finally:
        driver.kill()
    if arguments.json:
        common.write_json(
            arguments.json,
            {**machine, "versions": driver.versions},
            timings,
            benchmark=benchmark,
            subject=arguments.subject,
            ranks=arguments.ranks,
            async_calls=arguments.async_calls,
            busy_processes=arguments.busy,
            skipped=driver.skipped,
            times_faster=common.ratios_by_collective(timings, arguments.subject),
        )
    print(f"\nmeasured in {time.monotonic() - started:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
