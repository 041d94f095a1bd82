"""The state behind the Horovod-compatible API: one engine, started by hvd.init(), ended by hvd.shutdown()."""

from __future__ import annotations

import atexit
import contextlib
import math
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from horon import (
    _C,
    _backend,  # registers its own goodbye at exit, which has to come after ours
    _register,
)
from horon._joined import launcher_store, tell_launcher
from horon._newcomers import Admission, Incarnation, Registry, take_incarnation
from horon._survivors import FIRST_LOOK_S, agree_on_survivors, has_begun, pause
from horon.common._elastic_settings import elastic_settings
from horon.common._launch import Launch, find_launch
from horon.common._order_guard import OrderGuard
from horon.common._rendezvous import make_store
from horon.common._topology import Place, Topology, derive_topology, exchange_places, this_host
from horon.common.exceptions import NOT_INITIALIZED, HorovodInternalError, NotInitializedError

# Shorter ones are 0 in milliseconds, in which stores and groups count. Much longer ones overflow clocks that count
# nanoseconds; the engine ends its waits after a year in any case.
_LEAST_TIMEOUT_S = 0.001
_MOST_TIMEOUT_S = 10 * 365 * 24 * 3600
_FORKED = (
    "horon: hvd.init() in a process that was forked from one of {size} ranks after its hvd.init(): it would wait for "
    "the other ranks in vain. hvd.rank() and hvd.size() work here as they are; remove the call. For a process that is "
    "to be a rank, fork before hvd.init(), or start it anew (multiprocessing's 'spawn')."
)


class Registered(Protocol):
    """A process set object that learns its id from init and loses it at shutdown."""

    process_set_id: int | None
    ranks: list[int] | None


@dataclass(frozen=True)
class Pending:
    """What synchronize() needs to know about an operation in flight.

    Attributes:
        result: Makes what the caller gets of the engine's tensors.
        keeps: Tensors that must live until the operation is over.
    """

    result: Callable[[list[torch.Tensor]], Any]
    keeps: Any


def _refuse(*_: Any) -> int:
    raise NotInitializedError


def _know_nothing(handle: int) -> None:
    """No operation has this handle."""


class Numbers:
    """Numbers from 0 on, of which the last one may be given back.

    Args:
        prefix: What names with these numbers begin with.

    Thread safety: all methods.
    """

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._lock = threading.Lock()
        self._next = 0

    def take(self) -> int:
        with self._lock:
            number = self._next
            self._next = number + 1
        return number

    def give_back(self, number: int) -> None:
        """Does nothing when another one has been taken since."""
        with self._lock:
            if self._next == number + 1:
                self._next = number

    def name_of(self, number: int) -> str:
        return f"{self._prefix}{number}"


_GONE = Pending(list, None)
"""What is left of an operation that was in flight at shutdown: synchronize() says so."""


