"""A queue of limited length that can be closed from either end."""

from __future__ import annotations

import threading
from collections import deque
from typing import Any


class Channel:
    """From one thread to another.

    Thread safety: everything may be called from any thread.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._changed = threading.Condition()
        # Guarded by _changed:
        self._items: deque[Any] = deque()
        self._is_closed = False
        self._error: BaseException | None = None

    def put(self, item: Any) -> bool:
        """Blocks until there is room. Returns False if the channel was closed, and the item is lost."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or len(self._items) < self._capacity)
            if not self._is_closed:
                self._items.append(item)
                self._changed.notify_all()
            return not self._is_closed

    def get(self, end: Any) -> Any:
        """Blocks until there is an item. Returns `end` if the channel was closed.

        Raises:
            BaseException: The items are used up, and their source has failed with it.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or self._items or self._error)
            if self._is_closed:
                return end
            if self._items:
                self._changed.notify_all()
                return self._items.popleft()
            assert self._error is not None
            raise self._error

    def fail(self, error: BaseException) -> None:
        """No items will come after those that are there, because of an error."""
        with self._changed:
            self._error = error
            self._changed.notify_all()

    def close(self) -> None:
        """Drops what is there, and wakes both ends."""
        with self._changed:
            self._is_closed = True
            self._items.clear()
            self._changed.notify_all()
