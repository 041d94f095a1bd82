"""Distributed checkpoint: save, async_save and load of sharded state, resharding between world sizes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from harness import run_ranks
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor


def _model(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(9, 15), nn.Tanh(), nn.Linear(15, 3))
    fully_shard(model)
    return model


def _step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.ones(4, 9)).square().mean().backward()
    optimizer.step()


def _full(model: nn.Module) -> list[torch.Tensor]:
    return [p.full_tensor().detach().clone() for p in model.parameters() if isinstance(p, DTensor)]


def _save(rank: int, world_size: int, folder: str, asynchronous: bool) -> list[torch.Tensor]:
    model = _model(1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    _step(model, optimizer)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state, "step": torch.tensor(17), "name": "digits"}
    saved = _full(model)
    if asynchronous:
        # In a group of its own, as its documentation asks: the checkpoint's thread has collectives too.
        future = dcp.async_save(state, checkpoint_id=folder, process_group=dist.new_group())
        _step(model, optimizer)  # Training goes on, with collectives, while the checkpoint is written.
        future.result(timeout=40)
    else:
        dcp.save(state, checkpoint_id=folder)
    return saved


def _load(rank: int, world_size: int, folder: str) -> list[torch.Tensor]:
    model = _model(2)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    _step(model, optimizer)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state, "step": torch.tensor(0), "name": ""}
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    assert state["step"].item() == 17 and state["name"] == "digits"
    return _full(model)


@pytest.mark.parametrize("asynchronous", [False, True], ids=["save", "async_save"])
@pytest.mark.parametrize(("savers", "loaders"), [(2, 2), (3, 2), (1, 3)])
def test_save_and_load(tmp_path: Path, savers: int, loaders: int, asynchronous: bool) -> None:
    folder = str(tmp_path / "checkpoint")
    saved = run_ranks(_save, savers, folder, asynchronous)[0]
    for loaded in run_ranks(_load, loaders, folder):
        assert len(loaded) == 4
        for ours, theirs in zip(loaded, saved, strict=True):
            assert torch.equal(ours, theirs)