class Context:
    """An initialised Horovod: engine, topology, names, and operations in flight.

    Thread safety: init() and shutdown() are serialised by a lock, and concurrent callers of init() all return when it
    is ready. The rest may be called from any thread; its dictionaries rely on the GIL's atomic operations.

    Ownership: the engine, and the default process group if init() made it. The job's store is kept until the process
    ends, so that init() and shutdown() can alternate.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._engine: _C.NamedEngine | None = None
        self._topology: Topology | None = None
        self._job_store: Any = None
        self._made_group: Any = None
        # For who goes on without ranks that have died: ranks of the job that init() starts with (None: all), those it
        # has started with, and what sees their processes end, in that order.
        self._left: list[int] | None = None
        self._members: list[int] = []
        self._witness: Any = None
        self._is_going_on = False  # between agree_who_goes_on() and the end of the init() after it
        # Who was let in when: now, and when the witness was made. The registry is None where nobody comes.
        self._admission = self._witnessed = Admission()
        self._registry: Registry | None = None
        self._incarnation: Incarnation | None = None  # None where nobody comes
        self._n_come_seen = 0
        self._guard = OrderGuard()
        self._pid = os.getpid()
        self._exit_registered = False
        self._numbers: dict[tuple[str, int], Numbers] = {}
        self._n_joins = 0
        # Changes when ranks have started or joined together: some may not know what others agreed on before.
        self.era = 0
        self._start_name = ""  # of this start; the same on all ranks
        self._is_in_loop = False  # of hvd.elastic.run
        self.pending: dict[int, Pending] = {}
        # The engine's functions for what is called most; see _C.NamedEngine.calls.
        self.allreduce: Callable[..., int] = _refuse
        self.take: Callable[[int], Any] = _know_nothing
        self.process_sets: list[Registered] = []

    @property
    def is_initialized(self) -> bool:
        """Also in a process forked afterwards, a DataLoader's worker for instance: it knows rank and size."""
        return self._topology is not None

    @property
    def generation(self) -> str:
        """Part of the names of what is made once and compared with other ranks' for a long time, optimizers for one.

        What a script makes before its elastic loop, ranks of the first hour have made in another start than newcomers.
        """
        return "0" if self.may_grow and not self._is_in_loop else self._start_name

    def enter_loop(self) -> None:
        """From now on what is made is made by all ranks in the same start."""
        self._is_in_loop = True

    @property
    def engine(self) -> _C.NamedEngine:
        """The engine. Raises NotInitializedError before init() and after shutdown()."""
        engine = self._engine
        if engine is None:
            raise NotInitializedError
        return engine

    @property
    def topology(self) -> Topology:
        """Ranks and sizes. Raises ValueError before init() and after shutdown()."""
        topology = self._topology
        if topology is None:
            raise ValueError(NOT_INITIALIZED)
        return topology

    def init(
        self, comm: Any = None, process_sets: Sequence[Sequence[int]] = (), may_differ: Collection[int] = ()
    ) -> list[int]:
        """Starts the engine unless it runs. Blocks until all ranks have come.

        Args:
            comm: None; ranks of the job; or an mpi4py communicator.
            process_sets: Ranks of each set to add.
            may_differ: Indices of those that each rank gives as its own part of a communicator that was split. All
                parts are added, that of rank 0 first.

        Returns:
            The ids of the sets, in order.

        Raises:
            ValueError: A duplicate set (its index is the error's second argument), a rank outside of `comm`, a timeout
                out of range, nothing says where to meet, or on rank 0 a timeline that can not be written.
            RuntimeError: This process was forked from a rank, and there are others.
        """
        with self._lock:
            if self._pid != os.getpid():
                if self._topology is not None and self._topology.size > 1:
                    raise RuntimeError(_FORKED.format(size=self._topology.size))
                self._forget_parent()
            if self._engine is None:
                if self._incarnation is None:
                    self._incarnation = take_incarnation(os.environ, find_launch(os.environ).rank)
                own = self._incarnation
                if own is not None and own.newcomer != 0 and self._admission.number == 0:
                    self._come(own, comm, process_sets)
                else:
                    self._start(comm, process_sets)
                return [
                    self._add_process_set(ranks, index if index in may_differ else None)
                    for index, ranks in enumerate(process_sets)
                ]
            known = self.known_process_sets()
            missing = [list(ranks) for ranks in process_sets if tuple(ranks) not in known]
            if missing:
                raise ValueError(f"horon: hvd.init() was called before; add the process sets {missing} with "
                                 "hvd.add_process_set().")  # fmt: skip
            return [known[tuple(ranks)] for ranks in process_sets]

    def _add_process_set(self, ranks: Sequence[int], index_of_parts: int | None) -> int:
        engine = self.engine
        if index_of_parts is None:
            return engine.add_process_set(list(ranks))
        mine = torch.tensor([len(ranks), *ranks], dtype=torch.int64)
        handle = engine.allgather([mine], [f"horon.parts_of_communicator.{index_of_parts}"], 0)
        rest: list[int] = engine.wait(handle)[0].tolist()
        ids: dict[tuple[int, ...], int] = {}
        while rest:
            part, rest = tuple(rest[1 : 1 + rest[0]]), rest[1 + rest[0] :]
            if part not in ids:
                ids[part] = engine.add_process_set(list(part))
        return ids[tuple(ranks)]

    def known_process_sets(self) -> dict[tuple[int, ...], int]:
        """The id of every process set, by its ranks."""
        engine = self.engine
        return {tuple(engine.process_set_ranks(number)): number for number in engine.process_sets()}

    def shutdown(self) -> None:
        """Ends the engine, and the default group if init() made it. Does nothing when there is no engine."""
        with self._lock:
            engine, made_group = self._engine, self._made_group
            if engine is None or self._pid != os.getpid():
                return
            self._engine = self._topology = self._made_group = None
            self._guard.remove()
            self.allreduce, self.take = _refuse, _know_nothing
            self.pending = dict.fromkeys(engine.handles(), _GONE)
            for process_set in self.process_sets:
                process_set.process_set_id = None
            self.process_sets.clear()
            engine.shutdown()
            if made_group is not None and dist.is_initialized() and dist.group.WORLD is made_group:
                dist.destroy_process_group()

    def _end(self) -> None:
        """At the end of the process."""
        self.shutdown()
        if self._registry is not None and self._incarnation is not None and self._pid == os.getpid():
            with contextlib.suppress(Exception):  # nobody waits to be let in
                self._registry.tell_leaving(self._incarnation.name)
                self._incarnation.note()

    def numbers(self, kind: str, process_set: int) -> Numbers:
        """The numbers of operations without a name, counted by kind and process set.

        So a set's operations do not shift those of ranks outside of it.
        """
        numbers = self._numbers.get((kind, process_set))
        if numbers is None:
            joins = f"{self._n_joins}." if self._n_joins else ""
            numbers = self._numbers.setdefault((kind, process_set), Numbers(f"{kind}.noname.{joins}"))
        return numbers

    def new_name(self, kind: str, process_set: int) -> str:
        """The name under which ranks find each other's operation: "object.noname.3"."""
        numbers = self.numbers(kind, process_set)
        return numbers.name_of(numbers.take())

    def joined(self) -> None:
        """Counts from zero again: ranks that joined early have issued fewer operations than others."""
        self._n_joins += 1
        self.era += 1
        self._numbers.clear()

    def _start(self, comm: Any, process_sets: Sequence[Sequence[int]]) -> None:
        timeout = _timeout()
        launch = find_launch(os.environ)
        if comm is None and not dist.is_initialized():
            comm = self._left
        members = [] if comm is None or hasattr(comm, "Get_rank") else list(comm)
        members = members or list(range(launch.size))
        store, launch = self._meet(launch, comm, process_sets, timeout)
        # Counted in the store, by each rank for itself: a restarted or reused process may have been part of others.
        if dist.is_initialized():
            generation = store.add(f"horon/generation/{launch.rank}", 1)
        else:
            _register.registrar()
            generation = _C.call_roll(store, launch.rank, launch.size, timeout, lambda: self._find_lost(members))
        made_group: Any = None
        engine = None
        try:
            if not dist.is_initialized():
                group_store = dist.PrefixStore(f"horon/default/{generation}", store)
                dist.init_process_group(
                    "horon", store=group_store, rank=launch.rank, world_size=launch.size, timeout=timeout
                )
                made_group = dist.group.WORLD
                if elastic_settings(os.environ) is not None:
                    self._members, self._witness = members, made_group._get_backend(torch.device("cpu"))
                    self._witnessed = self._admission
            # Those that the default group counts as the job does.
            watched = list(range(launch.size)) if made_group is not None or comm is None else []
            topology = _exchange_topology(
                dist.PrefixStore(f"horon/places/{generation}", store), launch, timeout, watched
            )
            engine = _C.NamedEngine(
                dist.PrefixStore(f"horon/engine/{generation}", store),
                launch.rank,
                launch.size,
                timeout,
                _backend.make_gloo,
                watched,
            )
            tell_launcher()
            if self._registry is None and self._incarnation is not None and self._witness is not None:
                self._registry = Registry(launcher_store())
            _start_timeline(engine, launch.rank)
        except BaseException:
            if engine is not None:
                engine.shutdown()
            if made_group is not None:
                dist.destroy_process_group()
            raise
        self._is_going_on = False
        self._numbers.clear()
        self._n_joins = 0
        self.era += 1
        self._start_name = f"{self._admission.number}.{generation}"
        self.pending = {}
        self.allreduce, self.take = engine.calls()
        self._engine, self._topology, self._made_group = engine, topology, made_group
        if made_group is not None:
            self._guard.install()
        if not self._exit_registered:
            atexit.register(self._end)
            self._exit_registered = True

    def _meet(
        self, launch: Launch, comm: Any, process_sets: Sequence[Sequence[int]], timeout: timedelta
    ) -> tuple[Any, Launch]:
        """The store, and this process's place among the ranks of `comm`."""
        if hasattr(comm, "Get_rank"):
            launch = replace(launch, launcher="mpi4py", rank=comm.Get_rank(), size=comm.Get_size(), cross_rank=None,
                             cross_size=None, local_rank=None, local_size=None)  # fmt: skip
            _check_process_sets(process_sets, launch.size)
            return _store_over_mpi(comm, timeout), launch
        if dist.is_initialized():
            store = dist.distributed_c10d._get_default_store()
            if (dist.get_rank(), dist.get_world_size()) != (launch.rank, launch.size):
                launch = Launch("group", dist.get_rank(), dist.get_world_size())
        else:
            if self._job_store is None:
                self._job_store = make_store(launch, timeout)
            store = self._job_store
        if self._admission.number > 0:  # newcomers have counted nothing yet
            store = dist.PrefixStore(f"horon/admission/{self._admission.number}", store)
        ranks = list(comm) if comm is not None else []
        if ranks and ranks != list(range(launch.size)):
            launch = _within(ranks, launch)
            store = dist.PrefixStore(f"horon/comm/{'.'.join(map(str, ranks))}", store)
        _check_process_sets(process_sets, launch.size)
        return store, launch

    def agree_who_goes_on(self, least: int, timeout: timedelta) -> bool:
        """Finds out, with the other ranks that are left, who they are, and whom they let in: init() starts with these.

        Returns:
            Whether they are others than before, on all of them.

        For after shutdown(), which tells those that still wait. All ranks that are left call it, whatever each has seen
        happen, in jobs whose default group init() has made; in others it does nothing.

        Args:
            least: With fewer ranks it is an error, on all of them.
            timeout: For ranks of which it is not known whether they have ended.

        Raises:
            RuntimeError: Too few are left, the others have gone on without this rank, or the store is gone.
        """
        with self._lock:
            before, rank = self._left or self._members, find_launch(os.environ).rank
            if self._registry is None and (self._witness is None or len(before) < 2):
                return False
            self._is_going_on = True
            left = agree_on_survivors(
                self._agreements(),
                rank,
                before,
                self._ended,
                time.monotonic() + timeout.total_seconds(),
            )
            if rank not in left:
                raise RuntimeError(
                    f"horon: ranks {left} of the job have gone on without rank {rank}, which came too late."
                )
            if len(left) < least:
                raise RuntimeError(
                    f"horon: {len(left)} ranks of the job are left, {left}, and it is to have at least {least}."
                )
            if self._registry is not None:
                self._admission = self._registry.decide(self._admission, left)
                left = list(self._admission.members)
            self._left = left
            return left != list(before)

    def _agreements(self) -> Any:
        """The part of the store where ranks agree who is left; newcomers have not been there before."""
        number = self._admission.number
        return dist.PrefixStore(f"horon/elastic/{number}" if number else "horon/elastic", self._job_store)

    @property
    def may_grow(self) -> bool:
        """Whether processes may come while the job runs."""
        return self._registry is not None

    def has_newcomers(self) -> bool:
        """Whether processes wait to be let in. Asks the launcher's store, in jobs whose ranks are started anew."""
        registry = self._registry
        if registry is None:
            return False
        try:
            n_come = registry.n_come()
            if n_come == self._n_come_seen:
                return False
            waiting = [number for number in registry.waiting() if number not in self._admission.seen]
            if any(not registry.has_ended(number) for number in waiting):
                return True
        except RuntimeError:  # the launcher is gone
            return False
        self._n_come_seen = n_come
        return False

    def _come(self, own: Incarnation, comm: Any, process_sets: Sequence[Sequence[int]]) -> None:
        """Waits until the job's ranks let this process in, and starts with them."""
        settings = elastic_settings(os.environ)
        if settings is None or comm or process_sets:
            raise ValueError("horon: hvd.init() in a process that was started in the place of a rank that has died: "
                             "expected no communicator and no process sets, which the others do not give when they "
                             "start over.")  # fmt: skip
        registry = Registry(launcher_store())
        registry.come(own.newcomer, own.rank)
        print(f"horon: rank {own.rank}, started anew, waits until the others commit", file=sys.stderr, flush=True)
        size = find_launch(os.environ).size
        look_s = FIRST_LOOK_S
        while (admission := registry.admission_of(own.newcomer)) is None:
            if registry.is_over(size):
                registry.tell_ended(own.newcomer)
                own.note()
                print(f"horon: rank {own.rank}, started anew, ends: the others are done", file=sys.stderr, flush=True)
                os._exit(0)  # what the script does at its end is not for a process that never was a rank
            look_s = pause(look_s)
        self._registry, self._is_going_on = registry, True
        self._admission, self._left = admission, list(admission.members)
        while True:
            try:
                self._start(None, ())
                break
            except (dist.DistBackendError, HorovodInternalError):  # most likely another one has died since
                if not self.agree_who_goes_on(settings.least, settings.timeout):
                    raise
        registry.tell_met(own.newcomer)

    def _ended(self) -> list[int]:
        """Ranks of the job whose processes have been seen to end: those that take part, not who was the same rank
        before them.
        """
        newcomers = self._admission.newcomers
        ended = self._witness.ended_ranks() if self._witness is not None else []
        lost = {self._members[one] for one in ended}
        found = [rank for rank in lost if self._witnessed.newcomers.get(rank) == newcomers.get(rank)]
        if self._registry is None:
            return found
        return [*found, *(rank for rank, number in newcomers.items() if self._registry.has_ended(number))]

    def _find_lost(self, members: list[int]) -> str | None:
        """Who of these has been seen to end by the group that init() has made before."""
        if not self._is_going_on:
            return None
        lost = sorted({rank for rank in self._ended() if rank in members})
        if not lost and self._registry is not None and has_begun(self._agreements(), members):  # they have seen more
            return "hvd.init: others begin once more, most likely because another one died"
        return f"hvd.init: rank(s) {lost} of the job died before it was done" if lost else None

    def _forget_parent(self) -> None:
        """In a forked child: what the parent had is not ours to end."""
        self._engine = self._topology = self._made_group = self._job_store = self._witness = None
        self._is_going_on = False
        self._registry = self._incarnation = None
        self._admission = self._witnessed = Admission()
        self._guard.remove()
        self.allreduce, self.take = _refuse, _know_nothing
        self.pending.clear()
        self.process_sets.clear()
        self._pid = os.getpid()


