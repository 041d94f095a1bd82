"""horonrun and horon.run on several hosts: who is where, what travels, and what is said of hosts that fail.

Most of it with a program in the place of ssh, which runs what it is given on this host, as if it were another one.
Some with a real sshd in a network namespace, where there is one (Debian: openssh-server) and this is root.
"""

from __future__ import annotations

import atexit
import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from harness import on_gloo

pytestmark = [pytest.mark.any_torch, pytest.mark.skipif(on_gloo(), reason="horon's own")]

TIMEOUT_S = 100

# ---- pure ----


@pytest.mark.parametrize(
    ("given", "num_proc", "expected"),
    [
        ("a:2,b:2", 4, [("a", False, 0, 2), ("b", False, 2, 2)]),
        ("a:2,b:4", 3, [("a", False, 0, 2), ("b", False, 2, 1)]),
        ("a:2,b:4", 2, [("a", False, 0, 2)]),
        ("here:1,b:1,me:2,b:1", 5, [("here", True, 0, 3), ("b", False, 3, 2)]),
        ("b,here:7", 4, [("b", False, 0, 1), ("here", True, 1, 3)]),
    ],
)
def test_hosts_are_filled_in_their_order(given: str, num_proc: int, expected: list[Any]) -> None:
    from horon.runner._hosts import Share, parse_hosts, share_out

    found = share_out(parse_hosts(given), num_proc, lambda name: name in ("here", "me"))
    assert found == [Share(*fields) for fields in expected]


def test_too_few_slots() -> None:
    from horon.runner._hosts import parse_hosts, share_out

    with pytest.raises(ValueError, match="7 processes were asked for, but the hosts have 6 slots"):
        share_out(parse_hosts("a:2,b:4"), 7, lambda _: False)


def test_a_name_that_ssh_would_take_for_an_option() -> None:
    from horon.runner._hosts import parse_hosts

    with pytest.raises(ValueError, match="expected <name>:<number of processes>, got '-oProxyCommand=x:1'"):
        parse_hosts("-oProxyCommand=x:1")


@pytest.mark.parametrize("n_bytes", [1, 2, 3, 7, 1000])
def test_reports_come_in_any_pieces(n_bytes: int) -> None:
    from horon.runner._reports import Splitter, encode

    first, second = {"hello": {"port": 5}}, {"outcome": {"text": "a\nb\x1e"}}
    (first_line,), (second_line,) = encode(first), encode(second)
    sent = b"welcome\x1e\x1ehor!\nrank 0: " + first_line + b"done\n\x1e" + second_line + b"last \x1eho"
    splitter = Splitter()
    passed, reports = b"", []
    for begin in range(0, len(sent), n_bytes):
        more, found = splitter.feed(sent[begin : begin + n_bytes])
        passed += more
        reports += found
    assert reports == [first, second]
    assert passed + splitter.rest() == b"welcome\x1e\x1ehor!\nrank 0: done\n\x1elast \x1eho"


def test_long_reports_have_lines_that_a_pipe_takes_at_once() -> None:
    from horon.runner._reports import Splitter, encode

    report = {"outcome": {"results": {"0": '"\\\n' * 3000, "1": "x" * 100_000}, "problem": "größer"}}
    lines = encode(report)
    assert len(lines) > 20
    assert max(map(len, lines)) <= 4096
    splitter, passed, reports = Splitter(), b"", []
    for line in lines:  # and somebody prints meanwhile
        more, found = splitter.feed(b"epoch" + line + b"s\n")
        passed += more
        reports += found
    assert reports == [report]
    assert passed == b"epochs\n" * len(lines)


def test_what_is_no_report_is_passed_on_at_once() -> None:
    from horon.runner._reports import Splitter

    for line in (b"\x1ehoron: by chance\n", b"\x1ehoron:[1]\n", b"\x1ehoron:\xff\n"):
        assert Splitter().feed(line) == (line, [])
    assert Splitter().feed(b"epoch 3: ") == (b"epoch 3: ", [])


