"""Point-to-point: tags, any source, order, batches, mismatched sizes, traffic in both directions."""

from __future__ import annotations

import threading
import time

import pytest
import torch
import torch.distributed as dist
from harness import Cases, expect_error, gloo_lacks, run_ranks, store
from reference import DTYPES, SIZES, check_equal, make_input

LARGE = 1 << 20
"""Elements of float32: 4 MiB."""


def _matrix(rank: int, world_size: int, dtypes: list[torch.dtype]) -> None:
    cases = Cases()
    for dtype in dtypes:
        for count in SIZES:
            with cases(f"ring {dtype} n={count}"):
                received = torch.zeros(count, dtype=dtype)
                work = dist.isend(make_input(rank, count, dtype), (rank + 1) % world_size)
                source = dist.recv(received, (rank - 1) % world_size)
                work.wait()
                assert source == (rank - 1) % world_size
                check_equal(received, make_input((rank - 1) % world_size, count, dtype))
    cases.check()


@pytest.mark.parametrize("world_size", [2, 3])
def test_ring_of_every_dtype_and_size(world_size: int) -> None:
    run_ranks(_matrix, world_size, DTYPES)


@pytest.mark.parametrize("world_size", [4, 5])
def test_ring_at_other_world_sizes(world_size: int) -> None:
    run_ranks(_matrix, world_size, [torch.float32])


def _ping_pong(rank: int, world_size: int) -> None:
    for step in range(200):
        for count in (1, 5000):
            tensor = torch.full((count,), float(step))
            if rank == 0:
                dist.send(tensor, 1)
                dist.recv(tensor, 1)
            else:
                dist.recv(tensor, 0)
                dist.send(tensor + 1, 0)
            assert (tensor == step + (rank == 0)).all()


def test_ping_pong() -> None:
    run_ranks(_ping_pong, 2)


def _tags(rank: int, world_size: int) -> None:
    for count in (3, LARGE):
        if rank == 0:
            works = [dist.isend(torch.full((count,), float(tag)), 1, tag=tag) for tag in (7, 8, 9)]
            for work in works:
                work.wait()
        else:
            for tag in (9, 7, 8):
                tensor = torch.zeros(count)
                dist.recv(tensor, 0, tag=tag)
                assert (tensor == tag).all(), f"tag {tag} received what was sent with tag {tensor[0].item()}"
        dist.barrier()


def test_tags_in_another_order() -> None:
    run_ranks(_tags, 2)


def _crossed_receives(rank: int, world_size: int) -> None:
    for count in (3, LARGE):
        if rank == 0:
            dist.send(torch.full((count,), 1.0), 1, tag=1)
            dist.send(torch.full((count,), 2.0), 1, tag=2)
        else:
            second, first = torch.zeros(count), torch.zeros(count)
            works = [dist.irecv(second, 0, tag=2), dist.irecv(first, 0, tag=1)]
            for work in works:
                work.wait()
            assert (first == 1.0).all() and (second == 2.0).all()
        dist.barrier()


def test_blocking_sends_against_receives_in_another_order() -> None:
    run_ranks(_crossed_receives, 2)


def _same_tag_order(rank: int, world_size: int) -> None:
    counts = [1, LARGE, 3, 70001, 0, 5]
    if rank == 0:
        works = [dist.isend(torch.full((n,), float(i)), 1) for i, n in enumerate(counts)]
    else:
        tensors = [torch.full((n,), -1.0) for n in counts]
        works = [dist.irecv(tensor, 0) for tensor in tensors]
    for work in works:
        work.wait()
    if rank == 1:
        for index, tensor in enumerate(tensors):
            assert (tensor == index).all(), f"message {index} came out of order"


def test_messages_of_one_tag_keep_their_order() -> None:
    run_ranks(_same_tag_order, 2)


def _any_source(rank: int, world_size: int) -> None:
    for count in (5, LARGE):
        if rank == 0:
            seen = []
            for _ in range(world_size - 1):
                tensor = torch.zeros(count)
                source = dist.recv(tensor)
                assert (tensor == source).all(), f"the message of {tensor[0].item()} was reported as from {source}"
                seen.append(source)
            assert sorted(seen) == list(range(1, world_size))
        else:
            dist.send(torch.full((count,), float(rank)), 0)
        dist.barrier()


@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_receive_from_any_source(world_size: int) -> None:
    run_ranks(_any_source, world_size)


def _any_source_tag(rank: int, world_size: int) -> None:
    if rank == 0:
        for tag in (4, 3):
            tensor = torch.zeros(10)
            source = dist.recv(tensor, tag=tag)
            assert (tensor == 100.0 * tag + source).all()
            tensor = torch.zeros(10)
            other = dist.recv(tensor, tag=tag)
            assert (tensor == 100.0 * tag + other).all() and {source, other} == {1, 2}
    else:
        works = [dist.isend(torch.full((10,), 100.0 * tag + rank), 0, tag=tag) for tag in (3, 4)]
        for work in works:
            work.wait()


