"""Sends gradients out while the backward pass goes on, and waits for them."""

from __future__ import annotations

import hashlib
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from horon import _C
from horon.common._context import default_context
from horon.common._reduce_ops import Average, Max
from horon.common.exceptions import HorovodInternalError
from horon.common.process_sets import ProcessSet
from horon.common.util import split_list
from horon.torch._allreduce import sparse_allreduce_async
from horon.torch._gradient_parts import (
    BufferMaker,
    Direct,
    Packed,
    Part,
    SideBySide,
    Slot,
    new_buffer,
    works_by_element,
)
from horon.torch._issue import id_of
from horon.torch.compression import Compressor, NoneCompressor

# A gradient of at least so many bytes goes by itself, from where autograd put it.
_DIRECT_BYTES = 256 * 1024
_DIRECT_BYTES_ON_GPU = 10 * 1024 * 1024  # as csrc/cuda/fusion_policy.h: larger ones gain nothing in a buffer
# Smaller ones go together, in the order of the backward pass, up to so many bytes at once.
_BUCKET_BYTES = 1024 * 1024
_BUCKET_BYTES_ON_GPU = 25 * 1024 * 1024  # as csrc/named/gathering.h; DDP's, too

# Note [Layouts are compared by Max]
# Buckets have to be the same on all ranks. Each rank has a digest d of its own, 0 < d < M, and the ranks reduce the
# pair (d, M - d) by Max: the largest digest is the smallest one if all are equal. Ranks that have joined contribute
# zeros, which change nothing. A rank that joins before its first step has not compared yet when the others have, and
# would later do it alone; so all compare again after a join, from which they return together, and after an init.
_DIGESTS_END = 2**56 + 1

Groups = Sequence[Sequence[torch.Tensor]] | int | None


@dataclass(frozen=True)
class ReductionOptions:
    """How gradients are reduced; see DistributedOptimizer."""

    compression: type[Compressor]
    op: int
    gradient_predivide_factor: float
    groups: Groups
    sparse_as_dense: bool
    process_set: ProcessSet

    @property
    def factors(self) -> tuple[float, float]:
        """What gradients are multiplied by before and after the reduction."""
        factor = self.gradient_predivide_factor if self.op == Average else 1.0
        return 1.0 / factor, factor


@dataclass(eq=False)
class _Bucket:
    """Gradients that go out together, when the last of them is ready."""

    parts: list[Part]
    names: list[str]
    priority: int
    native: _C.GradientBucket | None = None
    """Sends it from C++, where there is nothing more to do than that; see Note [Sent without Python] there."""
    handle: int | None = None
    is_received: bool = False
    """Something that Python has sent was received, while others are waited for: it is not to be sent again."""
    sparse: list[tuple[Slot, Callable[[], torch.Tensor]]] = field(default_factory=list)

    @property
    def is_out(self) -> bool:
        is_native_out = self.native is not None and self.native.is_out
        return is_native_out or self.handle is not None or bool(self.sparse) or self.is_received

    def forget(self) -> None:
        self.handle = None
        self.is_received = False
        self.sparse.clear()


