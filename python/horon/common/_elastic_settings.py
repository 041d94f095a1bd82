"""What a job's environment says about going on without ranks that have died."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

MIN_NP_VARIABLE = "HORON_ELASTIC_MIN_NP"
_MIN_NP = (MIN_NP_VARIABLE, "HOROVOD_ELASTIC_MIN_NP")
_TIMEOUT = ("HORON_ELASTIC_TIMEOUT", "HOROVOD_ELASTIC_TIMEOUT")
_DEFAULT_TIMEOUT_S = 600.0  # Horovod's
_MOST = 1e9


@dataclass(frozen=True)
class ElasticSettings:
    """How a job goes on.

    Attributes:
        least: With fewer ranks it does not.
        timeout: For ranks of which it is not known whether they have ended.
    """

    least: int
    timeout: timedelta


def elastic_settings(environment: Mapping[str, str]) -> ElasticSettings | None:
    """Returns them; None: the job's ranks stay the same. Raises ValueError if a variable is no positive number."""
    least = _positive(environment, _MIN_NP, "a whole number", int)
    if least is None:
        return None
    timeout_s = _positive(environment, _TIMEOUT, "seconds", float)
    return ElasticSettings(int(least), timedelta(seconds=_DEFAULT_TIMEOUT_S if timeout_s is None else timeout_s))


def _positive(
    environment: Mapping[str, str], names: Sequence[str], kind: str, convert: type[int] | type[float]
) -> float | None:
    """The first of these variables that is set, or None."""
    for name in names:
        text = environment.get(name)
        if text:
            try:
                number: float = convert(text)
            except ValueError:
                number = 0
            if not 0 < number < _MOST:
                raise ValueError(f"horon: {name}={text!r}: expected {kind}, more than 0.")
            return number
    return None
