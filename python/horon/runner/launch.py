"""horonrun: horovodrun's options, as far as they mean something on one host."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from horon._version import __version__
from horon.runner import _child, _processes, _run
from horon.runner._failures import failures_of

_DESCRIPTION = """\
Starts a command in several processes of this host, the ranks of a job, and ends all when one fails. For several hosts,
start torchrun on each, or mpirun.
"""
_MIB = 1024 * 1024


def _megabytes(text: str) -> str:
    return str(int(text) * _MIB)


def _whole(text: str) -> str:
    return str(int(text))


# Options that only set a variable for the ranks: (option, variable, what makes its value, help). What a variable means,
# and whether it means anything, is said where it is read: docs/options.md.
_VARIABLES: Sequence[tuple[str, str, Callable[[str], str], str]] = (
    ("--fusion-threshold-mb", "HOROVOD_FUSION_THRESHOLD", _megabytes, "most bytes that are reduced together, in MiB"),
    ("--timeline-filename", "HOROVOD_TIMELINE", str, "rank 0 records a timeline there"),
    ("--stall-check-warning-time-seconds", "HOROVOD_STALL_CHECK_TIME_SECONDS", _whole, "until a stall is reported"),
    (
        "--stall-check-shutdown-time-seconds",
        "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS",
        _whole,
        "until it is an error; 0: never",
    ),
    ("--gloo-timeout-seconds", "HOROVOD_GLOO_TIMEOUT_SECONDS", _whole, "how long ranks wait for each other"),
    ("--network-interfaces", "HOROVOD_GLOO_IFACE", str, "without a meaning on one host"),
    ("--network-interface", "HOROVOD_GLOO_IFACE", str, "the same, deprecated"),
    ("--cycle-time-ms", "HOROVOD_CYCLE_TIME", str, "without a meaning"),
    ("--cache-capacity", "HOROVOD_CACHE_CAPACITY", _whole, "without a meaning"),
    ("--num-nccl-streams", "HOROVOD_NUM_NCCL_STREAMS", _whole, "without a meaning"),
    ("--thread-affinity", "HOROVOD_THREAD_AFFINITY", str, "without a meaning"),
    ("--log-level", "HOROVOD_LOG_LEVEL", str, "without a meaning"),
)
_SWITCHES: Sequence[tuple[str, str, str]] = (
    ("--timeline-mark-cycles", "HOROVOD_TIMELINE_MARK_CYCLES", "the timeline has marks for each round of the engine"),
    ("--no-stall-check", "HOROVOD_STALL_CHECK_DISABLE", "stalls are not reported"),
    ("--autotune", "HOROVOD_AUTOTUNE", "without a meaning"),
    ("--hierarchical-allreduce", "HOROVOD_HIERARCHICAL_ALLREDUCE", "without a meaning"),
    ("--hierarchical-allgather", "HOROVOD_HIERARCHICAL_ALLGATHER", "without a meaning"),
)
# Options of horovodrun that there is nothing for, by what they are called in horovod.run.
_REFUSED: Sequence[tuple[tuple[str, ...], str, bool]] = (
    (("--host-discovery-script",), "host_discovery_script", False),
    (("--slots-per-host",), "slots", False),
    (("--reset-limit",), "reset_limit", False),
    (("--blacklist-cooldown-range",), "cooldown_range", False),
    (("--mpi",), "use_mpi", True),
    (("--mpi-args",), "mpi_args", False),
)


@dataclass(frozen=True)
class Plan:
    """What is to be started."""

    num_proc: int
    command: Sequence[str]
    environment: Mapping[str, str]
    start_timeout: float | None
    is_verbose: bool


def plan(arguments: Sequence[str]) -> Plan:
    """Returns what a command line asks for. Exits, as argparse does, if that is nothing that can be done."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if not options.command:
        parser.error("expected a command to start, such as: python train.py")
    try:
        _run.refuse({name: getattr(options, name) for _, name, _ in _REFUSED})
        _run.check_counts(options.num_proc, options.min_num_proc, options.max_num_proc)
        _run.check_where(options.num_proc, options.hosts, options.hostfile)
    except (OSError, ValueError) as error:
        parser.error(str(error).removeprefix("horon: "))
    environment = dict(options.environment or ())
    if options.output_filename is not None:
        environment[_child.OUTPUT_VARIABLE] = str(Path(options.output_filename).resolve())
    return Plan(options.num_proc, options.command, environment, options.start_timeout, options.verbose)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="horonrun", description=_DESCRIPTION, allow_abbrev=False, usage="%(prog)s -np N [options] command ..."
    )
    add = parser.add_argument
    add("-v", "--version", action="version", version=__version__)
    add("-np", "--num-proc", dest="num_proc", type=int, required=True, metavar="N", help="number of processes")
    add("-cb", "--check-build", action=_CheckBuild, nargs=0, help="say what this build has, and end")
    add("-H", "--hosts", metavar="HOST:SLOTS,...", help="this host's name and slots; others: says how to start there")
    add("-hostfile", "--hostfile", metavar="FILE", help="the same, lines of: host slots=4")
    add("--output-filename", metavar="FOLDER", help="rank 3 of 16 writes to FOLDER/rank.03/stdout and stderr")
    add("--start-timeout", type=float, metavar="SECONDS", help="until all processes have to have been started")
    add("--min-np", "--min-num-proc", dest="min_num_proc", type=int, metavar="N", help="at most -np")
    add("--max-np", "--max-num-proc", dest="max_num_proc", type=int, metavar="N", help="at least -np")
    add("--verbose", action="store_true", help="print what is started")
    for option, variable, convert, text in _VARIABLES:
        add(option, action=_Variable, variable=variable, convert=convert, dest="environment", metavar="X", help=text)
    for option, variable, text in _SWITCHES:
        add(option, action=_Variable, variable=variable, nargs=0, dest="environment", help=text)
    for names, name, is_switch in _REFUSED:
        action: dict[str, Any] = {"action": "store_true"} if is_switch else {"metavar": "X"}
        add(*names, dest=name, default=None, help=argparse.SUPPRESS, **action)
    for option in ("--gloo", "--disable-cache", "--tcp"):
        add(option, action="store_true", help=argparse.SUPPRESS)
    for options in (("-p", "--ssh-port"), ("-i", "--ssh-identity-file")):
        add(*options, help=argparse.SUPPRESS)
    add("command", nargs=argparse.REMAINDER, help="what to start")
    return parser


