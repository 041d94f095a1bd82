"""The simulated NCCL itself: what PyTorch's backend does not show of it (test_cuda_simulator.py shows the rest)."""

from __future__ import annotations

import ctypes
import os
import signal
import struct
import time
from collections.abc import Callable
from pathlib import Path

import torch
from cuda_simulator import CudaSimulator

SUCCESS, INVALID_ARGUMENT, INVALID_USAGE, REMOTE_ERROR, IN_PROGRESS = 0, 4, 5, 6, 7
FLOAT, SUM = 7, 0


class UniqueId(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_char * 128),)


POINTER, COUNT, INT = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
ARGUMENTS = {
    "ncclAllReduce": (POINTER, POINTER, COUNT, INT, INT, POINTER, POINTER),
    "ncclSend": (POINTER, COUNT, INT, INT, POINTER, POINTER),
    "ncclRecv": (POINTER, COUNT, INT, INT, POINTER, POINTER),
}


class Nccl:
    """NCCL's functions on one communicator, which is made by `connect` and held in `comm`."""

    def __init__(self) -> None:
        torch.zeros(1, device="cuda")
        self.library = ctypes.CDLL(None)
        self.library.ncclGetLastError.restype = ctypes.c_char_p
        for name, types in ARGUMENTS.items():
            getattr(self.library, name).argtypes = types
        self.comm = ctypes.c_void_p()

    def connect(self, rank: int, n_ranks: int, name: str, blocking: bool = True) -> int:
        """ncclCommInitRankConfig; all ranks must give the same name, which need not come from ncclGetUniqueId."""
        identity = UniqueId("-".join(Path(name).parts[-3:]).encode()[-60:])
        config = ctypes.create_string_buffer(struct.pack("QIIi", 128, 0xCAFEBEEF, 23007, int(blocking)), 256)
        return int(self.library.ncclCommInitRankConfig(ctypes.byref(self.comm), n_ranks, identity, rank, config))

    def state(self) -> int:
        """ncclCommGetAsyncError."""
        found = ctypes.c_int()
        assert self.library.ncclCommGetAsyncError(self.comm, ctypes.byref(found)) == SUCCESS
        return found.value

    def await_state(self, wanted: Callable[[int], bool], timeout_s: float = 20) -> int:
        """Asks until the state is as wanted."""
        deadline = time.monotonic() + timeout_s
        while not wanted(self.state()):
            assert time.monotonic() < deadline, f"the state is still {self.state()}"
            time.sleep(0.001)
        return self.state()

    def await_ready(self) -> None:
        assert self.await_state(lambda state: state != IN_PROGRESS) == SUCCESS

    def all_reduce(self, tensor: torch.Tensor, op: int = SUM) -> int:
        address, stream = tensor.data_ptr(), torch.cuda.current_stream().cuda_stream
        return int(self.library.ncclAllReduce(address, address, tensor.numel(), FLOAT, op, self.comm, stream))

    def send(self, tensor: torch.Tensor, peer: int) -> int:
        stream = torch.cuda.current_stream().cuda_stream
        return int(self.library.ncclSend(tensor.data_ptr(), tensor.numel(), FLOAT, peer, self.comm, stream))

    def recv(self, tensor: torch.Tensor, peer: int) -> int:
        stream = torch.cuda.current_stream().cuda_stream
        return int(self.library.ncclRecv(tensor.data_ptr(), tensor.numel(), FLOAT, peer, self.comm, stream))


def connected(rank: int, world_size: int, name: str, blocking: bool = True) -> Nccl:
    nccl = Nccl()
    assert nccl.connect(rank, world_size, name, blocking) == (SUCCESS if blocking else IN_PROGRESS)
    nccl.await_ready()
    return nccl


# ---- non-blocking communicators ----


