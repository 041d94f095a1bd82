"""What is reduced at once: one large gradient by itself, or many small ones side by side in the arena."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from horon import _C, _arena
from horon.torch.compression import Compressor, NoneCompressor, dtype_sent_by

_NO_GRAPH = "horon: gradients that have gradients themselves (create_graph=True) can not be reduced"

# Views start on cache lines; on GPUs as what torch's allocator hands out, since kernels that rely on it write there.
_ALIGNMENT_BYTES = 64
_ALIGNMENT_BYTES_ON_GPU = 512


@dataclass(eq=False)
class Slot:
    """One parameter, and where its gradient is reduced.

    Attributes:
        order: Its place in the optimizer's groups, which is taken for the order of the forward pass.
        view: Its place in the arena, if it is reduced by itself and has one.
    """

    parameter: torch.Tensor
    name: str
    order: int
    view: torch.Tensor | None = None

    def describe(self) -> tuple[str, tuple[int, ...], str]:
        """What has to be the same on all ranks."""
        return self.name, tuple(self.parameter.shape), str(self.parameter.dtype)


class Part(Protocol):
    """Gradients that travel as one tensor."""

    @property
    def slots(self) -> Sequence[Slot]: ...

    def pack(self) -> torch.Tensor:
        """Returns the tensor to reduce in place, contiguous. A missing gradient counts, and becomes, zero."""

    def unpack(self) -> None:
        """Makes the reduced tensor the parameters' gradients. See Note [Gradients that are replaced]."""

    def native(self, name: str, op: int, prescale: float, postscale: float, priority: int) -> _C.GradientBucket:
        """What sends it from C++, uncompressed, if there is nothing more to do."""


# Note [Gradients that are replaced]
# A script may give a parameter another .grad, or none, between backward() and step(), when the old one is on its way or
# was reduced already. What it has put there is this rank's own, on which ranks would part; so the reduced gradient
# takes its place, as in Horovod. A script that changes gradients calls synchronize() first.
#
# Note [Gradients that have moved]
# model.to(), .double(), .cpu() and their like put the data of a .grad elsewhere and leave it the same tensor. A view
# that has been somebody's .grad may so have left its buffer; it is made anew before the buffer is filled. If the
# parameter has another dtype or device by then, its gradient is reduced in the old one, and a copy becomes its .grad.

SparseReduction = Callable[[torch.Tensor, str], Callable[[], torch.Tensor]]
"""Starts to reduce a sparse gradient under a name; returns what waits for the result."""


def works_by_element(compression: type[Compressor]) -> bool:
    """Whether a compression treats gradients side by side as it treats each of them, so that they can be packed."""
    return compression is NoneCompressor or dtype_sent_by(compression) is not None


def strides_of_gradient(parameter: torch.Tensor) -> tuple[int, ...]:
    """The layout that autograd gives a gradient, so that it accumulates into a view with it."""
    return torch.empty_like(parameter, device="meta").stride()