class _Variable(argparse.Action):
    """Sets a variable of the ranks' environment."""

    def __init__(self, *args: Any, variable: str, convert: Callable[[str], str] | None = None, **more: Any) -> None:
        super().__init__(*args, **more)
        self._variable = variable
        self._convert = convert

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        try:
            value = self._convert(values) if self._convert is not None else "1"
        except ValueError:
            parser.error(f"argument {option_string}: expected a whole number, got {values!r}")
        namespace.environment = {**(namespace.environment or {}), self._variable: value}


class _CheckBuild(argparse.Action):
    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        print(build_text())
        parser.exit()


def build_text() -> str:
    """What this build has, in horovodrun's form."""
    import horon.torch as hvd

    def line(is_there: object, name: str) -> str:
        return f"    [{'X' if is_there else ' '}] {name}"

    return "\n".join(
        [
            f"horon v{__version__}:",
            "",
            "Available Frameworks:",
            line(True, "PyTorch"),
            "",
            "Available Controllers:",
            line(hvd.mpi_built(), "MPI"),
            line(hvd.gloo_built(), "Gloo"),
            "",
            "Available Tensor Operations:",
            line(True, "shared memory"),
            line(hvd.nccl_built(), "NCCL"),
            line(hvd.mpi_built(), "MPI"),
            line(hvd.gloo_built(), "Gloo"),
        ]
    )


def run_commandline(arguments: Sequence[str] | None = None) -> int:
    """Starts what the command line asks for; returns the exit status: that of the first rank that failed, or 0."""
    job = plan(sys.argv[1:] if arguments is None else arguments)
    # It imports torch.
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    command = [sys.executable, "-m", "horon.runner._child", *job.command]
    if job.is_verbose:
        variables = [f"{name}={value}" for name, value in job.environment.items()]
        print("horonrun:", *variables, *command, f"(in {job.num_proc} processes)", file=sys.stderr, flush=True)
    try:
        _processes.start_and_wait(job.num_proc, command, job.environment, job.start_timeout)
    except ChildFailedError as error:
        failures = failures_of(error)
        texts = ", ".join(str(failure) for failure in failures)
        others = "; the others were ended" if len(failures) < job.num_proc else ""
        print(f"horonrun: {texts}{others}", file=sys.stderr, flush=True)
        return 128 - failures[0].status if failures[0].status < 0 else failures[0].status
    except SignalException as signal:
        return 128 + signal.sigval
    return 0


if __name__ == "__main__":
    sys.exit(run_commandline())
