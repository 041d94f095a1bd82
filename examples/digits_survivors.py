"""Trains as digits_ddp.py does, and goes on when ranks are lost.

    horonrun -np 3 --min-np 2 python examples/digits_survivors.py

Kill one of its processes meanwhile (each prints its pid), rank 0 if you like: the others go on with the epoch in which
that has happened. The job ends with an error when fewer than two are left.
"""

from __future__ import annotations

import argparse
import os
import time

import horon
import torch
import torch.distributed as dist
from digits_ddp import BATCH_PER_RANK, SEED, accuracy, build_model, load_data
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def train_epoch(
    model: nn.Module, optimizer: torch.optim.Optimizer, data: TensorDataset, epoch: int, pause_s: float
) -> None:
    wrapped = DistributedDataParallel(model)  # of the group that there is now; sends rank 0's parameters
    sampler: DistributedSampler[TensorDataset] = DistributedSampler(data, seed=SEED)
    sampler.set_epoch(epoch)
    for images, labels in DataLoader(data, batch_size=BATCH_PER_RANK, sampler=sampler):
        optimizer.zero_grad()
        nn.functional.cross_entropy(wrapped(images), labels).backward()
        optimizer.step()
        time.sleep(pause_s)


def from_rank_0(optimizer: torch.optim.Optimizer, epoch: int) -> int:
    """What rank 0 has: when another one died, some had come a step further than others."""
    state = [(optimizer.state_dict(), epoch)]
    dist.broadcast_object_list(state)
    optimizer.load_state_dict(state[0][0])
    return state[0][1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=12, help="default: %(default)s")
    parser.add_argument("--min-ranks", type=int, default=2, help="as horonrun's --min-np (default: %(default)s)")
    parser.add_argument("--pause", type=float, default=0.05, help="seconds between steps (default: %(default)s)")
    arguments = parser.parse_args()

    dist.init_process_group("horon")
    print(f"rank {dist.get_rank()} is process {os.getpid()}", flush=True)
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    data, held_out = load_data()
    model = build_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)

    epoch = 0
    while True:
        try:
            epoch = from_rank_0(optimizer, epoch)
            if epoch >= arguments.epochs:
                break  # all at once: nobody is left alone with an epoch that is to be done again
            train_epoch(model, optimizer, data, epoch, arguments.pause)
            epoch += 1
            correct = accuracy(model, held_out)
            if dist.get_rank() == 0:
                print(f"epoch {epoch}, {dist.get_world_size()} ranks: {correct:.2%} of held-out digits", flush=True)
        except dist.DistBackendError as error:
            print(f"process {os.getpid()} goes on: {error}", flush=True)
            horon.shrink_to_survivors(min_size=arguments.min_ranks)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
