"""Where the threads of this process are, for others that wait for it. Called from C++."""

from __future__ import annotations

import sys
import threading
from types import FrameType

_MOST_FRAMES = 12  # of the main thread, the innermost
_MOST_FRAMES_OF_OTHERS = 4
_MOST_OTHERS = 6


def _frames(frame: FrameType | None, most: int) -> list[str]:
    """Returns a line for each frame, the innermost first. Reads no file: a hanging one may be what hangs."""
    lines: list[str] = []
    while frame is not None:
        if len(lines) == most:
            lines.append("  ...")
            break
        lines.append(f"  {frame.f_code.co_name} ({frame.f_code.co_filename}:{frame.f_lineno})")
        frame = frame.f_back
    return lines


def describe_threads() -> str:
    """Returns the stacks of this process's Python threads, shortened, the main thread's first."""
    stacks = sys._current_frames()
    stacks.pop(threading.get_ident(), None)
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main = threading.main_thread().ident
    lines: list[str] = []
    if main in stacks:
        lines += ["Its main thread, innermost first:", *_frames(stacks.pop(main), _MOST_FRAMES)]
    for ident, frame in list(stacks.items())[:_MOST_OTHERS]:
        lines += [f"Thread {names.get(ident, ident)}:", *_frames(frame, _MOST_FRAMES_OF_OTHERS)]
    if len(stacks) > _MOST_OTHERS:
        lines.append(f"And {len(stacks) - _MOST_OTHERS} more threads.")
    return "\n".join(lines)
