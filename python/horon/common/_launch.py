"""Who am I? What the launcher's environment says about this process: a pure function of the environment."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

# Where Open MPI 4, Open MPI 5 (PRRTE) and PMIx put what is unique to a job. Ranks of a job agree on each.
_JOB_VARIABLES = (
    "OMPI_MCA_orte_precondition_transports",
    "OMPI_MCA_orte_hnp_uri",
    "OMPI_MCA_ess_base_jobid",
    "PMIX_NAMESPACE",
    "PMI_PORT",
)
# Of Slurm, where a job that is run again keeps its number.
_STEP_VARIABLES = ("SLURM_CLUSTER_NAME", "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")
_SESSION_FOLDERS = ("OMPI_MCA_orte_jobfam_session_dir", "PMIX_SERVER_TMPDIR", "PRTE_MCA_prte_top_session_dir")


@dataclass(frozen=True)
class Launch:
    """This process's place in the job, as far as its environment tells.

    Attributes:
        launcher: "torchrun", "mpirun", "horovod" (its variables are set), "srun", "alone", or "pmix": started by a
            launcher that does not say how many processes there are; rank and size are those of a lone process.
        node: What ranks of one node have in common and others have not, or None: then the host's name decides.
        master_addr, master_port: Where the TCPStore is, if given.
        job_id: Unique to this job on this host, or None.
        session_folder: A folder of the launcher that ends with the job, or None.
        has_agent: torchrun's agent serves a store for these ranks, whoever has set rank and size.
    """

    launcher: str
    rank: int
    size: int
    local_rank: int | None = None
    local_size: int | None = None
    cross_rank: int | None = None
    cross_size: int | None = None
    node: str | None = None
    master_addr: str | None = None
    master_port: int | None = None
    job_id: str | None = None
    session_folder: str | None = None
    has_agent: bool = False

    @property
    def is_one_host(self) -> bool:
        """Whether all ranks are known to be on this host."""
        return self.size == 1 or self.local_size == self.size


def find_launch(environment: Mapping[str, str]) -> Launch:
    """Reads rank, size and meeting point from the variables of Horovod, torchrun, Open MPI, a PMI launcher, or srun.

    The first of these whose rank and size are both set counts; with none of them, the process is alone.

    Raises:
        ValueError: A variable is not a number, or a rank is not below its size.
    """
    number = _Numbers(environment)
    for launcher, variables in _LAUNCHERS:
        rank, size = number(variables[0]), number(variables[1])
        if rank is None or size is None:
            continue
        if not 0 <= rank < size:
            raise ValueError(
                f"horon: {variables[0]}={rank} and {variables[1]}={size}: the rank must be from 0 to {size - 1}."
            )
        more = [number(variable) for variable in variables[2:]] + [None] * 4
        launch = Launch(
            launcher,
            rank,
            size,
            local_rank=more[0],
            local_size=more[1],
            cross_rank=more[2],
            cross_size=more[3],
            node=environment.get("GROUP_RANK") if launcher == "torchrun" else None,
        )
        break
    else:
        is_doubtful = bool(environment.get("PMIX_RANK")) and number("SLURM_STEP_NUM_TASKS") != 1
        return Launch("pmix" if is_doubtful else "alone", 0, 1, 0, 1, 0, 1)
    if launcher == "srun":
        if launch.size == 1:
            return Launch("alone", 0, 1, 0, 1, 0, 1)
        launch = replace(launch, local_size=launch.size if number("SLURM_STEP_NUM_NODES") == 1 else None)
    address = environment.get("MASTER_ADDR") or None
    return replace(
        launch,
        master_addr=address,
        master_port=number("MASTER_PORT"),
        job_id=_job_id(environment, launcher),
        session_folder=next((environment[name] for name in _SESSION_FOLDERS if environment.get(name)), None),
        has_agent=_has_agent(environment, launch),
    )


def _has_agent(environment: Mapping[str, str], launch: Launch) -> bool:
    ranks = environment.get("RANK"), environment.get("WORLD_SIZE")
    is_served = environment.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)
    return launch.launcher == "torchrun" or (is_served and ranks == (str(launch.rank), str(launch.size)))


# (launcher, (rank, size, local rank, local size, cross rank, cross size)); an unset variable is unknown.
_LAUNCHERS: Sequence[tuple[str, Sequence[str]]] = (
    (
        "horovod",
        (
            "HOROVOD_RANK",
            "HOROVOD_SIZE",
            "HOROVOD_LOCAL_RANK",
            "HOROVOD_LOCAL_SIZE",
            "HOROVOD_CROSS_RANK",
            "HOROVOD_CROSS_SIZE",
        ),
    ),
    ("torchrun", ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")),
    (
        "mpirun",
        (
            "OMPI_COMM_WORLD_RANK",
            "OMPI_COMM_WORLD_SIZE",
            "OMPI_COMM_WORLD_LOCAL_RANK",
            "OMPI_COMM_WORLD_LOCAL_SIZE",
        ),
    ),
    ("mpirun", ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")),
    # Of the step, which srun makes: in a batch script, a lone process, SLURM_NTASKS is what srun would start.
    ("srun", ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID")),
)


class _Numbers:
    """Reads whole numbers from the environment."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = environment

    def __call__(self, name: str) -> int | None:
        text = self._environment.get(name, "")
        if not text:
            return None
        try:
            return int(text)
        except ValueError:
            raise ValueError(f"horon: {name}={text!r} is not a whole number.") from None


def _job_id(environment: Mapping[str, str], launcher: str) -> str | None:
    if launcher == "srun" and not (environment.get("SLURM_JOB_ID") and environment.get("SLURM_STEP_ID")):
        return None
    names = {"mpirun": _JOB_VARIABLES, "srun": _STEP_VARIABLES}.get(launcher, ())
    parts = [f"{name}={environment[name]}" for name in names if environment.get(name)]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:24] if parts else None
