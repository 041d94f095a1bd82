"""Rank, size and meeting point from the environment; local and cross ranks from what the ranks say. No processes."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness import on_gloo

pytestmark = pytest.mark.skipif(on_gloo(), reason="horon's own")

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "1"}
OMPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "1923481601",
}
SRUN = {
    "PMIX_RANK": "1",
    "SLURM_PROCID": "1",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NUM_NODES": "1",
    "SLURM_NTASKS": "2",
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "3",
}
BATCH_STEP = {"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_LOCALID": "0", "SLURM_JOB_ID": "7"}
HOROVOD = {
    "HOROVOD_RANK": "5",
    "HOROVOD_SIZE": "6",
    "HOROVOD_LOCAL_RANK": "1",
    "HOROVOD_LOCAL_SIZE": "2",
    "HOROVOD_CROSS_RANK": "2",
    "HOROVOD_CROSS_SIZE": "3",
}


@pytest.mark.parametrize(
    ("environment", "launcher", "rank", "size", "local_rank", "local_size"),
    [
        ({}, "alone", 0, 1, 0, 1),
        (TORCHRUN, "torchrun", 3, 4, 1, 2),
        (OMPI, "mpirun", 1, 2, 1, 2),
        ({"PMI_RANK": "1", "PMI_SIZE": "3"}, "mpirun", 1, 3, None, None),
        (HOROVOD, "horovod", 5, 6, 1, 2),
        ({**OMPI, **TORCHRUN}, "torchrun", 3, 4, 1, 2),
        ({**OMPI, **TORCHRUN, **HOROVOD}, "horovod", 5, 6, 1, 2),
        ({"RANK": "1"}, "alone", 0, 1, 0, 1),  # a size is missing
        (SRUN, "srun", 1, 2, 1, 2),
        ({**SRUN, "SLURM_STEP_NUM_NODES": "2", "SLURM_LOCALID": "0"}, "srun", 1, 2, 0, None),
        ({**SRUN, **OMPI}, "mpirun", 1, 2, 1, 2),
        ({**SRUN, "SLURM_PROCID": "0", "PMIX_RANK": "0", "SLURM_STEP_NUM_TASKS": "1"}, "alone", 0, 1, 0, 1),
        (BATCH_STEP, "alone", 0, 1, 0, 1),
        ({"PMIX_RANK": "1"}, "pmix", 0, 1, 0, 1),
    ],
)
def test_who_am_i(environment, launcher, rank, size, local_rank, local_size) -> None:
    from horon.common._launch import find_launch

    launch = find_launch(environment)
    found = (launch.launcher, launch.rank, launch.size, launch.local_rank, launch.local_size)
    assert found == (launcher, rank, size, local_rank, local_size)


def test_cross_ranks_and_meeting_point() -> None:
    from horon.common._launch import find_launch

    launch = find_launch({**HOROVOD, "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"})
    assert (launch.cross_rank, launch.cross_size) == (2, 3)
    assert (launch.master_addr, launch.master_port) == ("10.0.0.1", 29500)


def test_job_ids() -> None:
    from horon.common._launch import find_launch

    one, other = find_launch(OMPI), find_launch({**OMPI, "PMIX_NAMESPACE": "7"})
    assert one.job_id and other.job_id and one.job_id != other.job_id
    assert find_launch({**OMPI, "OMPI_COMM_WORLD_RANK": "0"}).job_id == one.job_id
    steps = [find_launch({**SRUN, "SLURM_STEP_ID": step}).job_id for step in ("3", "4", "")]
    assert steps[0] and steps[1] and steps[0] != steps[1] and steps[2] is None
    assert find_launch({**SRUN, "SLURM_RESTART_COUNT": "1"}).job_id != steps[0]


@pytest.mark.parametrize(
    "environment",
    [{"RANK": "4", "WORLD_SIZE": "4"}, {"RANK": "x", "WORLD_SIZE": "4"}, {"RANK": "-1", "WORLD_SIZE": "4"}],
)
def test_nonsense_is_named(environment) -> None:
    from horon.common._launch import find_launch

    with pytest.raises(ValueError, match="RANK"):
        find_launch(environment)


def test_nowhere_to_meet() -> None:
    from datetime import timedelta

    from horon.common._launch import find_launch
    from horon.common._rendezvous import make_store

    nodes = {**SRUN, "SLURM_STEP_NUM_NODES": "2"}
    for environment in (HOROVOD, nodes, {"PMIX_RANK": "1"}):
        with pytest.raises(ValueError, match="MASTER_ADDR") as caught:
            make_store(find_launch(environment), timedelta(seconds=1))
        is_unknown = environment == {"PMIX_RANK": "1"}
        assert is_unknown or "MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 horovodrun ..." in str(caught.value)


def test_file_store_in_the_session_folder(tmp_path: Path) -> None:
    from datetime import timedelta

    from horon.common._launch import find_launch
    from horon.common._rendezvous import make_store

    launch = find_launch({**OMPI, "OMPI_MCA_orte_jobfam_session_dir": str(tmp_path)})
    store = make_store(launch, timedelta(seconds=1))
    store.set("key", "value")
    assert store.get("key") == b"value"
    assert [path.name for path in tmp_path.iterdir()] == [f"store-{launch.job_id}"]


def test_topology_by_host_names() -> None:
    from horon.common._topology import Place, derive_topology

    places = [Place(node, None, None) for node in ("a", "a", "b", "a", "b", "c")]
    found = [derive_topology(rank, places) for rank in range(6)]
    assert [t.local_rank for t in found] == [0, 1, 0, 2, 1, 0]
    assert [t.local_size for t in found] == [3, 3, 2, 3, 2, 1]
    assert [t.cross_rank for t in found] == [0, 0, 1, 0, 1, 2]
    assert [t.cross_size for t in found] == [3, 2, 3, 1, 2, 3]
    assert not any(t.is_homogeneous for t in found)


def test_topology_as_the_launcher_says() -> None:
    from horon.common._launch import find_launch
    from horon.common._topology import Place, derive_topology

    places = [Place.decode(Place(f"node {n // 2}", 1 - n % 2, 2).encode()) for n in range(6)]
    t = derive_topology(5, places, find_launch(HOROVOD))
    assert (t.local_rank, t.local_size, t.cross_rank, t.cross_size, t.is_homogeneous) == (0, 2, 2, 3, True)


def test_names() -> None:
    from horon.common._context import Context

    context = Context()
    assert [context.new_name("allreduce", 0) for _ in range(2)] == ["allreduce.noname.0", "allreduce.noname.1"]
    assert context.new_name("allreduce", 3) == "allreduce.noname.0"  # other sets do not shift these
    context.joined()
    assert context.new_name("allreduce", 0) == "allreduce.noname.1.0"


def test_numbers_that_are_given_back() -> None:
    from horon.common._context import Context

    numbers = Context().numbers("allreduce", 0)
    assert [numbers.take() for _ in range(3)] == [0, 1, 2]
    numbers.give_back(2)
    assert numbers.take() == 2
    numbers.give_back(1)  # another one has been taken since
    assert numbers.name_of(numbers.take()) == "allreduce.noname.3"
