"""Scripts and libraries that say `import horovod.torch` get horon, without a change.

Note [In Horovod's place]
What Python finds under the name `horovod` is decided by its search path. This folder holds a package of that name, and
nothing else; in_front() puts it there. The package gives horon's modules Horovod's names: `horovod.torch` is
`horon.torch` itself, so that a program may use both. Who does it:
- horonrun and horon.run, for their ranks, unless their Python has a Horovod of its own, or HORON_AS_HOROVOD says no;
- with HORON_AS_HOROVOD=on, `import torch`, before which horovod must not have been imported;
- `python -m horon.as_horovod`, under other launchers.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Mapping, MutableMapping
from pathlib import Path

from horon._words import is_on

kVariable = "HORON_AS_HOROVOD"

_FOLDER = str(Path(__file__).resolve().parent)


def in_front(environment: MutableMapping[str, str]) -> None:
    """From now on this process, and those that it starts, find horon under the name `horovod`, if they have not
    imported one already."""
    if _FOLDER not in sys.path:
        sys.path.insert(1 if has_own_folder() else 0, _FOLDER)
    given = environment.get("PYTHONPATH", "")
    if _FOLDER not in given.split(os.pathsep):
        environment["PYTHONPATH"] = os.pathsep.join([_FOLDER, *([given] if given else [])])


def in_front_if_asked(environment: MutableMapping[str, str]) -> None:
    """Does what HORON_AS_HOROVOD says."""
    if _is_wanted(environment):
        in_front(environment)


def in_front_for_ranks(environment: MutableMapping[str, str]) -> None:
    """The same; if it says nothing, so does a Python without Horovod."""
    wanted = _is_wanted(environment)
    if wanted or (wanted is None and not _is_horovod_installed()):
        in_front(environment)


def check(environment: Mapping[str, str]) -> None:
    """Raises ImportError where HORON_AS_HOROVOD is set to neither yes nor no."""
    try:
        is_on(environment, kVariable)
    except ValueError as error:
        raise ImportError(f"horon: {error}") from None


def has_own_folder() -> bool:
    """Whether the first place in sys.path is the script's folder, or this call's: it comes first, horovod or not."""
    return not getattr(sys.flags, "safe_path", False)  # new in Python 3.11


def _is_horovod_installed() -> bool:
    # Not in the folder of this call, which may be a clone of Horovod's repository; scripts look in their own.
    path = list(sys.path)
    if has_own_folder():
        del sys.path[:1]
    try:
        spec = importlib.util.find_spec("horovod")
        return spec is not None and spec.origin is not None  # not just any folder of that name
    finally:
        sys.path[:] = path


def _is_wanted(environment: Mapping[str, str]) -> bool | None:
    try:
        return is_on(environment, kVariable)
    except ValueError:
        return True  # then importing horovod says it: not everything that starts with the variable does that
