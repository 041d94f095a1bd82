"""A process of horon.run: calls the function that a folder holds, and leaves what it returned there.

python -m horon.runner._task PIPES FOLDER
"""

from __future__ import annotations

import io
import os
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle  # type: ignore[import-untyped,unused-ignore]
from torch.distributed.elastic.multiprocessing.errors import record

from horon.runner import _child

_TASK = "task.pickle"


def pack(call: Callable[[], Any]) -> bytes:
    """A call for other processes, and where this one finds modules: the call's may be among them."""
    return pickle.dumps((sys.path, cloudpickle.dumps(call)))


def leave(folder: Path, packed: bytes) -> None:
    (folder / _TASK).write_bytes(packed)


def find(folder: Path) -> Callable[[], Any]:
    path, call = pickle.loads((folder / _TASK).read_bytes())
    sys.path += [entry for entry in path if entry not in sys.path]
    return cloudpickle.loads(call)  # type: ignore[no-any-return]


def result_of(folder: Path, rank: int) -> Path:
    return folder / f"result.{rank}.pickle"


def read_result(folder: Path, rank: int) -> bytes:
    """Raises RuntimeError for a rank that has ended well without one."""
    try:
        return result_of(folder, rank).read_bytes()
    except FileNotFoundError:
        raise RuntimeError(f"horon.run: rank {rank} has exited with 0 instead of returning.") from None


@record  # so that the agent learns the traceback of whoever fails
def main() -> None:
    pipes, folder = sys.argv[1], Path(sys.argv[2])
    _child.die_with_parent()
    _child.prepare(pipes)
    if pipes != _child.NO_PIPES and isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # Python has begun without the variable
    result = find(folder)()
    result_of(folder, int(os.environ["RANK"])).write_bytes(cloudpickle.dumps(result))


if __name__ == "__main__":
    main()
