"""What ranks print comes through pipes of their own, and is passed on line by line.

Ranks that share a pipe or a file mix their lines, since a print that is not buffered writes a line in two pieces; and
what is buffered comes late, or never. A terminal on which nobody wants tags is left to the ranks: programs are coloured
there, ask questions, and print whole lines.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import selectors
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from horon.runner._lines import Lines, Tag
from horon.runner._sink import Sink, own_sinks

# Where a rank finds its pipes. They have names, since torch's agent closes all others.
PIPES_VARIABLE = "HORON_RUN_PIPES"
STREAMS = {1: "stdout", 2: "stderr"}  # by their descriptors

_PIECE = 1 << 16


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
    """A file for the output can not be written."""


class Outputs:
    """Passes on what a host's ranks print, while it is entered.

    When it is left all that they have printed has been passed on, or nobody will read it. What they have left behind
    may print on, and is not waited for.

    Args:
        folder: For the pipes.
        ranks: This host's.
        size: How many there are on all hosts.

    Raises:
        OutputError: A file of the output's folder can not be written.
    """

    def __init__(self, folder: Path, output: Output, ranks: range, size: int) -> None:
        self._sinks = own_sinks()
        self._sources: list[_Source] = []
        with contextlib.ExitStack() as opened:
            self._over = os.eventfd(0)
            opened.callback(os.close, self._over)
            for local_rank, rank in enumerate(ranks):
                for stream, sink in self._sinks.items():
                    if output == Output() and sink.is_terminal():
                        continue
                    path = pipe_of(folder, local_rank, stream)
                    os.mkfifo(path, 0o600)
                    # Before the rank opens it, which waits for that; there is no end before that either.
                    pipe = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
                    opened.callback(os.close, pipe)
                    tag = Tag(rank, stream, output.has_times) if output.is_tagged or output.has_times else None
                    source = _Source(pipe, sink, tag)
                    if output.folder is not None:
                        source.copy_to(self._file(opened, folder_of(output.folder, rank, size) / stream))
                    self._sources.append(source)
            self._opened = opened.pop_all()
        self.variables: Mapping[str, str] = self._variables(folder)
        self._thread = threading.Thread(target=self._pass_on, daemon=True)

    def _variables(self, folder: Path) -> dict[str, str]:
        if not self._sources:
            return {}
        # A pipe is no terminal, and what ranks print would come at their end.
        buffered = {} if "PYTHONUNBUFFERED" in os.environ else {"PYTHONUNBUFFERED": "1"}
        return {PIPES_VARIABLE: str(folder), **buffered}

    def _file(self, opened: contextlib.ExitStack, path: Path) -> Sink:
        def say(error: Exception) -> None:
            self._sinks["stderr"].write(f"horonrun: nothing more is written to {path}: {error}\n".encode())

        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            return Sink(opened.enter_context(path.open("w")), say)
        except OSError as error:
            raise OutputError(f"the output can not be written to {path}: {error.strerror}") from error

    def __enter__(self) -> Outputs:
        self._thread.start()
        return self

    def hurry(self) -> None:
        """The job is to end: who does not read is not waited for."""
        for sink in self._sinks.values():
            sink.hurry()

    def __exit__(self, *error: Any) -> None:
        os.eventfd_write(self._over, 1)
        try:
            self._thread.join()
        except BaseException:  # told to end, while somebody reads slowly
            self.hurry()
            self._thread.join()
            raise
        finally:
            if not self._thread.is_alive():
                self._opened.close()

    def _pass_on(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._over, selectors.EVENT_READ)
            for source in self._sources:
                selector.register(source.pipe, selectors.EVENT_READ, source)
            while True:
                ready = [key.data for key, _ in selector.select()]
                if None in ready:
                    break
                for source in ready:
                    if source.pass_on() == 0:
                        selector.unregister(source.pipe)
        for source in self._sources:
            source.end()


class _Source:
    """A rank's stdout or stderr, and where its lines go. Used by one thread."""

    def __init__(self, pipe: int, sink: Sink, tag: Tag | None) -> None:
        self.pipe = pipe
        self._sink = sink
        self._tag = tag
        self._file: Sink | None = None
        self._lines = Lines()

    def copy_to(self, file: Sink) -> None:
        self._file = file

    def pass_on(self) -> int | None:
        """Passes on what has come; returns how many bytes. 0: the rank has closed it. None: there is nothing yet."""
        try:
            data = os.read(self.pipe, _PIECE)
        except BlockingIOError:
            return None
        if self._file is not None:
            self._file.write(data)
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


def take_pipes(folder: str, local_rank: int) -> None:
    """What a rank does: from now on its output goes through its pipes, where there are any."""
    for descriptor, stream in STREAMS.items():
        path = pipe_of(Path(folder), local_rank, stream)
        if path.exists():
            pipe = os.open(path, os.O_WRONLY)
            os.dup2(pipe, descriptor)
            os.close(pipe)