def non_blocking(rank: int, world_size: int, name: str) -> tuple[set[int], int]:
    nccl = Nccl()
    tensor = torch.ones(100, device="cuda")
    if rank == 1:
        time.sleep(0.3)
    assert nccl.connect(rank, world_size, name, blocking=False) == IN_PROGRESS
    if rank == 0:
        assert nccl.all_reduce(tensor) == INVALID_ARGUMENT
        assert b"before the previous operation returned ncclSuccess" in nccl.library.ncclGetLastError(nccl.comm)
        assert nccl.state() == IN_PROGRESS
    nccl.await_ready()
    answers, n_early = set(), 0
    for _ in range(20):
        tensor.fill_(1)
        torch.cuda.synchronize()
        answer = nccl.all_reduce(tensor)
        answers.add(answer)
        torch.cuda.synchronize()  # without having asked whether the operation is on the stream
        n_early += int(tensor.cpu()[0] == 1)
        nccl.await_ready()
        torch.cuda.synchronize()
        assert tensor.cpu().eq(world_size).all()
    return answers, n_early


def test_non_blocking_communicator(cuda_simulator: CudaSimulator, tmp_path: Path) -> None:
    for answers, n_early in cuda_simulator.run(non_blocking, 2, f"{tmp_path}/a"):
        assert answers == {SUCCESS, IN_PROGRESS}
        assert 0 < n_early < 20, "a caller that does not ask must see that, and one that is lucky must not"


# ---- failures ----


def never_comes(rank: int, world_size: int, name: str, blocking: bool) -> None:
    nccl = connected(rank, world_size, name, blocking)
    if rank == 1:
        time.sleep(1)
    else:
        tensor = torch.ones(10, device="cuda")
        assert nccl.all_reduce(tensor) in (SUCCESS, IN_PROGRESS)
        nccl.await_ready()
        after = torch.zeros(1, device="cuda") + 1
        time.sleep(0.2)
        assert not torch.cuda.current_stream().query(), "it did not wait for rank 1"
        assert nccl.state() == SUCCESS
        begin = time.monotonic()
        assert nccl.library.ncclCommAbort(nccl.comm) == SUCCESS
        torch.cuda.synchronize()
        assert time.monotonic() - begin < 0.5
        assert after.item() == 1
        assert nccl.all_reduce(tensor) == INVALID_ARGUMENT
    os._exit(0)


def test_abort_ends_what_waits(cuda_simulator: CudaSimulator, tmp_path: Path) -> None:
    cuda_simulator.run(never_comes, 2, f"{tmp_path}/a", True)
    cuda_simulator.run(never_comes, 2, f"{tmp_path}/b", False)


def abort_while_connecting(rank: int, world_size: int, name: str) -> None:
    nccl = Nccl()
    assert nccl.connect(rank, 2, name, blocking=False) == IN_PROGRESS
    time.sleep(0.1)
    assert nccl.state() == IN_PROGRESS
    assert nccl.library.ncclCommAbort(nccl.comm) == SUCCESS


def test_abort_while_connecting(cuda_simulator: CudaSimulator, tmp_path: Path) -> None:
    cuda_simulator.run(abort_while_connecting, 1, f"{tmp_path}/a")


def peer_dies(rank: int, world_size: int, name: str, is_reported: bool) -> None:
    nccl = connected(rank, world_size, name)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    assert nccl.all_reduce(torch.ones(10, device="cuda")) == SUCCESS
    if is_reported:
        assert nccl.await_state(lambda state: state != SUCCESS) == REMOTE_ERROR
    else:
        time.sleep(0.5)
        assert nccl.state() == SUCCESS
    assert not torch.cuda.current_stream().query()
    assert nccl.library.ncclCommAbort(nccl.comm) == SUCCESS
    torch.cuda.synchronize()


def test_peer_that_dies(cuda_simulator: CudaSimulator, tmp_path: Path) -> None:
    for is_reported in (False, True):
        environment = {"HORON_SIMULATOR_REMOTE_ERROR": str(int(is_reported))}
        outcomes = cuda_simulator.outcomes(peer_dies, 2, f"{tmp_path}/{is_reported}", is_reported, env=environment)
        assert outcomes[0].exitcode == 0, outcomes[0].stderr
        assert outcomes[1].exitcode == -signal.SIGKILL


def leaves(rank: int, world_size: int, name: str) -> None:
    nccl = connected(rank, world_size, name)
    if rank == 0:
        time.sleep(0.3)
        assert nccl.state() == SUCCESS
    assert nccl.library.ncclCommDestroy(nccl.comm) == SUCCESS