def test_paths_for_another_host_begin_at_the_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from horon.runner._fleet import for_python

    monkeypatch.chdir(tmp_path)
    given = {"PYTHONPATH": f"src{os.pathsep}/lib", "LD_LIBRARY_PATH": "", "HOME": "/h"}
    assert for_python(given) == {"PYTHONPATH": f"{tmp_path}/src{os.pathsep}/lib"}


def test_how_ssh_is_called() -> None:
    from horon.runner._ssh import Ssh

    words = Ssh().command("far", ["python", "a b"], {"PYTHONPATH": "/x y"})
    assert words[0] == "ssh"
    assert words[-2:] == ["far", "env 'PYTHONPATH=/x y' python 'a b'"]
    assert "BatchMode=yes" in words
    assert not {"-p", "-i"} & set(words)
    words = Ssh(22022, "/k").command("me@far", ["true"], {})
    assert words[-6:] == ["-p", "22022", "-i", "/k", "me@far", "env true"]


def test_what_is_this_hosts_own_stays_here() -> None:
    from horon.runner._ssh import environment_for_others

    own = {"HOME": "/h", "SSH_AUTH_SOCK": "/s", "HOSTNAME": "here", "PWD": "/", "_": "x", "BASH_FUNC_f%%": "()"}
    common = {"PATH": "/bin", "HOROVOD_TIMELINE": "t", "LD_LIBRARY_PATH": "/l", "HOMEPAGE": "x", "CUDA_HOME": "/c"}
    assert environment_for_others({**own, **common}) == common


def _orders(hellos: list[tuple[str, str, int]], environment: dict[str, str]) -> list[tuple[str, int, str]]:
    from horon.runner._fleet import Job, orders
    from horon.runner._hosts import Share
    from horon.runner._node import Hello

    names = ["one", "two", "three"]
    shares = [Share(name, not hello[1], 0, 1) for name, hello in zip(names, hellos, strict=False)]
    found = orders(shares, [Hello(*hello) for hello in hellos], Job(["x"], {}, None, False), environment)
    return [(order.master_address, order.master_port, order.own_address) for order in found]


def test_where_the_hosts_find_each_other() -> None:
    from_here = [("", "", 5), ("10.0.0.1", "10.0.0.2", 6), ("10.1.0.1", "10.1.0.3", 7)]
    assert _orders(from_here, {}) == [
        ("localhost", 5, "10.0.0.1"),
        ("10.0.0.1", 5, "10.0.0.2"),
        ("10.1.0.1", 5, "10.1.0.3"),  # another network
    ]
    first_is_far = [("10.0.0.1", "10.0.0.2", 5), ("", "", 6), ("10.0.0.1", "10.0.0.3", 7)]
    assert _orders(first_is_far, {}) == [
        ("localhost", 5, "10.0.0.2"),
        ("10.0.0.2", 5, "10.0.0.1"),
        ("10.0.0.2", 5, "10.0.0.3"),
    ]
    assert [order[:2] for order in _orders(from_here, {"MASTER_ADDR": "gate", "MASTER_PORT": "29500"})] == [
        ("localhost", 29500),
        ("gate", 29500),
        ("gate", 29500),
    ]
    link_local = [("fe80::2%eth0", "fe80::1%eth1", 5), ("fe80::2%eth0", "fe80::3%eth7", 6)]
    assert _orders(link_local, {})[1] == ("one", 5, "fe80::3%eth7")


def test_an_ssh_session_says_how_it_came() -> None:
    from horon.runner._node import hello

    found = hello({"SSH_CONNECTION": "10.0.0.1 40000 10.0.0.2 22"})
    assert (found.client, found.server) == ("10.0.0.1", "10.0.0.2")
    assert hello({"SSH_CONNECTION": ""}).client == ""
    alone = hello({})
    assert (alone.client, alone.server) == ("", "")
    assert alone.port > 0