def test_receive_from_any_source_respects_tags() -> None:
    run_ranks(_any_source_tag, 3)


def _with_collective(rank: int, world_size: int) -> None:
    # The receive is posted before the collective, the send after it: no queue may hold both.
    for count in (4, LARGE):
        for _ in range(5):
            received, reduced = torch.zeros(count), torch.ones(count)
            if rank == 0:
                receiving = dist.irecv(received, 1)
                reducing = dist.all_reduce(reduced, async_op=True)
                receiving.wait()
                reducing.wait()
                assert (received == 5.0).all()
            else:
                dist.all_reduce(reduced)
                dist.send(torch.full((count,), 5.0), 0)
            assert (reduced == 2.0).all()


def test_receive_posted_before_a_collective() -> None:
    run_ranks(_with_collective, 2)


def _batch_ring(rank: int, world_size: int) -> None:
    cases = Cases()
    for count in SIZES:
        with cases(f"n={count}"):
            left, right = (rank - 1) % world_size, (rank + 1) % world_size
            from_left, from_right = torch.zeros(count), torch.zeros(count)
            works = dist.batch_isend_irecv(
                [
                    dist.P2POp(dist.isend, make_input(rank, count, torch.float32), right, tag=1),
                    dist.P2POp(dist.isend, make_input(rank, count, torch.float32, seed=1), left, tag=2),
                    dist.P2POp(dist.irecv, from_right, right, tag=2),
                    dist.P2POp(dist.irecv, from_left, left, tag=1),
                ]
            )
            for work in works:
                work.wait()
            check_equal(from_left, make_input(left, count, torch.float32))
            check_equal(from_right, make_input(right, count, torch.float32, seed=1))
    cases.check()


@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_batch_isend_irecv_ring(world_size: int) -> None:
    run_ranks(_batch_ring, world_size)


def _batch_with_an_error(rank: int, world_size: int) -> None:
    peer = 1 - rank
    good = torch.full((4,), float(rank))
    bad = torch.zeros(1).expand(4)  # cannot be written
    expect_error(lambda: dist.batch_isend_irecv([dist.P2POp(dist.irecv, bad, peer)]))
    total = torch.ones(3)
    dist.all_reduce(total)
    assert (total == world_size).all()
    received = torch.zeros(4)
    works = dist.batch_isend_irecv([dist.P2POp(dist.isend, good, peer), dist.P2POp(dist.irecv, received, peer)])
    assert len(works) == 2
    for work in reversed(works):
        work.wait()
    assert (received == peer).all()


def test_batch_isend_irecv_with_an_error_leaves_nothing_open() -> None:
    run_ranks(_batch_with_an_error, 2)


def _future_in_a_callback(rank: int, world_size: int) -> None:
    a, b, message = torch.ones(1 << 18), torch.ones(1 << 18), torch.ones(3)
    if rank == 0:
        first = dist.all_reduce(a, async_op=True)
        second = dist.all_reduce(b, async_op=True)
        first.get_future().then(lambda _: second.get_future())
        time.sleep(0.6)
        dist.send(message, 1)  # needs the GIL, which the callback must not keep
        second.wait()
    else:
        time.sleep(0.3)
        dist.all_reduce(a)
        dist.recv(message, 0)
        dist.all_reduce(b)


def test_a_callback_that_asks_for_a_future_does_not_block_the_process() -> None:
    run_ranks(_future_in_a_callback, 2)


def _future_of_a_message_in_a_callback(rank: int, world_size: int, count: int) -> None:
    if rank == 1:
        time.sleep(0.2)
        first = dist.isend(torch.ones(3), 0, tag=1)
        time.sleep(0.2)  # The callback waits by now.
        second = dist.isend(torch.full((count,), 2.0), 0, tag=2)
        first.wait()
        second.wait()
        return
    received, ended = torch.zeros(count), threading.Event()

    def then(_: torch.futures.Future) -> None:
        dist.irecv(received, 1, tag=2).get_future().wait()
        ended.set()

    dist.irecv(torch.zeros(3), 1, tag=1).get_future().then(then)
    assert ended.wait(20), "the callback waits for its own thread"
    assert (received == 2.0).all()


@pytest.mark.parametrize("count", [3, LARGE])
def test_a_callback_that_waits_for_the_future_of_another_message(count: int) -> None:
    gloo_lacks("no futures of messages")
    run_ranks(_future_of_a_message_in_a_callback, 2, count)


def _many_callbacks_send(rank: int, world_size: int) -> None:
    n = 3000
    ask, answer = 0, n  # tags
    received = [torch.zeros(1) for _ in range(n)]
    works = [dist.irecv(received[i], 1 - rank, tag=(ask if rank == 0 else answer) + i) for i in range(n)]
    if rank == 1:
        dist.barrier()
        works += [dist.isend(torch.full((1,), float(i)), 0, tag=ask + i) for i in range(n)]
        for work in works:
            work.wait()
        assert all(tensor.item() == i for i, tensor in enumerate(received))
        return
    answers = []

    def then(i: int) -> None:
        answers.append(dist.isend(received[i], 1, tag=answer + i))

    chained = [work.get_future().then(lambda _, i=i: then(i)) for i, work in enumerate(works)]
    dist.barrier()
    for work in works:
        work.wait()
    for future in chained:
        future.wait()
    assert len(answers) == n
    for work in answers:
        work.wait()


