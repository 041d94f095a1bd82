"""A rank's process: imports torch, says that it is ready, is told what it shall be, and runs its jobs.

    python gpu_worker.py SOCKET_NUMBER

As a "worker" it runs jobs until the harness hangs up; "once", it runs one and ends the way any Python program does.
"""

from __future__ import annotations

import faulthandler
import signal
import sys
from multiprocessing.connection import Connection
from pathlib import Path

HERE = Path(__file__).resolve().parent


def main() -> None:
    """Serves the harness at the other end of the socket."""
    sys.path[:0] = [str(HERE), str(HERE.parent / "python")]
    faulthandler.enable(file=sys.stderr)
    faulthandler.register(signal.SIGUSR2, all_threads=True)
    import zygote

    zygote.preload()
    connection = Connection(int(sys.argv[1]))
    connection.send("ready")
    try:
        role = connection.recv()
    except (EOFError, OSError):
        return  # The session ended before this process was needed.
    if role == "worker":
        zygote.pool_worker(connection)
    else:
        zygote.run_once(connection.recv(), connection)


if __name__ == "__main__":
    main()
