"""horon.data: loaders that read ahead, epoch by epoch; early ends; errors. No ranks."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
from harness import on_gloo
from horon.data import AsyncDataLoaderMixin, BaseDataLoader

pytestmark = pytest.mark.skipif(on_gloo(), reason="horon's own")


class _Loader(BaseDataLoader):
    def __init__(self, n_batches: int, fails_at: int | None = None) -> None:
        self.n_batches, self.fails_at = n_batches, fails_at
        self.n_read = 0
        self.has_read = threading.Semaphore(0)

    def __len__(self) -> int:
        return self.n_batches

    def _iterate(self) -> Iterator[int]:
        for batch in range(self.n_batches):
            if batch == self.fails_at:
                raise OSError("the disk is gone")
            self.n_read += 1
            self.has_read.release()
            yield batch

    def _process_batch(self, batch: Any) -> Any:
        return 10 * batch


class _AsyncLoader(AsyncDataLoaderMixin, _Loader):
    pass


def test_without_reading_ahead() -> None:
    assert list(_Loader(3)) == [0, 10, 20]
    loader = _AsyncLoader(async_loader_queue_size=0, n_batches=3)
    assert [list(loader), list(loader), len(loader)] == [[0, 10, 20], [0, 10, 20], 3]
    loader.close_async_loader()


@pytest.mark.parametrize("queue_size", [1, 2, 64])
@pytest.mark.parametrize("n_batches", [0, 1, 5])
def test_epochs(queue_size: int, n_batches: int) -> None:
    loader = _AsyncLoader(queue_size, True, n_batches=n_batches)
    for _ in range(3):
        assert list(loader) == [10 * batch for batch in range(n_batches)]
    loader.close_async_loader()
    assert not loader.thread.is_alive()
    assert list(loader) == []


def test_reads_ahead_and_no_further() -> None:
    loader = _AsyncLoader(2, n_batches=10)
    assert next(iter(loader)) == 0
    for _ in range(4):  # the one handed out, two in the queue, one in the thread's hand
        assert loader.has_read.acquire(timeout=20)
    assert not loader.has_read.acquire(timeout=0.1)
    loader.close_async_loader()
    assert loader.n_read == 4 and not loader.thread.is_alive()


def test_closing_before_the_start_and_twice() -> None:
    loader = _AsyncLoader(2, n_batches=3)
    loader.close_async_loader()
    loader.close_async_loader()
    assert list(loader) == []


def test_closing_wakes_who_waits() -> None:
    loader = _AsyncLoader(1, n_batches=2)
    release = threading.Event()

    def iterate() -> Iterator[int]:
        yield 1
        release.wait(20)
        yield 2

    loader._iterate = iterate  # type: ignore[method-assign]
    found: list[int] = []
    consumer = threading.Thread(target=lambda: found.extend(loader))
    consumer.start()
    loader._channel.close()
    release.set()
    consumer.join(20)
    loader.close_async_loader()
    assert not consumer.is_alive() and not loader.thread.is_alive() and len(found) <= 1


def test_an_error_comes_in_its_place_and_again() -> None:
    loader = _AsyncLoader(8, n_batches=3, fails_at=2)
    found = []
    with pytest.raises(OSError, match="the disk is gone"):
        for batch in loader:
            found.append(batch)
    assert found == [0, 10]
    with pytest.raises(OSError, match="the disk is gone"):
        list(loader)
    loader.close_async_loader()
