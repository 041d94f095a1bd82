"""A sampler that knows what was processed. Source: Horovod 0.28.1 ``torch.elastic.sampler``."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sized
from typing import Any

import torch.utils.data

from horon.common.basics import rank, size


class ElasticSampler(torch.utils.data.Sampler[int]):
    """Divides a dataset among the ranks, and after a restart what is left of it.

    Put it into the :class:`TorchState`, call record_batch after every batch and set_epoch at the end of every epoch.
    The last indices are taken again from the first ones so that all ranks get the same number.

    Args:
        dataset: Of constant length.
        shuffle: Whether to shuffle, differently in every epoch.
        seed: The same on all ranks.

    Source: Horovod 0.28.1 ``ElasticSampler``.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset = dataset
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0
        self.processed_num = 0
        self.num_replicas = 0
        self.rank = 0
        self.remaining_indices: list[int] = []
        self.num_samples = 0
        self.total_size = 0
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Starts an epoch: nothing of it was processed yet. To be called at the end of the one before."""
        self.epoch = epoch
        self.processed_num = 0
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Counts a batch of every rank as processed.

        Args:
            batch_idx: Not used.
            batch_size: Samples of one rank.
        """
        self.processed_num += batch_size * self.num_replicas

    def state_dict(self) -> dict[str, Any]:
        """The epoch, and how much of it was processed."""
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes over a state_dict and divides what is left."""
        self.epoch = state_dict["epoch"]
        self.processed_num = state_dict["processed_num"]
        self.reset()

    def reset(self) -> None:
        """Divides what was not processed among the ranks there are now."""
        self.num_replicas, self.rank = size(), rank()
        indices = list(range(len(self.dataset)))
        if self.shuffle:
            random.Random(self.seed + self.epoch).shuffle(indices)
        self.remaining_indices = indices[self.processed_num :]
        self.num_samples = -(-len(self.remaining_indices) // self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas

    def __iter__(self) -> Iterator[int]:
        remaining = self.remaining_indices
        if not remaining:
            return iter([])
        repeated = remaining * -(-self.total_size // len(remaining))
        return iter(repeated[: self.total_size][self.rank :: self.num_replicas])

    def __len__(self) -> int:
        return self.num_samples
