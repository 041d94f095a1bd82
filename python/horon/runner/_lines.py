"""Whole lines of several streams, one after the other, and what is put in front of each. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass

# A progress bar's lines end with a carriage return.
_ENDS = re.compile(rb"(?<=\n)|(?<=\r)(?!\n)")


class Lines:
    """Whole lines of a stream that others' lines go between."""

    _MOST = 1 << 16

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> bytes:
        """Returns the lines that are complete, and whatever is too long to wait for.

        A carriage return that comes last waits for what comes next: a line feed belongs to it.
        """
        data = self._rest + data
        end = max(data.rfind(b"\n"), data.rfind(b"\r", 0, -1)) + 1
        if len(data) - end > self._MOST:
            end = len(data)
        self._rest = data[end:]
        return data[:end]

    def rest(self) -> bytes:
        """What came last, at the end."""
        rest, self._rest = self._rest, b""
        return rest


@dataclass(frozen=True)
class Tag:
    """What is put in front of a rank's lines, in horovodrun's form: ``Mon Nov 30 09:15:00 2026[3]<stdout>:``.

    Attributes:
        has_time: Whether the time is, too.
    """

    rank: int
    stream: str
    has_time: bool = False

    def put_before(self, lines: bytes, time: str) -> bytes:
        """Returns the lines with it. What has no end yet gets one: somebody else's line may be the next."""
        tag = f"{time if self.has_time else ''}[{self.rank}]<{self.stream}>:".encode()
        tagged = b"".join(tag + line for line in _ENDS.split(lines) if line)
        return tagged if not tagged or tagged.endswith((b"\n", b"\r")) else tagged + b"\n"
