"""Horovod's names for horon's modules. See Note [In Horovod's place] in horon/_as_horovod/__init__.py."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Sequence
from types import CodeType, ModuleType
from typing import Any

from horon._as_horovod import check
from horon.runner import run

__all__ = ["__version__", "run"]

__version__ = "0.28.1"
"""The version of Horovod whose API this is; horon's own is ``horon.__version__``."""

# What Horovod has besides is for other frameworks.
_HERE = ("torch", "common", "runner", "data")


def _own_name(fullname: str) -> str:
    return "horon" + fullname.removeprefix(__name__)


def _ask(method: str, fullname: str) -> Any:
    """What the loader of the module that has this name here says of it."""
    spec = importlib.util.find_spec(_own_name(fullname))
    assert spec is not None
    return getattr(spec.loader, method)(spec.name)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.InspectLoader):
    """Gives `horovod.X` the module `horon.X`, that very one."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        package, _, rest = fullname.partition(".")
        if package != __name__ or rest.partition(".")[0] not in _HERE:
            return None
        theirs = importlib.util.find_spec(f"horon.{rest}")
        if theirs is None:
            return None
        is_package = theirs.submodule_search_locations is not None
        return importlib.machinery.ModuleSpec(fullname, self, origin=theirs.origin, is_package=is_package)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        module = importlib.import_module(_own_name(spec.name))
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        # It has been executed under its own name, and keeps that: only the import system has written the other one.
        assert module.__spec__ is not None
        module.__spec__ = module.__spec__.loader_state

    # For `python -m` and the like.

    def get_code(self, fullname: str) -> CodeType | None:
        return _ask("get_code", fullname)  # type: ignore[no-any-return]

    def get_source(self, fullname: str) -> str | None:
        return _ask("get_source", fullname)  # type: ignore[no-any-return]

    def is_package(self, fullname: str) -> bool:
        return _ask("is_package", fullname)  # type: ignore[no-any-return]

    def get_filename(self, fullname: str) -> str:
        return _ask("get_filename", fullname)  # type: ignore[no-any-return]


check(os.environ)
sys.meta_path.insert(0, _Finder())
