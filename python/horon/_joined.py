"""What a rank of `horonrun --min-np` tells its launcher: that the ranks have met, so that one may be lost."""

from __future__ import annotations

import contextlib
import os
from datetime import timedelta
from typing import Any

JOINED_KEY = "joined"
_TIMEOUT = timedelta(seconds=30)
_was_told = False


def launcher_store() -> Any:
    """The part of the launcher's store that is for this. Raises what TCPStore does if it can not be reached."""
    from torch.distributed import PrefixStore, TCPStore

    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return PrefixStore("horonrun", TCPStore(address, port, is_master=False, timeout=_TIMEOUT))


def tell_launcher() -> None:
    """To be called when all ranks have met. Does nothing the second time, and in jobs that are to keep all ranks."""
    global _was_told
    is_served = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)
    if _was_told or not is_served or not os.environ.get("HORON_ELASTIC_MIN_NP"):
        return
    _was_told = True
    with contextlib.suppress(Exception):  # the launcher then ends the job when a rank is lost
        launcher_store().set(JOINED_KEY, "")
