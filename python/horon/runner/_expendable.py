"""A rank without which the job may go on: the launcher sees who waits for it, and is not told of an end that may be."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from horon._joined import JOINED_KEY, launcher_store
from horon._newcomers import NEWCOMER_VARIABLE, NOTES_VARIABLE, Registry, process_name
from horon.runner import _child

# What ends a job: the launcher's agent sends it to this process and the rank at once, as to one process group.
_ENDS = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT}
# Between two starts of a process that the others do not let in.
_LONGEST_PAUSE_S = 60.0
_BLOCKED = _ENDS | {signal.SIGUSR1, signal.SIGUSR2}


def run_expendable(command: Sequence[str], least: int, n_restarts: int) -> int:
    """Runs the command and returns its exit status, or 0 if it has failed and the job may go on without it.

    Then it is started anew, and may become a rank again (horon/_newcomers.py).

    Args:
        least: With how many ranks.
        n_restarts: How many processes may be started anew in the whole job.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, _BLOCKED)  # they stay pending, and are looked for when the rank has ended
    newcomer: int | None = None
    pause_s = 0.0
    while True:
        status, has_told = _run(command, newcomer)
        if status == 0:
            if n_restarts > 0 and not has_told:
                _tell_leaving()
            return 0
        if signal.sigpending() & _ENDS:
            break
        outlook = _outlook(status, least, newcomer)
        if not outlook.may_go_on:
            break
        if outlook.store is None or n_restarts == 0:
            return 0
        pause_s = 0.0 if outlook.was_rank else min(max(2 * pause_s, 1.0), _LONGEST_PAUSE_S)
        newcomer = _next_newcomer(Registry(outlook.store), n_restarts, pause_s)
        if newcomer is None:
            return 0
    if status > 0:
        return status
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _BLOCKED)
    if -status in _BLOCKED:
        signal.signal(-status, signal.SIG_DFL)
    os.kill(os.getpid(), -status)  # as the rank was ended
    return 128 - status


def _run(command: Sequence[str], newcomer: int | None) -> tuple[int, bool]:
    """Returns its status, or the negative number of its signal; and whether it has said that it leaves."""
    if newcomer is not None:
        os.environ[NEWCOMER_VARIABLE] = str(newcomer)
    notes, to_write = os.pipe()
    os.set_inheritable(to_write, True)
    os.environ[NOTES_VARIABLE] = str(to_write)
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        _child.die_with_parent()
        if os.getppid() != parent:  # it was too late for that
            os._exit(1)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _BLOCKED)
        _child.become(list(command))
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    os.set_blocking(notes, False)  # what it has left behind may hold the other end
    try:
        has_told = bool(os.read(notes, 1))
    except BlockingIOError:
        has_told = False
    os.close(notes)
    os.close(to_write)
    return status, has_told


@dataclass(frozen=True)
class _Outlook:
    """What follows from a rank's end.

    Attributes:
        may_go_on: Whether the job may, without it.
        was_rank: Whether it was one: a newcomer may have ended before.
        store: The launcher's, if it answers.
    """

    may_go_on: bool
    was_rank: bool = True
    store: Any = None


def _outlook(status: int, least: int, newcomer: int | None) -> _Outlook:
    """Whether the job has begun, and has so many other ranks. Says so."""
    size, rank = int(os.environ["WORLD_SIZE"]), os.environ["RANK"]
    how = f"was ended by signal {-status}" if status < 0 else f"ended with {status}"
    try:
        store = launcher_store()
        registry = Registry(store)
        registry.take_back_leaving(process_name(os.environ))
        if newcomer is not None:
            registry.tell_ended(newcomer)
            if not registry.has_met(newcomer):
                _say(f"rank {rank}, started anew, {how} before the others had let it in")
                return _Outlook(True, False, store)
        if not store.check([JOINED_KEY]):
            _say(f"rank {rank} {how} before all had met")
            return _Outlook(False)
        left = size - int(store.add("lost", 1))
    except Exception as error:
        _say(f"rank {rank} {how}; the launcher's store does not answer: {error}")
        return _Outlook(False)
    what = "the others go on" if left >= least else "too few"
    _say(f"rank {rank} {how}; {left} of {size} ranks are left, and --min-np is {least}: {what}")
    return _Outlook(left >= least, True, store)


def _next_newcomer(registry: Registry, n_restarts: int, pause_s: float) -> int | None:
    """The number of the process that is to be started; None: none is."""
    if signal.sigtimedwait(_ENDS, pause_s) is not None:
        return None
    rank = os.environ["RANK"]
    try:
        number = None if registry.is_over(int(os.environ["WORLD_SIZE"])) else registry.take_number(n_restarts)
    except Exception as error:
        _say(f"rank {rank} is not started anew; the launcher's store does not answer: {error}")
        return None
    if number is not None:
        _say(f"rank {rank} is started anew ({number} of --max-restarts {n_restarts})")
    return number


def _tell_leaving() -> None:
    with contextlib.suppress(Exception):  # nobody asks any more
        Registry(launcher_store()).tell_leaving(process_name(os.environ))


def _say(text: str) -> None:
    sys.stderr.write(f"horonrun: {text}\n")  # in one piece: others of its kind may have something to say, too
    sys.stderr.flush()
