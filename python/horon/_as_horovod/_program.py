"""What Python does when it is started with a program, in a process that runs already."""

from __future__ import annotations

import io
import os
import runpy
import sys
from importlib.machinery import SourceFileLoader
from typing import NoReturn

from horon import _as_horovod

_USAGE = """\
usage: python -m horon.as_horovod [-m] program [arguments ...]

Runs a Python program, a file or (-m) a module, that imports horovod with horon in its place, without a change.
"""


def become() -> None:
    """Becomes the program that sys.argv names: its `__main__`, its arguments, its search path.

    Not runpy's functions for others: they take the program's `__main__` away when its last line has been executed,
    while its threads and exit handlers may still need it.
    """
    is_module = sys.argv[1:2] == ["-m"]
    given = sys.argv[2 if is_module else 1 :]
    if given[:1] in (["-h"], ["--help"]):
        print(_USAGE, end="")
        return
    if not given or given[0].startswith("-"):
        _refuse("expected a program")
    if is_module:
        _as_horovod.in_front(os.environ)
        sys.argv = given  # its first is replaced by the module's file
        runpy._run_module_as_main(given[0])  # type: ignore[attr-defined]  # what python -m is made of
        return
    _become_script(given)


def _become_script(given: list[str]) -> None:
    path = os.path.abspath(given[0])
    if not os.path.exists(path):
        _refuse(f"there is no {given[0]}")
    sys.argv = given
    is_package = not os.path.isfile(path)
    if _as_horovod.has_own_folder():
        sys.path[:1] = [path if is_package else os.path.dirname(os.path.realpath(path))]
    _as_horovod.in_front(os.environ)
    if is_package:
        runpy._run_module_as_main("__main__", alter_argv=False)  # type: ignore[attr-defined]
        return
    main = vars(sys.modules["__main__"])
    for name in [name for name in main if not name.startswith("__")]:
        del main[name]
    main.update(__file__=path, __spec__=None, __package__=None, __doc__=None)
    main.update(__cached__=None, __loader__=SourceFileLoader("__main__", path))
    with io.open_code(path) as file:
        code = compile(file.read(), path, "exec")
    exec(code, main)


def _refuse(reason: str) -> NoReturn:
    print(_USAGE + f"\npython -m horon.as_horovod: {reason}", file=sys.stderr)
    sys.exit(2)
