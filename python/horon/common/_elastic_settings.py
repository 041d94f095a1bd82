"""What a job's environment says about going on without ranks that have died."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

MIN_NP_VARIABLE = "HORON_ELASTIC_MIN_NP"
TIMEOUT_VARIABLE = "HOROVOD_ELASTIC_TIMEOUT"
_DEFAULT_TIMEOUT_S = 600.0  # Horovod's


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
    text = environment.get(MIN_NP_VARIABLE)
    if not text:
        return None
    timeout_text = environment.get(TIMEOUT_VARIABLE)
    return ElasticSettings(
        int(_positive(MIN_NP_VARIABLE, text, "a whole number", int)),
        timedelta(seconds=_positive(TIMEOUT_VARIABLE, timeout_text, "seconds", float) if timeout_text
                  else _DEFAULT_TIMEOUT_S),
    )  # fmt: skip


def _positive(name: str, text: str, kind: str, convert: type[int] | type[float]) -> float:
    try:
        number = convert(text)
    except ValueError:
        number = 0
    if not 0 < number < 1e9:
        raise ValueError(f"horon: {name}={text!r}: expected {kind}, more than 0.")
    return number
