"""The process from which all test processes are forked.

Importing torch costs one to two seconds. The harness starts this script once; it imports torch, starts no thread, and
forks a child for every request. A child then runs one job (a fresh process, which ends the way any Python program ends:
exceptions reach the top, atexit handlers run, the interpreter is finalized) or a loop of jobs (a worker of the pool).

Talks over a SOCK_SEQPACKET socket: in ("spawn", kind, stdout path, stderr path) with the child's own socket attached,
out ("pid", pid) at once and ("exit", pid, exit code or minus signal) when a child ends. When the socket closes, the
children are killed and the zygote ends, so that nothing survives the test session.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import os
import pickle
import selectors
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

DUMP_SIGNAL = signal.SIGUSR2
"""A child that gets it writes the Python stacks of all its threads to its stderr."""


class ForkServer:
    """Forks children on request and reports their ends. Single-threaded."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._children: set[int] = set()
        self._wake_read, self._wake_write = os.pipe()
        for descriptor in (self._wake_read, self._wake_write):
            os.set_blocking(descriptor, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)

    def serve(self) -> tuple[str, socket.socket] | None:
        """Returns None in the zygote when it is asked to end; in a child, the child's kind and socket."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._control, selectors.EVENT_READ)
            selector.register(self._wake_read, selectors.EVENT_READ)
            while True:
                for key, _ in selector.select():
                    if key.fileobj is self._control:
                        job = self._answer()
                        if job is not None:
                            return job if isinstance(job, tuple) else None
                    else:
                        with contextlib.suppress(BlockingIOError):
                            os.read(self._wake_read, 4096)
                self._reap()

    def _answer(self) -> tuple[str, socket.socket] | bool | None:
        data, descriptors, _, _ = socket.recv_fds(self._control, 65536, 1)
        if not data:
            self._end_children()
            return True
        _, kind, stdout_path, stderr_path = pickle.loads(data)
        connection = socket.socket(fileno=descriptors[0])
        pid = os.fork()
        if pid == 0:
            self._become_child(stdout_path, stderr_path)
            return kind, connection
        connection.close()
        self._children.add(pid)
        self._control.send(pickle.dumps(("pid", pid)))
        return None

    def _become_child(self, stdout_path: str, stderr_path: str) -> None:
        os.setpgid(0, 0)  # Whatever it forks can be found, and ended, with it.
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.close(self._wake_read)
        os.close(self._wake_write)
        self._control.close()
        for path, target in ((stdout_path, 1), (stderr_path, 2)):
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            os.dup2(descriptor, target)
            os.close(descriptor)

    def _reap(self) -> None:
        for pid in list(self._children):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                self._children.discard(pid)
                with contextlib.suppress(OSError):
                    self._control.send(pickle.dumps(("exit", pid, os.waitstatus_to_exitcode(status))))

    def _end_children(self) -> None:
        for pid in self._children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for pid in self._children:
            os.waitpid(pid, 0)


def load_function(path: str, name: str) -> Callable[..., Any]:
    """Finds a module-level function by its file, whatever pytest calls the module."""
    folder, file = os.path.split(path)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    return getattr(importlib.import_module(os.path.splitext(file)[0]), name)


def init_group(job: dict[str, Any]) -> None:
    """Joins the default group that the job describes. HORON_TEST_RANKS_PER_HOST=2: each two ranks count as a host's."""
    from datetime import timedelta

    import torch.distributed as dist

    if per_host := os.environ.get("HORON_TEST_RANKS_PER_HOST"):
        os.environ["HORON_HOST_ID"] = f"host{job['rank'] // int(per_host)}"
    dist.init_process_group(
        job["backend"],
        init_method="file://" + job["store"],
        rank=job["rank"],
        world_size=job["world_size"],
        timeout=timedelta(seconds=job["group_timeout_s"]),
    )


