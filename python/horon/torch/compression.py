"""Gradient compression: fewer bytes on the way. Source: Horovod 0.28.1 ``horovod.torch.compression``."""

from __future__ import annotations

from typing import Any

import torch


class Compressor:
    """What a compression is: derive from it to write your own. Source: Horovod 0.28.1 ``Compressor``."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Returns what is sent, and what decompress() needs to know."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """Returns the reduced tensor in its old form, given what compress() returned second."""
        raise NotImplementedError


class NoneCompressor(Compressor):
    """Sends tensors as they are. Source: Horovod 0.28.1 ``NoneCompressor``."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, None]:
        return tensor, None

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        return tensor


class _CastCompressor(Compressor):
    """Sends floating point tensors in a smaller dtype, and other tensors as they are."""

    dtype: torch.dtype

    @classmethod
    def compress(cls, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.dtype]:
        return tensor.to(cls.dtype) if tensor.dtype.is_floating_point else tensor, tensor.dtype

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        return tensor.to(ctx)


class FP16Compressor(_CastCompressor):
    """Sends floating point tensors as float16 (largest number 65504). Source: Horovod 0.28.1 ``FP16Compressor``."""

    dtype = torch.float16


class BF16Compressor(_CastCompressor):
    """Sends floating point tensors as bfloat16: float32's range with 8 bits of precision. Not in Horovod."""

    dtype = torch.bfloat16


def dtype_sent_by(compression: type[Compressor]) -> torch.dtype | None:
    """The dtype in which a compression sends floating point tensors; None if it is none of horon's casts.

    A class derived from one of them is a compression of its own, whose methods have to be called.
    """
    casts: tuple[type[_CastCompressor], ...] = (FP16Compressor, BF16Compressor)
    return next((cast.dtype for cast in casts if compression is cast), None)


class Compression:
    """The compressions to choose from, for ``compression=``. Source: Horovod 0.28.1 ``Compression``."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
