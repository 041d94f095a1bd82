"""Processes that come while a job runs, in the place of ranks that have died.

horonrun starts them (runner/_expendable.py), each with a number of its own. They say in the launcher's store that they
are there, and wait. The ranks of the job see that when they commit. Whenever they start over, for whatever reason, they
agree first who is left, and then whom they let in: the first decision counts. From then on these are ranks like the
others.
"""

from __future__ import annotations

import contextlib
import json
import os
import uuid
from collections.abc import Collection, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any

# For the rank, which takes them out of its environment: processes that it starts are none.
NEWCOMER_VARIABLE = "HORON_ELASTIC_NEWCOMER"  # this process's number; not there: it has been here from the beginning
NOTES_VARIABLE = "HORON_ELASTIC_NOTES"  # a pipe, as descriptor.inode: a rank writes when it has said that it leaves
RESTARTS_VARIABLE = "HORON_ELASTIC_RESTARTS"  # how many may come


def process_name(rank: int, newcomer: int) -> str:
    """Of one of the processes that are a rank, one after the other; the first one's number is 0."""
    return f"{rank}.{newcomer}"


@dataclass(frozen=True)
class Incarnation:
    """Which process this one is of those that are its rank, in a job whose ranks are started anew.

    Attributes:
        newcomer: Its number; 0: it has been here from the beginning.
        notes: As the variable.
    """

    rank: int
    newcomer: int
    notes: str

    @property
    def name(self) -> str:
        return process_name(self.rank, self.newcomer)

    def note(self) -> None:
        """Tells the process behind which this one stands that it need not say anything: it would have to import torch.

        The descriptor is something else's if somebody in between has closed it.
        """
        descriptor, _, inode = self.notes.partition(".")
        with contextlib.suppress(OSError, ValueError):
            if os.fstat(int(descriptor)).st_ino == int(inode):
                os.write(int(descriptor), b"!")


def take_incarnation(environment: MutableMapping[str, str], rank: int) -> Incarnation | None:
    """Takes the variables away. None: there are none, since the ranks of this job are not started anew."""
    restarts, newcomer, notes = (
        environment.pop(name, "") for name in (RESTARTS_VARIABLE, NEWCOMER_VARIABLE, NOTES_VARIABLE)
    )
    return Incarnation(rank, int(newcomer or "0"), notes) if restarts else None


def check_may_meet(environment: Mapping[str, str]) -> None:
    """Raises RuntimeError in a process that was started anew, and was not let in: the others have their groups."""
    if environment.get(NEWCOMER_VARIABLE, "0") != "0":
        raise RuntimeError(
            "horon: this process was started in the place of a rank that has died (horonrun --max-restarts), and joins "
            "the others in hvd.init(), when they start over under hvd.elastic.run. It can not make their groups itself."
        )


@dataclass(frozen=True)
class Admission:
    """Who takes part from some moment on.

    Attributes:
        number: How many such moments there were before.
        members: Ranks of the job, in the order of their new numbers.
        newcomers: For those of them that were not here from the beginning, their number.
        seen: Numbers of all newcomers that have been let in, or had ended before.
    """

    number: int = 0
    members: Sequence[int] = ()
    newcomers: Mapping[int, int] = field(default_factory=dict)
    seen: Collection[int] = ()

    def encode(self) -> str:
        return json.dumps([self.number, list(self.members), list(self.newcomers.items()), sorted(self.seen)])

    @staticmethod
    def decode(text: str | bytes) -> Admission:
        number, members, newcomers, seen = json.loads(text)
        return Admission(number, members, dict(newcomers), set(seen))


