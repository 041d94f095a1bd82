"""Starts ranks: ``horonrun`` and :func:`run`, for those who have used ``horovodrun`` and ``horovod.run``.

Both are thin: torch's elastic agent, which torchrun is made of, starts the processes of a host and looks after them,
and ssh reaches the other hosts.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from horon.runner._run import run

__all__ = ["run"]


# Not before it is asked for: Python warns of a module that is loaded when it is started with ``python -m``.
def __getattr__(name: str) -> Any:
    if name == "run":
        from horon.runner._run import run

        return run
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
