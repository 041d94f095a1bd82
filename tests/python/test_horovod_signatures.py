"""The names, parameters and defaults of horovod.torch 0.28.1, and the modules that scripts import them from."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import pytest
import torch
from harness import on_gloo

pytestmark = pytest.mark.skipif(on_gloo(), reason="horon's own")

_SCALING = "prescale_factor=1.0, postscale_factor=1.0, process_set=global"
_REDUCE = f"average=None, name=None, op=None, {_SCALING}"
_REDUCE_SYNC = f"average=None, name=None, compression=none, op=None, {_SCALING}"
_SCATTER = "name=None, op=0, process_set=global, prescale_factor=1.0, postscale_factor=1.0"
_SCATTER_SYNC = "name=None, compression=none, op=0, process_set=global, prescale_factor=1.0, postscale_factor=1.0"
_GATHER = "name=None, process_set=global"

SIGNATURES = {
    "init": "comm=None, process_sets=None",
    "shutdown": "",
    "start_timeline": "file_path, mark_cycles=False",
    "stop_timeline": "",
    "allreduce": f"tensor, {_REDUCE_SYNC}",
    "allreduce_": f"tensor, {_REDUCE}",
    "allreduce_async": f"tensor, {_REDUCE}",
    "allreduce_async_": f"tensor, {_REDUCE}",
    "grouped_allreduce": f"tensors, {_REDUCE_SYNC}",
    "grouped_allreduce_": f"tensors, {_REDUCE}",
    "grouped_allreduce_async": f"tensors, {_REDUCE}",
    "grouped_allreduce_async_": f"tensors, {_REDUCE}",
    "sparse_allreduce_async": "tensor, name, op, process_set=global",
    "allgather": f"tensor, {_GATHER}",
    "allgather_async": f"tensor, {_GATHER}",
    "grouped_allgather": f"tensors, {_GATHER}",
    "grouped_allgather_async": f"tensors, {_GATHER}",
    "broadcast": f"tensor, root_rank, {_GATHER}",
    "broadcast_": f"tensor, root_rank, {_GATHER}",
    "broadcast_async": f"tensor, root_rank, {_GATHER}",
    "broadcast_async_": f"tensor, root_rank, {_GATHER}",
    "alltoall": f"tensor, splits=None, {_GATHER}",
    "alltoall_async": f"tensor, splits=None, {_GATHER}",
    "reducescatter": f"tensor, {_SCATTER_SYNC}",
    "reducescatter_async": f"tensor, {_SCATTER}",
    "grouped_reducescatter": f"tensors, {_SCATTER_SYNC}",
    "grouped_reducescatter_async": f"tensors, {_SCATTER}",
    "join": "device=-1",
    "barrier": "process_set=global",
    "poll": "handle",
    "synchronize": "handle",
    "broadcast_parameters": "params, root_rank",
    "broadcast_optimizer_state": "optimizer, root_rank, model=None",
    "broadcast_object": "obj, root_rank=0, name=None, process_set=global",
    "allgather_object": "obj, name=None",
    "DistributedOptimizer": "optimizer, named_parameters=None, compression=none, backward_passes_per_step=1, op=0, "
    "gradient_predivide_factor=1.0, num_groups=0, groups=None, sparse_as_dense=False, process_set=global",
    "SyncBatchNorm": "num_features, eps=1e-05, momentum=0.1, affine=True, track_running_stats=True",
    "ProcessSet": "ranks_or_comm",
    "add_process_set": "process_set",
    "remove_process_set": "process_set",
    **dict.fromkeys(
        [
            "is_initialized",
            "rank",
            "size",
            "local_rank",
            "local_size",
            "cross_rank",
            "cross_size",
            "is_homogeneous",
            "mpi_threads_supported",
            "mpi_enabled",
            "mpi_built",
            "gloo_enabled",
            "gloo_built",
            "nccl_built",
            "ddl_built",
            "ccl_built",
            "cuda_built",
            "rocm_built",
        ],
        "",
    ),
}


def _text(function: Any) -> str:
    import horon.torch as hvd

    def one(parameter: inspect.Parameter) -> str:
        if parameter.default is parameter.empty:
            return parameter.name
        known = {id(hvd.global_process_set): "global", id(hvd.Compression.none): "none"}
        return f"{parameter.name}={known.get(id(parameter.default), repr(parameter.default))}"

    return ", ".join(one(parameter) for parameter in inspect.signature(function).parameters.values())


@pytest.mark.parametrize("name", sorted(SIGNATURES))
def test_signature(name: str) -> None:
    import horon.torch as hvd

    assert _text(getattr(hvd, name)) == SIGNATURES[name]
    assert "Horovod 0.28.1" in (getattr(hvd, name).__doc__ or ""), "the docstring names its source"


def test_reduce_ops() -> None:
    import horon.torch as hvd

    numbers = [hvd.Average, hvd.Sum, hvd.Adasum, hvd.Min, hvd.Max, hvd.Product]
    assert numbers == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("module", "names"),
    [
        ("horon.torch.mpi_ops", "init allreduce_async_ synchronize poll rank size Average is_homogeneous"),
        ("horon.torch.functions", "broadcast_parameters broadcast_optimizer_state broadcast_object allgather_object"),
        ("horon.torch.compression", "Compression Compressor NoneCompressor FP16Compressor"),
        ("horon.torch.optimizer", "DistributedOptimizer"),
        ("horon.torch.process_sets", "ProcessSet global_process_set"),
        ("horon.torch.sync_batch_norm", "SyncBatchNorm"),
        ("horon.torch.elastic", "run State ObjectState TorchState ElasticSampler"),
        ("horon.torch.elastic.state", "TorchState StateHandler get_handler_registry set_handler_registry"),
        ("horon.torch.elastic.sampler", "ElasticSampler"),
        ("horon.common.process_sets", "ProcessSet global_process_set add_process_set remove_process_set"),
        ("horon.common.exceptions", "HorovodInternalError HostsUpdatedInterrupt HorovodVersionMismatchError"),
        ("horon.common.elastic", "State ObjectState run_fn"),
        ("horon.common.util", "split_list num_rank_is_power_2 is_iterable env is_version_greater_equal_than"),
        ("horon.common.util", "extension_available gpu_available mpi_built gloo_built nccl_built ddl_built ccl_built"),
        ("horon.data", "BaseDataLoader AsyncDataLoaderMixin"),
        ("horon.data.data_loader_base", "BaseDataLoader AsyncDataLoaderMixin"),
    ],
)  # fmt: skip
def test_modules(module: str, names: str) -> None:
    found = importlib.import_module(module)
    assert [name for name in names.split() if not hasattr(found, name)] == []


def test_everything_public_is_there_and_documented() -> None:
    import horon.torch as hvd

    for name in hvd.__all__:
        assert getattr(hvd, name, None) is not None, name
    assert issubclass(hvd.HorovodInternalError, RuntimeError)
    assert issubclass(hvd.SyncBatchNorm, torch.nn.modules.batchnorm._BatchNorm)


def test_built() -> None:
    import horon.torch as hvd

    assert hvd.gloo_built() and hvd.gloo_enabled()
    assert not any((hvd.mpi_built(), hvd.mpi_enabled(), hvd.ddl_built(), hvd.ccl_built(), hvd.rocm_built()))
    assert type(hvd.nccl_built()) is int and type(hvd.cuda_built()) is bool
    with pytest.raises(ValueError, match="MPI is not enabled"):
        hvd.mpi_threads_supported()


def test_util() -> None:
    import horon.torch as hvd
    from horon.common import util

    for name in ("mpi", "gloo", "nccl", "ddl", "ccl"):
        assert getattr(util, f"{name}_built")(verbose=True) == getattr(hvd, f"{name}_built")()
    assert util.extension_available("torch", verbose=True) and not util.extension_available("tensorflow")
    assert util.gpu_available("torch") == (hvd.cuda_built() and torch.cuda.is_available())
    assert not util.gpu_available("tensorflow")
    assert util.is_version_greater_equal_than("1.10.0", "1.9.1")
    assert not util.is_version_greater_equal_than("2.0.0a1", "2.0.0")
    for bad in ((1, "1.0.0"), ("1.0.0", "1.0")):
        with pytest.raises(ValueError, match="is_version_greater_equal_than"):
            util.is_version_greater_equal_than(*bad)
