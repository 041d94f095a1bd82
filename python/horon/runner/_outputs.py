"""What ranks print comes through pipes of their own, and is passed on line by line.

Ranks that share a pipe or a file mix their lines, since a print that is not buffered writes a line in two pieces; and
what is buffered comes late, or never. The pipes have names, since torch's agent closes all others. Terminals on which
nobody wants tags are left to the ranks: programs are coloured there, ask questions, and print whole lines.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import selectors
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from horon.runner._lines import Lines, Tag
from horon.runner._sink import Sink, close_all, own_sinks

STREAMS = {1: "stdout", 2: "stderr"}  # by their descriptors

_PIECE = 1 << 16
# What a rank has started, and not waited for, may take so long to print what the rank has said last: `tee`, say.
_LAST_WORDS_S = 0.2
# A hurried sink takes a second.
_MOST_HURRIED_S = 5


@dataclass(frozen=True)
class Output:
    """What is done with what ranks print.

    Attributes:
        is_tagged: Lines begin with the rank and the stream.
        has_times: Before that, there is the time.
        folder: Where each rank's output is written as well, on its host. None: nowhere.
    """

    is_tagged: bool = False
    has_times: bool = False
    folder: str | None = None


def pipe_of(folder: Path, local_rank: int, stream: str) -> Path:
    return folder / f"{local_rank}.{stream}"


def folder_of(output: str, rank: int, size: int) -> Path:
    """Where a rank's stdout and stderr go; ranks have leading zeros, as in Horovod."""
    return Path(output) / f"rank.{rank:0{len(str(size - 1))}}"


class OutputError(RuntimeError):
    """A pipe or a file for the output can not be had."""


class Outputs:
    """Passes on what a host's ranks print, while it is entered.

    When it is left all that they have printed has been passed on, or nobody will read it. What they have left behind
    is not waited for.

    Attributes:
        folder: Where ranks find their pipes. None: they have none, and print where this process does.

    Args:
        folder: For the pipes.
        ranks: This host's.
        size: How many there are on all hosts.

    Raises:
        OutputError: A file of the output's folder can not be written.
    """

    def __init__(self, folder: Path, output: Output, ranks: range, size: int) -> None:
        self.folder: Path | None = None
        self._threads: list[_Passing] = []
        with contextlib.ExitStack() as opened:
            self._sinks = own_sinks()
            opened.callback(close_all, self._sinks)
            # A stream that is left alone would mix its lines if the other one were not: see take_pipes.
            if output != Output() or not all(sink.is_terminal() for sink in self._sinks.values()):
                self.folder = folder
                sources: dict[Sink, list[_Source]] = {sink: [] for sink in self._sinks.values()}
                for local_rank, rank in enumerate(ranks):
                    for stream, sink in self._sinks.items():
                        pipe = _open_pipe(opened, pipe_of(folder, local_rank, stream))
                        tag = Tag(rank, stream, output.has_times) if output.is_tagged or output.has_times else None
                        copy = self._copy(opened, output, rank, size, stream)
                        sources[sink].append(_Source(pipe, sink, tag, copy))
                # One for each place, so that nobody waits for the other place's reader.
                self._threads = [_Passing(opened, of_sink) for of_sink in sources.values()]
            self._opened = opened.pop_all()

    def _copy(self, opened: contextlib.ExitStack, output: Output, rank: int, size: int, stream: str) -> _Copy | None:
        if output.folder is None:
            return None
        return _Copy(opened, folder_of(output.folder, rank, size) / stream, self._sinks["stderr"])

    def __enter__(self) -> Outputs:
        for thread in self._threads:
            thread.start()
        return self

    def hurry(self) -> None:
        """The job is to end: who does not read is not waited for."""
        for sink in self._sinks.values():
            sink.hurry()

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        try:
            for thread in self._threads:
                thread.finish()
            for thread in self._threads:
                thread.is_done.wait()
        except BaseException:  # told to end, while somebody reads slowly
            self.hurry()
            for thread in self._threads:
                thread.finish()
            for thread in self._threads:
                thread.is_done.wait(_MOST_HURRIED_S)
            if kind is None:  # else what has been found out is more
                raise
        finally:
            if all(thread.is_done.is_set() for thread in self._threads):
                self._opened.close()


