"""Trains a small convolutional network on scikit-learn's handwritten digits, the Horovod way.

    torchrun --standalone --nproc-per-node 2 examples/digits_horovod.py
    horonrun -np 2 python examples/digits_horovod.py
    mpirun -np 2 python examples/digits_horovod.py
    python examples/digits_horovod.py                      # alone

With Horovod, the same script begins with ``import horovod.torch as hvd``. Data and model are those of digits_ddp.py.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import horon.torch as hvd
import torch
from digits_ddp import BATCH_PER_RANK, HELD_OUT, SEED, build_model, load_checkpoint, load_data, save_checkpoint
from torch import nn
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from tqdm import tqdm

LEARNING_RATE_PER_RANK = 1e-3


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=12, help="default: %(default)s")
    parser.add_argument("--checkpoint-dir", type=Path, default=Path("checkpoints"))
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint")
    parser.add_argument("--use-adasum", action="store_true", help="combine steps by Adasum instead of gradients")
    parser.add_argument("--fp16-allreduce", action="store_true", help="send gradients as float16")
    parser.add_argument("--losses-json", type=Path, help="write the mean loss of every step here")
    return parser.parse_args()


def pick_device() -> torch.device:
    """One GPU for each process of a host, by its local rank, if horon was built for them."""
    if hvd.cuda_built() and torch.cuda.is_available():
        torch.cuda.set_device(hvd.local_rank())
        return torch.device("cuda", hvd.local_rank())
    torch.set_num_threads(1)
    return torch.device("cpu")


def accuracy(model: nn.Module, data: torch.utils.data.TensorDataset, device: torch.device) -> float:
    """Of all ranks together: each takes every size-th image."""
    images, labels = (tensor[hvd.rank() :: hvd.size()].to(device) for tensor in data.tensors)
    model.eval()
    with torch.no_grad():
        correct = (model(images).argmax(dim=1) == labels).sum()
    model.train()
    counts = hvd.allreduce(torch.tensor([int(correct), len(labels)]), op=hvd.Sum, name="accuracy")
    return float(counts[0] / counts[1])


def train(arguments: argparse.Namespace) -> None:
    hvd.init()
    device = pick_device()
    torch.manual_seed(SEED + hvd.rank())  # different on purpose: rank 0's parameters are sent to all
    train_data, held_out = load_data()

    model = build_model().to(device)
    # Horovod's rule: size() times the batch, size() times the learning rate. Adasum needs no scaling.
    scale = 1 if arguments.use_adasum else hvd.size()
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE_PER_RANK * scale)
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        compression=hvd.Compression.fp16 if arguments.fp16_allreduce else hvd.Compression.none,
        op=hvd.Adasum if arguments.use_adasum else hvd.Average,
    )

    # Checkpoints are read and written on rank 0 only; the others are told.
    checkpoint = arguments.checkpoint_dir / "digits_horovod.pt"
    first_epoch = 0
    if arguments.resume and hvd.rank() == 0 and checkpoint.exists():
        first_epoch = load_checkpoint(checkpoint, model, optimizer)
        print(f"resuming after epoch {first_epoch}", flush=True)
    first_epoch = hvd.broadcast_object(first_epoch, root_rank=0, name="first_epoch")
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)

    sampler = DistributedSampler(train_data, num_replicas=hvd.size(), rank=hvd.rank(), seed=SEED)
    loader = DataLoader(train_data, batch_size=BATCH_PER_RANK, sampler=sampler)
    loss_function = nn.CrossEntropyLoss()
    losses: list[float] = []
    with tqdm(
        total=arguments.epochs * len(loader),
        initial=min(first_epoch, arguments.epochs) * len(loader),
        desc="digits, Horovod's way",
        unit="step",
        disable=hvd.rank() != 0,
    ) as progress:
        for epoch in range(first_epoch, arguments.epochs):
            sampler.set_epoch(epoch)
            for images, labels in loader:
                optimizer.zero_grad()
                loss = loss_function(model(images.to(device)), labels.to(device))
                loss.backward()
                optimizer.step()
                losses.append(float(hvd.allreduce(loss.detach(), name="loss")))
                progress.set_postfix(epoch=epoch + 1, loss=f"{losses[-1]:.4f}", refresh=False)
                progress.update()
            if hvd.rank() == 0:
                save_checkpoint(checkpoint, model, optimizer, epoch + 1)

    held_out_accuracy = accuracy(model, held_out, device)
    if hvd.rank() == 0:
        print(f"held-out accuracy: {held_out_accuracy:.2%} of {HELD_OUT} images", flush=True)
        if arguments.losses_json:
            arguments.losses_json.write_text(json.dumps({"size": hvd.size(), "losses": losses}))


if __name__ == "__main__":
    sys.exit(train(parse_arguments()))
