"""horon.run: a function on several ranks of this host."""

from __future__ import annotations

import functools
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import cloudpickle  # type: ignore[import-untyped,unused-ignore]

from horon.runner import _child, _hosts, _processes
from horon.runner._failures import failures_of

_ELASTIC = (
    "the number of ranks does not change while a job runs. hvd.elastic.run works with a fixed one, and "
    "torchrun --max-restarts starts a job again that has failed"
)
_MPI = "start the script itself with mpirun: hvd.init() reads its variables"
# What horovod.run takes and there is nothing for, with the reason.
REFUSED: Mapping[str, str] = {
    "host_discovery_script": _ELASTIC,
    "slots": _ELASTIC,
    "reset_limit": _ELASTIC,
    "cooldown_range": _ELASTIC,
    "use_mpi": _MPI,
    "mpi_args": _MPI,
}


def run(
    func: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int = 1,
    min_num_proc: int | None = None,
    max_num_proc: int | None = None,
    slots: int | None = None,
    reset_limit: int | None = None,
    cooldown_range: Sequence[int] | None = None,
    hosts: str | None = None,
    hostfile: str | None = None,
    host_discovery_script: str | None = None,
    start_timeout: float | None = None,
    ssh_port: int | None = None,
    ssh_identity_file: str | None = None,
    disable_cache: bool | None = None,
    output_filename: str | None = None,
    verbose: int | bool | None = None,
    use_gloo: bool | None = None,
    use_mpi: bool | None = None,
    mpi_args: str | None = None,
    network_interface: str | None = None,
    network_interfaces: Sequence[str] | None = None,
    executable: str | None = None,
    np: int | None = None,
    min_np: int | None = None,
    max_np: int | None = None,
) -> list[Any]:
    """Calls a function on `num_proc` ranks of this host, each a fresh process, and returns what they returned.

    The function calls ``hvd.init()`` itself. It, its arguments and its results travel by cloudpickle, so that it may be
    a lambda or defined in a notebook. Blocks until all have ended; when one fails, the others are ended. Each process
    computes with as many threads as leave a core for each, unless OMP_NUM_THREADS is set.

    Args:
        func: What to call.
        args, kwargs: Its arguments.
        num_proc: Number of ranks.
        min_num_proc, max_num_proc: `num_proc` has to lie between them; it does not change.
        hosts: This host's name (or localhost) and its slots, ``localhost:4``; other hosts are an error that says how to
            start there.
        hostfile: A file with lines of ``localhost slots=4``.
        start_timeout: Seconds until all processes have to have been started.
        output_filename: A folder; rank 3 of 16 writes to ``rank.03/stdout`` and ``rank.03/stderr`` there, instead of
            where this process does.
        verbose: Prints the command of each process.
        network_interfaces: For Horovod's sake. Within a host there is no network.
        executable: The Python to use (default: this one).
        np, min_np, max_np, network_interface: Deprecated names of `num_proc`, `min_num_proc`, `max_num_proc`,
            `network_interfaces`.
        slots, reset_limit, cooldown_range, host_discovery_script, use_mpi, mpi_args: Refused.
        ssh_port, ssh_identity_file, disable_cache, use_gloo: Nothing depends on them.

    Returns:
        What the ranks returned, in their order.

    Raises:
        ValueError: An argument that is refused, another host, or a number of ranks that is not positive.
        RuntimeError: A rank failed; says which, and its traceback.

    Source: horovod/runner/__init__.py of Horovod 0.28.1.
    """
    given = {
        "slots": slots,
        "reset_limit": reset_limit,
        "cooldown_range": cooldown_range,
        "host_discovery_script": host_discovery_script,
        "use_mpi": use_mpi,
        "mpi_args": mpi_args,
    }
    refuse(given)
    for old, new, value in (
        ("np", "num_proc", np),
        ("min_np", "min_num_proc", min_np),
        ("max_np", "max_num_proc", max_np),
        ("network_interface", "network_interfaces", network_interface),
    ):
        if value is not None:
            warnings.warn(f"{old} is deprecated, use {new} instead", DeprecationWarning, stacklevel=2)
    num_proc = num_proc if np is None else np
    check_counts(
        num_proc,
        min_num_proc if min_np is None else min_np,
        max_num_proc if max_np is None else max_np,
    )
    check_where(num_proc, hosts, hostfile)
    return _run_in_folder(
        functools.partial(func, *args, **(kwargs or {})),
        num_proc,
        executable or sys.executable,
        {} if output_filename is None else {_child.OUTPUT_VARIABLE: str(Path(output_filename).resolve())},
        start_timeout,
        bool(verbose),
    )


def refuse(given: Mapping[str, Any]) -> None:
    """Raises ValueError, with the reason, if something was given that there is nothing for."""
    for name, value in given.items():
        if value is not None and value is not False:
            raise ValueError(f"horon: {name}={value!r} is not supported: {REFUSED[name]}.")


def check_counts(num_proc: int, least: int | None, most: int | None) -> None:
    """Raises ValueError unless the number of ranks is positive, and between the two where they are given."""
    if num_proc < 1:
        raise ValueError(f"horon: expected a positive number of processes, got {num_proc}.")
    if (least is not None and num_proc < least) or (most is not None and num_proc > most):
        raise ValueError(
            f"horon: {num_proc} processes are not from {least if least is not None else 1} to "
            f"{most if most is not None else 'any number'}, and {_ELASTIC}."
        )


def check_where(num_proc: int, hosts: str | None, hostfile: str | None) -> None:
    """Raises ValueError unless all ranks are to run on this host."""
    if hosts is not None and hostfile is not None:
        raise ValueError("horon: expected hosts or a host file, got both.")
    if hosts is not None:
        _hosts.check_hosts(_hosts.parse_hosts(hosts), num_proc, _processes.is_this_host)
    elif hostfile is not None:
        parsed = _hosts.parse_hostfile(Path(hostfile).read_text())
        _hosts.check_hosts(parsed, num_proc, _processes.is_this_host)


def _run_in_folder(
    call: Callable[[], Any],
    num_proc: int,
    executable: str,
    environment: Mapping[str, str],
    start_timeout: float | None,
    is_verbose: bool,
) -> list[Any]:
    # Neither is needed before, and the second imports torch.
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    from horon.runner import _task

    with tempfile.TemporaryDirectory(prefix="horon-run-") as name:
        folder = Path(name)
        _task.leave(folder, call)
        command = [executable, "-m", "horon.runner._task", name]
        if is_verbose:
            print("horon.run:", *command, f"(in {num_proc} processes)", file=sys.stderr, flush=True)
        try:
            _processes.start_and_wait(num_proc, command, environment, start_timeout)
        except ChildFailedError as error:
            texts = [f"{failure}.\n{failure.text}" for failure in failures_of(error)]
            others = "the others were ended when " if len(texts) < num_proc else ""
            raise RuntimeError(f"horon.run: {others}{''.join(texts)}") from error
        return [cloudpickle.loads(_task.result_of(folder, rank).read_bytes()) for rank in range(num_proc)]