class GradientReducer:
    """Reduces the gradients of some parameters over a process set, in place, bucket by bucket.

    A hook on every parameter counts its backward passes; when all gradients of a bucket are there, it goes out. The
    buckets and the memory for them are made in the first backward pass. synchronize() sends what has not gone out, and
    waits for all.

    See Note [Layouts are compared by Max].

    Thread safety: one thread at a time, as for autograd of one model. Ownership: the hooks are taken off the
    parameters when the reducer dies.
    """

    def __init__(
        self, named_parameters: Sequence[tuple[str, torch.Tensor]], passes: int, options: ReductionOptions
    ) -> None:
        self.passes = passes
        self._options = options
        self.process_set = options.process_set
        self._slots = [Slot(parameter, name, order) for order, (name, parameter) in enumerate(named_parameters)]
        self._buckets: list[_Bucket] | None = None
        self._building = threading.Lock()
        self._digest = b""
        # Optimizers are wrapped in the same order on all ranks; their first backward passes may come in any.
        kind = f"gradient_layout.{default_context.generation}"
        self._comparison_name = default_context.new_name(kind, id_of(options.process_set))
        self._comparison: tuple[int, torch.Tensor] | None = None  # handle and result, while it is under way
        self._compared_in_era: int | None = None
        self._hooks = self._make_hooks()
        # Autograd makes large gradients where they are reduced.
        direct = [slot.parameter for slot in self._slots if self._is_direct(slot) and slot.parameter.is_cpu]
        sizes = [parameter.numel() * parameter.dtype.itemsize for parameter in direct]
        _C.expect_gradients(sizes)
        weakref.finalize(self, _C.forget_gradients, sizes)

    def set_passes(self, passes: int) -> None:
        """Sets how many backward passes come before a gradient goes out, from now on; once some have gone out, from
        the next step on."""
        self.passes = passes
        if not any(bucket.is_out for bucket in self._buckets or ()):
            self._hooks.reset(passes)

    @property
    def has_gradients(self) -> bool:
        """Whether gradients were computed since the last step."""
        return self._hooks.has_gradients

    def reset(self) -> None:
        """Forgets what was in flight."""
        self._comparison = None
        self._hooks.reset(self.passes)
        for bucket in self._buckets or ():
            bucket.forget()

    def synchronize(self) -> None:
        """Sends what has not gone out, and blocks until all gradients are reduced.

        Raises:
            HorovodInternalError: Ranks disagree, or one was lost. Nothing is in flight afterwards, unless their layouts
                differ: then what has gone out is over with hvd.shutdown().
        """
        if self._buckets is None:
            self._build()
        assert self._buckets is not None
        self._hooks.begin_step()
        self._compare_layouts()
        # As a rule there are none; after a backward pass Python is slow, see Note [Sent without Python] in C++.
        others = [self._buckets[number] for number in self._hooks.not_sent()]
        for bucket in others:
            if not bucket.is_out:
                self._send(bucket)
        error: HorovodInternalError | None = None
        try:
            self._hooks.receive()
        except HorovodInternalError as failure:
            error = failure
        for bucket in others:
            try:
                self._receive(bucket)
            except HorovodInternalError as failure:
                error = error or failure
        self._hooks.reset(self.passes)
        for bucket in others:
            bucket.forget()
        if error is not None:
            raise error

    @torch.no_grad()
    def zero_in_place(self) -> None:
        """Moves gradients that the user keeps from step to step into the arena. They are about to be set to zero."""
        for bucket in self._buckets or ():
            for part in bucket.parts:
                if isinstance(part, Direct) and part.slots[0].parameter.is_cpu:
                    parameter = part.slots[0].parameter
                    gradient = parameter.grad
                    if gradient is not None and not gradient.is_sparse and gradient is not part.slots[0].view:
                        parameter.grad = part.view()

    def _make_hooks(self) -> _C.GradientHooks:
        reference = weakref.ref(self)

        def lay_out() -> None:
            reducer = reference()
            if reducer is not None:
                with reducer._building:  # gradients of a CPU and of a GPU come on two threads
                    if reducer._buckets is None:
                        reducer._build()

        def send(bucket: int) -> None:
            reducer = reference()
            if reducer is not None and reducer._buckets is not None:
                reducer._send(reducer._buckets[bucket])

        def refuse() -> None:
            raise AssertionError(
                "Gradients were computed more than backward_passes_per_step times before call to step(). "
                "Increase backward_passes_per_step to accumulate gradients locally."
            )

        return _C.GradientHooks([slot.parameter for slot in self._slots], self.passes, lay_out, send, refuse)

    @torch.no_grad()
    def _send(self, bucket: _Bucket) -> None:
        engine = default_context.engine
        if bucket.native is not None:
            bucket.native.set_engine(engine, id_of(self._options.process_set))
            if bucket.native.try_send():
                return
        options = self._options
        if not options.sparse_as_dense:
            self._send_sparse(bucket)
            if bucket.sparse and len(bucket.parts) == 1 and isinstance(bucket.parts[0], Direct):
                return
        tensors = [part.pack() for part in bucket.parts]
        is_on_cpu = tensors[0].is_cpu
        bucket.handle = engine.allreduce(
            tensors,
            tensors,
            bucket.names,
            options.op,
            *options.factors,
            id_of(options.process_set),
            bucket.priority,
            # On the CPU the reduction may be left to whoever waits; a GPU works on it meanwhile.
            will_wait_later=is_on_cpu,
        )
        if is_on_cpu:
            engine.meet(bucket.handle)

    def _send_sparse(self, bucket: _Bucket) -> None:
        for part in bucket.parts:
            for slot in part.slots:
                gradient = slot.parameter.grad
                if gradient is not None and gradient.is_sparse:
                    options = self._options
                    wait = sparse_allreduce_async(gradient, slot.name, options.op, options.process_set)
                    bucket.sparse.append((slot, wait))

    @torch.no_grad()
    def _receive(self, bucket: _Bucket) -> None:
        if bucket.handle is not None:
            default_context.engine.wait(bucket.handle)
            for part in bucket.parts:
                part.unpack()
            bucket.is_received = True
            bucket.handle = None
        while bucket.sparse:
            slot, wait = bucket.sparse[-1]
            slot.parameter.grad = wait()
            bucket.is_received = True
            bucket.sparse.pop()

    def _build(self) -> None:
        """Lays out the buckets, and starts to ask whether all ranks have the same."""
        buckets = self._slots_of_buckets()
        make_buffer = self._memory_for(buckets)
        layout = [self._parts_of(slots, make_buffer) for slots in buckets]
        del make_buffer  # what is left of its memory would count as somebody's who keeps gradients
        described = [[[slot.describe() for slot in part.slots] for part in parts] for parts in layout]
        self._digest = hashlib.sha256(repr(described).encode()).digest()
        laid_out = [
            _Bucket(
                parts,
                [self._name_of(part) for part in parts],
                priority=min(slot.order for part in parts for slot in part.slots),
            )
            for parts in layout
        ]
        number_of = {
            slot: number for number, bucket in enumerate(laid_out) for part in bucket.parts for slot in part.slots
        }
        place_of = {
            slot: (part.pack_of_gradients, index)
            for bucket in laid_out
            for part in bucket.parts
            if isinstance(part, Packed)
            for index, slot in enumerate(part.slots)
        }
        for bucket in laid_out:
            bucket.native = self._native(bucket)
        self._hooks.set_buckets(
            [number_of[slot] for slot in self._slots],
            [place_of.get(slot) for slot in self._slots],
            [bucket.native for bucket in laid_out],
        )
        self._buckets = laid_out  # last: what raises above may be tried again
        self._start_comparison()

    def _native(self, bucket: _Bucket) -> _C.GradientBucket | None:
        """What sends a bucket from C++; None where it always needs Python."""
        options = self._options
        part = bucket.parts[0]
        if len(bucket.parts) > 1 or options.compression is not NoneCompressor:
            return None
        native = part.native(bucket.names[0], options.op, *options.factors, bucket.priority)
        native.set_engine(default_context.engine, id_of(options.process_set))
        return native

    def _slots_of_buckets(self) -> list[list[Slot]]:
        """Which parameters go together: the user's groups, else by size, dtype and the order of the backward pass."""
        groups = self._options.groups
        if groups is None:
            return self._automatic_buckets(list(reversed(self._slots)))
        if isinstance(groups, int):
            return _on_one_kind_of_device([list(slots) for slots in split_list(self._slots, groups)])
        slot_of = {slot.parameter: slot for slot in self._slots}
        chosen = [[slot_of[parameter] for parameter in group if parameter in slot_of] for group in groups]
        grouped = {slot for slots in chosen for slot in slots}
        rest = [slot for slot in reversed(self._slots) if slot not in grouped]
        return _on_one_kind_of_device(chosen) + self._automatic_buckets(rest)

    def _automatic_buckets(self, slots: list[Slot]) -> list[list[Slot]]:
        buckets: list[list[Slot]] = []
        filling: dict[tuple[torch.dtype, torch.device], tuple[list[Slot], int]] = {}
        for slot in slots:
            n_bytes = slot.parameter.numel() * slot.parameter.dtype.itemsize
            if self._is_direct(slot):
                buckets.append([slot])
                continue
            key = slot.parameter.dtype, slot.parameter.device
            bucket, filled = filling.get(key, ([], 0))
            limit = _BUCKET_BYTES if slot.parameter.is_cpu else _BUCKET_BYTES_ON_GPU
            if not bucket or filled + n_bytes > limit:
                bucket, filled = [], 0
                buckets.append(bucket)
            bucket.append(slot)
            filling[key] = bucket, filled + n_bytes
        return buckets

    def _is_direct(self, slot: Slot) -> bool:
        n_bytes = slot.parameter.numel() * slot.parameter.dtype.itemsize
        limit = _DIRECT_BYTES if slot.parameter.is_cpu else _DIRECT_BYTES_ON_GPU
        return n_bytes >= limit or not works_by_element(self._options.compression)

    def _memory_for(self, buckets: list[list[Slot]]) -> BufferMaker:
        """On GPUs the memory of the user's groups lies side by side. Other buckets are large, and each one's memory is
        its own, so that gradients can be made in it (Note [Gradients in their places] in C++)."""
        if self._options.groups is None:
            return new_buffer
        needed: Counter[tuple[torch.dtype, torch.device]] = Counter()
        for slots in buckets:
            for together in self._packed_in(slots):
                if not together[0].parameter.is_cpu:
                    needed += Packed.needs(together, self._options.compression)
        return SideBySide(needed) if needed else new_buffer

    def _packed_in(self, slots: list[Slot]) -> list[list[Slot]]:
        """The gradients of a bucket that share a buffer: by dtype and device."""
        packed: dict[tuple[torch.dtype, torch.device], list[Slot]] = {}
        for slot in slots:
            if not self._is_direct(slot):
                packed.setdefault((slot.parameter.dtype, slot.parameter.device), []).append(slot)
        return list(packed.values())

    def _parts_of(self, slots: list[Slot], make_buffer: BufferMaker) -> list[Part]:
        options = self._options
        parts: list[Part] = [
            Direct(slot, options.compression, options.sparse_as_dense) for slot in slots if self._is_direct(slot)
        ]
        return parts + [
            Packed(together, options.compression, options.sparse_as_dense, make_buffer)
            for together in self._packed_in(slots)
        ]

    def _name_of(self, part: Part) -> str:
        """A parameter's own, as in Horovod; for several, the first one's, and what makes the layout unmistakable."""
        first = f"allreduce.{part.slots[0].name}"
        return first if isinstance(part, Direct) else f"{first}+{len(part.slots) - 1}.{self._digest[:4].hex()}"

    def _start_comparison(self) -> None:
        digest = self._digest_as_number()
        extremes = torch.tensor([digest, _DIGESTS_END - digest], dtype=torch.int64)
        number = id_of(self._options.process_set)
        name = self._comparison_name
        handle = default_context.engine.allreduce([extremes], [extremes], [name], Max, 1.0, 1.0, number)
        self._comparison = handle, extremes
        self._compared_in_era = default_context.era

    def _digest_as_number(self) -> int:
        return 1 + int.from_bytes(self._digest[:7], "little")

    def _compare_layouts(self) -> None:
        if self._comparison is None and self._compared_in_era != default_context.era:
            self._start_comparison()
        comparison, self._comparison = self._comparison, None
        if comparison is None:
            return
        handle, extremes = comparison
        default_context.engine.wait(handle)
        largest, end_minus_smallest = extremes.tolist()
        if largest != _DIGESTS_END - end_minus_smallest:
            raise HorovodInternalError(
                "DistributedOptimizer: names, shapes, dtypes, order or groups of the parameters differ between ranks"
                f"{self._who_differs()}. Build the same model and optimizer on all ranks."
            )

    def _who_differs(self) -> str:
        """Asks all ranks, which know by now that they differ. Ranks that have joined can not answer."""
        number = id_of(self._options.process_set)
        mine = self._options.process_set.rank() or 0
        row = torch.tensor([[mine, self._digest_as_number()]], dtype=torch.int64)
        try:
            handle = default_context.engine.allgather([row], [f"{self._comparison_name}.differs"], number)
            rows: list[list[int]] = default_context.engine.wait(handle)[0].tolist()
        except HorovodInternalError:
            return ""
        others = [rank for rank, digest in rows if digest != self._digest_as_number()]
        return f": this one's are not those of rank(s) {others} of the process set"


def _on_one_kind_of_device(groups: list[list[Slot]]) -> list[list[Slot]]:
    """Divides groups that have gradients on the CPU and on GPUs, which can not go out together; drops empty ones."""
    halves = (
        [slot for slot in slots if slot.parameter.is_cpu is on_cpu] for slots in groups for on_cpu in (True, False)
    )
    return [slots for slots in halves if slots]
