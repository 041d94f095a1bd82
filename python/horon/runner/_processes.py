"""Starts a host's processes and waits for them, with torch's elastic agent."""

from __future__ import annotations

import contextlib
import os
import socket
import tempfile
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from horon.runner import _child
from horon.runner._outputs import Output, Outputs

# How long hosts that have answered may take to import torch and to find the first one. torch has ten minutes.
_MEETING_TIMEOUT_S = 120


@dataclass(frozen=True)
class Place:
    """A host among those of a job.

    Attributes:
        number: Its place; the first one serves the store through which all find each other.
        n_hosts: How many there are.
        first_rank, size: The first rank of this host, and how many there are on all of them.
        master_address, master_port: Where that store is, as seen from here.
    """

    number: int
    n_hosts: int
    first_rank: int
    size: int
    master_address: str
    master_port: int


def is_this_host(name: str) -> bool:
    """Whether a name or an address is this host's: nothing can be bound to another one's."""
    if name in (socket.gethostname(), socket.getfqdn()):
        return True
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_DGRAM)
    except (OSError, UnicodeError):
        return False
    return any(_is_ours(family, address) for family, _, _, _, address in found)


def _is_ours(family: int, address: Any) -> bool:
    with contextlib.closing(socket.socket(family, socket.SOCK_DGRAM)) as probe:
        try:
            probe.bind(address)
        except OSError:
            return False
    return True


def threads_for(n_cores: int, num_proc: int) -> int:
    """How many threads each process computes with, so that there is a core for each; at least one.

    horovodrun leaves it to each process to take all cores, torchrun allows one.
    """
    return max(n_cores // num_proc, 1)


def start_and_wait(
    num_proc: int,
    command: Sequence[str],
    environment: Mapping[str, str],
    start_timeout: float | None,
    output: Output,
    place: Place | None = None,
    folder: str | None = None,
    when_over: Callable[[], None] = lambda: None,
) -> None:
    """Runs `command` in `num_proc` processes, which have torchrun's variables. Returns when all have ended well.

    When one ends badly, the others of this host are ended, too, and none is started again.

    Args:
        command: ``python -m`` and a module of this folder that takes the folder of its pipes as its first argument.
        output: What is done with what the processes print.
        place: This host among others, which do the same; None: it is the only one.
        when_over: Called when they have ended, before the last that they have printed is passed on.
        folder: Where the agent and the processes may leave what they have to say. None: nobody wants it afterwards.

    Raises:
        torch.distributed.elastic.multiprocessing.errors.ChildFailedError: One ended badly.
        torch.distributed.elastic.multiprocessing.SignalException: This process got a signal; its children have it, too.
        OutputError: A file for the output can not be written.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    threads = {} if "OMP_NUM_THREADS" in os.environ else {"OMP_NUM_THREADS": _threads(num_proc)}
    first_rank, size = (0, num_proc) if place is None else (place.first_rank, place.size)
    # The agent's own folder, for tracebacks that processes leave, would stay behind.
    with (
        tempfile.TemporaryDirectory(prefix="horon-agent-") as own_folder,
        Outputs(Path(own_folder), output, range(first_rank, first_rank + num_proc), size) as outputs,
        _set_meanwhile({**threads, **environment}),
    ):
        pipes = _child.NO_PIPES if outputs.folder is None else str(outputs.folder)
        config = LaunchConfig(
            **_meeting(place, {"timeout": start_timeout} if start_timeout else {}),
            nproc_per_node=num_proc,
            max_restarts=0,
            local_addr="localhost",  # names of hosts need not have an address
            logs_specs=DefaultLogsSpecs(log_dir=folder or own_folder),
        )
        try:
            elastic_launch(config, command[0])(*command[1:3], pipes, *command[3:])
        except (SignalException, KeyboardInterrupt):
            if place is None:  # else horonrun, which reads it, knows whether there is time
                outputs.hurry()
            raise
        finally:
            when_over()


def _meeting(place: Place | None, configuration: dict[str, Any]) -> dict[str, Any]:
    """How the agents of all hosts find each other."""
    if place is None:
        alone = {"min_nodes": 1, "max_nodes": 1, "run_id": str(uuid.uuid4())}
        return {**alone, "rdzv_backend": "c10d", "rdzv_endpoint": "localhost:0", "rdzv_configs": configuration}
    address = f"[{place.master_address}]" if ":" in place.master_address else place.master_address
    return {
        "min_nodes": place.n_hosts,
        "max_nodes": place.n_hosts,
        "run_id": "horonrun",  # the store is this job's
        "rdzv_backend": "static",
        "rdzv_endpoint": f"{address}:{place.master_port}",
        "rdzv_configs": {"timeout": _MEETING_TIMEOUT_S, **configuration, "rank": place.number},
    }


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