def admit(before: Admission, left: Sequence[int], waiting: Mapping[int, int], ended: Collection[int]) -> Admission:
    """Returns who takes part next: those that are left, in their order, and behind them who waits. Pure.

    Args:
        left: Ranks of the job.
        waiting: The rank of each newcomer that has come, by number.
        ended: Numbers of those that have ended since.
    """
    fresh = {number: rank for number, rank in sorted(waiting.items()) if number not in before.seen}
    # Whose rank is still counted as there has come before anybody has noticed that the one before is not.
    let_in = {rank: number for number, rank in fresh.items() if number not in ended and rank not in left}
    dropped = {number for number, rank in fresh.items() if number in ended or let_in.get(rank, number) != number}
    newcomers = {rank: number for rank, number in before.newcomers.items() if rank in left}
    return Admission(
        before.number + 1,
        [*left, *let_in],
        {**newcomers, **let_in},
        {*before.seen, *let_in.values(), *dropped},
    )


class Registry:
    """What the launcher's store says of newcomers. Raises what the store does, if it can not be reached.

    Args:
        store: launcher_store().
    """

    def __init__(self, store: Any) -> None:
        self._store = store

    # ---- horonrun's

    def take_number(self, most: int) -> int | None:
        """The number of another newcomer; None if no more may come."""
        number = int(self._store.add("restarts", 1))
        return number if number <= most else None

    def tell_ended(self, number: int) -> None:
        self._store.set(f"newcomer/{number}/ended", "")

    def has_met(self, number: int) -> bool:
        """Whether it has become a rank."""
        return bool(self._store.check([f"newcomer/{number}/met"]))

    def take_back_leaving(self, process: str) -> None:
        """It has said that it leaves, and did not end well: it counts as lost."""
        key = f"leaving/{process}"
        if self._store.check([key]):
            self._store.delete_key(key)
            self._store.add("leaving", -1)

    # ---- a newcomer's

    def come(self, number: int, rank: int) -> None:
        self._store.set(f"newcomer/{number}/rank", str(rank))
        self._store.add("come", 1)

    def admission_of(self, number: int) -> Admission | None:
        """Where it is let in; None: not yet."""
        key = f"newcomer/{number}/admitted"
        return self.decision(int(self._store.get(key))) if self._store.check([key]) else None

    def tell_met(self, number: int) -> None:
        self._store.set(f"newcomer/{number}/met", "")
        self._store.add("lost", -1)

    # ---- everybody's

    def is_over(self, size: int) -> bool:
        """Whether all are leaving that are ranks: nobody is let in any more.

        Args:
            size: How many there were at the beginning.
        """
        return int(self._store.add("leaving", 0)) >= size - int(self._store.add("lost", 0))

    def tell_leaving(self, process: str) -> None:
        """That process, which process_name() names, is about to end well. It may be said twice."""
        mine = str(uuid.uuid4())
        if self._store.compare_set(f"leaving/{process}", "", mine) == mine.encode():
            self._store.add("leaving", 1)

    # ---- the ranks'

    def n_come(self) -> int:
        """Changes when somebody has come."""
        return int(self._store.add("come", 0))

    def waiting(self) -> dict[int, int]:
        """The rank of each that has ever come, by number."""
        keys = {number: f"newcomer/{number}/rank" for number in range(1, int(self._store.add("restarts", 0)) + 1)}
        return {number: int(self._store.get(key)) for number, key in keys.items() if self._store.check([key])}

    def has_ended(self, number: int) -> bool:
        return bool(self._store.check([f"newcomer/{number}/ended"]))

    def decision(self, number: int) -> Admission:
        """What was decided as the number-th admission."""
        return Admission.decode(self._store.get(f"admission/{number}"))

    def decide(self, before: Admission, left: Sequence[int]) -> Admission:
        """Decides whom the ranks that are left let in, unless another one of them has."""
        waiting = self.waiting()
        made = admit(before, left, waiting, [number for number in waiting if self.has_ended(number)])
        decided = Admission.decode(self._store.compare_set(f"admission/{made.number}", "", made.encode()))
        self._tell_admitted(decided)
        return decided

    def _tell_admitted(self, admission: Admission) -> None:
        for number in admission.newcomers.values():
            key = f"newcomer/{number}/admitted"
            if not self._store.check([key]):
                self._store.set(key, str(admission.number))