def test_gloo_gets_the_interface_that_ssh_has_come_through() -> None:
    from horon.runner._node import Order, variables_of

    interfaces = {"lo": ["127.0.0.1", "::1"], "eth1": ["10.0.0.2", "fe80::2%eth1"]}

    def variables(address: str, environment: dict[str, str]) -> dict[str, str]:
        order = Order([2, 1], 1, "10.0.0.1", 5, address, "/", environment, ["x"], None, None)
        return variables_of(order, interfaces)

    assert variables("10.0.0.2", {})["GLOO_SOCKET_IFNAME"] == "eth1"
    assert variables("fe80::2%eth0", {})["GLOO_SOCKET_IFNAME"] == "eth1"
    assert "GLOO_SOCKET_IFNAME" not in variables("192.0.2.1", {})  # behind a NAT
    assert variables("10.0.0.2", {"HOROVOD_GLOO_IFACE": "ib0"})["GLOO_SOCKET_IFNAME"] == "ib0"
    assert variables("10.0.0.2", {"GLOO_SOCKET_IFNAME": "ib1"})["GLOO_SOCKET_IFNAME"] == "ib1"
    assert variables("10.0.0.2", {})["HORON_RUN_RANKS_PER_HOST"] == "2,1"


@pytest.mark.parametrize(("local_rank", "host", "cross"), [(0, 2, ("2", "3")), (1, 2, ("1", "2"))])
def test_cross_ranks_count_hosts_with_that_local_rank(local_rank: int, host: int, cross: tuple[str, str]) -> None:
    from horon.runner._child import horovod_variables

    torchruns = {"RANK": "3", "WORLD_SIZE": "5", "LOCAL_RANK": str(local_rank), "LOCAL_WORLD_SIZE": "2"}
    found = horovod_variables(
        {**torchruns, "GROUP_RANK": str(host), "GROUP_WORLD_SIZE": "3", "HORON_RUN_RANKS_PER_HOST": "2,1,2"}
    )
    assert (found["HOROVOD_CROSS_RANK"], found["HOROVOD_CROSS_SIZE"]) == cross


def test_of_failures_on_several_hosts_the_killed_rank_comes_first() -> None:
    from horon.runner._failures import Failure, exit_status, in_order, texts_of

    found = in_order([Failure(0, 1, "", 7, "a"), Failure(3, -9, "", 7, "b"), Failure(2, 1, "", 6, "b")])
    assert texts_of(found, 4) == (
        "rank 2 on b ended with 1, rank 3 on b was ended by signal 9, rank 0 on a ended with 1; the others were ended"
    )
    assert exit_status(found) == 1
    assert exit_status(found[1:]) == 137


def test_who_has_raised_before_it_was_ended(tmp_path: Path) -> None:
    from horon.runner._failures import Failure, failures_left_in

    for local_rank, text in (("0", '{"message": {"message": "x", "extraInfo": {"py_callstack": "Traceback", '
                                   '"timestamp": "17"}}}'), ("1", '{"mess')):  # fmt: skip
        folder = tmp_path / "run" / "attempt_0" / local_rank
        folder.mkdir(parents=True)
        (folder / "error.json").write_text(text)
    assert failures_left_in(tmp_path, 4) == [Failure(4, 1, "Traceback", 17)]
    assert failures_left_in(tmp_path / "nowhere", 4) == []


def test_this_host_is_known_by_its_addresses() -> None:
    from horon.runner._processes import is_this_host

    assert all(is_this_host(name) for name in ("localhost", "127.0.0.1", "127.1.2.3"))
    assert not any(is_this_host(name) for name in ("192.0.2.1", "no.such.host.invalid", "a" * 300))


# ---- with a program in ssh's place ----

FAKE_SSH = """\
#!{python}
import os, subprocess, sys, time

host, command = sys.argv[-2:]
with open({log!r}, "a") as log:
    print(host, os.getpid(), file=log)
if host == "unreachable":
    print("ssh: connect to host unreachable port 22: No route to host", file=sys.stderr)
    sys.exit(255)
if host == "silent":
    time.sleep(1000)
print(f"Welcome to {{host}}", flush=True)  # by a login shell's own script
kept = {{name: os.environ[name] for name in ("HOME", "LD_LIBRARY_PATH") if name in os.environ}}
kept["SSH_CONNECTION"] = "127.0.0.1 40000 127.0.0.1 22"
kept["PATH"] = "/usr/bin:/bin"
if host.startswith("far"):
    kept["HORON_HOST_ID"] = host  # shares no memory with the others
os.environ.clear()
os.environ.update(kept)
os.chdir("/")
os.execv("/bin/sh", ["/bin/sh", "-c", command])
"""