@contextlib.contextmanager
def gloo_forbidden() -> Iterator[None]:
    """While it lasts, whoever makes a Gloo group in this process gets an error: horon, torch, or the test."""
    import torch.distributed as dist

    def refuse(*_: Any, **__: Any) -> Any:
        raise RuntimeError("HORON_TEST_FORBID_GLOO: a Gloo group was asked for")

    saved = dist.ProcessGroupGloo
    modules: list[Any] = [dist, dist.distributed_c10d]
    for module in modules:
        module.ProcessGroupGloo = refuse
    try:
        yield
    finally:
        for module in modules:
            module.ProcessGroupGloo = saved


def run_job(job: dict[str, Any]) -> Any:
    """Runs one job's function, inside a process group if it asks for one."""
    os.environ.update(job["env"])
    function = load_function(job["path"], job["function"])
    with gloo_forbidden() if os.environ.get("HORON_TEST_FORBID_GLOO") == "1" else contextlib.nullcontext():
        if job["init"]:
            init_group(job)
        return function(job["rank"], job["world_size"], *job["args"])


def send_reply(connection: Connection, reply: tuple[Any, ...]) -> None:
    """Pickles with tensors by value. Connection.send would share their memory with the harness by descriptors."""
    connection.send_bytes(pickle.dumps(reply))


def pool_worker(connection: Connection) -> None:
    """Runs jobs until the harness hangs up. A failed job ends with a reply; the harness then ends the process."""
    import torch.distributed as dist

    while True:
        try:
            job = connection.recv()
        except (EOFError, OSError):
            os._exit(0)  # The session is over; there is no group to take leave of.
        saved = dict(os.environ)
        try:
            result = run_job(job)
            if dist.is_initialized():
                dist.destroy_process_group()
            # After an init_process_group that raised, it would number groups otherwise than a fresh process.
            dist.distributed_c10d._world.group_count = 0
            reply = (True, result)
        except BaseException:
            reply = (False, traceback.format_exc())
        os.environ.clear()
        os.environ.update(saved)
        sys.stdout.flush()
        sys.stderr.flush()
        send_reply(connection, (job["number"], *reply))


def run_once(job: dict[str, Any], connection: Connection | None) -> None:
    """A fresh process: exceptions reach the top."""
    result = run_job(job)
    if connection is not None:
        send_reply(connection, (result, time.monotonic()))


def preload() -> None:
    """Imports everything that is slow to import, before any fork."""
    import warnings

    import numpy  # noqa: F401
    import pytest  # noqa: F401
    import torch.distributed.checkpoint
    import torch.distributed.fsdp
    import torch.distributed.optim
    import torch.distributed.tensor  # noqa: F401

    warnings.simplefilter("ignore", FutureWarning)  # Names that torch deprecates are tested on purpose.
    # The children's collectors leave alone what exists now: at exit they would touch, and so copy, all of its pages.
    gc.collect()
    gc.freeze()


def main() -> None:
    """The zygote (--serve, socket number), or one fresh process that was really executed (--exec, job file)."""
    faulthandler.register(DUMP_SIGNAL, all_threads=True)
    if sys.argv[1] == "--exec":
        with open(sys.argv[2], "rb") as file:
            run_once(pickle.load(file), None)
        return
    control = socket.socket(fileno=int(sys.argv[2]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C belongs to pytest, which then closes the socket.
    preload()
    threads = len(os.listdir("/proc/self/task")) if os.path.isdir("/proc/self/task") else 1
    control.send(pickle.dumps(("ready", threads)))
    job = ForkServer(control).serve()
    if job is None:
        return
    kind, child = job
    faulthandler.unregister(DUMP_SIGNAL)
    faulthandler.enable(file=2)
    faulthandler.register(DUMP_SIGNAL, file=2, all_threads=True)
    connection = Connection(child.detach())
    if kind == "worker":
        pool_worker(connection)
    else:
        run_once(connection.recv(), connection)


if __name__ == "__main__":
    main()
