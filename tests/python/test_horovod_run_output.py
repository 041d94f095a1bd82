"""What ranks print, and where it goes: whole lines, at once, tagged, into files, to readers that are slow or gone."""

from __future__ import annotations

import io
import os
import pty
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from harness import on_gloo

pytestmark = pytest.mark.skipif(on_gloo(), reason="horon's own")

TIMEOUT_S = 100

# ---- pure ----


def test_lines_of_several_streams_are_not_mixed() -> None:
    from horon.runner._lines import Lines

    lines = Lines()
    assert lines.feed(b"epoch") == b""
    assert lines.feed(b" 1\nepoch") == b"epoch 1\n"
    assert lines.feed(b" 2 10%\r 2 20%") == b"epoch 2 10%\r"
    assert lines.feed(b"x" * 70_000) == b" 2 20%" + b"x" * 70_000
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

    reader = threading.Thread(target=read_slowly)
    reader.start()
    Sink(stream).write(data)
    reader.join()
    assert seen == data


@pytest.mark.parametrize("is_blocking", [False, True])
def test_nobody_is_waited_for_when_the_job_is_to_end(pipe: tuple[int, Any], is_blocking: bool) -> None:
    from horon.runner._sink import Sink

    reading, stream = pipe
    os.set_blocking(stream.fileno(), is_blocking)
    lost: list[Exception] = []
    sink = Sink(stream, lost.append)
    writer = threading.Thread(target=sink.write, args=(b"x" * (1 << 20),))
    writer.start()
    writer.join(0.2)
    assert writer.is_alive()
    sink.hurry()
    writer.join(TIMEOUT_S)
    assert not writer.is_alive()
    os.read(reading, 1 << 20)
    sink.write(b"too late")
    os.set_blocking(reading, False)
    with pytest.raises(BlockingIOError):
        os.read(reading, 1)
    assert not lost  # whoever hurries knows


def test_a_hurried_sink_writes_while_there_is_room(pipe: tuple[int, Any]) -> None:
    from horon.runner._sink import Sink

    reading, stream = pipe
    sink = Sink(stream)
    sink.hurry()
    sink.write(b"the last words\n")
    assert os.read(reading, 100) == b"the last words\n"


def test_a_reader_that_is_gone() -> None:
    from horon.runner._sink import Sink

    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as stream:
        sink = Sink(stream)
        for _ in range(2):
            sink.write(b"nobody reads this")


def test_a_full_disk_is_said_once() -> None:
    from horon.runner._sink import Sink

    lost: list[Exception] = []
    with open("/dev/full", "w") as stream:
        sink = Sink(stream, lost.append)
        for _ in range(2):
            sink.write(b"too much")
    assert [str(error) for error in lost] == ["[Errno 28] No space left on device"]


def test_streams_without_a_file() -> None:
    from horon.runner._sink import Sink

    stream = io.StringIO()
    Sink(stream).write("größer\n".encode())
    assert stream.getvalue() == "größer\n"
    Sink(None).write(b"closed")


def test_stdout_and_stderr_at_one_place_share_a_sink(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from horon.runner._sink import own_sinks

    with (tmp_path / "both").open("w") as first, os.fdopen(os.dup(first.fileno()), "w") as second:
        monkeypatch.setattr(sys, "stdout", first)
        monkeypatch.setattr(sys, "stderr", second)
        sinks = own_sinks()
    assert sinks["stdout"] is sinks["stderr"]


# ---- horonrun ----


def _command(folder: Path, script: str, *options: str, num_proc: int = 2) -> list[str]:
    path = folder / "script.py"
    path.write_text(script)
    launcher = [sys.executable, "-m", "horon.runner.launch", "-np", str(num_proc), *options]
    return [*launcher, sys.executable, str(path)]


def _start(folder: Path, script: str, *options: str, **more: Any) -> subprocess.Popen[str]:
    given = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **more}
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
    guard.cancel()
    process.send_signal(signal.SIGTERM)
    _finish(process)
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


@pytest.mark.parametrize(
    ("options", "seen"), [((), b"True False\r\n"), (("--tag-output",), b"[0]<stdout>:False False\r\n")]
)
def test_a_terminal_is_left_to_ranks_unless_there_are_tags(
    tmp_path: Path, options: tuple[str, ...], seen: bytes
) -> None:
    controller, terminal = pty.openpty()
    command = _command(tmp_path, _IS_A_TERMINAL, *options, num_proc=1)
    process = subprocess.Popen(command, cwd=tmp_path, stdout=terminal, stderr=subprocess.PIPE, text=True)
    _, err = _finish(process)
    os.close(terminal)
    assert process.returncode == 0, err
    assert os.read(controller, 1000) == seen
    os.close(controller)


def test_run_prints_where_this_process_does(capsys: pytest.CaptureFixture[str]) -> None:
    import horon

    def speak() -> int:
        print("from", os.environ["RANK"])
        return 1

    assert horon.run(speak, num_proc=2) == [1, 1]
    assert sorted(capsys.readouterr().out.splitlines()) == ["from 0", "from 1"]
