"""horonrun: horovodrun's options, as far as they mean something."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from horon._version import __version__
from horon.common._elastic_settings import MIN_NP_VARIABLE
from horon.runner import _child, _processes, _run
from horon.runner._failures import Failure, exit_status, failures_of, texts_of
from horon.runner._hosts import Share
from horon.runner._outputs import Output, OutputError
from horon.runner._ssh import Ssh

_DESCRIPTION = """\
Starts a command in several processes, the ranks of a job, and ends all when one fails. Other hosts than this one are
reached by ssh without a password; they have Python and horon in the same place, and the ranks work in a folder of the
same name.
"""
_MIB = 1024 * 1024


def _megabytes(text: str) -> str:
    return str(int(text) * _MIB)


def _whole(text: str) -> str:
    return str(int(text))


def _positive(text: str) -> str:
    if int(text) < 1:
        raise ValueError
    return text


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
    ("--network-interfaces", "HOROVOD_GLOO_IFACE", str, "those that connect the hosts; default: as ssh has come"),
    ("--network-interface", "HOROVOD_GLOO_IFACE", str, "the same, deprecated"),
    (
        "--elastic-timeout",
        "HOROVOD_ELASTIC_TIMEOUT",
        _positive,
        "for ranks of which it is not known whether they have died",
    ),
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
# Options that take back what one before them has set: (option, variable).
_TAKEN_BACK: Sequence[tuple[str, str]] = (
    ("--no-timeline-mark-cycles", "HOROVOD_TIMELINE_MARK_CYCLES"),
    ("--stall-check", "HOROVOD_STALL_CHECK_DISABLE"),
    ("--no-autotune", "HOROVOD_AUTOTUNE"),
    ("--no-hierarchical-allreduce", "HOROVOD_HIERARCHICAL_ALLREDUCE"),
    ("--no-hierarchical-allgather", "HOROVOD_HIERARCHICAL_ALLGATHER"),
)
# Options that nothing depends on here: without a value, and with one.
_IDLE_SWITCHES: Sequence[str] = (
    "--gloo",
    "--disable-cache",
    "--tcp",
    "--torus-allreduce",
    "--no-torus-allreduce",
    "--mpi-threads-disable",
    "--no-mpi-threads-disable",
    "--log-with-timestamp",
    "--log-without-timestamp",
    "--log-hide-timestamp",
    "--no-log-hide-timestamp",
)
_IDLE_OPTIONS: Sequence[str] = (
    "--autotune-log-file",
    "--autotune-warmup-samples",
    "--autotune-steps-per-sample",
    "--autotune-bayes-opt-max-samples",
    "--autotune-gaussian-process-noise",
)
# Options of horovodrun that there is nothing for, by what they are called in horovod.run.
_REFUSED: Sequence[tuple[tuple[str, ...], str, bool]] = (
    (("--host-discovery-script",), "host_discovery_script", False),
    (("--slots-per-host",), "slots", False),
    (("--reset-limit",), "reset_limit", False),
    (("--blacklist-cooldown-range",), "cooldown_range", False),
    (("--mpi",), "use_mpi", True),
    (("--mpi-args",), "mpi_args", False),
    (("--jsrun",), "use_jsrun", True),
    (("--binding-args",), "binding_args", False),
    (("--config-file",), "config_file", False),
)


@dataclass(frozen=True)
class Plan:
    """What is to be started."""

    num_proc: int
    command: Sequence[str]
    environment: Mapping[str, str]
    start_timeout: float | None
    is_verbose: bool
    shares: Sequence[Share]
    ssh: Ssh
    output: Output


def plan(arguments: Sequence[str]) -> Plan:
    """Returns what a command line asks for. Exits, as argparse does, if that is nothing that can be done."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.command[:1] == ["--"]:  # where options end, for many
        del options.command[0]
    if not options.command:
        parser.error("expected a command to start, such as: python train.py")
    try:
        _run.refuse({name: getattr(options, name) for _, name, _ in _REFUSED})
        _run.check_counts(options.num_proc, options.min_num_proc, options.max_num_proc)
        shares = _run.shares_of(options.num_proc, options.hosts, options.hostfile)
    except (OSError, ValueError) as error:
        parser.error(str(error).removeprefix("horon: "))
    if options.max_restarts < 0:
        parser.error(f"argument --max-restarts: expected 0 or more, got {options.max_restarts}")
    environment = dict(options.environment or ())
    if options.min_num_proc is not None and options.min_num_proc < options.num_proc:
        for name in (MIN_NP_VARIABLE, _child.MIN_NP_VARIABLE):
            environment[name] = str(options.min_num_proc)
        if options.max_restarts > 0:
            environment[_child.MAX_RESTARTS_VARIABLE] = str(options.max_restarts)
    elif options.max_restarts > 0:
        parser.error("--max-restarts needs a --min-np that is less than -np: the others go on meanwhile")
    folder = None if options.output_filename is None else str(Path(options.output_filename).resolve())
    return Plan(
        options.num_proc,
        options.command,
        environment,
        options.start_timeout,
        options.verbose,
        shares,
        Ssh(options.ssh_port, options.ssh_identity_file),
        Output(options.is_tagged, options.has_times, folder),
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="horonrun", description=_DESCRIPTION, allow_abbrev=False, usage="%(prog)s -np N [options] command ..."
    )
    add = parser.add_argument
    add("-v", "--version", action="version", version=__version__)
    add("-np", "--num-proc", dest="num_proc", type=int, required=True, metavar="N", help="number of processes")
    add("-cb", "--check-build", action=_CheckBuild, nargs=0, help="say what this build has, and end")
    add("-H", "--hosts", metavar="HOST:SLOTS,...", help="hosts and their slots, filled in this order")
    add("-hostfile", "--hostfile", metavar="FILE", help="the same, lines of: host slots=4")
    add("--output-filename", metavar="FOLDER", help="to FOLDER/rank.03/stdout as well, on the host of rank 3")
    add("--tag-output", dest="is_tagged", action="store_true", help="lines that ranks print begin with [3]<stdout>:")
    add("-prefix-timestamp", "--prefix-output-with-timestamp", dest="has_times", action="store_true",
        help="the same, after the time")  # fmt: skip
    add("--start-timeout", type=float, metavar="SECONDS", help="until all processes have to have been started")
    add("--min-np", "--min-num-proc", dest="min_num_proc", type=int, metavar="N",
        help="go on with so many when others have died, if the script can; the status is then 0")  # fmt: skip
    add("--max-restarts", type=int, default=0, metavar="N",
        help="with --min-np: ranks that died are started anew, so often in all (default: %(default)s)")  # fmt: skip
    add("--max-np", "--max-num-proc", dest="max_num_proc", type=int, metavar="N", help="at least -np; not more start")
    add("--verbose", action="store_true", help="print what is started")
    for option, variable, convert, text in _VARIABLES:
        add(option, action=_Variable, variable=variable, convert=convert, dest="environment", metavar="X", help=text)
    for option, variable, text in _SWITCHES:
        add(option, action=_Variable, variable=variable, nargs=0, dest="environment", help=text)
    for names, name, is_switch in _REFUSED:
        action: dict[str, Any] = {"action": "store_true"} if is_switch else {"metavar": "X"}
        add(*names, dest=name, default=None, help=argparse.SUPPRESS, **action)
    for option, variable in _TAKEN_BACK:
        add(option, action=_NoVariable, variable=variable, nargs=0, dest="environment", help=argparse.SUPPRESS)
    for option in _IDLE_SWITCHES:
        add(option, action="store_true", help=argparse.SUPPRESS)
    for option in _IDLE_OPTIONS:
        add(option, metavar="X", help=argparse.SUPPRESS)
    add("-p", "--ssh-port", type=int, metavar="PORT", help="as in ssh -p")
    add("-i", "--ssh-identity-file", metavar="FILE", help="as in ssh -i")
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


