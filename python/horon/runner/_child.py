"""What a process of horonrun does first: Horovod's variables, its output's place; then it becomes the command.

python -m horon.runner._child COMMAND...
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

OUTPUT_VARIABLE = "HORON_RUN_OUTPUT"

# Horovod's, by torchrun's. One host: all are local.
_NAMES = {
    "HOROVOD_RANK": "RANK",
    "HOROVOD_SIZE": "WORLD_SIZE",
    "HOROVOD_LOCAL_RANK": "LOCAL_RANK",
    "HOROVOD_LOCAL_SIZE": "LOCAL_WORLD_SIZE",
    "HOROVOD_CROSS_RANK": "GROUP_RANK",
    "HOROVOD_CROSS_SIZE": "GROUP_WORLD_SIZE",
}


def horovod_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables by which scripts know that Horovod's launcher has started them."""
    return {name: environment[theirs] for name, theirs in _NAMES.items()}


def output_folder(output: str, rank: int, size: int) -> Path:
    """Where a rank's stdout and stderr go; ranks have leading zeros, as in Horovod."""
    return Path(output) / f"rank.{rank:0{len(str(size - 1))}}"


def prepare() -> None:
    """Sets the variables, and redirects the output if that was asked for."""
    os.environ.update(horovod_variables(os.environ))
    output = os.environ.pop(OUTPUT_VARIABLE, None)
    if output is not None:
        folder = output_folder(output, int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
        folder.mkdir(parents=True, exist_ok=True)
        for descriptor, name in ((1, "stdout"), (2, "stderr")):
            file = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
            os.dup2(file, descriptor)
            os.close(file)


def main() -> None:
    prepare()
    command = sys.argv[1:]
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.exit(f"horonrun: {command[0]}: {error.strerror}")


if __name__ == "__main__":
    main()