def test_peer_that_leaves_is_no_failure(cuda_simulator: CudaSimulator, tmp_path: Path) -> None:
    cuda_simulator.run(leaves, 2, f"{tmp_path}/a", env={"HORON_SIMULATOR_REMOTE_ERROR": "1"})


def mismatch(rank: int, world_size: int, name: str) -> None:
    nccl = connected(rank, world_size, name)
    assert nccl.all_reduce(torch.ones(10 + rank, device="cuda")) == SUCCESS
    assert nccl.await_state(lambda state: state != SUCCESS) == INVALID_USAGE
    text = nccl.library.ncclGetLastError(nccl.comm).decode()
    assert "rank 0 calls AllReduce(count 10," in text
    assert "rank 1 calls AllReduce(count 11," in text
    assert nccl.library.ncclCommAbort(nccl.comm) == SUCCESS
    torch.cuda.synchronize()


def test_calls_that_do_not_match(cuda_simulator: CudaSimulator, tmp_path: Path) -> None:
    cuda_simulator.run(mismatch, 2, f"{tmp_path}/a")


# ---- groups, several streams, several devices ----


def messages(rank: int, world_size: int, name: str) -> None:
    """Every rank sends to every rank, itself too, in an order of its own, with a collective in between."""
    nccl = connected(rank, world_size, name)
    sent = [torch.full((3,), 10.0 * rank + peer).to("cuda") for peer in range(world_size)]
    received = [torch.zeros(3, device="cuda") for _ in range(world_size)]
    total = torch.ones(5, device="cuda")
    order = [(rank + 1 + i) % world_size for i in range(world_size)]
    nccl.library.ncclGroupStart()
    for peer in order if rank % 2 else []:
        assert nccl.recv(received[peer], peer) == SUCCESS
    assert nccl.all_reduce(total) == SUCCESS
    for peer in reversed(order):
        assert nccl.send(sent[peer], peer) == SUCCESS
    for peer in [] if rank % 2 else order:
        assert nccl.recv(received[peer], peer) == SUCCESS
    assert nccl.library.ncclGroupEnd() == SUCCESS
    for peer in range(world_size):
        assert received[peer].cpu().eq(10.0 * peer + rank).all()
    assert total.cpu().eq(world_size).all()
    assert nccl.library.ncclCommDestroy(nccl.comm) == SUCCESS


def test_messages_in_a_group(cuda_simulator: CudaSimulator, tmp_path: Path) -> None:
    cuda_simulator.run(messages, 3, f"{tmp_path}/a", env={"HORON_SIMULATOR_DELAY_US": "1000"})


def one_process(rank: int, world_size: int) -> None:
    nccl = Nccl()
    comms = (ctypes.c_void_p * 3)()
    assert nccl.library.ncclCommInitAll(comms, 3, None) == SUCCESS
    tensors = [torch.full((4,), index + 1.0, device=f"cuda:{index}") for index in range(3)]
    nccl.library.ncclGroupStart()
    for comm, tensor in zip(comms, tensors, strict=True):
        nccl.comm = ctypes.c_void_p(comm)
        with torch.cuda.device(tensor.device):
            assert nccl.all_reduce(tensor) == SUCCESS
    assert nccl.library.ncclGroupEnd() == SUCCESS
    assert all(tensor.cpu().eq(6).all() for tensor in tensors)
    for comm in comms:
        assert nccl.library.ncclCommAbort(ctypes.c_void_p(comm)) == SUCCESS


def test_several_devices_in_one_process(cuda_simulator: CudaSimulator) -> None:
    cuda_simulator.run(one_process, env={"HORON_SIMULATOR_DEVICES": "3"})


def in_order(rank: int, world_size: int, name: str) -> None:
    """Operations of a communicator run one after another, on whatever streams they were started."""
    nccl = connected(rank, world_size, name)
    streams = [torch.cuda.Stream() for _ in range(3)]
    tensor = torch.ones(8, device="cuda")
    torch.cuda.synchronize()
    for i in range(6):
        with torch.cuda.stream(streams[i % 3]):
            assert nccl.all_reduce(tensor) == SUCCESS
    torch.cuda.synchronize()
    assert tensor.cpu().eq(world_size**6).all()
    assert nccl.library.ncclCommDestroy(nccl.comm) == SUCCESS


