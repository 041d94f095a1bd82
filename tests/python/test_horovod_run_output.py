"""What ranks print, and where it goes: whole lines, at once, tagged, into files, to readers that are slow or gone."""

from __future__ import annotations

import gc
import io
import os
import pty
import re
import signal
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from harness import on_gloo

pytestmark = [pytest.mark.any_torch, pytest.mark.skipif(on_gloo(), reason="horon's own")]

TIMEOUT_S = 100

# ---- pure ----


def test_lines_of_several_streams_are_not_mixed() -> None:
    from horon.runner._lines import Lines

    lines = Lines()
    assert lines.feed(b"epoch") == b""
    assert lines.feed(b" 1\nepoch") == b"epoch 1\n"
    assert lines.feed(b" 2 10%\r 2 20%") == b"epoch 2 10%\r"
    assert lines.feed(b"\r") == b""
    assert lines.feed(b"\n 2 ") == b" 2 20%\r\n"
    assert lines.feed(b"x" * 70_000) == b" 2 " + b"x" * 70_000
    assert lines.feed(b"last") == b""
    assert lines.rest() == b"last"


def test_tags() -> None:
    from horon.runner._lines import Tag

    tag = Tag(3, "stdout")
    assert tag.put_before(b"", "now") == b""
    assert tag.put_before(b"a\n\n b\r\n10%\rlast", "now") == (
        b"[3]<stdout>:a\n[3]<stdout>:\n[3]<stdout>: b\r\n[3]<stdout>:10%\r[3]<stdout>:last\n"
    )
    assert Tag(0, "stderr", has_time=True).put_before(b"a\n", "now") == b"now[0]<stderr>:a\n"


# ---- sinks ----


@pytest.fixture
def pipe() -> Iterator[tuple[int, Any]]:
    reading, writing = os.pipe()
    with os.fdopen(writing, "w") as stream:
        yield reading, stream
    os.close(reading)


def _in_thread(act: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=act, daemon=True)
    thread.start()
    return thread


def _await(thread: threading.Thread) -> None:
    thread.join(TIMEOUT_S)
    assert not thread.is_alive()


@pytest.mark.parametrize("is_blocking", [False, True])
def test_a_reader_that_is_slow_gets_all(pipe: tuple[int, Any], is_blocking: bool) -> None:
    from horon.runner._sink import Sink

    reading, stream = pipe
    os.set_blocking(stream.fileno(), is_blocking)
    data, seen = bytes(range(256)) * 4096, bytearray()  # more than a pipe holds

    def read_slowly() -> None:
        while len(seen) < len(data):
            seen.extend(os.read(reading, 1 << 14))
            time.sleep(0.001)

    reader = _in_thread(read_slowly)
    Sink(stream).write(data)
    _await(reader)
    assert seen == data
    assert os.get_blocking(stream.fileno()) == is_blocking  # others have it, too


def _hurry_while_nobody_reads(sink: Any) -> None:
    writer = _in_thread(lambda: sink.write(b"x" * (1 << 20)))  # more than there is room for
    writer.join(0.2)
    assert writer.is_alive()
    sink.hurry()
    _await(writer)


@pytest.mark.parametrize("is_blocking", [False, True])
def test_nobody_is_waited_for_when_the_job_is_to_end(pipe: tuple[int, Any], is_blocking: bool) -> None:
    from horon.runner._sink import Sink

    reading, stream = pipe
    os.set_blocking(stream.fileno(), is_blocking)
    sink = Sink(stream)
    _hurry_while_nobody_reads(sink)
    os.read(reading, 1 << 20)
    sink.write(b"too late")
    os.set_blocking(reading, False)
    with pytest.raises(BlockingIOError):
        os.read(reading, 1)


def test_nobody_is_waited_for_at_a_terminal() -> None:
    from horon.runner._sink import Sink

    controller, terminal = pty.openpty()
    with os.fdopen(terminal, "w") as stream:
        _hurry_while_nobody_reads(Sink(stream))
        termios.tcflush(terminal, termios.TCIOFLUSH)
    os.close(controller)


def test_a_hurried_sink_writes_while_there_is_room(pipe: tuple[int, Any]) -> None:
    from horon.runner._sink import Sink

    reading, stream = pipe
    sink = Sink(stream)
    sink.hurry()
    sink.write(b"the last words\n")
    assert os.read(reading, 100) == b"the last words\n"


