"""Where lines go: this process's stdout or stderr, a notebook's, or a file."""

from __future__ import annotations

import os
import select
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any

# A pipe that can be written to takes so much without blocking: PIPE_BUF of Linux.
_AT_ONCE = 4096
# So long whoever reads may do nothing when the job is to end.
_PATIENCE_S = 1.0


class Sink:
    """Takes bytes, as fast as whoever reads them does. One for each place: who shares it does not break others' lines.

    When its reader is gone, bytes are dropped: a job does not end for that.

    Args:
        stream: sys.stdout, or what stands in its place; None: nobody wants them.
        when_lost: Called once, with the reason, when bytes are dropped from then on.
    """

    def __init__(self, stream: Any, when_lost: Callable[[Exception], None] = lambda _: None) -> None:
        self._when_lost = when_lost
        self._stream = stream
        self._writing = threading.Lock()
        self._descriptor = _descriptor_of(stream)
        self._is_closed = stream is None
        self._is_hurried = threading.Event()
        self._wake = os.eventfd(0)  # for who waits for room; ends with this object

    def __del__(self) -> None:
        os.close(self._wake)

    def write(self, data: bytes) -> None:
        """Blocks until all is written, or nobody will read it."""
        if not data or self._is_closed:
            return
        with self._writing:
            try:
                self._write(data)
            except (OSError, ValueError) as error:  # whoever read it is gone, or a disk is full
                self._is_closed = True
                self._when_lost(error)

    def is_same_place(self, other: Sink) -> bool:
        if self._descriptor is None or other._descriptor is None:
            return self._stream is other._stream
        return os.path.sameopenfile(self._descriptor, other._descriptor)

    def is_terminal(self) -> bool:
        return self._descriptor is not None and os.isatty(self._descriptor)

    def hurry(self) -> None:
        """From now on, what can not be written for a second is dropped, with all that comes after it."""
        self._is_hurried.set()
        os.eventfd_write(self._wake, 1)

    def _write(self, data: bytes) -> None:
        if self._descriptor is None:
            self._stream.write(data.decode(errors="replace"))
            self._stream.flush()
            return
        self._stream.flush()  # what this process has said itself comes first
        rest = memoryview(data)
        while rest and self._await_room():
            try:
                rest = rest[os.write(self._descriptor, rest[:_AT_ONCE]) :]
            except BlockingIOError:
                continue

    def _await_room(self) -> bool:
        """Returns whether more can be written."""
        assert self._descriptor is not None
        room = select.poll()
        room.register(self._descriptor, select.POLLOUT)
        if not self._is_hurried.is_set():
            room.register(self._wake, select.POLLIN)
            if any(descriptor == self._descriptor for descriptor, _ in room.poll()):
                return True
            room.unregister(self._wake)
        self._is_closed = not room.poll(_PATIENCE_S * 1000)
        return not self._is_closed


def _descriptor_of(stream: Any) -> int | None:
    """None: it is a notebook's, or a test's, which has no file behind it."""
    try:
        return int(stream.fileno()) if getattr(stream, "buffer", None) is not None else None
    except (OSError, ValueError, AttributeError):
        return None


def own_sinks() -> Mapping[str, Sink]:
    """Those of this process, by what they are called. One for both where they lead to the same place."""
    out, err = Sink(sys.stdout), Sink(sys.stderr)
    return {"stdout": out, "stderr": out if err.is_same_place(out) else err}
