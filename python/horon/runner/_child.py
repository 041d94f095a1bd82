"""What a process of horonrun does first: Horovod's variables, its output's place; then it becomes the command.

python -m horon.runner._child PIPES COMMAND...
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Mapping

from horon import _as_horovod
from horon._newcomers import NEWCOMER_VARIABLE, NOTES_VARIABLE, RESTARTS_VARIABLE
from horon.runner import _outputs

_PR_SET_PDEATHSIG = 1

NO_PIPES = "-"
MIN_NP_VARIABLE = "HORON_RUN_MIN_NP"  # the job goes on with so many; not there: with all
MAX_RESTARTS_VARIABLE = "HORON_RUN_MAX_RESTARTS"  # how many of its ranks may be started anew
RANKS_PER_HOST_VARIABLE = "HORON_RUN_RANKS_PER_HOST"  # 4,4,2; not there: one host

# Horovod's, by torchrun's.
_NAMES = {
    "HOROVOD_RANK": "RANK",
    "HOROVOD_SIZE": "WORLD_SIZE",
    "HOROVOD_LOCAL_RANK": "LOCAL_RANK",
    "HOROVOD_LOCAL_SIZE": "LOCAL_WORLD_SIZE",
}


def horovod_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables by which scripts know that Horovod's launcher has started them."""
    local_rank, host = int(environment["LOCAL_RANK"]), int(environment["GROUP_RANK"])
    counts = environment.get(RANKS_PER_HOST_VARIABLE)
    ranks_per_host = [int(count) for count in counts.split(",")] if counts else []
    # Hosts that have a rank with this local rank, too.
    peers = [number for number, count in enumerate(ranks_per_host) if count > local_rank]
    return {
        **{name: environment[theirs] for name, theirs in _NAMES.items()},
        "HOROVOD_CROSS_RANK": str(peers.index(host)) if peers else environment["GROUP_RANK"],
        "HOROVOD_CROSS_SIZE": str(len(peers)) if peers else environment["GROUP_WORLD_SIZE"],
    }


def die_with_parent() -> None:
    """This process is ended if the launcher is, by whatever: nobody else would look after it."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)


def prepare(pipes: str) -> None:
    """Sets the variables, lets `horovod` mean horon, and takes the pipes for the output, if there are any.

    Args:
        pipes: Their folder, or NO_PIPES.
    """
    os.environ.update(horovod_variables(os.environ))
    os.environ.pop(RANKS_PER_HOST_VARIABLE, None)
    _as_horovod.in_front_for_ranks(os.environ)
    if pipes != NO_PIPES:
        _outputs.take_pipes(pipes, int(os.environ["LOCAL_RANK"]))


def main() -> None:
    die_with_parent()
    pipes, *command = sys.argv[1:]
    prepare(pipes)
    least = os.environ.pop(MIN_NP_VARIABLE, None)
    n_restarts = os.environ.pop(MAX_RESTARTS_VARIABLE, None)
    for name in (RESTARTS_VARIABLE, NEWCOMER_VARIABLE, NOTES_VARIABLE):
        os.environ.pop(name, None)  # of a job in whose rank this one was started
    if least is not None:
        from horon.runner._expendable import run_expendable

        sys.exit(run_expendable(command, int(least), int(n_restarts or "0")))
    become(command)


def become(command: list[str]) -> None:
    """Runs the command in place of this process."""
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.exit(f"horonrun: {command[0]}: {error.strerror}")


if __name__ == "__main__":
    main()
