"""Words that environment variables take for yes and no, as csrc/core/environment.cc does.

That would have to be loaded, in the middle of `import torch` or before it.
"""

from __future__ import annotations

from collections.abc import Mapping

_ON = ("on", "1", "true", "yes")
_OFF = ("off", "0", "false", "no")


def is_on(environment: Mapping[str, str], variable: str) -> bool | None:
    """Returns what a variable says; None if it is not set, or empty.

    Raises:
        ValueError: Neither yes nor no.
    """
    text = environment.get(variable, "").strip().lower()
    if not text:
        return None
    if text not in _ON + _OFF:
        raise ValueError(f"{variable}: expected on or off, got {environment[variable]!r}")
    return text in _ON
