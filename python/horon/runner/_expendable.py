"""A rank without which the job may go on: the launcher sees who waits for it, and is not told of an end that may be."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence

from horon._joined import JOINED_KEY, launcher_store
from horon.runner import _child

# What ends a job: the launcher's agent sends it to this process and the rank at once, as to one process group.
_ENDS = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT}
_BLOCKED = _ENDS | {signal.SIGUSR1, signal.SIGUSR2}


def run_expendable(command: Sequence[str], least: int) -> int:
    """Runs the command and returns its exit status, or 0 if it has failed and the job may go on without it.

    Args:
        least: With how many ranks.
    """
    parent = os.getpid()
    signal.pthread_sigmask(signal.SIG_BLOCK, _BLOCKED)
    pid = os.fork()
    if pid == 0:
        _child.die_with_parent()
        if os.getppid() != parent:  # it was too late for that
            os._exit(1)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _BLOCKED)
        _child.become(list(command))
    # From here on they stay pending, and are looked for when the rank has ended.
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if status == 0 or (not signal.sigpending() & _ENDS and _is_expendable(status, least)):
        return 0
    if status > 0:
        return status
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _BLOCKED)
    if -status in _BLOCKED:
        signal.signal(-status, signal.SIG_DFL)
    os.kill(os.getpid(), -status)  # as the rank was ended
    return 128 - status


def _is_expendable(status: int, least: int) -> bool:
    """Whether the job has begun, and has so many other ranks. Says so."""
    size, rank = int(os.environ["WORLD_SIZE"]), os.environ["RANK"]
    how = f"was ended by signal {-status}" if status < 0 else f"ended with {status}"
    try:
        store = launcher_store()
        if not store.check([JOINED_KEY]):
            _say(f"rank {rank} {how} before all had met")
            return False
        left = size - int(store.add("lost", 1))
    except Exception as error:
        _say(f"rank {rank} {how}; the launcher's store does not answer: {error}")
        return False
    what = "the others go on" if left >= least else "too few"
    _say(f"rank {rank} {how}; {left} of {size} ranks are left, and --min-np is {least}: {what}")
    return left >= least


def _say(text: str) -> None:
    sys.stderr.write(f"horonrun: {text}\n")  # in one piece: others of its kind may have something to say, too
    sys.stderr.flush()
