"""Small things that scripts import from ``horovod.common.util``."""

from __future__ import annotations

import itertools
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

T = TypeVar("T")


def split_list(items: Sequence[T], n_parts: int) -> list[Sequence[T]]:
    """Cuts a list into `n_parts` runs whose lengths differ by one at most. Source: Horovod 0.28.1 ``split_list``."""
    each, more = divmod(len(items), n_parts)
    starts = [part * each + min(part, more) for part in range(n_parts + 1)]
    return [items[start:end] for start, end in itertools.pairwise(starts)]


def num_rank_is_power_2(num_rank: int) -> bool:
    """Whether a number of ranks is a power of two. Source: Horovod 0.28.1 ``num_rank_is_power_2``."""
    return num_rank > 0 and num_rank.bit_count() == 1


def is_iterable(x: Any) -> bool:
    """Whether ``iter(x)`` works. Source: Horovod 0.28.1 ``is_iterable``."""
    try:
        iter(x)
    except TypeError:
        return False
    return True


def extension_available(ext_base_name: str, verbose: bool = False) -> bool:
    """True for "torch", the only framework here. Source: Horovod 0.28.1 ``extension_available``."""
    return ext_base_name == "torch"


def gpu_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Whether CUDA tensors work, for "torch". CUDA is not initialised for it. Source: Horovod ``gpu_available``."""
    import torch

    from horon.common import basics

    return extension_available(ext_base_name) and basics.cuda_built() and torch.cuda.is_available()


# The build's parts, as under the same names in horon.torch. Their module imports this one.


def mpi_built(verbose: bool = False) -> bool:
    from horon.common import basics

    return basics.mpi_built()


def gloo_built(verbose: bool = False) -> bool:
    from horon.common import basics

    return basics.gloo_built()


def nccl_built(verbose: bool = False) -> int:
    from horon.common import basics

    return basics.nccl_built()


def ddl_built(verbose: bool = False) -> bool:
    from horon.common import basics

    return basics.ddl_built()


def ccl_built(verbose: bool = False) -> bool:
    from horon.common import basics

    return basics.ccl_built()


def is_version_greater_equal_than(ver: str, target: str) -> bool:
    """Whether a version is `target` or later.

    Raises:
        ValueError: No strings, or `target` is not of the form major.minor.patch.

    Source: Horovod 0.28.1 ``is_version_greater_equal_than``.
    """
    from torch.torch_version import TorchVersion

    if not isinstance(ver, str) or not isinstance(target, str) or target.count(".") != 2:
        raise ValueError(f"horon: is_version_greater_equal_than: expected '1.2.3' as target, got {ver!r}, {target!r}.")
    return bool(TorchVersion(ver) >= target)


@contextmanager
def env(**variables: str | None) -> Iterator[None]:
    """Sets environment variables for the length of a with block; None leaves one alone. Source: Horovod ``env``."""
    wanted = {name: value for name, value in variables.items() if value is not None}
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def get_average_backwards_compatibility_fun(reduce_ops: Any) -> Callable[[int | None, bool | None], int]:
    """Returns what makes one op of ``op=`` and the old ``average=``.

    Args:
        reduce_ops: Has ``Average`` and ``Sum``.

    Returns:
        A function (op, average) -> op that raises ValueError when both are given.
    """

    def chosen(op: int | None, average: bool | None) -> int:
        if average is None:
            return int(reduce_ops.Average if op is None else op)
        if op is not None:
            raise ValueError("The op parameter supersedes average. Please provide only one of them.")
        warnings.warn(
            "Parameter `average` has been replaced with `op` and will be removed in v1.0",
            DeprecationWarning,
            stacklevel=3,
        )
        return int(reduce_ops.Average if average else reduce_ops.Sum)

    return chosen