def test_what_this_process_has_said_comes_first(pipe: tuple[int, Any]) -> None:
    from horon.runner._sink import Sink

    reading, stream = pipe
    stream.write("first, ")
    Sink(stream).write(b"second")
    assert os.read(reading, 100) == b"first, second"


def test_a_reader_that_is_gone() -> None:
    from horon.runner._sink import Sink

    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as stream:
        sink = Sink(stream)
        for _ in range(2):
            sink.write(b"nobody reads this")


def test_a_file_that_is_full_is_told_once(tmp_path: Path) -> None:
    from horon.runner._outputs import _Copy
    from horon.runner._sink import Sink

    (tmp_path / "full").symlink_to("/dev/full")
    stderr = io.StringIO()
    with ExitStack() as opened:
        copy = _Copy(opened, tmp_path / "full", Sink(stderr))
        for _ in range(2):
            copy.write(b"too much")
    assert stderr.getvalue() == f"horonrun: nothing more is written to {tmp_path}/full: No space left on device\n"


def test_streams_without_a_file() -> None:
    from horon.runner._sink import Sink

    class Tee:
        def __init__(self) -> None:
            self.seen = ""

        def write(self, text: str) -> None:
            self.seen += text

    text, tee, octets = io.StringIO(), Tee(), io.BytesIO()
    ascii_only = io.TextIOWrapper(octets, encoding="ascii")
    Sink(text).write("größer\n".encode())
    assert text.getvalue() == "größer\n"
    Sink(tee).write("größer\n".encode())
    assert tee.seen == "größer\n"
    Sink(ascii_only).write("größer\n".encode())
    assert octets.getvalue().decode() == "größer\n"
    Sink(None).write(b"closed")


def test_a_stream_that_fails_is_told_once(capfd: pytest.CaptureFixture[str]) -> None:
    from horon.runner._sink import Sink

    class Broken:
        def write(self, text: str) -> None:
            raise TypeError("expected something else")

    sink = Sink(Broken())
    for _ in range(2):
        sink.write(b"lost")
    said = "horonrun: what ranks print can not be shown: TypeError('expected something else')\n"
    assert capfd.readouterr().err == said