def test_thousands_of_callbacks_that_send() -> None:
    gloo_lacks("no futures of messages")
    run_ranks(_many_callbacks_send, 2)


def _size_mismatch(rank: int, world_size: int, sent: int, expected: int) -> None:
    if rank == 0:
        expect_error(lambda: _wait(dist.isend(torch.ones(sent), 1, tag=5)), within_s=10)
    else:
        expect_error(lambda: dist.recv(torch.zeros(expected), 0, tag=5), within_s=10)
    for count in (3, 70001):  # The message was drained: later ones, of the same tag too, are right.
        tensor = torch.full((count,), 4.0) if rank == 0 else torch.zeros(count)
        (dist.send if rank == 0 else dist.recv)(tensor, 1 - rank, tag=5)
        assert (tensor == 4.0).all()
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    assert (tensor == 2.0).all()


def _wait(work: dist.Work) -> None:
    work.wait()


@pytest.mark.parametrize(("sent", "expected"), [(3, 4), (4, 3), (LARGE, 3), (3, LARGE), (LARGE, LARGE + 1), (0, 1)])
def test_byte_count_mismatch_fails_both_ends(sent: int, expected: int) -> None:
    gloo_lacks("a mismatch breaks the pair of ranks")
    run_ranks(_size_mismatch, 2, sent, expected)


def _layouts(rank: int, world_size: int) -> None:
    expected = make_input(0, 37 * 41, torch.float32).reshape(37, 41)
    if rank == 0:
        dist.send(expected.t().contiguous().t(), 1)
        dist.send(expected, 1)
    else:
        tensor = torch.zeros(37, 41)
        dist.recv(tensor, 0)
        check_equal(tensor, expected)
        base = torch.full((37, 82), -9.0)
        dist.recv(base[:, ::2], 0)
        check_equal(base[:, ::2], expected)
        assert (base[:, 1::2] == -9.0).all(), "elements between those of the view were changed"


def test_layouts() -> None:
    gloo_lacks("needs dense tensors")
    run_ranks(_layouts, 2)


def _objects(rank: int, world_size: int) -> None:
    sent = [{"a": 1}, None, "x" * 100000]
    if rank == 0:
        dist.send_object_list(sent, 1)
    else:
        received: list[object] = [None] * 3
        assert dist.recv_object_list(received, 0) == 0
        assert received == sent


def test_object_lists() -> None:
    run_ranks(_objects, 2)


def _many_small(rank: int, world_size: int) -> None:
    total = 2000
    if rank == 0:
        for work in [dist.isend(torch.tensor([float(i)]), 1, tag=i % 3) for i in range(total)]:
            work.wait()
    else:
        tensors = [torch.zeros(1) for _ in range(total)]
        for work in [dist.irecv(tensors[i], 0, tag=i % 3) for i in range(total)]:
            work.wait()
        assert [t.item() for t in tensors] == [float(i) for i in range(total)]


def test_many_small_messages() -> None:
    run_ranks(_many_small, 2)


def _unexpected_flood(rank: int, world_size: int) -> None:
    # All are sent before the first receive is posted, and received backwards: a bounded queue must not lose any.
    total, count = 300, 2000
    if rank == 0:
        works = [dist.isend(torch.full((count,), float(i)), 1, tag=i) for i in range(total)]
        store().set("sent", "1")
        for work in works:
            work.wait()
    else:
        store().wait(["sent"])
        for tag in reversed(range(total)):
            tensor = torch.zeros(count)
            dist.recv(tensor, 0, tag=tag)
            assert (tensor == tag).all(), f"tag {tag}"


def test_unexpected_messages_received_backwards() -> None:
    run_ranks(_unexpected_flood, 2)


def _both_directions(rank: int, world_size: int) -> None:
    count = 8 << 20
    for _ in range(2):
        received = torch.zeros(count)
        works = [dist.isend(torch.full((count,), float(rank)), 1 - rank), dist.irecv(received, 1 - rank)]
        for work in works:
            work.wait()
        assert (received == 1 - rank).all()


def test_large_messages_in_both_directions() -> None:
    run_ranks(_both_directions, 2)


def _buffers_change_after_wait(rank: int, world_size: int) -> None:
    for count in (10, LARGE):
        if rank == 0:
            tensor = torch.ones(count)
            dist.send(tensor, 1)
            tensor.fill_(-1.0)
        else:
            store().add("ready", 1)
            tensor = torch.zeros(count)
            dist.recv(tensor, 0)
            assert (tensor == 1.0).all(), "the sender's later writes arrived"


def test_sender_may_reuse_its_buffer_after_send() -> None:
    run_ranks(_buffers_change_after_wait, 2)
