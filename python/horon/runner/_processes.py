"""Starts processes on this host and waits for them, with torch's elastic agent."""

from __future__ import annotations

import contextlib
import os
import socket
import tempfile
import uuid
from collections.abc import Iterator, Mapping, Sequence

_LOCAL_NAMES = ("localhost", "127.0.0.1", "::1")


def is_this_host(name: str) -> bool:
    """Whether a name is this host's, as far as it can be told without asking others."""
    return name in (*_LOCAL_NAMES, socket.gethostname(), socket.getfqdn())


def threads_for(n_cores: int, num_proc: int) -> int:
    """How many threads each process computes with, so that there is a core for each; at least one.

    horovodrun leaves it to each process to take all cores, torchrun allows one.
    """
    return max(n_cores // num_proc, 1)


def start_and_wait(
    num_proc: int, command: Sequence[str], environment: Mapping[str, str], start_timeout: float | None
) -> None:
    """Runs `command` in `num_proc` processes, which have torchrun's variables. Returns when all have ended well.

    When one ends badly, the others are ended, too, and none is started again.

    Raises:
        torch.distributed.elastic.multiprocessing.errors.ChildFailedError: One ended badly.
        torch.distributed.elastic.multiprocessing.SignalException: This process got a signal; its children have it, too.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    threads = {} if "OMP_NUM_THREADS" in os.environ else {"OMP_NUM_THREADS": _threads(num_proc)}
    # The agent's own folder, for tracebacks that processes leave, would stay behind.
    with tempfile.TemporaryDirectory(prefix="horon-agent-") as folder, _set_meanwhile({**threads, **environment}):
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=num_proc,
            run_id=str(uuid.uuid4()),
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            rdzv_configs={"timeout": start_timeout} if start_timeout else {},
            max_restarts=0,
            local_addr="localhost",  # names of hosts need not have an address
            logs_specs=DefaultLogsSpecs(log_dir=folder),
        )
        elastic_launch(config, command[0])(*command[1:])


def _threads(num_proc: int) -> str:
    return str(threads_for(len(os.sched_getaffinity(0)), num_proc))


@contextlib.contextmanager
def _set_meanwhile(variables: Mapping[str, str]) -> Iterator[None]:
    """The agent gives its own environment to its children."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