def _within(ranks: list[int], launch: Launch) -> Launch:
    if len(set(ranks)) != len(ranks) or not all(0 <= rank < launch.size for rank in ranks):
        raise ValueError(f"horon: hvd.init(comm={ranks}): expected different ranks from 0 to {launch.size - 1}.")
    if launch.rank not in ranks:
        raise ValueError(f"horon: hvd.init(comm={ranks}): rank {launch.rank} is not among them; do not call it here.")
    return Launch(launch.launcher, ranks.index(launch.rank), len(ranks))


def _check_process_sets(process_sets: Sequence[Sequence[int]], size: int) -> None:
    seen = {tuple(range(size))}
    for index, ranks in enumerate(process_sets):
        if not ranks or not all(0 <= rank < size for rank in ranks):
            raise ValueError(f"horon: process set {list(ranks)}: ranks must be from 0 to {size - 1}.")
        if tuple(ranks) in seen:
            raise ValueError("duplicate process set", index)
        seen.add(tuple(ranks))


def _exchange_topology(store: Any, launch: Launch, timeout: timedelta, watched: list[int]) -> Topology:
    host = os.environ.get("HORON_HOST_ID") or this_host(socket.gethostname())
    node = host if launch.node is None else f"node {launch.node}"
    mine = Place(node, launch.local_rank, launch.local_size)
    places = exchange_places(
        store, launch.rank, launch.size, mine, timeout, lambda: _C.check_alive(watched, "hvd.init() was done")
    )
    return derive_topology(launch.rank, places, launch)