def test_stdout_and_stderr_at_one_place_share_a_sink(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from horon.runner._sink import own_sinks

    with (tmp_path / "both").open("w") as first, os.fdopen(os.dup(first.fileno()), "w") as second:
        monkeypatch.setattr(sys, "stdout", first)
        monkeypatch.setattr(sys, "stderr", second)
        sinks = own_sinks()
        sinks["stdout"].write(b"a")
        sinks["stderr"].write(b"b")
    assert sinks["stdout"] is sinks["stderr"]
    assert (tmp_path / "both").read_text() == "ab"


def test_no_descriptor_is_left_open(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    from horon.runner._outputs import Output, Outputs

    def pass_on(number: int) -> None:
        folder = tmp_path / str(number)
        folder.mkdir()
        with Outputs(folder, Output(folder=str(folder)), range(4), 4):
            pass

    gc.disable()
    try:
        pass_on(0)
        before = len(os.listdir("/proc/self/fd"))
        for number in range(1, 4):
            pass_on(number)
        assert len(os.listdir("/proc/self/fd")) == before
    finally:
        gc.enable()


@pytest.mark.parametrize("has_failed", [False, True])
def test_a_signal_does_not_hide_what_was_found_out(
    pipe: tuple[int, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_failed: bool
) -> None:
    from horon.runner._outputs import Output, Outputs, pipe_of

    class Told(Exception):
        pass

    def tell(signum: int, frame: object) -> None:
        raise Told

    monkeypatch.setattr(sys, "stdout", pipe[1])  # which nobody reads
    before = signal.signal(signal.SIGALRM, tell)
    try:
        with pytest.raises(RuntimeError if has_failed else Told), Outputs(tmp_path, Output(), range(1), 1):
            with pipe_of(tmp_path, 0, "stdout").open("wb", buffering=0) as rank:
                rank.write(b"x" * 100_000)
            signal.setitimer(signal.ITIMER_REAL, 0.3)
            if has_failed:
                raise RuntimeError("rank 3 has failed")
        left = [one for one in threading.enumerate() if type(one).__name__ == "_Passing"]
        assert not left  # nor is one at work on descriptors that are closed
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


# ---- horonrun ----


def _command(folder: Path, script: str, *options: str, num_proc: int = 2) -> list[str]:
    path = folder / "script.py"
    path.write_text(script)
    launcher = [sys.executable, "-m", "horon.runner.launch", "-np", str(num_proc), *options]
    return [*launcher, sys.executable, str(path)]


def _start(folder: Path, script: str, *options: str, **more: Any) -> subprocess.Popen[str]:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    given = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "env": environment, **more}
    return subprocess.Popen(_command(folder, script, *options), cwd=folder, text=True, **given)


def _finish(process: subprocess.Popen[str]) -> tuple[str, str]:
    known = psutil.Process(process.pid).children(recursive=True)
    try:
        return process.communicate(timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        for one in [*psutil.Process(process.pid).children(recursive=True), *known, process]:
            one.kill()
        process.wait()
        raise


_IN_PIECES = """
import os, sys
for n in range(500):
    print("rank", os.environ["RANK"], "line", n)
    print("rank", os.environ["RANK"], "error", n, file=sys.stderr)
"""


def test_lines_are_whole_though_nothing_is_buffered(tmp_path: Path) -> None:
    process = _start(tmp_path, _IN_PIECES, stderr=subprocess.STDOUT)
    out, _ = _finish(process)
    assert process.returncode == 0, out
    assert sorted(out.splitlines()) == sorted(
        f"rank {rank} {word} {n}" for rank in (0, 1) for word in ("line", "error") for n in range(500)
    )


def test_lines_come_when_they_are_printed(tmp_path: Path) -> None:
    process = _start(tmp_path, "import time\nprint('up')\ntime.sleep(1000)")
    guard = threading.Timer(TIMEOUT_S, process.kill)
    guard.start()
    assert process.stdout is not None
    assert [process.stdout.readline() for _ in range(2)] == ["up\n", "up\n"]
    process.send_signal(signal.SIGTERM)
    _finish(process)
    guard.cancel()
    assert process.returncode == 128 + signal.SIGTERM


_ON_BOTH = """
import os, sys
print("to stdout")
print("to stderr", file=sys.stderr)
sys.stdout.write("no end")
"""


@pytest.mark.parametrize(
    ("option", "tag"),
    [
        ("--tag-output", r"\[{rank}\]<{stream}>:"),
        ("--prefix-output-with-timestamp", r"\w+ \w+ +\d+ \d+:\d\d:\d\d \d{{4}}\[{rank}\]<{stream}>:"),
        ("-prefix-timestamp", r"\w+ \w+ +\d+ \d+:\d\d:\d\d \d{{4}}\[{rank}\]<{stream}>:"),
    ],
)
def test_tags_say_where_lines_come_from(tmp_path: Path, option: str, tag: str) -> None:
    process = _start(tmp_path, _ON_BOTH, option)
    out, err = _finish(process)
    assert process.returncode == 0, err
    for rank in (0, 1):
        for text, stream, line in (
            (out, "stdout", "to stdout"),
            (out, "stdout", "no end"),
            (err, "stderr", "to stderr"),
        ):
            assert re.search(rf"^{tag.format(rank=rank, stream=stream)}{line}$", text, re.MULTILINE), (out, err)
    assert out.count("\n") == 4


def test_files_hold_what_is_shown(tmp_path: Path) -> None:
    process = _start(tmp_path, _ON_BOTH, "--output-filename", "out")
    out, err = _finish(process)
    assert process.returncode == 0, err
    assert (out.count("to stdout\n"), out.count("no end"), err.count("to stderr\n")) == (2, 2, 2)
    for rank in (0, 1):
        folder = tmp_path / "out" / f"rank.{rank}"
        assert (folder / "stdout").read_text() == "to stdout\nno end"
        assert "to stderr\n" in (folder / "stderr").read_text()


def test_a_file_that_can_not_be_written(tmp_path: Path) -> None:
    process = _start(tmp_path, _ON_BOTH, "--output-filename", "/dev/null/out")
    out, err = _finish(process)
    assert (process.returncode, out) == (1, "")
    assert err == "horonrun: the output can not be written to /dev/null/out/rank.0/stdout: Not a directory\n"


_LEAVES_SOMETHING_BEHIND = """
import subprocess, sys
process = subprocess.Popen(["sleep", "300"], start_new_session=True)
print("pid", process.pid)
sys.stdout.write("the last line has no end")
"""


def test_what_ranks_leave_behind_is_not_waited_for(tmp_path: Path) -> None:
    process = _start(tmp_path, _LEAVES_SOMETHING_BEHIND)
    out, err = _finish(process)
    pids = [int(pid) for pid in re.findall(r"pid (\d+)", out)]
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    assert process.returncode == 0, err
    assert len(pids) == out.count("the last line has no end") == 2


_PRINTS_FOR_EVER = """
while True:
    print("x" * 100)
"""


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_nobody_reads(tmp_path: Path, signum: int) -> None:
    process = _start(tmp_path, _PRINTS_FOR_EVER)
    assert process.stdout is not None
    process.stdout.readline()
    ranks = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signum)
    assert process.wait(TIMEOUT_S) == 128 + signum
    process.stdout.close()
    assert not [rank for rank in ranks if rank.is_running() and rank.status() != psutil.STATUS_ZOMBIE]


_PRINTS_MUCH = """
for n in range(20000):
    print("line", n)
"""


def test_a_reader_that_has_seen_enough(tmp_path: Path) -> None:
    process = _start(tmp_path, _PRINTS_MUCH)
    assert process.stdout is not None
    assert process.stdout.readline() == "line 0\n"
    process.stdout.close()
    assert process.stderr is not None
    err = process.stderr.read()
    assert process.wait(TIMEOUT_S) == 0, err
    assert err == ""


_IS_A_TERMINAL = "import sys\nprint(sys.stdout.isatty(), sys.stderr.isatty())"


def _read_all(controller: int) -> bytes:
    seen = b""
    with suppress(OSError):  # nobody has the terminal any more
        while piece := os.read(controller, 1 << 16):
            seen += piece
    os.close(controller)
    return seen


@pytest.mark.parametrize(
    ("options", "seen"),
    [((), b"True True\r\n"), (("--tag-output",), b"[0]<stdout>:False False\r\n")],
)
def test_a_terminal_is_left_to_ranks_unless_there_are_tags(
    tmp_path: Path, options: tuple[str, ...], seen: bytes
) -> None:
    controller, terminal = pty.openpty()
    command = _command(tmp_path, _IS_A_TERMINAL, *options, num_proc=1)
    process = subprocess.Popen(command, cwd=tmp_path, stdout=terminal, stderr=terminal)
    os.close(terminal)
    assert process.wait(TIMEOUT_S) == 0
    assert _read_all(controller) == seen


def test_lines_are_whole_where_one_stream_is_a_terminal(tmp_path: Path) -> None:
    controller, terminal = pty.openpty()
    found: list[bytes] = []
    reader = _in_thread(lambda: found.append(_read_all(controller)))
    with (tmp_path / "out").open("w") as out:
        process = subprocess.Popen(_command(tmp_path, _IN_PIECES), cwd=tmp_path, stdout=out, stderr=terminal)
    os.close(terminal)
    assert process.wait(TIMEOUT_S) == 0
    _await(reader)
    for word, text in (("line", (tmp_path / "out").read_text()), ("error", found[0].decode())):
        assert sorted(text.splitlines()) == sorted(f"rank {rank} {word} {n}" for rank in (0, 1) for n in range(500))


def test_stdout_that_is_closed(tmp_path: Path) -> None:
    command = _command(tmp_path, _ON_BOTH, "--output-filename", "out")
    script = " ".join(command) + " >&-"
    found = subprocess.run(script, cwd=tmp_path, shell=True, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert found.returncode == 0, found.stderr
    for rank in (0, 1):
        assert (tmp_path / "out" / f"rank.{rank}" / "stdout").read_text() == "to stdout\nno end"


def test_run_prints_where_this_process_does(capsys: pytest.CaptureFixture[str]) -> None:
    import horon

    def speak() -> int:
        print("from", os.environ["RANK"])
        return 1

    assert horon.run(speak, num_proc=2) == [1, 1]
    assert sorted(capsys.readouterr().out.splitlines()) == ["from 0", "from 1"]


def test_two_jobs_at_once(tmp_path: Path) -> None:
    """In a process of its own: pytest's may have replaced what a thread prints to."""
    script = tmp_path / "two.py"
    script.write_text(_TWO_JOBS)
    found = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=TIMEOUT_S)
    assert found.returncode == 0, found.stderr
    assert sorted(found.stdout.splitlines()) == sorted([*["short"] * 2, *["long"] * 2, "[1, 1]", "[2, 2]"])


_TWO_JOBS = """
import threading
import time

import horon


def short():
    print("short")
    return 1


def long():
    time.sleep(3)
    print("long")
    return 2


def run(function):
    print(horon.run(function, num_proc=2), flush=True)


threads = [threading.Thread(target=run, args=(function,)) for function in (long, short)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
"""