def test_operations_of_a_communicator_keep_their_order(cuda_simulator: CudaSimulator, tmp_path: Path) -> None:
    cuda_simulator.run(in_order, 2, f"{tmp_path}/a", env={"HORON_SIMULATOR_DELAY_US": "2000"})


# ---- communicators from others ----


def children(rank: int, world_size: int, name: str, blocking: bool) -> None:
    nccl = connected(rank, world_size, name, blocking)
    parent, even_or_odd, survivors = nccl.comm, ctypes.c_void_p(), ctypes.c_void_p()
    color = rank % 2 if rank < 3 else -1
    expected = SUCCESS if blocking else IN_PROGRESS
    assert nccl.library.ncclCommSplit(parent, color, -rank, ctypes.byref(even_or_odd), None) == expected
    nccl.await_ready()
    if color < 0:
        assert even_or_odd.value is None
    else:
        nccl.comm = even_or_odd
        nccl.await_ready()
        number, count = ctypes.c_int(), ctypes.c_int()
        assert nccl.library.ncclCommUserRank(nccl.comm, ctypes.byref(number)) == SUCCESS
        assert nccl.library.ncclCommCount(nccl.comm, ctypes.byref(count)) == SUCCESS
        assert (number.value, count.value) == {0: (1, 2), 1: (0, 1), 2: (0, 2)}[rank]
        tensor = torch.full((4,), rank + 1.0, device="cuda")
        assert nccl.all_reduce(tensor) in (SUCCESS, IN_PROGRESS)
        nccl.await_ready()
        assert tensor.cpu().eq({0: 4, 1: 2, 2: 4}[rank]).all()
        assert nccl.library.ncclCommAbort(nccl.comm) == SUCCESS
    if rank == 3:
        os._exit(0)
    nccl.comm = parent
    stuck = torch.ones(4, device="cuda")
    assert nccl.all_reduce(stuck) in (SUCCESS, IN_PROGRESS)  # rank 3 never comes
    nccl.await_ready()
    excluded, abort = (ctypes.c_int * 1)(3), 1
    assert nccl.library.ncclCommShrink(parent, excluded, 1, ctypes.byref(survivors), None, abort) == expected
    nccl.comm = survivors
    nccl.await_ready()
    tensor = torch.full((4,), rank + 1.0, device="cuda")
    assert nccl.all_reduce(tensor) in (SUCCESS, IN_PROGRESS)
    nccl.await_ready()
    assert tensor.cpu().eq(6).all()
    for comm in (parent, survivors):
        assert nccl.library.ncclCommAbort(comm) == SUCCESS


def test_split_and_shrink(cuda_simulator: CudaSimulator, tmp_path: Path) -> None:
    cuda_simulator.run(children, 4, f"{tmp_path}/a", True)
    cuda_simulator.run(children, 4, f"{tmp_path}/b", False)


def factor_on_device(rank: int, world_size: int, name: str) -> None:
    nccl = connected(rank, world_size, name)
    factor = torch.full((1,), 0.5, device="cuda")
    op = ctypes.c_int()
    assert (
        nccl.library.ncclRedOpCreatePreMulSum(ctypes.byref(op), ctypes.c_void_p(factor.data_ptr()), FLOAT, 0, nccl.comm)
        == SUCCESS
    )
    tensor = torch.full((4,), 3.0, device="cuda")
    factor.fill_(0.25)  # read when the operation runs
    assert nccl.all_reduce(tensor, op.value) == SUCCESS
    assert nccl.library.ncclRedOpDestroy(op, nccl.comm) == SUCCESS
    assert tensor.cpu().eq(1.5).all()
    assert nccl.all_reduce(tensor, op.value) == INVALID_ARGUMENT
    assert nccl.library.ncclCommDestroy(nccl.comm) == SUCCESS


def test_factor_on_device(cuda_simulator: CudaSimulator, tmp_path: Path) -> None:
    cuda_simulator.run(factor_on_device, 2, f"{tmp_path}/a")
