"""One rank of `collectives.py`: does what the driver says, batch by batch, and sleeps in between.

worker.py FAMILY SOCKET      FAMILY: torch, mpi, horovod or deepspeed; see families.py
"""

from __future__ import annotations

import gc
import itertools
import os
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import operations
import torch
from channel import Channel, Closed, Message
from contenders import Call, Contender, receives_nothing

kLeadInCalls = 3  # not counted: they absorb what is left of the ranks' skew, and wake the caches


@dataclass
class Prepared:
    """The calls of one contender, one for each buffer of its pool."""

    lead_in: Call
    calls: list[Call] = field(default_factory=list)
    issues: list[Call] = field(default_factory=list)


class Rank:
    """The state between the driver's messages. Not thread-safe."""

    def __init__(self, host: Any, channel: Channel) -> None:
        self._host = host
        self._channel = channel
        self._contenders: dict[str, Contender] = {}
        self._pools: dict[str, list[operations.Buffers]] = {}
        self._prepared: dict[str, Prepared] = {}
        self._collective = ""

    def make(self, names: Sequence[str]) -> Message:
        self._contenders, skipped = self._host.make(names)
        return {"skipped": skipped, "versions": self._host.versions}

    def prepare(self, collective: str, size_bytes: int, pool: int, is_async: bool) -> Message:
        """Allocates pools of `pool` buffers, in place of the last ones, and binds the calls to them."""
        self._collective = collective
        self._prepared.clear()
        self._pools.clear()
        gc.collect()
        for name, contender in self._contenders.items():
            buffers = self._pool_of(contender, size_bytes, pool)
            tiny = self._allocate(contender, operations.kElementBytes * self._host.n_ranks)
            lead_in = contender.call(collective, tiny, -1)
            calls = [contender.call(collective, b, i) for i, b in enumerate(buffers)]
            issues = [contender.issue(collective, b, i) for i, b in enumerate(buffers)] if is_async else []
            if lead_in is not None and None not in calls and None not in issues:
                self._prepared[name] = Prepared(
                    lead_in, [call for call in calls if call], [issue for issue in issues if issue]
                )
        return {"supported": list(self._prepared)}

    def _pool_of(self, contender: Contender, size_bytes: int, count: int) -> list[operations.Buffers]:
        if contender.pool not in self._pools:
            self._pools[contender.pool] = [self._allocate(contender, size_bytes) for _ in range(count)]
        return self._pools[contender.pool]

    def _allocate(self, contender: Contender, size_bytes: int) -> operations.Buffers:
        return operations.allocate(self._collective, size_bytes, self._host.rank, self._host.n_ranks, contender.empty)

    def check(self, name: str) -> Message:
        """Makes one call and compares its result; says what is wrong."""
        contender, prepared = self._contenders[name], self._prepared[name]
        buffers = self._pools[contender.pool][0]
        operations.fill(buffers, self._host.rank)
        if prepared.issues:
            contender.wait_all([prepared.issues[0]()])
        else:
            prepared.calls[0]()
        expected = operations.expected(self._collective, buffers, self._host.rank, self._host.n_ranks)
        if not contender.is_checked or expected is None or torch.equal(buffers.output, expected):
            return {}
        wrong = int((buffers.output != expected).sum())
        return {"wrong": f"{name}: {self._collective}: {wrong} of {expected.numel()} elements are wrong"}

    def batch(self, name: str, calls: int) -> Message:
        """Rewrites the inputs, waits for the driver's "go", and makes `calls` calls. Returns each one's ns."""
        contender, prepared = self._contenders[name], self._prepared[name]
        started = time.perf_counter()
        for i, buffers in enumerate(self._pools[contender.pool]):
            buffers.input.fill_(self._host.rank + i)
        rewrite_seconds = time.perf_counter() - started
        self._channel.send({})
        self._channel.receive()
        gc.disable()
        for _ in range(kLeadInCalls):
            prepared.lead_in()
        durations_ns = _time_async(contender, prepared) if prepared.issues else _time_each(prepared.calls, calls)
        gc.enable()
        if prepared.lead_in is receives_nothing:
            durations_ns = []
        return {"ns": durations_ns, "rewrite_seconds": rewrite_seconds}


def _time_each(pool: Sequence[Call], calls: int) -> list[int]:
    sequence = [pool[i % len(pool)] for i in range(calls)]
    now = time.perf_counter_ns
    stamps = [now()]
    for call in sequence:
        call()
        stamps.append(now())
    return [after - before for before, after in itertools.pairwise(stamps)]


def _time_async(contender: Contender, prepared: Prepared) -> list[int]:
    """Starts all, waits for all, and returns the time for each."""
    started = time.perf_counter_ns()
    contender.wait_all([issue() for issue in prepared.issues])
    return [(time.perf_counter_ns() - started) // len(prepared.issues)]


def make_host(family: str) -> Any:
    """Makes this process a rank of its family; blocks until all ranks are here."""
    if family == "torch":
        from contenders import TorchHost

        return TorchHost()
    import peers

    return {"mpi": peers.MpiHost, "horovod": peers.HorovodHost, "deepspeed": peers.DeepSpeedHost}[family]()


def serve(rank: Rank, channel: Channel) -> None:
    while True:
        message = channel.receive()
        command = message.pop("do")
        if command == "end":
            return
        reply: Message = getattr(rank, command)(**message)
        channel.send(reply)


def main() -> int:
    family, path = sys.argv[1:]
    channel = Channel.connect(path)
    try:
        torch.set_num_threads(1)
        host = make_host(family)
        channel.send({"rank": host.rank, "pid": os.getpid()})
        serve(Rank(host, channel), channel)
    except Closed:
        os._exit(1)  # the driver is gone; the other ranks see the same, so nobody is left to shut down with
    except Exception:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # shutting down could wait for ranks that are still in a call
    host.finish()
    return 0


if __name__ == "__main__":
    sys.exit(main())
