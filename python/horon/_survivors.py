"""Going on with those who are left, when ranks have died."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from horon import _C, _backend  # noqa: F401  (makes torch.distributed know the types of _C)

FIRST_LOOK_S = 0.005
_LONGEST_LOOK_S = 0.1
# How long a store may take for an answer that is there.
_ANSWER_TIMEOUT = timedelta(seconds=60)
# How often those that are left may fail to meet although all of them are there.
_MOST_VAIN = 3


def shrink_to_survivors(
    group: Any = None, timeout: timedelta = timedelta(seconds=60), min_size: int = 1
) -> dist.ProcessGroup:
    """Puts a group of the ranks that are left in the place of one that has lost ranks, and returns it.

    Every rank that is left calls it, as soon as an operation has failed there: those that still wait in one get an
    error by it. They agree, through the group's store, on who is left: everybody who calls this, once all others are
    known to have ended, or `timeout` has passed. Then they make a group of those. Of the default group the rules of
    ``torch.distributed.shrink_group`` hold: ranks are numbered anew, without gaps and in the same order, and all other
    groups end. Wrappers such as DDP have to be made again, for the new group.

    Args:
        group: The default group if None. Its tensors on CPUs are horon's.
        timeout: How long to wait for a rank of which it is not known whether it has ended: one that is stuck, or on a
            host that is gone.
        min_size: With fewer ranks left it is an error, on all of them.

    Raises:
        ValueError: A bad argument, or the group is not horon's.
        RuntimeError: Nobody is missing; too few are left; the others have gone on without this rank, which came too
            late; or the store can not be reached, because who served it has ended. With torchrun and horonrun the
            agents serve it, else rank 0.
        torch.distributed.DistBackendError: The ranks that were left did not meet, three times.

    Source: ours; Horovod has ``hvd.elastic`` for this, MPI's ULFM ``MPI_Comm_shrink``.
    """
    of = group if group is not None else dist.distributed_c10d._get_default_group()
    backend = of._get_backend(torch.device("cpu"))
    if not isinstance(backend, _C.HoronBackend):
        raise ValueError(f"horon: shrink_to_survivors: expected a group of backend horon, got {of.name()}.")
    size, rank = dist.get_world_size(of), dist.get_rank(of)
    if timeout.total_seconds() <= 0:
        raise ValueError(f"horon: shrink_to_survivors: timeout: expected more than 0, got {timeout}.")
    if not 1 <= min_size <= size:
        raise ValueError(f"horon: shrink_to_survivors: min_size: expected 1 to {size}, got {min_size}.")
    is_default = of is dist.distributed_c10d._get_default_group()
    name, of_group = dist.distributed_c10d._world.pg_map[of]
    store = dist.PrefixStore("horon/survivors", of_group)
    # Shorter than what others wait in the next round for those whose meeting fails late.
    meeting_timeout = timeout / 2
    left = list(range(size))
    n_vain = 0
    while True:
        backend.give_up("a rank has left it to go on with those that are left")  # so that all come who wait in it
        before = left
        left = agree_on_survivors(store, rank, before, backend.ended_ranks, time.monotonic() + timeout.total_seconds())
        _check(left, rank, size, min_size)
        lost = [other for other in range(size) if other not in left]
        failed: dist.DistBackendError | None = None
        try:
            backend.prepare_shrink(lost, meeting_timeout)
        except dist.DistBackendError as error:  # most likely one of those that were left has died since
            failed = error
        if settle(store, rank, left, failed is None, backend.ended_ranks, time.monotonic() + timeout.total_seconds()):
            break
        n_vain = n_vain + 1 if left == before else 0
        if n_vain >= _MOST_VAIN:
            raise failed or RuntimeError("horon: shrink_to_survivors: another rank could not meet those that are left.")
    ranks = [dist.get_process_group_ranks(of)[other] for other in left]
    shrunk = dist.shrink_group(lost, group)
    world = dist.distributed_c10d._world
    # torch gives it the old group's store, with the keys of ranks that have other numbers now ...
    own = dist.PrefixStore(f"horon/shrunk/{'.'.join(map(str, left))}", of_group)
    world.pg_map[shrunk] = (name, own)
    if not is_default:  # ... and takes ranks of the group for global ones (2.15 and before).
        world.pg_group_ranks[shrunk] = {global_rank: index for index, global_rank in enumerate(ranks)}
    return shrunk


def decide(came: Collection[int], ended: Collection[int], members: Collection[int], is_late: bool) -> list[int] | None:
    """Who is left, in the order of the members; None as long as that is not known. Pure.

    Args:
        came: Those that have called.
        ended: Those that somebody has seen end.
        is_late: Nobody waits any longer.
    """
    is_known = all(member in came or member in ended for member in members)
    left = [member for member in members if member in came and member not in ended]
    return left if is_known or is_late else None


def _check(left: list[int], rank: int, size: int, min_size: int) -> None:
    if rank not in left:
        raise RuntimeError(
            f"horon: shrink_to_survivors: ranks {left} have gone on without rank {rank}, which came too late, or was "
            "seen to have ended. End this process."
        )
    if len(left) < min_size:
        raise RuntimeError(
            f"horon: shrink_to_survivors: {len(left)} of {size} ranks are left, {left}: fewer than min_size={min_size}."
        )
    if len(left) == size:
        raise RuntimeError(
            f"horon: shrink_to_survivors: all {size} ranks are there, so there is nobody to go on without. The group "
            "can not be used any more: destroy it and make it anew."
        )


def agree_on_survivors(
    store: Any, me: int, members: Collection[int], ended: Callable[[], Collection[int]], deadline_s: float
) -> list[int]:
    """Those of `members` that are left, in their order, which all of them find alike: the first decision counts.

    All that are left call this, equally often. Blocks until every other one has come or is known to have ended, or
    the deadline (of time.monotonic()) is over.

    Args:
        store: Of all members, for this alone.
        me, members: Numbers.
        ended: Tells which members' processes have ended, as far as this one can see.

    Raises:
        RuntimeError: The store can not be reached.
    """
    with _saying_that_the_store_is_gone():
        return _agree(store, me, members, ended, deadline_s)


@contextlib.contextmanager
def _saying_that_the_store_is_gone() -> Iterator[None]:
    try:
        yield
    except (dist.DistStoreError, dist.DistNetworkError) as error:
        raise RuntimeError(
            "horon: the store can not be reached in which the ranks that are left agree who they are: most likely its "
            "server was in a rank that has died. Let a process serve it that goes on (torchrun and horonrun do). "
            f"{error}"
        ) from error


def has_begun(store: Any, members: Collection[int]) -> bool:
    """Whether one of them has called agree_on_survivors."""
    return any(store.add(f"came/{member}", 0) > 0 for member in members)


def _agree(
    whole: Any, me: int, members: Collection[int], ended: Callable[[], Collection[int]], deadline_s: float
) -> list[int]:
    # Each member counts how often it came: the keys of an earlier time are not used again.
    store = dist.PrefixStore(str(whole.add(f"came/{me}", 1)), whole)
    views: dict[int, set[int]] = {me: set()}  # whom each one that has come has seen end
    seen = -1  # how many changes of views
    store.set(f"view/{me}", "")
    store.add("changes", 1)
    look_s = FIRST_LOOK_S
    while not store.check(["decision"]):
        mine = set(ended())
        if mine != views[me]:
            views[me] = mine
            store.set(f"view/{me}", " ".join(map(str, sorted(mine))))
            store.add("changes", 1)
        changes = store.add("changes", 0)
        if changes != seen:
            seen = changes
            for other in members:
                if other != me and store.check([f"view/{other}"]):
                    views[other] = {int(word) for word in store.get(f"view/{other}").split()}
        left = decide(views, set().union(*views.values()), members, time.monotonic() > deadline_s)
        if left is not None:
            store.compare_set("decision", "", " ".join(map(str, left)))
            break
        look_s = pause(look_s)
    store.wait(["decision"], _ANSWER_TIMEOUT)
    return [int(word) for word in store.get("decision").split()]


def pause(seconds: float) -> float:
    """Sleeps, since neither a store's keys nor the end of processes wake anybody who waits for both; returns for how
    long the next time."""
    time.sleep(seconds)
    return min(seconds * 1.5, _LONGEST_LOOK_S)


def settle(
    whole: Any, me: int, left: Collection[int], is_made: bool, ended: Callable[[], Collection[int]], deadline_s: float
) -> bool:
    """Whether all of those that agreed last have made their group: the same on all of them.

    Some may have it when another one dies; they must not go on without those that have not.
    """
    with _saying_that_the_store_is_gone():
        return _settle(whole, me, left, is_made, ended, deadline_s)


def _settle(
    whole: Any, me: int, left: Collection[int], is_made: bool, ended: Callable[[], Collection[int]], deadline_s: float
) -> bool:
    store = dist.PrefixStore(str(whole.add(f"came/{me}", 0)), whole)
    if is_made:
        store.add("made", 1)
    look_s = FIRST_LOOK_S
    while not store.check(["outcome"]):
        if is_made and store.add("made", 0) == len(left):
            store.compare_set("outcome", "", "made")
        elif not is_made or set(ended()) & set(left) or time.monotonic() > deadline_s:
            store.compare_set("outcome", "", "failed")
        else:
            look_s = pause(look_s)
    return bool(store.get("outcome") == b"made")
