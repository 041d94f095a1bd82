"""Runs functions as ranks with simulated GPUs (tests/cuda_simulator), where torch is a CUDA build.

The fixture `cuda_simulator` of conftest.py builds the simulator once, keeps it under build/, and skips the test where
it cannot be used. Knobs are environment variables, which each new process reads once:

    HORON_SIMULATOR_DEVICES=2             devices of each process (default 1); CUDA_VISIBLE_DEVICES hides some
    HORON_SIMULATOR_DELAY_US=2000         every entry of a stream begins up to so much late, at random
    HORON_SIMULATOR_SEED=1                the same random numbers in each run
    HORON_SIMULATOR_MEMORY_MB=64          of each device (default 8192)
    HORON_SIMULATOR_IGNORE_KERNELS=1      kernels that are not known do nothing, instead of ending the process
    HORON_SIMULATOR_REMOTE_ERROR=1        NCCL reports a peer that died, as it would over a network
    HORON_SIMULATOR_VERBOSE=1             says which functions were called that are not supported
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import harness
import pytest
import torch


def has_gpu_parts() -> bool:
    """Whether the horon that is tested carries CUDA tensors; a CUDA build of torch alone is not enough."""
    try:
        from horon import _build_info
    except ImportError:
        return False
    return bool(_build_info.CUDA)


needs_gpu_parts = pytest.mark.skipif(
    not has_gpu_parts(), reason="horon was built without its GPU parts; HORON_CUDA=1 says what they need"
)

BUILD_SCRIPT = Path(__file__).resolve().parents[1] / "cuda_simulator" / "build.py"


def _build_module() -> Any:
    """The script as a module, under a name that no package and no folder has."""
    spec = importlib.util.spec_from_file_location("horon_cuda_simulator_build", BUILD_SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@functools.cache
def _library_or_reason() -> Path | str:
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is not a CUDA build"
    if torch.cuda.is_available():
        return "a real GPU is here: a simulated one would only hide it"
    script = _build_module()
    try:
        return Path(script.build())
    except script.CannotBuild as error:
        return f"the CUDA simulator cannot be built: {error}"


def library() -> Path:
    """The simulator; skips the test where there is none. That it does not compile is a failure."""
    found = _library_or_reason()
    if isinstance(found, str):
        pytest.skip(found)
    return found


@dataclass(frozen=True)
class CudaSimulator:
    """Starts processes that see simulated GPUs."""

    library: Path

    def outcomes(self, fn: Callable[..., Any], world_size: int, *args: Any, **options: Any) -> list[harness.Outcome]:
        """Runs `fn(rank, world_size, *args)` in new processes and returns how each ended.

        Args:
            options: As of harness.run_fresh_processes; without a process group unless `backend` or `init` asks for it.
        """
        options.setdefault("init", "backend" in options)
        return harness.run_fresh_processes(fn, world_size, *args, preload=str(self.library), **options)

    def run(self, fn: Callable[..., Any], world_size: int = 1, *args: Any, **options: Any) -> list[Any]:
        """The same; every process must end well, and their results are returned by rank.

        Raises:
            RankError: A process failed or hung; with what it wrote.
        """
        outcomes = self.outcomes(fn, world_size, *args, **options)
        harness.assert_clean_exits(outcomes)
        return [outcome.result for outcome in outcomes]
