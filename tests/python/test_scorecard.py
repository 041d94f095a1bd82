"""How benchmarks/scorecard.py judges figures; measures nothing."""

from __future__ import annotations

import dataclasses
import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def scorecard() -> Any:
    sys.path.insert(0, str(BENCHMARKS))
    try:
        spec = importlib.util.spec_from_file_location("scorecard", BENCHMARKS / "scorecard.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module  # dataclasses look for it there
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(BENCHMARKS))
    return module


def _results(scorecard: Any, **us: float) -> Any:
    timings = [
        {"collective": "all_reduce", "size_bytes": 4, "contender": name.replace("_", "-"), "median_us": value}
        for name, value in us.items()
    ]
    return scorecard.Results({"two-ranks": {"timings": timings}})


@pytest.mark.parametrize(
    ("horon", "meet", "verdict"),
    [(6.9, 7.5, "reached"), (7.1, 6.5, "missed"), (8.5, 7.5, "out of reach")],
)
def test_a_missed_line_is_out_of_reach_only_where_its_yardstick_misses_it(
    scorecard: Any, horon: float, meet: float, verdict: str
) -> None:
    results = _results(scorecard, horon=horon, noop=6.0, noop_meet=meet)
    judged = scorecard.judge(scorecard.kLines[0], results)
    assert (judged.asked, judged.verdict) == ("<= 1", verdict)
    assert judged.measured == pytest.approx(horon - 6.0)
    assert judged.yardstick == pytest.approx(meet - 6.0)


def test_a_yardstick_that_can_be_beaten_puts_nothing_out_of_reach(scorecard: Any) -> None:
    loose = dataclasses.replace(scorecard.kLines[0], is_strict=False)
    judged = scorecard.judge(loose, _results(scorecard, horon=8.5, noop=6.0, noop_meet=7.5))
    assert (judged.verdict, judged.yardstick) == ("missed", 1.5)


def test_what_is_missing_is_not_measured_and_never_reached(scorecard: Any) -> None:
    nothing = scorecard.Results({})
    assert {scorecard.judge(line, nothing).verdict for line in scorecard.kLines} == {"not measured"}
    without_yardstick = scorecard.judge(scorecard.kLines[0], _results(scorecard, horon=8.5, noop=6.0))
    assert (without_yardstick.verdict, without_yardstick.yardstick) == ("missed", None)


def test_every_line_belongs_to_a_run_and_asks_for_one_thing(scorecard: Any) -> None:
    assert {line.run for line in scorecard.kLines} == set(scorecard.kRuns)
    for line in scorecard.kLines:
        assert (line.at_least is None) != (line.at_most is None), line.what
        assert (line.yardstick is None) == (not line.yardstick_name), line.what
    names = [line.what for line in scorecard.kLines]
    assert len(set(names)) == len(names)


class _Asked:
    """Results that are all alike, and remember of which run they were asked."""

    def __init__(self) -> None:
        self.runs: set[str] = set()

    def us(self, run: str, *_: Any) -> float:
        self.runs.add(run)
        return 1.0

    def timing(self, run: str, *_: Any) -> dict[str, float]:
        self.runs.add(run)
        return {"p99_over_median": 1.0}

    def times_mpi(self, *_: Any) -> float:
        self.runs.add("cpp")
        return 1.0

    def speed(self, *_: Any) -> float:
        self.runs.add("ddp")
        return 1.0


def test_figures_and_yardsticks_of_a_line_are_of_its_own_run(scorecard: Any) -> None:
    for line in scorecard.kLines:
        for figure in (line.measured, line.yardstick):
            if figure is not None:
                asked = _Asked()
                figure(asked)
                assert asked.runs == {line.run}, line.what
