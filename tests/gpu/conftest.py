"""Skips everything where there is no GPU (FAIL_WITHOUT_CUDA=1: fails), and ends the ranks' processes."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "python"))
sys.path.insert(0, str(HERE))

import gpu_harness  # noqa: E402  (after its folder is known)
from cuda_simulator import has_gpu_parts  # noqa: E402


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds --backend."""
    text = "backend to test; nccl checks the tests themselves against PyTorch's"
    parser.addoption("--backend", default=gpu_harness.tested_backend(), choices=["horon", "nccl"], help=text)


def pytest_configure(config: pytest.Config) -> None:
    """Registers the markers, and tells the harness the backend."""
    config.addinivalue_line("markers", "needs_kernels: needs a GPU that runs torch's kernels; not for the simulator")
    config.addinivalue_line("markers", "horon_only: what PyTorch's nccl backend does not have, or does otherwise")
    os.environ["HORON_GPU_TESTS_BACKEND"] = config.getoption("--backend")


@lru_cache(maxsize=1)
def why_not() -> str | None:
    """Why the tests can not run here, or None."""
    if gpu_harness.tested_backend() == "horon" and not has_gpu_parts():
        return "horon was built without its GPU parts"
    if gpu_harness.on_simulator():
        return None
    import torch

    if torch.version.cuda is None:
        return "torch is not a CUDA build"
    if torch.cuda.device_count() == 0:
        return "there is no GPU"
    return None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks what can not run: no GPU, slow, not on the simulator, not on nccl."""
    asked = "slow" in (config.getoption("-m") or "") or os.environ.get("HORON_SLOW") == "1"
    if gpu_harness.tested_backend() == "horon" and why_not() is None and importlib.util.find_spec("horon") is None:
        pytest.exit("horon is not installed: build it, or use --backend nccl to check the tests alone", 3)
    for item in items:
        if "slow" in item.keywords and not asked:
            item.add_marker(pytest.mark.skip(reason="slow: HORON_SLOW=1 or -m slow runs it"))
        if "needs_kernels" in item.keywords and gpu_harness.on_simulator():
            item.add_marker(pytest.mark.skip(reason="simulator: runs no kernels of torch's"))
        if "horon_only" in item.keywords and gpu_harness.on_nccl():
            item.add_marker(pytest.mark.skip(reason="nccl: horon's own"))


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skips, or fails, where there is no GPU."""
    reason = why_not()
    if reason is None:
        return
    if os.environ.get("FAIL_WITHOUT_CUDA") == "1":
        pytest.fail(f"FAIL_WITHOUT_CUDA=1, and {reason}", pytrace=False)
    pytest.skip(f"{reason} (FAIL_WITHOUT_CUDA=1 makes this a failure)")


@pytest.fixture(scope="session", autouse=True)
def processes_end() -> Iterator[None]:
    """Ends all ranks after the last test."""
    yield
    gpu_harness.close_session()
