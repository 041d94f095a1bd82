"""State that survives a failed collective, and the loop that starts over. Source: Horovod 0.28.1 ``common.elastic``.

A failed collective restores the last commit and starts over, with the same ranks or, where that was asked for, without
those that have died. Where it was asked for, too, others come in their place.
"""

from __future__ import annotations

import functools
import queue
import time
from collections.abc import Callable, Sequence
from typing import Any

from horon.common._context import default_context
from horon.common.exceptions import HorovodInternalError, HostsUpdatedInterrupt

kHostsRemoved = 1
"""Horovod's ``HostUpdateResult.removed``: nobody new has to be told the state."""
_HOSTS_ADDED = 2


class State:
    """What the ranks have to agree on: base class. Derive from it and write save, restore and sync.

    Args:
        bcast_object: Sends a Python object from rank 0 to all.
        get_rank: Returns this process's rank.

    Source: Horovod 0.28.1 ``State``.
    """

    def __init__(self, bcast_object: Callable[[Any], Any], get_rank: Callable[[], int]) -> None:
        self._bcast_object = bcast_object
        self._rank = get_rank
        self._host_messages: queue.Queue[tuple[float, int]] = queue.Queue()
        self._last_updated_timestamp: float = 0
        self._reset_callbacks: list[Callable[[], None]] = []

    def register_reset_callbacks(self, callbacks: Sequence[Callable[[], None]]) -> None:
        """Adds functions that run after every restart, before the state is sent."""
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Called after a restart: forgets messages about hosts, then resets, then runs the callbacks."""
        self._host_messages = queue.Queue()
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def on_hosts_updated(self, timestamp: float, update_res: int) -> None:
        """Takes a message that hosts were added or removed. May come from another thread.

        Args:
            timestamp: Seconds; later than the last one's.
            update_res: Bits: 1 removed, 2 added.
        """
        self._host_messages.put((timestamp, update_res))

    def commit(self) -> None:
        """Saves the state, and raises HostsUpdatedInterrupt if there is a message about hosts."""
        self.save()
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Raises HostsUpdatedInterrupt on all ranks if rank 0 has got a message about hosts. All ranks call it.

        So it does when processes wait to be let in, which horonrun has started in the place of ranks that had died.
        """
        if default_context.may_grow and self._rank() == 0 and default_context.has_newcomers():
            # Later than the last one's, by another rank 0 with another clock.
            self.on_hosts_updated(max(time.time(), self._last_updated_timestamp + 0.001), _HOSTS_ADDED)
        before = latest = self._last_updated_timestamp
        update = 0
        while not self._host_messages.empty():
            timestamp, result = self._host_messages.get()
            if timestamp > latest:
                latest, update = timestamp, update | result
        before, self._last_updated_timestamp, update = self._bcast_object((before, latest, update))
        if self._last_updated_timestamp > before:
            raise HostsUpdatedInterrupt(update == kHostsRemoved)

    def save(self) -> None:
        """Copies the state in memory."""
        raise NotImplementedError

    def restore(self) -> None:
        """Goes back to what was saved last."""
        raise NotImplementedError

    def sync(self) -> None:
        """Sends rank 0's state to all."""
        raise NotImplementedError

    def reset(self) -> None:
        """Called after a restart, before sync(). Does nothing unless overridden."""


class ObjectState(State):
    """State of plain Python objects, given as keywords, which become attributes.

    Args:
        bcast_object: Sends a Python object from rank 0 to all.
        get_rank: Returns this process's rank.
        kwargs: The attributes and their first values.

    Source: Horovod 0.28.1 ``ObjectState``.
    """

    def __init__(self, bcast_object: Callable[[Any], Any], get_rank: Callable[[], int], **kwargs: Any) -> None:
        super().__init__(bcast_object=bcast_object, get_rank=get_rank)
        self._saved_state = kwargs
        self._set_attrs()

    def save(self) -> None:
        self._saved_state = {name: getattr(self, name) for name in self._saved_state}

    def restore(self) -> None:
        self._set_attrs()

    def sync(self) -> None:
        if self._saved_state:
            self._saved_state = self._bcast_object(self._saved_state)
            self._set_attrs()

    def _set_attrs(self) -> None:
        for name, value in self._saved_state.items():
            setattr(self, name, value)


def run_fn(func: Callable[..., Any], reset: Callable[[], None]) -> Callable[..., Any]:
    """Wraps a training function so that it starts over after a failed collective.

    Args:
        func: Its first argument is a :class:`State`.
        reset: Ends horon and starts it again.

    Source: Horovod 0.28.1 ``run_fn``.
    """

    @functools.wraps(func)
    def wrapper(state: State, *args: Any, **kwargs: Any) -> Any:
        skip_sync = False
        while True:
            try:
                if not skip_sync:
                    state.sync()
                return func(state, *args, **kwargs)
            except HorovodInternalError:
                state.restore()
                skip_sync = False
            except HostsUpdatedInterrupt as interrupt:
                skip_sync = interrupt.skip_sync
            reset()
            state.on_reset()

    return wrapper
