"""Who has failed, and how? From what torch's elastic agent says of its processes, and what they have left."""

from __future__ import annotations

import json
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# What ranks raise when another one has failed.
_CONSEQUENCES = ("HorovodInternalError", "DistBackendError")


@dataclass(frozen=True)
class Failure:
    """A rank that has ended badly.

    Attributes:
        status: Its exit status; the negative number of a signal.
        text: The traceback of its exception, or nothing.
        time_s: When, as its host counts.
        host: Where it was, if that is to be said.
    """

    rank: int
    status: int
    text: str
    time_s: int = 0
    host: str = ""

    def __str__(self) -> str:
        how = f"was ended by signal {-self.status}" if self.status < 0 else f"ended with {self.status}"
        return f"rank {self.rank}{f' on {self.host}' if self.host else ''} {how}"

    @property
    def is_consequence(self) -> bool:
        """Whether it only says that another rank has failed."""
        last_line = self.text.rstrip().rpartition("\n")[2]
        return last_line.partition(":")[0].rpartition(".")[2] in _CONSEQUENCES


def failures_of(error: Any) -> Sequence[Failure]:
    """Returns the failures of a ChildFailedError, without the ranks that the agent ended then.

    Causes are first, then it is the order in which they came. The agent itself knows when they came to the second only.
    """
    found = sorted(error.failures.items(), key=lambda item: item[1].timestamp)
    failures = [_failure(rank, failure) for rank, failure in found]
    failures[1:] = [failure for failure in failures[1:] if failure.status != -signal.SIGTERM]
    return sorted(failures, key=lambda failure: failure.is_consequence)


def failures_left_in(folder: Path, first_rank: int) -> list[Failure]:
    """Returns those of ranks that have raised before they were ended, from what they have left in the agent's folder.

    Args:
        first_rank: The one that is the first of its host.
    """
    failures = []
    for path in sorted(folder.glob("**/error.json")):  # in a folder that has the local rank's name
        try:
            message = json.loads(path.read_text())["message"]
            rank = first_rank + int(path.parent.name)
        except (KeyError, TypeError, ValueError):  # it was ended while it wrote
            continue
        failures.append(Failure(rank, 1, _text(message), _time(message)))
    return failures


def in_order(failures: Sequence[Failure]) -> list[Failure]:
    """Those of several hosts: causes first, then in the order of their times, which are whole seconds.

    Within one, who was killed comes before those who say that they have failed because of it.
    """
    return sorted(failures, key=lambda failure: (failure.is_consequence, failure.time_s, failure.status > 0))


def texts_of(failures: Sequence[Failure], num_proc: int) -> str:
    """What is said of them, and of the other ranks."""
    others = "; the others were ended" if len(failures) < num_proc else ""
    return ", ".join(str(failure) for failure in failures) + others


def exit_status(failures: Sequence[Failure]) -> int:
    """What a launcher exits with: the first one's status, or, as a shell has it, 128 and its signal."""
    return 128 - failures[0].status if failures[0].status < 0 else failures[0].status


def _failure(rank: int, found: Any) -> Failure:
    status, text = found.exitcode, _text(found.message)
    # A rank that has raised tells the others as it exits. They may be gone before it is, and then the agent ends it.
    was_about_to_exit = bool(text) and status == -signal.SIGTERM
    return Failure(rank, 1 if was_about_to_exit else status, text, found.timestamp)


def _time(message: Any) -> int:
    found = message.get("extraInfo", {}) if isinstance(message, dict) else {}
    return int(found.get("timestamp") or 0)


def _text(message: Any) -> str:
    """Of an exception that `record` has seen; without one, torch says where to read about tracebacks."""
    if not isinstance(message, dict):
        return ""
    return str(message.get("extraInfo", {}).get("py_callstack") or message.get("message", ""))
