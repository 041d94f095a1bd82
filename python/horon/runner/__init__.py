"""Starts ranks on this host: ``horonrun`` and :func:`run`, for those who have used ``horovodrun`` and ``horovod.run``.

Both are thin: torch's elastic agent, which torchrun is made of, starts the processes and looks after them.
"""

from horon.runner._run import run

__all__ = ["run"]
