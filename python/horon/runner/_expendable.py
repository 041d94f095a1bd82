"""A rank without which the job may go on: the launcher sees who waits for it, and is not told of an end that may be."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from datetime import timedelta
from types import FrameType

from horon.common._elastic_settings import MIN_NP_VARIABLE
from horon.runner import _child

# What the launcher tells its processes.
_PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_STORE_TIMEOUT = timedelta(seconds=30)


def run_expendable(command: Sequence[str]) -> int:
    """Runs the command and returns its exit status, or 0 if it has failed and enough others may still be there."""
    was_told = False

    def pass_on(number: int, _: FrameType | None) -> None:
        nonlocal was_told
        was_told = True
        if pid:
            os.kill(pid, number)

    pid = 0
    before = {number: signal.signal(number, pass_on) for number in _PASSED_ON}
    pid = os.fork()
    if pid == 0:
        for number, handler in before.items():
            signal.signal(number, handler)
        _child.die_with_parent()
        _child.become(list(command))
    _, raw_status = os.waitpid(pid, 0)
    pid = 0
    status = os.waitstatus_to_exitcode(raw_status)
    if status == 0:
        return 0
    if was_told or not _is_expendable(status):
        return _as_own_end(status)
    return 0


def _is_expendable(status: int) -> bool:
    """Whether the job still has the ranks that it is to have at least. Says so."""
    size, least = int(os.environ["WORLD_SIZE"]), int(os.environ[MIN_NP_VARIABLE])
    try:
        left = size - _count_lost()
    except Exception as error:
        print(f"horonrun: the launcher's store does not answer: {error}", file=sys.stderr, flush=True)
        return False
    how = f"was ended by signal {-status}" if status < 0 else f"ended with {status}"
    what = "the others go on" if left >= least else "too few"
    counts = f"{left} of {size} ranks are left, and --min-np is {least}"
    print(f"horonrun: rank {os.environ['RANK']} {how}; {counts}: {what}", file=sys.stderr, flush=True)
    return left >= least


def _count_lost() -> int:
    """How many ranks have failed, this one included: counted where the ranks meet, in the launcher."""
    from torch.distributed import PrefixStore, TCPStore

    store = TCPStore(
        os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False, timeout=_STORE_TIMEOUT
    )  # fmt: skip
    return int(PrefixStore("horonrun", store).add("lost", 1))


def _as_own_end(status: int) -> int:
    """What to exit with. Ends this process as the command's was ended, if by a signal."""
    if status < 0:
        if -status in _PASSED_ON:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    return status
