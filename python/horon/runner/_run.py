"""horon.run: a function on several ranks, of this host or of several."""

from __future__ import annotations

import base64
import functools
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import cloudpickle  # type: ignore[import-untyped,unused-ignore]

from horon.runner import _hosts, _processes
from horon.runner._failures import Failure, failures_of
from horon.runner._hosts import Share
from horon.runner._outputs import Output
from horon.runner._ssh import Ssh

_ELASTIC = (
    "no hosts are added while a job runs. With horonrun --min-np and hvd.elastic.run one goes on without ranks that "
    "have died, and with --max-restarts they come again"
)
_MPI = "start the script itself with mpirun: hvd.init() reads its variables"
# What horovod.run takes and there is nothing for, with the reason.
REFUSED: Mapping[str, str] = {
    "host_discovery_script": _ELASTIC,
    "slots": _ELASTIC,
    "reset_limit": "-np and --min-np say how many ranks may be lost, --max-restarts how many come again",
    "cooldown_range": _ELASTIC,
    "use_mpi": _MPI,
    "mpi_args": _MPI,
    "use_jsrun": _MPI,
    "binding_args": _MPI,
    "config_file": "give its settings as options, or as HOROVOD_ variables",
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
    """Calls a function on `num_proc` ranks, each a fresh process, and returns what they returned.

    The function calls ``hvd.init()`` itself. It, its arguments and its results travel by cloudpickle, so that it may be
    a lambda or defined in a notebook. Blocks until all have ended; when one fails, the others are ended. Each process
    computes with as many threads as leave a core for each, unless OMP_NUM_THREADS is set.

    Args:
        func: What to call.
        args, kwargs: Its arguments.
        num_proc: Number of ranks.
        min_num_proc, max_num_proc: `num_proc` has to lie between them; it does not change.
        hosts: Hosts and their slots, which are filled in this order: ``localhost:4,other:4``. Others are reached by
            ssh without a password, and have `executable` and horon in the same place. Default: this host.
        hostfile: A file with lines of ``localhost slots=4``.
        start_timeout: Seconds until all processes have to have been started. Default: 60 until all hosts have answered.
        ssh_port, ssh_identity_file: As in ``ssh -p`` and ``ssh -i``.
        output_filename: A folder; what rank 3 of 16 prints is written to ``rank.03/stdout`` and ``rank.03/stderr``
            there, on its own host, as well as to where this process prints.
        verbose: Prints the command of each process.
        network_interfaces: Names of those that connect the hosts. Default: those through which ssh has come.
        executable: The Python to use (default: this one).
        np, min_np, max_np, network_interface: Deprecated names of `num_proc`, `min_num_proc`, `max_num_proc`,
            `network_interfaces`.
        slots, reset_limit, cooldown_range, host_discovery_script, use_mpi, mpi_args: Refused.
        disable_cache, use_gloo: Nothing depends on them.

    Returns:
        What the ranks returned, in their order.

    Raises:
        ValueError: An argument that is refused, too few slots, or a number of ranks that is not positive.
        RuntimeError: A rank failed; says which, and its traceback. Or a host could not be reached, or was lost,
            or a file for the output can not be written.

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
    shares = shares_of(num_proc, hosts, hostfile)
    call = functools.partial(func, *args, **(kwargs or {}))
    python = executable or sys.executable
    output = Output(folder=None if output_filename is None else str(Path(output_filename).resolve()))
    if are_all_here(shares):
        return _run_in_folder(call, num_proc, python, output, start_timeout, bool(verbose))
    environment = {}
    interfaces = network_interfaces or ([network_interface] if network_interface else [])
    if interfaces:
        environment["HOROVOD_GLOO_IFACE"] = interfaces if isinstance(interfaces, str) else ",".join(interfaces)
    ssh = Ssh(ssh_port, ssh_identity_file)
    return _run_on_hosts(call, shares, python, environment, output, start_timeout, bool(verbose), ssh)


def refuse(given: Mapping[str, Any]) -> None:
    """Raises ValueError, with the reason, if something was given that there is nothing for."""
    for name, value in given.items():
        if value is not None and value is not False:
            raise ValueError(f"horon: {name}={value!r} is not supported: {REFUSED[name]}.")


def check_counts(num_proc: int, least: int | None, most: int | None) -> None:
    """Raises ValueError unless the number of ranks is positive, and between the two where they are given."""
    if num_proc < 1:
        raise ValueError(f"horon: expected a positive number of processes, got {num_proc}.")
    if least is not None and least < 1:
        raise ValueError(f"horon: expected a least number of processes of 1 or more, got {least}.")
    if (least is not None and num_proc < least) or (most is not None and num_proc > most):
        raise ValueError(
            f"horon: {num_proc} processes are not from {least if least is not None else 1} to "
            f"{most if most is not None else 'any number'}, and {_ELASTIC}."
        )


def shares_of(num_proc: int, hosts: str | None, hostfile: str | None) -> list[Share]:
    """Returns which ranks run where. Raises ValueError if there are too few slots, or hosts are given twice."""
    if hosts is not None and hostfile is not None:
        raise ValueError("horon: expected hosts or a host file, got both.")
    if hosts is not None:
        given = _hosts.parse_hosts(hosts)
    elif hostfile is not None:
        given = _hosts.parse_hostfile(Path(hostfile).read_text())
    else:
        given = [_hosts.Host("localhost", None)]
    return _hosts.share_out(given, num_proc, _processes.is_this_host)


def are_all_here(shares: Sequence[Share]) -> bool:
    return all(share.is_here for share in shares)


def _run_in_folder(
    call: Callable[[], Any],
    num_proc: int,
    executable: str,
    output: Output,
    start_timeout: float | None,
    is_verbose: bool,
) -> list[Any]:
    # Neither is needed before, and the second imports torch.
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    from horon.runner import _task

    with tempfile.TemporaryDirectory(prefix="horon-run-") as name:
        folder = Path(name)
        _task.leave(folder, _task.pack(call))
        command = [executable, "-m", "horon.runner._task", name]
        if is_verbose:
            print("horon.run:", *command, f"(in {num_proc} processes)", file=sys.stderr, flush=True)
        try:
            _processes.start_and_wait(num_proc, command, {}, start_timeout, output)
        except ChildFailedError as error:
            raise RuntimeError(_failure_text(failures_of(error), num_proc)) from error
        return [cloudpickle.loads(_task.read_result(folder, rank)) for rank in range(num_proc)]


def _run_on_hosts(
    call: Callable[[], Any],
    shares: Sequence[Share],
    python: str,
    environment: Mapping[str, str],
    output: Output,
    start_timeout: float | None,
    is_verbose: bool,
    ssh: Ssh,
) -> list[Any]:
    from horon.runner import _fleet, _task

    task = base64.b64encode(_task.pack(call)).decode()
    job = _fleet.Job([python, "-m", "horon.runner._task"], environment, start_timeout, is_verbose, output, task)
    num_proc = sum(share.n_ranks for share in shares)
    try:
        results = _fleet.run_on_hosts(shares, job, ssh, python)
    except _fleet.FleetError as error:
        texts = [f"horon.run: {error}"] if str(error) else []
        texts += [_failure_text(error.failures, num_proc)] if error.failures else []
        raise RuntimeError("\n".join(texts)) from error
    return [cloudpickle.loads(base64.b64decode(results[str(rank)])) for rank in range(num_proc)]


def _failure_text(failures: Sequence[Failure], num_proc: int) -> str:
    others = "the others were ended when " if len(failures) < num_proc else ""
    return f"horon.run: {others}{''.join(f'{failure}.{chr(10)}{failure.text}' for failure in failures)}"
