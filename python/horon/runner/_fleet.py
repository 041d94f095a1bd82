"""Starts a job's ranks on several hosts, over ssh, and looks after them."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import IO, Any

from horon.runner._failures import Failure, in_order
from horon.runner._hosts import Share
from horon.runner._lines import Lines
from horon.runner._node import Hello, Order, Outcome
from horon.runner._outputs import Output
from horon.runner._reports import Splitter
from horon.runner._sink import Sink, close_all, own_sinks
from horon.runner._ssh import Ssh, environment_for_others

_START_TIMEOUT_S = 60.0
# torch's agent gives ranks half a minute between SIGTERM and SIGKILL.
_END_PATIENCE_S = 40.0
# How long a host's launcher may take to exit after it has said how it went.
_EXIT_PATIENCE_S = 5.0
# When a launcher has exited, and nothing has come for so long, nothing of it is under way.
_QUIET_S = 1.0
_PIECE = 1 << 16


class FleetError(RuntimeError):
    """A host could not be started, was lost, or ranks have failed.

    Attributes:
        failures: Of ranks, causes first. What went wrong besides, or instead, is the text.
    """

    def __init__(self, text: str, failures: Sequence[Failure] = ()) -> None:
        super().__init__(text)
        self.failures = failures


@dataclass(frozen=True)
class Job:
    """What all hosts start.

    Attributes:
        command, task: As in Order.
        environment: Variables that were given for this job.
        output: What is done with what ranks print.
    """

    command: Sequence[str]
    environment: Mapping[str, str]
    start_timeout: float | None
    is_verbose: bool
    output: Output = field(default_factory=Output)
    task: str | None = None


@dataclass(frozen=True)
class _Event:
    """What came of a host: a report, or its launcher's exit status."""

    number: int
    kind: str
    value: Any


class _Node:
    """A host's launcher: its process, or ssh's, and two threads that pass on what it prints."""

    def __init__(
        self,
        number: int,
        share: Share,
        command: Sequence[str],
        events: queue.SimpleQueue[_Event],
        sinks: Mapping[str, Sink],
    ) -> None:
        self.share = share
        self.hello: Hello | None = None
        self.outcome: Outcome | None = None
        self._number = number
        self._events = events
        # In a session of its own, so that Ctrl-C reaches it by us only.
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            # How the user has come to this host is not how others do.
            env={name: value for name, value in os.environ.items() if name != "SSH_CONNECTION"},
        )
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        self._streams = [
            _Stream(self._process.stdout, sinks["stdout"], self._put),
            _Stream(self._process.stderr, sinks["stderr"], lambda _: None),
        ]
        threading.Thread(target=self._await_exit, daemon=True).start()

    def _put(self, reports: Sequence[Mapping[str, Any]]) -> None:
        for report in reports:
            for kind, value in report.items():
                self._events.put(_Event(self._number, kind, value))

    def _await_exit(self) -> None:
        status = self._process.wait()
        for stream in self._streams:
            stream.end()
        self._events.put(_Event(self._number, "exit", status))

    def tell(self, line: bytes) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # it has ended, and its exit says so
            self._process.stdin.write(line + b"\n")
            self._process.stdin.flush()

    def end(self, signum: int) -> None:
        assert self._process.stdin is not None
        self.tell(f"end {int(signum)}".encode())
        with contextlib.suppress(OSError):
            self._process.stdin.close()

    def kill(self) -> None:
        self._process.kill()

    def is_silent(self) -> bool:
        """Whether nothing more is passed on."""
        return all(stream.has_ended() for stream in self._streams)