class BufferMaker(Protocol):
    """Makes memory for gradients."""

    def __call__(self, n_elements: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor: ...


def new_buffer(n_elements: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Memory for gradients: in the arena, or, where there is none or it is full, anywhere."""
    if device.type == "cpu":
        try:
            return _arena.empty(n_elements, dtype=dtype)
        except (ValueError, torch.OutOfMemoryError):
            pass
    return torch.empty(n_elements, dtype=dtype, device=device)


class SideBySide:
    """Memory on GPUs for gradients that are reduced one after another: one piece for each dtype and device.

    Buffers that are asked for in the order of the backward pass are handed out from its end on. So those that the
    engine reduces together, which it sorts by the order of the forward pass, lie as in its fusion buffer: they are
    reduced where they are, by one call.

    Args:
        n_elements: How many will be asked for, by dtype and device.
    """

    def __init__(self, n_elements: Mapping[tuple[torch.dtype, torch.device], int]) -> None:
        self._left = {
            (dtype, device): torch.empty(n, dtype=dtype, device=device) for (dtype, device), n in n_elements.items()
        }

    def __call__(self, n_elements: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        left = self._left.get((dtype, device))
        if left is None or left.numel() < n_elements:
            return new_buffer(n_elements, dtype, device)
        self._left[dtype, device] = left[: left.numel() - n_elements]
        return left[left.numel() - n_elements :]


class Packed:
    """Gradients of one dtype, one after another in one buffer: a parameter's ``.grad`` is its view."""

    def __init__(
        self, slots: Sequence[Slot], compression: type[Compressor], sparse_as_dense: bool, make_buffer: BufferMaker
    ) -> None:
        self.slots = slots
        first = slots[0].parameter
        starts = self._starts(slots)
        self._buffer = make_buffer(starts[-1], first.dtype, first.device).zero_()
        views = [self._place(slot.parameter, start) for slot, start in zip(slots, starts, strict=False)]
        self.pack_of_gradients = _C.GradientPack([slot.parameter for slot in slots], self._buffer, views)
        self._sent = self._buffer
        dtype_sent = self._dtype_sent(slots, compression)
        if dtype_sent is not first.dtype:
            self._sent = make_buffer(starts[-1], dtype_sent, first.device).zero_()
        self._sparse_as_dense = sparse_as_dense
        self._sparse: list[tuple[int, int]] = []  # index, and the number of sparse dimensions

    def _place(self, parameter: torch.Tensor, start: int) -> torch.Tensor:
        part = self._buffer[start : start + parameter.numel()]
        return part.as_strided(parameter.size(), strides_of_gradient(parameter))

    @staticmethod
    def _starts(slots: Sequence[Slot]) -> list[int]:
        """Where each gradient begins, and where the last one ends, in elements."""
        first = slots[0].parameter
        alignment = _ALIGNMENT_BYTES if first.is_cpu else _ALIGNMENT_BYTES_ON_GPU
        unit = max(alignment // first.dtype.itemsize, 1)
        starts = [0]
        for slot in slots:
            starts.append(starts[-1] + -(-slot.parameter.numel() // unit) * unit)
        return starts

    @staticmethod
    def _dtype_sent(slots: Sequence[Slot], compression: type[Compressor]) -> torch.dtype:
        dtype = slots[0].parameter.dtype
        return (dtype_sent_by(compression) or dtype) if dtype.is_floating_point else dtype

    @classmethod
    def needs(cls, slots: Sequence[Slot], compression: type[Compressor]) -> Counter[tuple[torch.dtype, torch.device]]:
        """How many elements it asks its make_buffer for."""
        first = slots[0].parameter
        n_elements = cls._starts(slots)[-1]
        needed = Counter({(first.dtype, first.device): n_elements})
        dtype_sent = cls._dtype_sent(slots, compression)
        if dtype_sent is not first.dtype:
            needed[dtype_sent, first.device] += n_elements
        return needed

    def pack(self) -> torch.Tensor:
        self._sparse.clear()
        for index in self.pack_of_gradients.pack():
            gradient = self.slots[index].parameter.grad
            assert gradient is not None
            if not gradient.is_sparse:
                raise AssertionError(_NO_GRAPH)
            self._pack_sparse(index, gradient)
        if self._sent is not self._buffer:
            self._sent.copy_(self._buffer)
        return self._sent

    def native(self, name: str, op: int, prescale: float, postscale: float, priority: int) -> _C.GradientBucket:
        return _C.GradientBucket(
            name, op, prescale, postscale, priority, pack=self.pack_of_gradients, buffer=self._buffer
        )

    def _pack_sparse(self, index: int, gradient: torch.Tensor) -> None:
        view = self.pack_of_gradients.view(index)
        if self._sparse_as_dense:
            view.copy_(gradient.to_dense())
            self._sparse.append((index, gradient.sparse_dim()))
        else:
            view.zero_()  # It goes by itself, and nothing of it goes here.

    def unpack(self) -> None:
        if self._sent is not self._buffer:
            self._buffer.copy_(self._sent)
        self.pack_of_gradients.put_back()
        for index, n_sparse_dims in self._sparse:
            parameter = self.slots[index].parameter
            reduced = self.pack_of_gradients.view(index).to(parameter)
            parameter.grad = reduced.to_sparse(n_sparse_dims)


class Direct:
    """One gradient, reduced where autograd left it."""

    def __init__(self, slot: Slot, compression: type[Compressor], sparse_as_dense: bool) -> None:
        self.slots = (slot,)
        self._slot = slot
        self._strides = strides_of_gradient(slot.parameter)
        self._compression = compression
        self._sparse_as_dense = sparse_as_dense
        self._cast: torch.Tensor | None = None
        self._gradient: torch.Tensor | None = None
        self._n_sparse_dims = 0
        self._sent: torch.Tensor | None = None
        self._ctx: Any = None

    def pack(self) -> torch.Tensor:
        parameter = self._slot.parameter
        gradient = parameter.grad
        if gradient is None:
            # New memory: somebody may keep what it was the last time.
            parameter.grad = gradient = self._new_view().zero_()
        self._n_sparse_dims = 0
        if gradient.is_sparse:
            self._n_sparse_dims = gradient.sparse_dim()
            gradient = gradient.to_dense()
        if gradient.requires_grad:
            raise AssertionError(_NO_GRAPH)
        self._gradient = gradient
        flat = self._flat(gradient, self._strides)
        dtype_sent = dtype_sent_by(self._compression)
        if dtype_sent is not None and flat.dtype.is_floating_point:
            if self._cast is None:
                self._cast = new_buffer(flat.numel(), dtype_sent, flat.device)
            self._sent = self._cast.copy_(flat)
        elif works_by_element(self._compression):
            self._sent = flat
        else:
            sent, self._ctx = self._compression.compress(gradient)
            self._sent = sent.contiguous()
        return self._sent

    def unpack(self) -> None:
        gradient, sent = self._gradient, self._sent
        assert gradient is not None
        assert sent is not None
        if works_by_element(self._compression):
            if sent.data_ptr() != gradient.data_ptr() or sent.dtype != gradient.dtype:
                gradient.copy_(sent.as_strided(gradient.size(), self._strides))
        else:
            result = self._compression.decompress(sent, self._ctx)
            if result is not gradient:
                gradient.copy_(result.view_as(gradient))
        if self._n_sparse_dims:
            self._slot.parameter.grad = gradient.to_sparse(self._n_sparse_dims)
        elif self._slot.parameter.grad is not gradient:
            self._slot.parameter.grad = gradient
        self._gradient = self._sent = self._ctx = None

    def native(self, name: str, op: int, prescale: float, postscale: float, priority: int) -> _C.GradientBucket:
        return _C.GradientBucket(
            name,
            op,
            prescale,
            postscale,
            priority,
            parameter=self._slot.parameter,
            strides=list(self._strides),
        )

    def view(self) -> torch.Tensor:
        """Its place in the arena, made when first asked for."""
        slot = self._slot
        parameter = slot.parameter
        if slot.view is None or (slot.view.dtype, slot.view.device) != (parameter.dtype, parameter.device):
            slot.view = self._new_view()
        return slot.view

    def _new_view(self) -> torch.Tensor:
        parameter = self._slot.parameter
        buffer = new_buffer(parameter.numel(), parameter.dtype, parameter.device)
        # Detached, it is nobody's view for autograd: detach_() works.
        return buffer.as_strided(parameter.size(), strides_of_gradient(parameter)).detach()

    @staticmethod
    def _flat(gradient: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
        """All elements in the order of memory, which is the same on all ranks; a copy if the layout is another one."""
        if gradient.stride() != strides:
            copy = torch.empty(gradient.numel(), dtype=gradient.dtype, device=gradient.device)
            copy.as_strided(gradient.size(), strides).copy_(gradient)
            return copy
        return gradient.as_strided((gradient.numel(),), (1,))
