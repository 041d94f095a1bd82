"""PyTorch's distributed_test.py as a test case for the backend named by HORON_SUITE_BACKEND.

Importing it needs BACKEND, WORLD_SIZE and HORON_SUITE_BACKEND in the environment (run_distributed_test.py sets them),
and prepares this process for them; a spawned rank imports it again and is prepared in the same way.
Source: pytorch `test/distributed/test_distributed_spawn.py`.
"""

from __future__ import annotations

import logging
import multiprocessing
import multiprocessing.connection
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import early_skips
import gloo_name

early_skips.install()

from torch.testing._internal import common_distributed  # noqa: E402
from torch.testing._internal.distributed import distributed_test  # noqa: E402

SUITE_BACKEND = os.environ["HORON_SUITE_BACKEND"]
START_METHOD = os.environ.get("HORON_SUITE_START_METHOD", "fork")
kTerminateGraceSeconds = 5.0

logging.getLogger(common_distributed.__name__).setLevel(logging.ERROR)  # the ranks' start and end, twice a test

if SUITE_BACKEND != "gloo":
    gloo_name.put_behind_gloo(SUITE_BACKEND)
    gloo_name.translate_profiler_titles(distributed_test, SUITE_BACKEND)


class DistributedSuite(distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase):
    """Every test of `_DistTestBase`, in fresh processes, one for each rank.

    Stricter than upstream: any rank that ends with a bad exit code fails the test, not only rank 0. Faster: the ranks
    are forked from this process, which has torch loaded and no group, and their ends are waited for without polling.
    """

    def setUp(self) -> None:
        super().setUp()
        with tempfile.NamedTemporaryFile(prefix="torch_suite_", suffix=".log", delete=False) as log:
            self.log_path = Path(log.name)
        self._spawn_processes()

    def tearDown(self) -> None:
        processes = list(self.processes)
        super().tearDown()  # sends SIGTERM
        deadline = time.monotonic() + kTerminateGraceSeconds
        for process in processes:
            process.join(max(0.0, deadline - time.monotonic()))
            if process.exitcode is None:
                process.kill()
                process.join()
        for path in (self.log_path, Path(self.file_name)):
            path.unlink(missing_ok=True)

    def _spawn_processes(self) -> None:
        context: Any = multiprocessing.get_context(START_METHOD)

        def process(*, target: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            return context.Process(target=run_rank, name=name, args=(self.log_path, target, args, kwargs))

        self._start_processes(process)

    def _join_processes(self, fn: Callable[..., Any]) -> None:
        deadline = time.monotonic() + common_distributed.get_timeout(self.id())
        running = list(self.processes)
        while running and (left := deadline - time.monotonic()) > 0:
            multiprocessing.connection.wait([process.sentinel for process in running], timeout=left)
            if any(process.exitcode == self.TEST_ERROR_EXIT_CODE for process in running):
                break
            running = [process for process in running if process.exitcode is None]
        super()._join_processes(fn)

    def _check_return_codes(self, fn: Callable[..., Any], elapsed_time: float) -> None:
        try:
            super()._check_return_codes(fn, elapsed_time)
            codes = [process.exitcode for process in self.processes]
            if any(codes) and fn not in self.skip_return_code_checks:
                self.fail(f"exit codes of the ranks: {codes}")
        except (RuntimeError, AssertionError) as error:
            tail = self.log_path.read_text(errors="replace")[-4000:]
            raise AssertionError(f"{error}\n--- output of the ranks, its end ---\n{tail}") from None


def run_rank(log_path: Path, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Runs in the rank's process: upstream's entry, its output in a file that the parent shows on failure."""
    with log_path.open("ab") as log:
        os.dup2(log.fileno(), sys.stdout.fileno())
        os.dup2(log.fileno(), sys.stderr.fileno())
    if per_host := os.environ.get("HORON_TEST_RANKS_PER_HOST"):
        os.environ["HORON_HOST_ID"] = f"host{args[0] // int(per_host)}"
    distributed_test.INIT_METHOD = os.environ["INIT_METHOD"]  # a spawned rank would have read it just now
    target(*args, **kwargs)