class _Stream:
    """A thread that passes on what comes through a pipe, line by line, and the reports in it."""

    def __init__(
        self, pipe: IO[bytes], sink: Sink, take_reports: Callable[[Sequence[Mapping[str, Any]]], None]
    ) -> None:
        self._pipe = pipe
        self._sink = sink
        self._take_reports = take_reports
        self._splitter, self._lines = Splitter(), Lines()
        self._changing = threading.Lock()  # held while something is passed on
        self._n_read = 0
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Returns when all that the pipe held is passed on. What ranks have left behind may keep it open for ever."""
        n_read = -1
        while self._thread.is_alive() and n_read != self._n_read:
            n_read = self._n_read
            self._thread.join(_QUIET_S)
            with self._changing:  # by somebody who reads slowly, perhaps
                pass
        self._pass_rest()

    def has_ended(self) -> bool:
        return not self._thread.is_alive()

    def _read(self) -> None:
        while data := os.read(self._pipe.fileno(), _PIECE):
            with self._changing:
                self._n_read += len(data)
                passed, reports = self._splitter.feed(data)
                self._sink.write(self._lines.feed(passed))
                self._take_reports(reports)
        self._pass_rest()
        self._pipe.close()

    def _pass_rest(self) -> None:
        with self._changing:
            self._sink.write(self._lines.feed(self._splitter.rest()) + self._lines.rest())


def orders(shares: Sequence[Share], hellos: Sequence[Hello], job: Job, environment: Mapping[str, str]) -> list[Order]:
    """Returns what each host is told. Pure.

    Args:
        hellos: What each host has said.
        environment: Of this process. MASTER_ADDR and MASTER_PORT in it, where there are any, say where the first host's
            store is as seen from the others.
    """
    first = hellos[0]
    port = int(environment.get("MASTER_PORT") or first.port)
    seen = next((hello.client for hello in hellos if hello.client), "")
    common = environment_for_others({**environment, **job.environment})
    found = []
    for number, hello in enumerate(hellos):
        # The first host is found where ssh has found it; if it is this one, where the others' ssh came from.
        name = shares[0].name.rpartition("@")[2].partition("%")[0]
        address = environment.get("MASTER_ADDR") or first.server or hello.client or name
        if number == 0:
            address = "localhost"
        elif "%" in address:  # which is an interface of another host
            address = name
        found.append(
            Order(
                ranks_per_host=[share.n_ranks for share in shares],
                number=number,
                master_address=address,
                master_port=port,
                own_address=hello.server or seen,
                folder=os.getcwd(),
                environment=common,
                command=job.command,
                task=job.task,
                start_timeout=job.start_timeout,
                output=asdict(job.output),
            )
        )
    return found


def for_python(environment: Mapping[str, str]) -> dict[str, str]:
    """What Python may need to start on another host; the rest comes with the order. Paths begin at the root."""
    given = {name: environment[name] for name in ("PYTHONPATH", "LD_LIBRARY_PATH") if environment.get(name)}
    return {name: os.pathsep.join(map(os.path.abspath, paths.split(os.pathsep))) for name, paths in given.items()}


def run_on_hosts(shares: Sequence[Share], job: Job, ssh: Ssh, python: str) -> Mapping[str, str]:
    """Starts the ranks of all hosts, and waits for them. When one ends badly, all are ended.

    Args:
        python: The Python to use on all hosts, which has horon there.

    Returns:
        A task's results, as in Outcome.

    Raises:
        FleetError: A host could not be started or was lost, or a rank has failed.
    """
    events: queue.SimpleQueue[_Event] = queue.SimpleQueue()
    nodes: list[_Node] = []
    sinks = own_sinks()
    fleet = _Fleet(nodes, events)
    try:
        for number, share in enumerate(shares):
            command = [python, "-m", "horon.runner._node"]
            if not share.is_here:
                command = ssh.command(share.name, command, for_python(os.environ))
            if job.is_verbose:
                print(f"horonrun: {shlex.join(command)} (for {share.n_ranks} processes)", file=sys.stderr, flush=True)
            try:
                nodes.append(_Node(number, share, command, events, sinks))
            except OSError as error:
                raise FleetError(f"could not start {command[0]}: {error.strerror}") from error
        hellos = fleet.await_hellos(job.start_timeout or _START_TIMEOUT_S)
        for node, order in zip(nodes, orders(shares, hellos, job, os.environ), strict=True):
            node.tell(json.dumps(asdict(order)).encode())
        fleet.await_end()
    except BaseException as error:
        if not isinstance(error, FleetError):  # told to end
            for sink in sinks.values():
                sink.hurry()
        try:
            fleet.end(_signal_for(error))
        except BaseException:  # Ctrl-C once more
            fleet.end(signal.SIGKILL)
            raise
        raise
    finally:
        if all(node.is_silent() for node in nodes):
            close_all(sinks)
    results: dict[str, str] = {}
    for node in nodes:
        results.update(node.outcome.results if node.outcome is not None else {})
    return results


def _signal_for(error: BaseException) -> int:
    return signal.SIGINT if isinstance(error, KeyboardInterrupt) else signal.SIGTERM


class _Fleet:
    """All hosts' launchers, and what comes of them. Used by one thread."""

    def __init__(self, nodes: list[_Node], events: queue.SimpleQueue[_Event]) -> None:
        self._nodes = nodes
        self._events = events
        self._exited: set[int] = set()
        self._problems: list[str] = []
        self._is_ending = False

    def await_hellos(self, timeout_s: float) -> list[Hello]:
        """Returns what all hosts have said. Raises FleetError for those that said nothing."""
        deadline_s = time.monotonic() + timeout_s
        while silent := [node for node in self._nodes if node.hello is None]:
            if not self._take(deadline_s) or self._problems:
                self._problems += [
                    f"{node.share.name} has not answered within {timeout_s:g} s (--start-timeout)"
                    for node in silent
                    if not self._problems
                ]
                raise FleetError("; ".join(self._problems))
        return [node.hello for node in self._nodes if node.hello is not None]

    def await_end(self) -> None:
        """Returns when all have ended well. Raises FleetError when one has not, and all have been ended."""
        while self._is_well() and any(self._nodes[number].outcome is None for number in self._running()):
            self._take(None)
        self.end(signal.SIGTERM)
        if self._is_well():
            return
        failures = in_order([failure for node in self._nodes for failure in _failures(node)])
        raise FleetError("; ".join(self._problems), failures)

    def end(self, signum: int) -> None:
        """Ends all, and returns when they have ended. Whoever asks a second time waits no more."""
        deadline_s = time.monotonic() + (0 if self._is_ending else _END_PATIENCE_S)
        for number in self._running():
            node = self._nodes[number]
            if self._is_ending or node.hello is None:  # it has no ranks yet
                node.kill()
            else:
                node.end(signum)
        self._is_ending = True
        while self._running():
            exit_deadline_s = self._exit_deadline()
            if not self._take(deadline_s if exit_deadline_s is None else min(deadline_s, exit_deadline_s)):
                silent = [self._nodes[number].share for number in self._running() if self._lacks_outcome(number)]
                self._problems += [
                    f"{share.name} has not said how {_ranks(share)} ended within {_END_PATIENCE_S:g} s"
                    for share in silent
                ]
                self._kill_rest()
                return

    def _exit_deadline(self) -> float | None:
        """None while one has not said how it went. Who has may still be held by what a rank has left behind."""
        is_done = all(self._nodes[number].outcome is not None for number in self._running())
        return time.monotonic() + _EXIT_PATIENCE_S if is_done else None

    def _lacks_outcome(self, number: int) -> bool:
        return self._nodes[number].hello is not None and self._nodes[number].outcome is None

    def _kill_rest(self) -> None:
        for number in self._running():
            self._nodes[number].kill()

    def _running(self) -> list[int]:
        return [number for number in range(len(self._nodes)) if number not in self._exited]

    def _is_well(self) -> bool:
        return not self._problems and not any(_failures(node) for node in self._nodes)

    def _take(self, deadline_s: float | None) -> bool:
        """Waits for an event. Returns whether one has come in time."""
        patience_s = None if deadline_s is None else max(deadline_s - time.monotonic(), 0)
        try:
            event = self._events.get(timeout=patience_s)
        except queue.Empty:
            return False
        if event.kind in _TAKERS:  # else it is a rank's own
            _TAKERS[event.kind](self, self._nodes[event.number], event)
        return True

    def _take_hello(self, node: _Node, event: _Event) -> None:
        node.hello = Hello(**event.value)

    def _take_outcome(self, node: _Node, event: _Event) -> None:
        node.outcome = Outcome(**event.value)
        if node.outcome.problem:
            self._problems.append(f"{node.share.name}: {node.outcome.problem}")

    def _take_exit(self, node: _Node, event: _Event) -> None:
        self._exited.add(event.number)
        if node.outcome is not None or self._is_ending:
            return
        how = f"{'the launcher' if node.share.is_here else 'ssh'} ended with {event.value}"
        if node.hello is None:
            self._problems.append(
                f"could not start on {node.share.name} ({how}). Can `ssh {node.share.name}` log in there without a "
                f"password, and has {sys.executable} horon there?"
            )
        else:
            self._problems.append(f"lost {node.share.name}, which has {_ranks(node.share)} ({how})")


_TAKERS: Mapping[str, Callable[[_Fleet, _Node, _Event], None]] = {
    "hello": _Fleet._take_hello,
    "outcome": _Fleet._take_outcome,
    "exit": _Fleet._take_exit,
}


def _failures(node: _Node) -> list[Failure]:
    found = node.outcome.failures if node.outcome is not None else ()
    return [replace(Failure(**failure), host=node.share.name) for failure in found]


def _ranks(share: Share) -> str:
    last = share.first_rank + share.n_ranks - 1
    return f"rank {last}" if share.n_ranks == 1 else f"ranks {share.first_rank} to {last}"
