"""Tests that run twice: with gradients that are views of DDP's buckets, and with the program's own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest


@dataclass
class _Kind:
    """Of the gradients in the case that runs."""

    are_views: bool = True


KIND = _Kind()

views_and_own = pytest.mark.parametrize("are_views", [True, False], ids=["views", "own"])


def of_kind(rank: int, world_size: int, are_views: bool, body: Callable[..., None], *args: object) -> None:
    """Runs a rank's part of a case that looks at ``KIND``."""
    KIND.are_views = are_views
    body(rank, world_size, *args)
