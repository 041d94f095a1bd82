"""Where what ranks print goes: this process's stdout or stderr, or what somebody has put in their place."""

from __future__ import annotations

import contextlib
import os
import select
import stat
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any

# A pipe that can be written to takes so much without blocking: PIPE_BUF of Linux.
_AT_ONCE = 4096
# So long whoever reads may take when the job is to end, for all that comes.
_PATIENCE_S = 1.0


class Sink:
    """Takes bytes, as fast as whoever reads them does. One for each place: who shares it breaks nobody else's lines.

    When its reader is gone, bytes are dropped: a job does not end for that.

    Args:
        stream: sys.stdout, or what stands in its place; None: nobody wants them.
    """

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._is_closed = stream is None
        self._writing = threading.Lock()
        self._hurried_until_s: float | None = None
        self._file = _file_behind(stream)
        self._descriptor: int | None = None
        if self._file is not None:
            with contextlib.suppress(Exception):  # what this process has said itself comes first
                stream.flush()
            self._descriptor = _one_that_does_not_block(self._file)
            self._wake = os.eventfd(0)  # for who waits for room

    def close(self) -> None:
        """Nobody writes any more."""
        if self._descriptor is not None:
            os.close(self._wake)
            os.close(self._descriptor)
            self._descriptor = None
        self._is_closed = True

    def write(self, data: bytes) -> None:
        """Blocks until all is written, or nobody will read it."""
        if not data or self._is_closed:
            return
        with self._writing:
            try:
                if self._descriptor is None:
                    _write_without_file(self._stream, data)
                else:
                    self._write(self._descriptor, data)
            except OSError:  # whoever read it is gone
                self._is_closed = True
            except Exception as error:  # what somebody has put in the place of sys.stdout
                self._is_closed = True
                print(f"horonrun: what ranks print can not be shown: {error!r}", file=sys.__stderr__, flush=True)

    def hurry(self) -> None:
        """The job is to end: what can not be written within a second from now is dropped."""
        if self._descriptor is not None and self._hurried_until_s is None:
            self._hurried_until_s = time.monotonic() + _PATIENCE_S
            os.eventfd_write(self._wake, 1)

    def is_same_place(self, other: Sink) -> bool:
        if self._file is None or other._file is None:
            return self._stream is other._stream
        return os.path.sameopenfile(self._file, other._file)

    def is_terminal(self) -> bool:
        return self._file is not None and os.isatty(self._file)

    def _write(self, descriptor: int, data: bytes) -> None:
        rest = memoryview(data)
        while rest and self._await_room(descriptor):
            with contextlib.suppress(BlockingIOError):  # somebody else has taken the room
                rest = rest[os.write(descriptor, rest[:_AT_ONCE]) :]

    def _await_room(self, descriptor: int) -> bool:
        """Returns whether more can be written."""
        room = select.poll()
        room.register(descriptor, select.POLLOUT)
        if self._hurried_until_s is None:
            room.register(self._wake, select.POLLIN)
            if any(ready == descriptor for ready, _ in room.poll()):
                return True
            room.unregister(self._wake)
        assert self._hurried_until_s is not None  # set before the wake
        left_s = max(self._hurried_until_s - time.monotonic(), 0)
        self._is_closed = not room.poll(left_s * 1000)
        return not self._is_closed


def _file_behind(stream: Any) -> int | None:
    """None: it is a notebook's, or a test's."""
    try:
        return int(stream.fileno()) if getattr(stream, "buffer", None) is not None else None
    except (OSError, ValueError, AttributeError):
        return None


def _one_that_does_not_block(file: int) -> int:
    """A descriptor of the same pipe or terminal, by itself. Of anything else, one that shares what the file's has."""
    kind = os.fstat(file).st_mode
    if stat.S_ISFIFO(kind) or stat.S_ISCHR(kind):
        with contextlib.suppress(OSError):  # another user's
            return os.open(f"/proc/self/fd/{file}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)
    return os.dup(file)


def _write_without_file(stream: Any, data: bytes) -> None:
    binary = getattr(stream, "buffer", None)
    if binary is not None:
        stream.flush()
        binary.write(data)
        binary.flush()
        return
    stream.write(data.decode(errors="replace"))
    flush = getattr(stream, "flush", None)
    if flush is not None:
        flush()


def own_sinks() -> Mapping[str, Sink]:
    """Those of this process, by what they are called. One for both where they lead to the same place."""
    out, err = Sink(sys.stdout), Sink(sys.stderr)
    if not out.is_same_place(err):
        return {"stdout": out, "stderr": err}
    err.close()
    return {"stdout": out, "stderr": out}


def close_all(sinks: Mapping[str, Sink]) -> None:
    for sink in set(sinks.values()):
        sink.close()