def _open_pipe(opened: contextlib.ExitStack, path: Path) -> int:
    """Before the rank opens it, which waits for that; there is no end before that either."""
    try:
        os.mkfifo(path, 0o600)
        pipe = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError as error:
        raise OutputError(f"there can be no pipe at {path}: {error.strerror}; TMPDIR chooses another place") from error
    opened.callback(os.close, pipe)
    return pipe


class _Copy:
    """A file with what a rank prints."""

    def __init__(self, opened: contextlib.ExitStack, path: Path, stderr: Sink) -> None:
        self._path = path
        self._stderr = stderr
        self._is_written = True
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = opened.enter_context(path.open("wb", buffering=0))
        except OSError as error:
            raise OutputError(f"the output can not be written to {path}: {error.strerror}") from error

    def write(self, data: bytes) -> None:
        rest = memoryview(data)
        try:
            while rest and self._is_written:
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            self._is_written = False
            self._stderr.write(f"horonrun: nothing more is written to {self._path}: {error.strerror}\n".encode())


class _Source:
    """A rank's stdout or stderr, and where its lines go. Used by one thread."""

    def __init__(self, pipe: int, sink: Sink, tag: Tag | None, copy: _Copy | None) -> None:
        self.pipe = pipe
        self._sink = sink
        self._tag = tag
        self._copy = copy
        self._lines = Lines()

    def pass_on(self) -> int | None:
        """Passes on what has come; returns how many bytes. 0: the rank has closed it. None: there is nothing yet."""
        try:
            data = os.read(self.pipe, _PIECE)
        except BlockingIOError:
            return None
        if self._copy is not None:
            self._copy.write(data)
        self._write(self._lines.feed(data))
        return len(data)

    def end(self) -> None:
        """Passes on the rest, which is no more than the pipe holds, whatever is written meanwhile."""
        left = fcntl.fcntl(self.pipe, fcntl.F_GETPIPE_SZ)
        while left > 0 and (n_bytes := self.pass_on()):
            left -= n_bytes
        self._write(self._lines.rest())

    def _write(self, lines: bytes) -> None:
        self._sink.write(lines if self._tag is None else self._tag.put_before(lines, time.asctime()))


class _Passing(threading.Thread):
    """Passes on what comes from some sources.

    Attributes:
        is_done: Set at the end. An exception in join(), of a signal, would make Python take the thread for ended.
    """

    def __init__(self, opened: contextlib.ExitStack, sources: list[_Source]) -> None:
        super().__init__(daemon=True)
        self.is_done = threading.Event()
        self._sources = sources
        self._over = os.eventfd(0)
        opened.callback(os.close, self._over)

    def finish(self) -> None:
        """The ranks have ended."""
        os.eventfd_write(self._over, 1)

    def run(self) -> None:
        try:
            self._pass_on()
        finally:
            self.is_done.set()

    def _pass_on(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._over, selectors.EVENT_READ)
            for source in self._sources:
                selector.register(source.pipe, selectors.EVENT_READ, source)
            n_open = len(self._sources)
            until_s: float | None = None
            while n_open or until_s is None:
                patience_s = None if until_s is None else until_s - time.monotonic()
                if patience_s is not None and patience_s <= 0:
                    break  # a rank has left somebody behind who holds its pipe
                for key, _ in selector.select(patience_s):
                    if key.data is None:
                        until_s = time.monotonic() + _LAST_WORDS_S
                        selector.unregister(self._over)
                    elif key.data.pass_on() == 0:
                        selector.unregister(key.data.pipe)
                        n_open -= 1
        for source in self._sources:
            source.end()


def take_pipes(folder: str, local_rank: int) -> None:
    """What a rank does: from now on its output goes through its pipes.

    Python writes what it prints at once then, and a line in two pieces. So both streams have pipes, or none.
    """
    for descriptor, stream in STREAMS.items():
        pipe = os.open(pipe_of(Path(folder), local_rank, stream), os.O_WRONLY)
        if pipe == descriptor:  # it was closed
            os.set_inheritable(pipe, True)
        else:
            os.dup2(pipe, descriptor)
            os.close(pipe)
    os.environ.setdefault("PYTHONUNBUFFERED", "1")  # what is buffered comes late, or never
