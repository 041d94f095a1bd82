"""A rank without which the job may go on: the launcher sees who waits for it, and is not told of an end that may be."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from horon._joined import JOINED_KEY, launcher_store
from horon._newcomers import NEWCOMER_VARIABLE, NOTES_VARIABLE, RESTARTS_VARIABLE, Registry, process_name
from horon.runner import _child

# What ends a job: the launcher's agent sends it to this process and the rank at once, as to one process group.
_ENDS = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT}
# A process that was started anew and has lasted for so long may be followed by another one at once.
_HOPEFUL_S = 60.0
_LONGEST_PAUSE_S = 60.0
# How often it is looked whether the others still need a newcomer that is not one of them yet.
_LOOK_S = 2.0
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
        began_s = time.monotonic()
        status, has_told = _run(command, newcomer, n_restarts)
        if status == 0:
            if n_restarts > 0 and not has_told:
                _tell_good_end(newcomer)
            return 0
        if signal.sigpending() & _ENDS:
            break
        outlook = _outlook(status, least, newcomer)
        if not outlook.may_go_on:
            break
        if outlook.store is None or n_restarts == 0:
            return 0
        is_hopeless = newcomer is not None and time.monotonic() - began_s < _HOPEFUL_S
        pause_s = min(max(2 * pause_s, 1.0), _LONGEST_PAUSE_S) if is_hopeless else 0.0
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


def _run(command: Sequence[str], newcomer: int | None, n_restarts: int) -> tuple[int, bool]:
    """Returns its status, or the negative number of its signal; and whether it has said that it leaves."""
    notes, to_write = os.pipe()
    if n_restarts > 0:
        os.set_inheritable(to_write, True)
        os.environ[RESTARTS_VARIABLE] = str(n_restarts)
        os.environ[NEWCOMER_VARIABLE] = str(newcomer or 0)
        os.environ[NOTES_VARIABLE] = f"{to_write}.{os.fstat(to_write).st_ino}"
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        _child.die_with_parent()
        if os.getppid() != parent:  # it was too late for that
            os._exit(1)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _BLOCKED)
        _child.become(list(command))
    if signal.sigpending() & _ENDS:  # sent before it was there
        os.kill(pid, signal.SIGTERM)
    is_superfluous = newcomer is not None and _outlives_the_job(pid, newcomer)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    status = 0 if is_superfluous else status
    os.set_blocking(notes, False)  # what it has left behind may hold the other end
    try:
        has_told = bool(os.read(notes, 1))
    except BlockingIOError:
        has_told = False
    os.close(notes)
    os.close(to_write)
    return status, has_told


def _outlives_the_job(pid: int, newcomer: int) -> bool:
    """Waits until a newcomer has ended, or has become a rank; or ends it, and says so, when all others have left.

    It may not ask itself: some have much to do before they call hvd.init(), or never do.
    """
    ended = select.poll()
    descriptor = os.pidfd_open(pid)
    ended.register(descriptor, select.POLLIN)
    try:
        registry = Registry(launcher_store())
        while not ended.poll(_LOOK_S * 1000) and not registry.has_met(newcomer):
            # Once more, so that it can say so itself if it waits.
            if _is_over(registry) and not ended.poll(_LOOK_S * 1000):
                for signum in (signal.SIGTERM, signal.SIGKILL):
                    os.kill(pid, signum)
                    if ended.poll(_LOOK_S * 1000):
                        break
                return True
    except Exception as error:
        _say(f"rank {os.environ['RANK']}: the launcher's store does not answer: {error}")
    finally:
        os.close(descriptor)
    return False


def _is_over(registry: Registry) -> bool:
    return registry.is_over(int(os.environ["WORLD_SIZE"]))


def _name(newcomer: int | None) -> str:
    return process_name(int(os.environ["RANK"]), newcomer or 0)


@dataclass(frozen=True)
class _Outlook:
    """What follows from a rank's end.

    Attributes:
        may_go_on: Whether the job may, without it.
        store: The launcher's, if it answers.
    """

    may_go_on: bool
    store: Any = None


def _outlook(status: int, least: int, newcomer: int | None) -> _Outlook:
    """Whether the job has begun, and has so many other ranks. Says so."""
    size, rank = int(os.environ["WORLD_SIZE"]), os.environ["RANK"]
    how = f"was ended by signal {-status}" if status < 0 else f"ended with {status}"
    try:
        store = launcher_store()
        registry = Registry(store)
        registry.take_back_leaving(_name(newcomer))
        if newcomer is not None:
            registry.tell_ended(newcomer)
            if not registry.has_met(newcomer):
                _say(f"rank {rank}, started anew, {how} before the others had let it in")
                return _Outlook(True, store)
        if not store.check([JOINED_KEY]):
            _say(f"rank {rank} {how} before all had met")
            return _Outlook(False)
        left = size - int(store.add("lost", 1))
    except Exception as error:
        _say(f"rank {rank} {how}; the launcher's store does not answer: {error}")
        return _Outlook(False)
    what = "the others go on" if left >= least else "too few"
    _say(f"rank {rank} {how}; {left} of {size} ranks are left, and --min-np is {least}: {what}")
    return _Outlook(left >= least, store)


def _next_newcomer(registry: Registry, n_restarts: int, pause_s: float) -> int | None:
    """The number of the process that is to be started; None: none is."""
    if signal.sigtimedwait(_ENDS, pause_s) is not None:
        return None
    rank = os.environ["RANK"]
    try:
        number = None if _is_over(registry) else registry.take_number(n_restarts)
    except Exception as error:
        _say(f"rank {rank} is not started anew; the launcher's store does not answer: {error}")
        return None
    if number is not None:
        _say(f"rank {rank} is started anew ({number} of --max-restarts {n_restarts})")
    return number


def _tell_good_end(newcomer: int | None) -> None:
    with contextlib.suppress(Exception):  # nobody asks any more
        registry = Registry(launcher_store())
        if newcomer is not None:
            registry.tell_ended(newcomer)
        if newcomer is None or registry.has_met(newcomer):
            registry.tell_leaving(_name(newcomer))


def _say(text: str) -> None:
    sys.stderr.write(f"horonrun: {text}\n")  # in one piece: others of its kind may have something to say, too
    sys.stderr.flush()
