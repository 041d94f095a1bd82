"""The base of a data loader, and what makes it read ahead in a thread of its own.

Source: Horovod 0.28.1 ``horovod.data.data_loader_base``.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from horon.data._channel import Channel

_log = logging.getLogger(__name__)


class BaseDataLoader:
    """Derive from it, and say how long it is and where batches come from. Source: Horovod 0.28.1 ``BaseDataLoader``."""

    def __len__(self) -> int:
        """The number of batches."""
        raise NotImplementedError

    def _iterate(self) -> Iterator[Any]:
        """Yields the batches of one epoch."""
        raise NotImplementedError

    def _process_batch(self, batch: Any) -> Any:
        """What a trainer overrides to change batches on their way out."""
        return batch

    def __iter__(self) -> Iterator[Any]:
        for batch in self._iterate():
            yield self._process_batch(batch)


if TYPE_CHECKING:
    _NextLoader = BaseDataLoader  # whatever class comes next in the loader's bases
else:
    _NextLoader = object


class _EndOfEpoch:
    """Comes after the last batch of an epoch."""


class AsyncDataLoaderMixin(_NextLoader):
    """Lets a loader read ahead, into the next epoch, too: ``class AsyncLoader(AsyncDataLoaderMixin, Loader)``.

    A daemon thread, started by the first iteration, runs ``_iterate()`` again and again. An iteration that is left
    early is gone on with by the next one. What ``_iterate()`` raises is raised where its batch would have come.

    Thread safety: one thread iterates, and any may close.

    Args:
        async_loader_queue_size: Batches to read ahead; 0: none, and no thread.
        debug_data_loader: Whether each batch is logged, at level INFO.
        args: For the next class's constructor.
        kwargs: For the next class's constructor.

    Source: Horovod 0.28.1 ``AsyncDataLoaderMixin``.
    """

    def __init__(
        self, async_loader_queue_size: int = 64, debug_data_loader: bool = False, *args: Any, **kwargs: Any
    ) -> None:
        self.async_loader_queue_size = async_loader_queue_size
        self.debug_data_loader = debug_data_loader
        super().__init__(*args, **kwargs)
        self.started = False
        if async_loader_queue_size > 0:
            self._channel = Channel(async_loader_queue_size)
            self.thread = threading.Thread(target=self._async_worker, name="horon data loader", daemon=True)

    def close_async_loader(self) -> None:
        """Ends the thread; what it has read ahead is lost. Blocks until the batch that it is reading has come.

        An iteration that goes on, or a later one, ends at once.
        """
        if self.async_loader_queue_size > 0:
            self._channel.close()
            if self.started:
                self.thread.join()

    def _async_worker(self) -> None:
        try:
            is_open = True
            while is_open:
                for batch in self._iterate():
                    is_open = self._channel.put(batch)
                    self._tell("read")
                    if not is_open:
                        break
                else:
                    is_open = self._channel.put(_EndOfEpoch)
        except BaseException as error:
            self._channel.fail(error)

    def __iter__(self) -> Iterator[Any]:
        if self.async_loader_queue_size <= 0:
            for batch in self._iterate():
                yield self._process_batch(batch)
            return
        if not self.started:
            self.started = True
            self.thread.start()
        while (batch := self._channel.get(_EndOfEpoch)) is not _EndOfEpoch:
            self._tell("handed out")
            yield self._process_batch(batch)

    def _tell(self, what: str) -> None:
        if self.debug_data_loader:
            _log.info("data loader: a batch was %s", what)
