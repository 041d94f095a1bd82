"""The extension module: bindings without logic (torch_backend/bindings.cc)."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any, overload

import torch

class Options:
    """Settings of a process group; see docs/options.md. All ranks of a group must use the same.

    Args:
        timeout: Default timeout of the group's operations; torch's own ``timeout=`` argument wins.
    """

    inline_bytes: int
    deposit_bytes: int
    buffer_bytes: int
    ring_bytes: int
    eager_bytes: int
    claiming: str
    cuda_batch_bytes: int
    sparse: bool
    hierarchical: bool
    carrier: str
    host_id: str
    global_ranks_in_group: list[int]
    group_name: str
    _timeout: timedelta
    def __init__(self, timeout: timedelta = ...) -> None: ...
    def __copy__(self) -> Options: ...
    def __deepcopy__(self, memo: dict[int, Any]) -> Options: ...

class HoronBackend:
    """A ``c10d::Backend``, as ``pg._get_backend(device)`` returns it."""

    @property
    def options(self) -> Options: ...
    @property
    def is_shared(self) -> bool:
        """True when all ranks share memory; False where bytes go over a network."""

    @property
    def transport(self) -> str:
        """How collectives travel: 'shared memory'; between hosts 'tcp' or 'gloo', with 'hosts, ' in front where
        ranks of one host share memory."""

    def all_reduce_(self, tensor: torch.Tensor, op: str = "sum") -> None:
        """Reduces a CPU tensor in place and blocks, past c10d's dispatcher: no Work, no hooks.

        Args:
            tensor: Any shape; the same number of elements and dtype on every rank.
            op: "sum", "avg", "product", "min", "max", "band", "bor" or "bxor".
        """

    def ended_ranks(self) -> list[int]:
        """Ranks of this group whose processes have ended, among those on this host."""

    def prepare_shrink(self, ranks_to_exclude: list[int], timeout: timedelta) -> None:
        """Makes what ``shrink`` returns when it is called with these ranks next.

        Args:
            timeout: For the ranks that are left to meet.
        """

    def give_up(self, reason: str) -> None:
        """Fails what is pending in this group, on all ranks, as ``abort`` does, and does not wait for its hooks."""

    def get_error(self) -> Any: ...
    def split(self, store: Any, ranks: list[int], options: Options | None = None) -> HoronBackend | None: ...
    def perform_nocolor_split(self, device: Any) -> None: ...

class GradientPack:
    """Gradients side by side in one buffer.

    Args:
        parameters: Whose gradients.
        buffer: Contiguous.
        views: The place of each in the buffer.
    """

    def __init__(self, parameters: list[torch.Tensor], buffer: torch.Tensor, views: list[torch.Tensor]) -> None: ...
    def view(self, index: int) -> torch.Tensor:
        """Returns what is, or becomes, a parameter's gradient: a new tensor with the memory of its place."""

    def pack(self) -> list[int]:
        """Moves gradients into their views, which become the gradients; a missing one becomes zeros.

        Returns the indices of sparse gradients and of those with a graph, which it leaves alone.
        """

    def put_back(self) -> None:
        """Makes each view its parameter's gradient again, or a copy where that has another dtype or device now."""

class GradientBucket:
    """Gradients that go out together, uncompressed, from C++.

    Args:
        name: For all of it.
        op: As in NamedEngine.allreduce, as are ``prescale``, ``postscale`` and ``priority``.
        parameter: On the CPU; its gradient is the bucket.
        strides: Of that gradient, the same on all ranks. One with others goes out from Python.
        pack: Whose gradients are the bucket, in ``buffer``: contiguous, on the CPU.
    """

    @overload
    def __init__(
        self,
        name: str,
        op: int,
        prescale: float,
        postscale: float,
        priority: int,
        *,
        parameter: torch.Tensor,
        strides: list[int],
    ) -> None: ...
    @overload
    def __init__(
        self,
        name: str,
        op: int,
        prescale: float,
        postscale: float,
        priority: int,
        *,
        pack: GradientPack,
        buffer: torch.Tensor,
    ) -> None: ...
    def set_engine(self, engine: NamedEngine, process_set: int) -> None: ...
    def try_send(self) -> bool:
        """Sends it, and meets the other ranks for it as NamedEngine.meet; False if it has to go out from Python."""

    @property
    def is_out(self) -> bool: ...

