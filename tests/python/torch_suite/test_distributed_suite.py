"""PyTorch's own distributed_test.py on horon: whatever passes on Gloo passes here.

gloo_passes_<torch>.txt are the tests that Gloo passes with two ranks and no accelerator; a new one is made by
`run_distributed_test.py --backend gloo --record-passes FILE`. HORON_SUITE_BACKEND names another backend to run.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("expecttest", reason="PyTorch's distributed_test.py needs it: pip install expecttest")
pytestmark = pytest.mark.torch_suite

SUITE = Path(__file__).parent
kSuiteTimeoutSeconds = 1800


def list_for(torch_version: str) -> Path:
    """Returns the recorded list of that minor version, or of the nearest older one, or the oldest."""

    def minor(version: str) -> tuple[int, ...]:
        return tuple(int(part) for part in version.split(".")[:2])

    recorded = sorted(SUITE.glob("gloo_passes_*.txt"), key=lambda path: minor(path.stem.split("_")[-1]))
    older = [path for path in recorded if minor(path.stem.split("_")[-1]) <= minor(torch_version)]
    return older[-1] if older else recorded[0]


def run_in_own_session(command: list[str]) -> int:
    """Runs `command` to its end; on a timeout, or when pytest is interrupted, its ranks end with it."""
    runner = subprocess.Popen(command, start_new_session=True)
    try:
        return runner.wait(timeout=kSuiteTimeoutSeconds)
    finally:
        if runner.poll() is None:
            os.killpg(runner.pid, signal.SIGKILL)
            runner.wait()


def test_what_passes_on_gloo_passes_on_horon(tmp_path: Path) -> None:
    backend = os.environ.get("HORON_SUITE_BACKEND", "horon")
    passes_on_gloo = list_for(torch.__version__)
    outcomes = tmp_path / "outcomes.json"
    command = [sys.executable, str(SUITE / "run_distributed_test.py"), "--backend", backend]
    command += ["--list", str(passes_on_gloo), "--json", str(outcomes)]

    status = run_in_own_session(command)

    assert outcomes.exists(), "the suite did not finish; its output is above"
    tests = json.loads(outcomes.read_text())["tests"]
    not_passed = {t["name"]: t["outcome"] for t in tests if t["outcome"] not in ("passed", "exception")}
    assert not not_passed
    assert {t["name"] for t in tests} == set(passes_on_gloo.read_text().split())
    assert status == 0
