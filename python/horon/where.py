"""horon-where: what the ranks on this host are doing, and what they wait for."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Sequence
from datetime import timedelta

import psutil  # type: ignore[import-untyped,unused-ignore]

from horon._version import __version__

_DESCRIPTION = """\
Asks each process of yours on this host that uses horon where it is: what it waits for in horon and since when, how much
it computes, and where its Python threads are. Nothing is stopped, and no rights beyond being the same user are needed.
"""


def _title(pid: int) -> str:
    """Returns what a process is called: its rank, if its environment has one, and its command."""
    if pid == 0:
        return "a process that can not be seen from here (another PID namespace)"
    try:
        process = psutil.Process(pid)
        rank = process.environ().get("RANK") or process.environ().get("HOROVOD_RANK")
        command = " ".join(process.cmdline())
    except psutil.Error:
        return f"pid {pid}"
    return f"pid {pid}{f' (rank {rank})' if rank else ''}: {command}"


def _without_answer(pid: int) -> str:
    with contextlib.suppress(psutil.Error):
        if psutil.Process(pid).status() == psutil.STATUS_STOPPED:
            return "is stopped (SIGSTOP or Ctrl-Z; SIGCONT lets it go on)"
    return "did not answer: it is stopped, or gets no CPU time"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command. Returns its exit status: 1 if no process was found.

    Args:
        arguments: The command line without the program's name; ``sys.argv`` unless given.
    """
    parser = argparse.ArgumentParser("horon-where", description=_DESCRIPTION)
    parser.add_argument("pids", metavar="PID", type=int, nargs="*", help="only these processes")
    parser.add_argument("--timeout", type=float, default=3.0, help="how long to wait for each (seconds)")
    parser.add_argument("--version", action="version", version=__version__)
    options = parser.parse_args(arguments)
    from horon import _C  # late: it imports torch

    answers = []
    for post in _C.find_watch_posts():
        answer = _C.ask_watch_post(post, timedelta(seconds=options.timeout))
        if answer is not None and (not options.pids or answer[0] in options.pids):
            answers.append(answer)
    for pid, text in sorted(answers, key=lambda answer: answer[0]):
        print(_title(pid))
        lines = (text or _without_answer(pid)).splitlines()
        print("\n".join(f"    {line}" for line in lines), flush=True)
    if not answers:
        print("no process of yours on this host that uses horon was found", file=sys.stderr)
    return 0 if answers else 1


if __name__ == "__main__":
    sys.exit(main())
