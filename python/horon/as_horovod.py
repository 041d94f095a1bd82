"""Runs a Python program that imports horovod with horon in its place, without a change.

    python -m horon.as_horovod train.py --epochs 3
    torchrun --nproc-per-node 4 -m horon.as_horovod train.py
    mpirun -np 4 python -m horon.as_horovod -m package.train

horonrun needs no help. See Note [In Horovod's place] in horon/_as_horovod/__init__.py.
"""

from __future__ import annotations

import argparse
import os
import runpy
import sys
from pathlib import Path

from horon import _as_horovod


def main() -> None:
    """Becomes the program: its `__main__`, its arguments, its search path."""
    parser = argparse.ArgumentParser(
        prog="python -m horon.as_horovod",
        usage="%(prog)s [-m] program [arguments ...]",
        description="Runs a Python program that imports horovod with horon in its place, without a change.",
    )
    parser.add_argument("-m", action="store_true", dest="is_module", help="the program is a module, as in python -m")
    parser.add_argument("program", help="a file, or a module")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="the program's own")
    given = parser.parse_args()
    _as_horovod.in_front(os.environ)
    sys.argv = [given.program, *given.arguments]
    if given.is_module:
        runpy.run_module(given.program, run_name="__main__", alter_sys=True)
        return
    if not Path(given.program).exists():
        parser.error(f"there is no {given.program}")
    # Python has put the folder of this call there for the module's sake; a script looks in its own.
    sys.path[:] = [entry for entry in sys.path if entry not in ("", os.getcwd())]
    sys.path.insert(0, str(Path(given.program).resolve().parent))
    runpy.run_path(given.program, run_name="__main__")


if __name__ == "__main__":
    main()