class _NoVariable(argparse.Action):
    """Takes a variable of the ranks' environment back."""

    def __init__(self, *args: Any, variable: str, **more: Any) -> None:
        super().__init__(*args, **more)
        self._variable = variable

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        given = namespace.environment or {}
        namespace.environment = {name: value for name, value in given.items() if name != self._variable}


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
    command = [sys.executable, "-m", "horon.runner._child", *job.command]
    return _start_here(job, command) if _run.are_all_here(job.shares) else _start_on_hosts(job, command)


def _start_here(job: Plan, command: Sequence[str]) -> int:
    # It imports torch.
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    if job.is_verbose:
        variables = [f"{name}={value}" for name, value in job.environment.items()]
        print("horonrun:", *variables, *command, f"(in {job.num_proc} processes)", file=sys.stderr, flush=True)
    try:
        _processes.start_and_wait(job.num_proc, command, job.environment, job.start_timeout, job.output)
    except OutputError as error:
        print(f"horonrun: {error}", file=sys.stderr, flush=True)
        return 1
    except ChildFailedError as error:
        return _tell(failures_of(error), job.num_proc)
    except SignalException as told:
        return 128 + told.sigval
    return 0


def _start_on_hosts(job: Plan, command: Sequence[str]) -> int:
    from horon.runner import _fleet

    def exit_for(number: int, _: Any) -> None:
        sys.exit(128 + number)

    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup's
            signal.signal(number, exit_for)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in a shell's background; torch's agent does not
    order = _fleet.Job(command, job.environment, job.start_timeout, job.is_verbose, job.output)
    try:
        _fleet.run_on_hosts(job.shares, order, job.ssh, sys.executable)
    except _fleet.FleetError as error:
        if str(error):
            print(f"horonrun: {error}", file=sys.stderr, flush=True)
        return _tell(error.failures, job.num_proc) if error.failures else 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    return 0


def _tell(failures: Sequence[Failure], num_proc: int) -> int:
    print(f"horonrun: {texts_of(failures, num_proc)}", file=sys.stderr, flush=True)
    return exit_status(failures)


if __name__ == "__main__":
    sys.exit(run_commandline())
