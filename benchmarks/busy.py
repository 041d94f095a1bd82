"""Busy neighbours: processes that only compute, to measure beside."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator

# Looks for its parent now and then, so that it does not outlive a benchmark that was killed.
_PROGRAM = """
import os
parent = os.getppid()
while os.getppid() == parent:
    for _ in range(1_000_000):
        pass
"""


@contextlib.contextmanager
def busy_processes(count: int) -> Iterator[None]:
    """Runs `count` of them; ends them on leaving."""
    hogs = [subprocess.Popen([sys.executable, "-c", _PROGRAM]) for _ in range(count)]
    try:
        yield
    finally:
        for hog in hogs:
            hog.kill()
            hog.wait()
