"""Trains a small convolutional network on scikit-learn's handwritten digits with DistributedDataParallel.

    torchrun --standalone --nproc-per-node 2 examples/digits_ddp.py
    torchrun --standalone --nproc-per-node 2 examples/digits_ddp.py --backend gloo

The training code is what one writes for any backend: horon's name is in the default of --backend, and nowhere else.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler
from tqdm import tqdm

SEED = 1797
HELD_OUT = 360
BATCH_PER_RANK = 32
EXIT_INTERRUPTED = 128 + signal.SIGINT


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default="horon", help="horon, gloo, ... (default: %(default)s)")
    parser.add_argument("--epochs", type=int, default=12, help="default: %(default)s")
    parser.add_argument("--checkpoint-dir", type=Path, default=Path("checkpoints"))
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint")
    parser.add_argument("--losses-json", type=Path, help="write the mean loss of every step here")
    return parser.parse_args()


def load_data() -> tuple[TensorDataset, TensorDataset]:
    """1,437 images of 8 x 8 for training and 360 held out, the same split everywhere."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(SEED))
    train, held_out = order[HELD_OUT:], order[:HELD_OUT]
    return TensorDataset(images[train], labels[train]), TensorDataset(images[held_out], labels[held_out])


def build_model() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * 4 * 4, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )


def save_checkpoint(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, epoch: int) -> None:
    """Writes beside the old checkpoint and renames, so that an interruption leaves one of the two."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".tmp")
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
    torch.save(state, unfinished)
    unfinished.replace(path)


def load_checkpoint(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Loads what save_checkpoint wrote; returns the number of epochs that are done."""
    state = torch.load(path, map_location="cpu", weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return int(state["epoch"])


def accuracy(model: nn.Module, data: TensorDataset) -> float:
    """Of all ranks together: each takes every world_size-th image."""
    images, labels = (tensor[dist.get_rank() :: dist.get_world_size()] for tensor in data.tensors)
    model.eval()
    with torch.no_grad():
        correct = (model(images).argmax(dim=1) == labels).sum()
    model.train()
    counts = torch.tensor([int(correct), len(labels)], dtype=torch.int64)
    dist.all_reduce(counts)
    return float(counts[0] / counts[1])


def train(arguments: argparse.Namespace) -> None:
    dist.init_process_group(arguments.backend)
    rank = dist.get_rank()
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    train_data, held_out = load_data()

    model = build_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    checkpoint = arguments.checkpoint_dir / "digits.pt"
    first_epoch = 0
    if arguments.resume and checkpoint.exists():
        first_epoch = load_checkpoint(checkpoint, model, optimizer)
        if rank == 0:
            print(f"resuming after epoch {first_epoch}", flush=True)
    ddp_model = DistributedDataParallel(model)

    sampler = DistributedSampler(train_data, seed=SEED)
    loader = DataLoader(train_data, batch_size=BATCH_PER_RANK, sampler=sampler)
    loss_function = nn.CrossEntropyLoss()
    losses: list[float] = []
    with tqdm(
        total=arguments.epochs * len(loader),
        initial=min(first_epoch, arguments.epochs) * len(loader),
        desc=f"digits on {arguments.backend}",
        unit="step",
        disable=rank != 0,
    ) as progress:
        for epoch in range(first_epoch, arguments.epochs):
            sampler.set_epoch(epoch)
            for images, labels in loader:
                optimizer.zero_grad()
                loss = loss_function(ddp_model(images), labels)
                loss.backward()
                optimizer.step()
                mean_loss = loss.detach().clone()
                dist.all_reduce(mean_loss)
                losses.append(float(mean_loss) / dist.get_world_size())
                progress.set_postfix(epoch=epoch + 1, loss=f"{losses[-1]:.4f}", refresh=False)
                progress.update()
            if rank == 0:
                save_checkpoint(checkpoint, model, optimizer, epoch + 1)

    held_out_accuracy = accuracy(model, held_out)
    if rank == 0:
        print(f"held-out accuracy: {held_out_accuracy:.2%} of {HELD_OUT} images", flush=True)
        if arguments.losses_json:
            arguments.losses_json.write_text(json.dumps({"backend": arguments.backend, "losses": losses}))
    dist.destroy_process_group()


def is_lost_peer(error: RuntimeError) -> bool:
    """Whether a collective failed because another rank is gone, in horon's or in Gloo's words."""
    return isinstance(error, dist.DistError) or any(
        words in str(error) for words in ("Connection closed by peer", "Connection reset by peer")
    )


def main() -> int:
    arguments = parse_arguments()
    rank = os.environ.get("RANK", "?")
    try:
        try:
            train(arguments)
        except RuntimeError as error:
            if not is_lost_peer(error):
                raise
            print(f"rank {rank}: stopped: {str(error).splitlines()[0]}", file=sys.stderr, flush=True)
            return 1
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # one is enough; torchrun may send another
        print(f"rank {rank}: interrupted", file=sys.stderr, flush=True)
        return EXIT_INTERRUPTED
    return 0


if __name__ == "__main__":
    sys.exit(main())
