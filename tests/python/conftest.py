"""Session-wide fixtures: markers, the end of the process pool, and proof that nothing is left behind."""

from __future__ import annotations

import importlib.util
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))

import harness
from cuda_simulator import CudaSimulator, library

SHM = Path("/dev/shm")

# torch's TCPStore looks up the name of everybody who connects to it, on the thread that serves all. Where the resolver
# does not answer, that takes 5 or 10 s with glibc's defaults, which is longer than some tests let ranks wait.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:2")


def pytest_configure(config: pytest.Config) -> None:
    """Registers the markers."""
    config.addinivalue_line("markers", "slow: takes long or much memory; run with HORON_SLOW=1 or -m slow")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skips slow tests unless they were asked for, and says so early when the backend is not installed."""
    asked = "slow" in (config.getoption("-m") or "") or os.environ.get("HORON_SLOW") == "1"
    for item in items:
        if "slow" in item.keywords and not asked:
            item.add_marker(pytest.mark.skip(reason="slow: HORON_SLOW=1 or -m slow runs it"))
    if harness.BACKEND == "horon" and importlib.util.find_spec("horon") is None:
        pytest.exit("horon is not installed: build it, or set HORON_TEST_BACKEND=gloo to check the tests alone", 3)


def shm_entries() -> set[str]:
    """Names in /dev/shm that belong to this user, but for semaphores, which other Python programs make all the time."""
    if not SHM.is_dir():
        return set()
    entries = set()
    for entry in SHM.iterdir():
        try:
            if entry.lstat().st_uid == os.getuid() and not entry.name.startswith("sem."):
                entries.add(entry.name)
        except FileNotFoundError:
            continue
    return entries


def _what_it_is(process: psutil.Process) -> str:
    try:
        return f"{process.pid} {process.status()}: {' '.join(process.cmdline())}"
    except psutil.Error as error:  # it has just ended, or nobody waits for it
        return str(error)


@pytest.fixture(scope="session", autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """Ends the pool after the last test; then no process and no shared memory may be left that was not there before."""
    before = shm_entries()
    yield
    harness.close_session()
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline and psutil.Process().children(recursive=True):
        time.sleep(0.05)
    left = psutil.Process().children(recursive=True)
    assert not left, f"processes left behind: {[_what_it_is(one) for one in left]}"
    new = shm_entries() - before
    if harness.on_gloo():
        new = {name for name in new if "horon" in name.lower()}
    assert not new, f"left in /dev/shm: {sorted(new)}"


@pytest.fixture(scope="session")
def cuda_simulator() -> CudaSimulator:
    """The simulated GPU, built if need be; skips where it cannot be."""
    return CudaSimulator(library())


@pytest.fixture
def shm_before() -> set[str]:
    """What /dev/shm held when the test began."""
    return shm_entries()