def _store_over_mpi(comm: Any, timeout: timedelta) -> Any:
    """A TCPStore on the communicator's first rank, whose address travels over MPI."""
    names = comm.allgather(socket.gethostname())
    is_master = comm.Get_rank() == 0
    store = None
    address = None
    if is_master:
        host = "127.0.0.1" if len(set(names)) == 1 else socket.getfqdn()
        store = dist.TCPStore(host, 0, comm.Get_size(), is_master=True, timeout=timeout, wait_for_workers=False)
        address = (host, store.port)
    host, port = comm.bcast(address, root=0)
    return store or dist.TCPStore(host, port, comm.Get_size(), is_master=False, timeout=timeout, wait_for_workers=False)


def _start_timeline(engine: _C.NamedEngine, rank: int) -> None:
    """Records from the beginning, on rank 0, if HORON_TIMELINE or HOROVOD_TIMELINE is a path."""
    path = os.environ.get("HORON_TIMELINE") or os.environ.get("HOROVOD_TIMELINE")
    if path and path != "DYNAMIC" and rank == 0:
        engine.start_timeline(path, os.environ.get("HOROVOD_TIMELINE_MARK_CYCLES", "0") not in ("", "0"))


def _timeout() -> timedelta:
    """How long ranks wait for each other in init(), and in operations that have begun. Raises ValueError."""
    for name in ("HORON_TIMEOUT_SECONDS", "HOROVOD_GLOO_TIMEOUT_SECONDS"):
        text = os.environ.get(name)
        if text:
            return timedelta(seconds=_timeout_in_range(name, text))
    return timedelta(minutes=30)


def _timeout_in_range(name: str, text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not _LEAST_TIMEOUT_S <= seconds <= _MOST_TIMEOUT_S:  # nor is nan
        raise ValueError(
            f"horon: {name}={text!r}: expected seconds, from {_LEAST_TIMEOUT_S} to {_MOST_TIMEOUT_S} (ten years)."
        )
    return seconds


default_context = Context()
"""The one that the module-level functions of horon.torch use."""