class GradientHooks:
    """Counts the gradients of parameters as backward passes make them; takes its hooks off when it dies.

    Args:
        parameters: Leaves that require gradients.
        passes: Backward passes until a gradient counts.
        lay_out: Called before the first gradient counts; has to call ``set_buckets``.
        send: Called with the number of a bucket when all of its gradients are there.
        refuse: Called for a gradient that comes again before ``reset``; has to raise.
    """

    def __init__(
        self,
        parameters: list[torch.Tensor],
        passes: int,
        lay_out: Callable[[], None],
        send: Callable[[int], None],
        refuse: Callable[[], None],
    ) -> None: ...
    def set_buckets(
        self,
        bucket_of: list[int],
        place_of: list[tuple[GradientPack, int] | None],
        buckets: list[GradientBucket | None],
    ) -> None:
        """Sets each parameter's bucket, and the pack into which its gradient is moved as soon as it is there.

        Args:
            buckets: By number: what sends it; None where ``send`` does.
        """

    def begin_step(self) -> None:
        """Gives gradients of earlier steps that somebody keeps memory of their own; again, nothing."""

    @property
    def n_set_aside(self) -> int:
        """How often kept gradients were given memory of their own."""

    def not_sent(self) -> list[int]:
        """Returns the numbers of the buckets that a GradientBucket has not sent."""

    def receive(self) -> None:
        """Blocks until those that it has sent are reduced, and makes the reduced gradients the parameters'.

        Raises:
            HorovodInternalError: Ranks disagree, or one is gone. All have ended.
        """

    def reset(self, passes: int) -> None: ...
    @property
    def has_gradients(self) -> bool: ...

class HorovodInternalError(RuntimeError):
    """An operation failed for a reason that is not the caller's: ranks disagree, or one is gone."""

class NamedEngine:
    """Named operations in any order, negotiated between the ranks; see docs/architecture.md.

    Blocks until all ranks have met. Process set 0 holds all ranks. An operation returns a handle, and every handle has
    to be waited for, once. Several tensors in one call are one atomic group. Tensors are on the CPU.

    Args:
        store: A ``c10d::Store`` that all ranks share.
        timeout: For meeting, and for each transfer.
        make_gloo: Makes a Gloo backend over a store, for process sets whose ranks share no memory.
        watched_ranks: Ranks of the default group, whose death ends the wait for all to come.

    Raises:
        ValueError: A name that is in flight, a rank outside the process set, a bad root, splits or dtype.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        size: int,
        timeout: timedelta,
        make_gloo: Callable[[Any, int, int, timedelta], Any],
        watched_ranks: list[int] = ...,
    ) -> None: ...
    def allreduce(
        self,
        tensors: list[torch.Tensor],
        outputs: list[torch.Tensor],
        names: list[str],
        op: int,
        prescale: float,
        postscale: float,
        process_set: int,
        priority: int = 0,
        will_wait_later: bool = False,
    ) -> int:
        """Starts a reduction.

        Args:
            outputs: May be the inputs.
            op: Average 0, Sum 1, Adasum 2, Min 3, Max 4, Product 5.
            priority: Smaller is wanted earlier.
            will_wait_later: Promises that ``wait`` follows. Where there is no core for a second thread of every rank,
                the operation then begins with that wait, or when others have waited for it for half a second.
        """

    def allgather(self, tensors: list[torch.Tensor], names: list[str], process_set: int) -> int: ...
    def broadcast(
        self, tensor: torch.Tensor, output: torch.Tensor, root_rank: int, name: str, process_set: int
    ) -> int: ...
    def alltoall(self, tensor: torch.Tensor, splits: list[int] | None, name: str, process_set: int) -> int: ...
    def reducescatter(
        self,
        tensors: list[torch.Tensor],
        names: list[str],
        op: int,
        prescale: float,
        postscale: float,
        process_set: int,
    ) -> int: ...
    def join(self, device: int = 0) -> int:
        """``device``: the GPU that joins in for process sets in which this rank has used none."""

    def barrier(self, process_set: int) -> int: ...
    def poll(self, handle: int) -> bool: ...
    def meet(self, handle: int) -> None:
        """Waits up to a millisecond for the other ranks to come with the same operation, and carries it out.

        Only for large ones (2 MiB), where each rank has one core of one host, as long as that pays; ``wait`` follows.
        """

    def wait(self, handle: int) -> list[torch.Tensor]:
        """Blocks and returns the outputs: ``[output, received_splits]`` of an alltoall, one int of a join.

        Raises:
            HorovodInternalError: The operation failed.
        """

    def calls(self) -> tuple[Callable[..., int], Callable[[int], Any]]:
        """Functions for what is called most, which take their arguments by position.

        ``allreduce(tensor, output, name, op, prescale, postscale, process_set, will_wait)`` returns a handle;
        ``take(handle)`` waits and returns the output (of ``allreduce``, a tensor; otherwise as ``wait``), or None for a
        handle that is unknown or was waited for.
        """

    def handles(self) -> list[int]:
        """Of the operations that were not waited for."""

    def add_process_set(self, ranks: list[int]) -> int: ...
    def remove_process_set(self, id: int) -> bool: ...
    def process_set_ranks(self, id: int) -> list[int]: ...
    def process_sets(self) -> list[int]: ...
    def start_timeline(self, path: str, mark_cycles: bool = False) -> None: ...
    def stop_timeline(self) -> None: ...
    def shutdown(self) -> None: ...
    def abort(self, reason: str) -> None: ...
    @property
    def is_running(self) -> bool: ...

def create_backend(
    store: Any,
    rank: int,
    size: int,
    options: Options,
    make_gloo: Callable[[Any, int, int, timedelta], Any],
    is_empty: bool = False,
) -> HoronBackend: ...
def find_watch_posts() -> list[int]:
    """Numbers of this user's processes on this host that can be asked where they are."""

