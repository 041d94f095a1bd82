"""Data loaders that read ahead. Source: Horovod 0.28.1 ``horovod.data``."""

from __future__ import annotations

from horon.data.data_loader_base import AsyncDataLoaderMixin, BaseDataLoader

__all__ = ["AsyncDataLoaderMixin", "BaseDataLoader"]
