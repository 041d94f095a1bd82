"""What benchmarks/gpu.py makes of its samples: medians of ratios, their intervals, and what counts as reached."""

from __future__ import annotations

import random
import statistics
import sys
from pathlib import Path
from typing import Any

import pytest
from harness import on_gloo

pytestmark = pytest.mark.skipif(on_gloo(), reason="no backend is tested here")


@pytest.fixture
def report(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[2] / "benchmarks"))
    import gpu_report

    yield gpu_report
    for name in ("gpu_report", "gpu_timing", "common"):
        sys.modules.pop(name, None)


def test_intervals_hold_the_median_as_often_as_they_say(report: Any) -> None:
    for n_values in (10, 25, 150):
        hits = 0
        for seed in range(500):
            source = random.Random(seed)
            median, interval = report.median_with_interval([source.expovariate(1) for _ in range(n_values)])
            assert interval[0] <= median <= interval[1]
            hits += interval[0] <= 0.6931 <= interval[1]
        assert hits >= 0.93 * 500, n_values
    assert report.median_with_interval([3.0, 1.0]) == (2.0, None)


def _step(report: Any, contender: str, totals: list[float], table: int = 0) -> Any:
    cell = sys.modules["gpu_timing"].Cell
    median = statistics.median(totals)
    name = report._STEPS[table]
    return cell(name, contender, 1, 0, len(totals), median, median, median, median, None, None, totals)


@pytest.mark.parametrize(("factor", "met"), [(1.0, "no difference seen"), (1.01, "**no**"), (0.99, "yes")])
def test_steps_are_compared_round_by_round(report: Any, factor: float, met: str) -> None:
    """A machine that is slow for some rounds is slow for both; and a hundredth is seen in noise of a tenth."""
    source = random.Random(0)
    rounds = [source.choice((100.0, 120.0)) for _ in range(101)]
    theirs = [one * source.gauss(1, 0.002) for one in rounds]
    mine = [factor * one * source.gauss(1, 0.002) for one in rounds]
    cells = [_step(report, "DDP on horon", mine), _step(report, "DDP on nccl", theirs)]
    goal = next(goal for goal in report.goals(cells) if goal.ratio is not None)
    assert goal.ratio == pytest.approx(factor, abs=0.002)
    assert goal.met == met
    assert f"{goal.ratio:.3f} ({goal.interval[0]:.3f} to {goal.interval[1]:.3f})" == goal.measured


def test_what_was_not_measured_is_said(report: Any) -> None:
    assert {(goal.measured, goal.met) for goal in report.goals([])} == {("not measured", "-")}
    assert "Not measured yet" in report.render(None, [], None)