SCRIPT = """
import os, sys, time
import torch
import horon.torch as hvd

hvd.init()
total = hvd.allreduce(torch.full((3,), float(hvd.rank() + 1)), op=hvd.Sum, name="sum").tolist()
names = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE")
place = [os.environ["HOROVOD_" + name] for name in names]
seen = [hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size()]
assert place == [str(one) for one in seen], (place, seen)
assert sys.stdin.read() == ""
line = f"{' '.join(place)} {os.getcwd()} {os.environ.get('GIVEN')} {total[0]}\\n"
sys.stdout.write(line)
sys.stdout.flush()
how = sys.argv[1:2]
if how and hvd.rank() == 2:
    if how == ["fail"]:
        sys.exit(3)
    if how == ["kill"]:
        os.kill(os.getpid(), 9)
if how and how != ["print"]:
    time.sleep(1000)
"""


@pytest.fixture
def path_with_ssh(tmp_path: Path) -> str:
    folder = tmp_path / "bin"
    folder.mkdir()
    program = folder / "ssh"
    program.write_text(FAKE_SSH.format(python=sys.executable, log=str(tmp_path / "ssh.log")))
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return f"{folder}{os.pathsep}{os.environ['PATH']}"


def _start(
    folder: Path, path: str, hosts: str, *arguments: str, options: tuple[str, ...] = ()
) -> subprocess.Popen[str]:
    script = folder / "script.py"
    script.write_text(SCRIPT)
    n_slots = sum(int(host.rpartition(":")[2]) for host in hosts.split(","))
    command = [sys.executable, "-m", "horon.runner.launch", "-np", str(n_slots), "-H", hosts, *options]
    command += [sys.executable, str(script), *arguments]
    environment = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1", "GIVEN": "x y"}
    environment.pop("GLOO_SOCKET_IFNAME", None)
    return subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def _finish(process: subprocess.Popen[str]) -> tuple[str, str]:
    known = psutil.Process(process.pid).children(recursive=True)
    try:
        return process.communicate(timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        for one in [*psutil.Process(process.pid).children(recursive=True), *known]:
            one.kill()
        process.kill()
        process.wait()
        raise


def _check_all_ended(processes: list[psutil.Process]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while alive := [one for one in processes if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]:
        if time.monotonic() > deadline:
            for one in alive:
                one.kill()
            pytest.fail(f"processes have outlived horonrun: {alive}")
        time.sleep(0.05)


def _await_ranks(process: subprocess.Popen[str], n_ranks: int) -> list[psutil.Process]:
    """Returns horonrun's processes, once all ranks have printed their line."""
    assert process.stdout is not None
    n_seen = 0
    while n_seen < n_ranks:
        line = process.stdout.readline()
        assert line, process.communicate()[1]
        n_seen += not line.startswith("Welcome")
    return psutil.Process(process.pid).children(recursive=True)


@pytest.mark.parametrize("hosts", ["localhost:1,near:2", "far1:2,far2:1"])
def test_ranks_of_several_hosts(tmp_path: Path, path_with_ssh: str, hosts: str) -> None:
    process = _start(tmp_path, path_with_ssh, hosts, "print")
    out, err = _finish(process)
    assert process.returncode == 0, err
    lines = sorted(line for line in out.splitlines() if not line.startswith("Welcome"))
    assert len(lines) == 3, out
    counts = [int(host.rpartition(":")[2]) for host in hosts.split(",")]
    rank = 0
    for number, count in enumerate(counts):
        for local_rank in range(count):
            peers = [index for index, n in enumerate(counts) if n > local_rank]
            place = f"{rank} 3 {local_rank} {count} {peers.index(number)} {len(peers)}"
            assert lines[rank] == f"{place} {tmp_path} x y 6.0"
            rank += 1
    assert err == ""


def test_one_that_fails_ends_all(tmp_path: Path, path_with_ssh: str) -> None:
    process = _start(tmp_path, path_with_ssh, "localhost:2,far1:1", "fail")
    processes = _await_ranks(process, 3)
    _, err = _finish(process)
    assert process.returncode == 3, err
    assert "horonrun: rank 2 on far1 ended with 3; the others were ended\n" in err
    _check_all_ended(processes)


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGKILL])
def test_who_ends_horonrun_ends_all(tmp_path: Path, path_with_ssh: str, signum: int) -> None:
    process = _start(tmp_path, path_with_ssh, "localhost:1,far1:2", "sleep")
    processes = _await_ranks(process, 3)
    assert len(processes) >= 3
    process.send_signal(signum)
    _finish(process)
    assert process.returncode == (-signum if signum == signal.SIGKILL else 128 + signum)
    _check_all_ended(processes)