def ask_watch_post(post: int, timeout: timedelta) -> tuple[int, str | None] | None:
    """A process's pid and what it says; None instead if there is none, or within the timeout no answer."""

def shutdown_all(drain: timedelta) -> None: ...
def check_alive(global_ranks: list[int], what: str) -> None:
    """Raises DistBackendError, "rank 1 (pid 4711) died before <what>", if one of these ranks did.

    Other hosts are asked, too, which may take a fifth of a second.

    Args:
        global_ranks: Ranks of the default group.
    """

def call_roll(
    store: Any, rank: int, size: int, timeout: timedelta, find_lost: Callable[[], str | None] | None = None
) -> int:
    """Waits until all ranks have come, and returns the number of this start, which all count alike.

    Args:
        find_lost: Called about every second; says who can not come any more, which ends the wait on all ranks.

    Raises:
        ValueError: Two processes have one rank, or ranks have different settings or builds.
        DistBackendError: A rank did not come within `timeout`; names it.
    """

def active_instruction_set() -> str: ...
def has_gpu_parts() -> bool:
    """Whether this build carries CUDA tensors. Where it does not, the two functions below do not exist."""

def cuda_pack(tensors: list[torch.Tensor], buffer: torch.Tensor, factor: float = 1.0) -> None:
    """Copies contiguous CUDA tensors into ``buffer``, each on the next boundary of 16 bytes, times ``factor``.

    One launch of the fusion buffer's kernel (1,023 tensors each), on the current stream.

    Raises:
        ValueError: Device or dtype differs, something is not contiguous, or the buffer is too small.
    """

def nccl_version() -> int:
    """As ``NCCL_VERSION_CODE``. Only where ``has_gpu_parts()``."""

def cuda_unpack(buffer: torch.Tensor, tensors: list[torch.Tensor], factor: float = 1.0) -> None:
    """The way back: from the buffer into the tensors."""

def empty_in_arena(sizes: list[int], dtype: torch.dtype) -> torch.Tensor: ...
def empty_like_in_arena(like: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor: ...
def is_in_arena(tensor: torch.Tensor) -> bool: ...
def result_in_arena(tensor: torch.Tensor) -> torch.Tensor | None:
    """An uninitialised tensor in the arena with the sizes of a CPU tensor of at least 1 MiB; None for others, and where
    there is no room."""

def arena_statistics() -> dict[str, int]: ...
def expect_gradients(bytes: list[int]) -> None:
    """From now on tensors of these sizes that autograd makes in a backward pass lie in the arena, if it has room."""

def forget_gradients(bytes: list[int]) -> None:
    """Takes ``expect_gradients`` of the same sizes back."""

class DdpParts:
    @property
    def n_made(self) -> int: ...
    def set_lending(self, is_lending: bool, may_average: bool) -> None: ...

class DdpGradients:
    VIEWS: DdpGradients
    OWN: DdpGradients
    COPIED: DdpGradients

class OwnGradients:
    def __init__(self, parameters: list[torch.Tensor]) -> None: ...
    @staticmethod
    def are_shared(parameters: list[torch.Tensor]) -> bool: ...
    def watch(self) -> None: ...
    def begin_forward(self) -> None: ...
    def end_rebuild(self) -> None: ...

def register_ddp_arena_hook(
    reducer: Any, group: Any, gradients: DdpGradients, own: OwnGradients | None
) -> DdpParts: ...
