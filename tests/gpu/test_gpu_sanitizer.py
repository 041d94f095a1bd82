"""compute-sanitizer over the pack kernel and a fused call: no access outside of memory, no race."""

from __future__ import annotations

import os
import shutil
import site
import subprocess
import sys
from pathlib import Path

import pytest
from gpu_harness import environment_of

pytestmark = [pytest.mark.horon_only, pytest.mark.needs_kernels]

HERE = Path(__file__).resolve().parent
FOUND_SOMETHING = 86


def _sanitizer() -> str:
    """The toolkit's, or that of NVIDIA's package for Python."""
    of_python = [f"{folder}/nvidia/cu13/bin/compute-sanitizer" for folder in site.getsitepackages()]
    for candidate in ("compute-sanitizer", "/usr/local/cuda/bin/compute-sanitizer", *of_python):
        path = shutil.which(candidate)
        if path:
            return path
    why = "compute-sanitizer is not there: it comes with the CUDA toolkit, or pip install nvidia-cuda-sanitizer-api"
    if os.environ.get("FAIL_WITHOUT_CUDA") == "1":
        pytest.fail(why)
    pytest.skip(why)


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **environment_of(0)}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)


def test_the_program_runs_by_itself() -> None:
    done = _run([sys.executable, str(HERE / "sanitized_program.py")])
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_nothing_is_found(tool: str) -> None:
    options = ["--tool", tool, "--error-exitcode", str(FOUND_SOMETHING)]
    # NCCL's own kernels share memory in ways that racecheck does not know; torch asks CUDA questions that may fail.
    more = {"memcheck": ["--report-api-errors", "no"], "racecheck": ["--kernel-name", "kernel_substring=pack_kernel"]}
    options += more[tool]
    done = _run([_sanitizer(), *options, sys.executable, str(HERE / "sanitized_program.py")])
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-3000:]
    assert "done" in done.stdout