def _start_lines(folder: Path, path: str, hosts: str, script: str, **more: Any) -> subprocess.Popen[str]:
    """Starts two ranks on two hosts, which need neither torch nor horon."""
    command = [sys.executable, "-m", "horon.runner.launch", "-np", "2", "-H", hosts, sys.executable, "-c", script]
    environment = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1", **more.pop("environment", {})}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, cwd=folder, env=environment, **{**pipes, **more})


def _launchers(process: subprocess.Popen[str]) -> list[psutil.Process]:
    found = psutil.Process(process.pid).children(recursive=True)
    return [one for one in found if "horon.runner._node" in _command_line(one)]


_UP_AND_SLEEP = "import time; print('up', flush=True); time.sleep(1000)"


def test_a_launcher_that_is_killed_is_noticed_although_its_rank_lives(tmp_path: Path, path_with_ssh: str) -> None:
    process = _start_lines(tmp_path, path_with_ssh, "localhost:1,far1:1", _UP_AND_SLEEP)
    processes = _await_ranks(process, 2)
    here = next(one for one in _launchers(process) if one.ppid() == process.pid and not _is_child_of_ssh(one))
    here.kill()
    _, err = _finish(process)
    assert process.returncode == 1
    assert "horonrun: lost localhost, which has rank 0 (the launcher ended with -9)" in err
    _check_all_ended(processes)  # the orphan, too


def _is_child_of_ssh(one: psutil.Process) -> bool:
    return "SSH_CONNECTION" in one.environ()


def test_a_launcher_that_gets_a_signal_from_others_does_not_say_that_all_is_well(
    tmp_path: Path, path_with_ssh: str
) -> None:
    process = _start_lines(tmp_path, path_with_ssh, "localhost:1,far1:1", _UP_AND_SLEEP)
    processes = _await_ranks(process, 2)
    for one in _launchers(process):
        if "-c" not in _command_line(one):  # a shell's
            one.terminate()
    _, err = _finish(process)
    assert process.returncode == 1
    assert "the launcher there was ended by signal 15" in err
    _check_all_ended(processes)


_FIRST_ENDS_WELL = """
import os, sys, time
print("up", flush=True)
if os.environ["RANK"] == "1":
    time.sleep(2)
    sys.exit(7)
"""


def test_a_host_whose_ranks_have_ended_well_does_not_keep_the_others(tmp_path: Path, path_with_ssh: str) -> None:
    process = _start_lines(tmp_path, path_with_ssh, "localhost:1,far1:1", _FIRST_ENDS_WELL)
    processes = _await_ranks(process, 2)
    _, err = _finish(process)
    assert process.returncode == 7
    assert "rank 1 on far1 ended with 7" in err
    assert "has not said how" not in err  # which is said of those that are waited for in vain
    _check_all_ended(processes)


def test_how_the_user_has_come_to_this_host_does_not_matter(tmp_path: Path, path_with_ssh: str) -> None:
    session = {"SSH_CONNECTION": "198.51.100.7 5000 192.0.2.1 22"}
    process = _start_lines(tmp_path, path_with_ssh, "localhost:1,near:1", "print('up')", environment=session)
    out, err = _finish(process)
    assert process.returncode == 0, err
    assert out.count("up\n") == 2


