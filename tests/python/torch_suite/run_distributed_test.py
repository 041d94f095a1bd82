"""Runs PyTorch's own distributed_test.py on Gloo, or on horon under the name Gloo.

    python run_distributed_test.py --backend gloo|horon|renamed-gloo [--only PATTERN] [--json OUT]

It needs `expecttest`. Exit status 1 if a test failed, or if one of --list was not executed.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import sys
import time
import traceback
import unittest
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from exceptions import EXCEPTIONS


@dataclass
class Outcome:
    """How one test ended: `outcome` is passed, failed, skipped or exception (not run; see exceptions.py)."""

    name: str
    outcome: str
    seconds: float = 0.0
    detail: str = ""


class OutcomeRecorder(unittest.TestResult):
    """Keeps one Outcome for each test, and prints a line for each that was executed."""

    def __init__(self) -> None:
        super().__init__()
        self.outcomes: list[Outcome] = []
        self._started = 0.0

    def startTest(self, test: unittest.TestCase) -> None:
        super().startTest(test)
        self._started = time.monotonic()

    def addSuccess(self, test: unittest.TestCase) -> None:
        self._record(test, "passed", "")

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:
        self._record(test, "skipped", reason)

    def addFailure(self, test: unittest.TestCase, err: Any) -> None:
        self._record(test, "failed", "".join(traceback.format_exception(*err)))

    addError = addFailure

    def addUnexpectedSuccess(self, test: unittest.TestCase) -> None:
        self._record(test, "failed", "unexpected success")

    def _record(self, test: unittest.TestCase, outcome: str, detail: str) -> None:
        name = test.id().split(".")[-1]
        seconds = time.monotonic() - self._started
        if self.outcomes and self.outcomes[-1].name == name:  # an error in tearDown after the test's own outcome
            if outcome == "failed":
                self.outcomes[-1] = Outcome(name, outcome, seconds, self.outcomes[-1].detail + detail)
            return
        self.outcomes.append(Outcome(name, outcome, seconds, detail))
        if outcome != "skipped":
            print(f"{outcome:7} {seconds:6.1f} s  {name}", flush=True)


def main() -> int:
    arguments = parse_arguments()
    prepare_environment(arguments)
    from suite_cases import DistributedSuite  # reads the environment that was just set

    names = choose(list(unittest.TestLoader().getTestCaseNames(DistributedSuite)), arguments)
    excepted = [name for name in names if arguments.backend == "horon" and name in EXCEPTIONS]
    recorder = OutcomeRecorder()
    started = time.monotonic()
    for name in names:
        if name not in excepted:
            DistributedSuite(name).run(recorder)
    outcomes = recorder.outcomes + [Outcome(name, "exception", detail=EXCEPTIONS[name]) for name in excepted]
    return report(outcomes, time.monotonic() - started, arguments)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=("gloo", "horon", "renamed-gloo"), default="horon")
    parser.add_argument("--only", metavar="PATTERN", help="part of a test's name, or a pattern with * and ?")
    parser.add_argument("--list", type=Path, metavar="FILE", help="run only the tests named in FILE, one a line")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the outcome of every test here")
    parser.add_argument(
        "--record-passes",
        type=Path,
        metavar="FILE",
        help="write the names of the passed tests here",
    )
    parser.add_argument("--world-size", type=int, default=2)
    parser.add_argument("--timeout", type=int, default=120, help="seconds until a test counts as hung (default 120)")
    parser.add_argument(
        "--start-method",
        choices=("fork", "spawn"),
        default="fork",
        help="how a rank's process starts; spawn is upstream's own, and imports torch anew for every rank",
    )
    return parser.parse_args()


def prepare_environment(arguments: argparse.Namespace) -> None:
    """Sets what upstream's runner sets; torch and the suite read it when they are imported."""
    os.environ.update(
        BACKEND="gloo",
        WORLD_SIZE=str(arguments.world_size),
        INIT_METHOD="file://set anew for each test, as TEMP_DIR is, by upstream's setUp",
        HORON_SUITE_BACKEND=arguments.backend,
        HORON_SUITE_START_METHOD=arguments.start_method,
        DISTRIBUTED_TESTS_DEFAULT_TIMEOUT=str(arguments.timeout),
    )
    for threads in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ.setdefault(threads, "1")


def choose(names: list[str], arguments: argparse.Namespace) -> list[str]:
    if arguments.list:
        wanted = set(arguments.list.read_text().split())
        if missing := wanted - set(names):
            raise SystemExit(f"{arguments.list}: not in this torch's suite: {', '.join(sorted(missing))}")
        names = [name for name in names if name in wanted]
    if arguments.only:
        pattern = arguments.only if any(c in arguments.only for c in "*?[") else f"*{arguments.only}*"
        names = [name for name in names if fnmatch.fnmatchcase(name, pattern)]
    return names


def report(outcomes: list[Outcome], seconds: float, arguments: argparse.Namespace) -> int:
    import torch

    by_outcome = {
        kind: [outcome for outcome in outcomes if outcome.outcome == kind]
        for kind in ("passed", "failed", "skipped", "exception")
    }
    counts = {kind: len(members) for kind, members in by_outcome.items()}
    counts = {"total": len(outcomes), "executed": counts["passed"] + counts["failed"], **counts}
    for outcome in by_outcome["failed"]:
        print(f"\n=== {outcome.name}\n{outcome.detail}")
    print(
        f"\n{arguments.backend}, torch {torch.__version__}, {arguments.world_size} ranks, {seconds:.0f} s: "
        f"{counts['total']} tests, executed {counts['executed']}, passed {counts['passed']}, "
        f"failed {counts['failed']}, skipped {counts['skipped']}, exceptions {counts['exception']}"
    )
    for outcome in by_outcome["exception"]:
        print(f"  exception: {outcome.name}: {outcome.detail}")
    for outcome in by_outcome["failed"]:
        print(f"  failed: {outcome.name}")
    if arguments.json:
        document = {
            "backend": arguments.backend,
            "torch": torch.__version__,
            "world_size": arguments.world_size,
            "start_method": arguments.start_method,
            "seconds": round(seconds, 1),
            "counts": counts,
            "tests": [asdict(outcome) for outcome in outcomes],
        }
        arguments.json.write_text(json.dumps(document, indent=1) + "\n")
    if arguments.record_passes:
        arguments.record_passes.write_text("".join(f"{outcome.name}\n" for outcome in by_outcome["passed"]))
    not_executed = by_outcome["skipped"] if arguments.list else []
    return 1 if by_outcome["failed"] or not_executed else 0


if __name__ == "__main__":
    sys.exit(main())