_LEAVES_SOMETHING_BEHIND = """
import subprocess, sys
process = subprocess.Popen(["sleep", "300"], start_new_session=True)
print("pid", process.pid, flush=True)
sys.stdout.write("the last line has no end")
"""


def test_what_ranks_leave_behind_keeps_no_output(tmp_path: Path, path_with_ssh: str) -> None:
    process = _start_lines(tmp_path, path_with_ssh, "localhost:1,near:1", _LEAVES_SOMETHING_BEHIND)
    out, err = _finish(process)
    for line in out.splitlines():
        if line.startswith("pid "):
            os.kill(int(line.split()[1]), signal.SIGKILL)
    assert process.returncode == 0, err
    assert out.count("the last line has no end") == 2


def test_nohup_is_respected(tmp_path: Path, path_with_ssh: str) -> None:
    script = "import time; print('up', flush=True); time.sleep(3)"

    def ignore() -> None:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)

    process = _start_lines(tmp_path, path_with_ssh, "localhost:1,near:1", script, preexec_fn=ignore)
    _await_ranks(process, 2)
    process.send_signal(signal.SIGHUP)
    _, err = _finish(process)
    assert process.returncode == 0, err


def test_a_host_that_is_lost(tmp_path: Path, path_with_ssh: str) -> None:
    process = _start(tmp_path, path_with_ssh, "localhost:1,far1:1,far2:1", "sleep")
    processes = _await_ranks(process, 3)
    words = [line.split() for line in (tmp_path / "ssh.log").read_text().splitlines()]
    launcher = psutil.Process(next(int(pid) for host, pid in words if host == "far2"))
    ranks_there = launcher.children(recursive=True)
    launcher.kill()
    for rank in ranks_there:
        rank.kill()
    _, err = _finish(process)
    assert process.returncode == 1
    assert "horonrun: lost far2, which has rank 2 (ssh ended with -9)" in err
    _check_all_ended(processes)


@pytest.mark.parametrize(
    ("hosts", "options", "said"),
    [
        (
            "localhost:1,unreachable:1",
            (),
            "No route to host\nhoronrun: could not start on unreachable (ssh ended with 255). Can `ssh unreachable`",
        ),
        (
            "far1:1,silent:1",
            ("--start-timeout", "3"),
            "horonrun: silent has not answered within 3 s (--start-timeout)",
        ),
    ],
)
def test_hosts_that_can_not_be_had(
    tmp_path: Path, path_with_ssh: str, hosts: str, options: tuple[str, ...], said: str
) -> None:
    process = _start(tmp_path, path_with_ssh, hosts, options=options)
    out, err = _finish(process)
    assert process.returncode == 1
    assert said in err
    assert "6.0" not in out


def test_hosts_that_do_not_find_the_first_one(
    tmp_path: Path, path_with_ssh: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MASTER_ADDR", "192.0.2.1")  # nobody has it
    monkeypatch.setenv("MASTER_PORT", "29513")
    process = _start(tmp_path, path_with_ssh, "localhost:1,near:1", options=("--start-timeout", "3"))
    _, err = _finish(process)
    assert process.returncode == 1
    whoever_gives_up_first = ("It is to be at 192.0.2.1:29513;", "Others did not come to port 29513 here;")
    assert any(f"{text} MASTER_ADDR and MASTER_PORT choose another" in err for text in whoever_gives_up_first), err


def test_output_goes_to_files_of_each_host(tmp_path: Path, path_with_ssh: str) -> None:
    options = ("--output-filename", "out", "--verbose", "--tag-output")
    process = _start(tmp_path, path_with_ssh, "localhost:1,near:1", options=options)
    out, err = _finish(process)
    assert process.returncode == 0, err
    shown = sorted(line for line in out.splitlines() if line != "Welcome to near")
    for rank in (0, 1):
        text = (tmp_path / "out" / f"rank.{rank}" / "stdout").read_text()
        assert text.startswith(f"{rank} 2 0 1 {rank} 2 ")
        assert shown[rank] == f"[{rank}]<stdout>:{text.rstrip()}"
    assert "near 'env " in err


def test_a_file_for_the_output_that_can_not_be(tmp_path: Path, path_with_ssh: str) -> None:
    options = ("--output-filename", "/dev/null/out")
    process = _start(tmp_path, path_with_ssh, "localhost:1,near:1", options=options)
    _, err = _finish(process)
    assert process.returncode == 1
    assert "the output can not be written to /dev/null/out/rank." in err


_PRINTS_FOR_EVER = """
while True:
    print("x" * 100)
"""


def test_nobody_reads_what_ranks_print(tmp_path: Path, path_with_ssh: str) -> None:
    process = _start_lines(tmp_path, path_with_ssh, "localhost:1,near:1", _PRINTS_FOR_EVER)
    processes = _await_ranks(process, 2)
    assert process.stdout is not None
    process.stdout.readline()
    process.send_signal(signal.SIGTERM)
    assert process.wait(25) == 128 + signal.SIGTERM  # a launcher that says nothing is killed after 40 s
    process.stdout.close()
    _check_all_ended(processes)


def _where(base: float) -> tuple[int, int, float]:
    import horon.torch as hvd
    import torch

    hvd.init()
    total = hvd.allreduce(torch.tensor([base + hvd.rank()]), op=hvd.Sum, name="sum")
    return hvd.rank(), hvd.cross_rank(), float(total)


def test_run_on_hosts_returns_what_the_ranks_returned(path_with_ssh: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import horon

    monkeypatch.setenv("PATH", path_with_ssh)
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    text = "y" * 300_000  # longer than what a pipe holds
    found = horon.run(lambda base: (*_where(base), text), (1.0,), num_proc=3, hosts="localhost:1,far1:2")
    assert found == [(0, 0, 6.0, text), (1, 1, 6.0, text), (2, 0, 6.0, text)]


def _fails_on_rank_1(exit_takes_s: float) -> None:
    import horon.torch as hvd
    import torch

    if os.environ["RANK"] == "1":
        atexit.register(time.sleep, exit_takes_s)  # comes after hvd.shutdown, which tells rank 0
    hvd.init()
    if hvd.rank() == 1:
        raise LookupError("there is no such thing")
    hvd.allreduce(torch.ones(4), name="never")


@pytest.mark.parametrize("exit_takes_s", [0, 1000])
def test_run_on_hosts_says_who_has_failed_and_why(
    path_with_ssh: str, monkeypatch: pytest.MonkeyPatch, exit_takes_s: float
) -> None:
    import horon

    monkeypatch.setenv("PATH", path_with_ssh)
    with pytest.raises(RuntimeError, match="rank 1 on far1 ended with 1") as error:
        horon.run(_fails_on_rank_1, (exit_takes_s,), num_proc=2, hosts="localhost:1,far1:1")
    assert "there is no such thing" in str(error.value)


def test_no_ssh(monkeypatch: pytest.MonkeyPatch) -> None:
    import horon

    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(RuntimeError, match=r"horon\.run: could not start ssh: No such file or directory"):
        horon.run(print, num_proc=2, hosts="localhost:1,far1:1")


def test_run_on_hosts_that_can_not_be_had(path_with_ssh: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import horon

    monkeypatch.setenv("PATH", path_with_ssh)
    with pytest.raises(RuntimeError, match="could not start on unreachable"):
        horon.run(print, num_proc=2, hosts="localhost:1,unreachable:1")


# ---- with sshd ----


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


@pytest.fixture
def two_hosts(tmp_path: Path) -> Iterator[dict[str, str]]:
    """Network namespaces with a cable between them, and an sshd in the second one."""
    sshd = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin")
    if os.geteuid() != 0 or not sshd or not all(map(shutil.which, ("ip", "ssh", "ssh-keygen"))):
        pytest.skip("needs root, ip (iproute2), ssh and sshd (openssh-server)")
    tag = f"hrs{os.getpid()}"
    here, there = f"{tag}a", f"{tag}b"
    server = None
    for name in ("host_key", "key"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(tmp_path / name)], check=True)
    shutil.copy(tmp_path / "key.pub", tmp_path / "authorized")
    settings = {
        "Port": "2222",
        "HostKey": tmp_path / "host_key",
        "AuthorizedKeysFile": tmp_path / "authorized",
        "PidFile": "none",
        "UsePAM": "no",
        "StrictModes": "no",
        "PermitRootLogin": "yes",
        "PasswordAuthentication": "no",
    }
    (tmp_path / "sshd_config").write_text("".join(f"{name} {value}\n" for name, value in settings.items()))
    # ssh keeps what it knows of hosts in the user's own home, wherever $HOME is.
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "ssh").write_text(
        f'#!/bin/sh\nexec {shutil.which("ssh")} -F none -o UserKnownHostsFile={tmp_path}/known "$@"\n'
    )
    (folder / "ssh").chmod(0o755)
    try:
        try:
            for namespace in (here, there):
                _ip("netns", "add", namespace)
            _ip("link", "add", here, "netns", here, "type", "veth", "peer", "name", there, "netns", there)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no network namespaces here: {error.stderr}")
        for number, namespace in enumerate((here, there), 1):
            _ip("-n", namespace, "addr", "add", f"10.78.0.{number}/24", "dev", namespace)
            _ip("-n", namespace, "link", "set", "lo", "up")
            _ip("-n", namespace, "link", "set", namespace, "up")
        Path("/run/sshd").mkdir(exist_ok=True)
        server = subprocess.Popen(
            ["ip", "netns", "exec", there, sshd, "-D", "-e", "-f", str(tmp_path / "sshd_config")],
            stderr=subprocess.PIPE,
            text=True,
        )
        assert server.stderr is not None
        for line in server.stderr:
            if line.startswith("Server listening"):
                break
        else:
            pytest.skip("sshd does not start here")
        yield {"here": here, "key": str(tmp_path / "key"), "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}
    finally:
        if server is not None:
            server.kill()
            server.communicate()
        for namespace in (here, there):
            subprocess.run(["ip", "netns", "del", namespace], capture_output=True)


def _start_over_ssh(folder: Path, two_hosts: dict[str, str], hosts: str, how: str) -> subprocess.Popen[str]:
    script = folder / "script.py"
    script.write_text(SCRIPT)
    options = ["-np", "3", "-H", hosts, "-p", "2222", "-i", two_hosts["key"]]
    command = ["ip", "netns", "exec", two_hosts["here"], sys.executable, "-m", "horon.runner.launch", *options]
    environment = {**os.environ, "PATH": two_hosts["PATH"], "OMP_NUM_THREADS": "1", "GIVEN": "x y"}
    environment.pop("GLOO_SOCKET_IFNAME", None)
    return subprocess.Popen(
        [*command, sys.executable, str(script), how],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_ranks_over_ssh(tmp_path: Path, two_hosts: dict[str, str]) -> None:
    process = _start_over_ssh(tmp_path, two_hosts, "10.78.0.2:2,10.78.0.1:1", "print")
    out, err = _finish(process)
    assert process.returncode == 0, err
    assert len(out.splitlines()) == 3, (out, err)
    assert all(line.endswith(f"{tmp_path} x y 6.0") for line in out.splitlines()), out


def test_a_rank_that_is_killed_over_ssh(tmp_path: Path, two_hosts: dict[str, str]) -> None:
    process = _start_over_ssh(tmp_path, two_hosts, "localhost:1,10.78.0.2:2", "kill")
    _await_ranks(process, 3)
    ranks = [one for one in psutil.process_iter() if str(tmp_path / "script.py") in _command_line(one)]
    _, err = _finish(process)
    assert process.returncode == 137, err
    assert "horonrun: rank 2 on 10.78.0.2 was ended by signal 9; the others were ended\n" in err
    _check_all_ended(ranks)


def _command_line(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []
