"""What comes from a host: its launcher's reports, in between what its ranks print. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

# Begins a report, which ends with its line. No program prints a record separator by accident, and a login shell that
# greets everybody does not either.
_MARK = b"\x1ehoron:"


# So much is written to a pipe at once, without others' writes in its middle, on Linux. What ranks have left behind may
# print meanwhile.
_MOST_AT_ONCE = 4096
_PART = "part"


def encode(report: Mapping[str, Any]) -> list[bytes]:
    """A report as lines, each to be written by itself. One may come in the middle of another line, whose rest then
    comes after it.
    """
    text = json.dumps(report)
    line = _line(report)
    if len(line) <= _MOST_AT_ONCE:
        return [line]
    n_part = _MOST_AT_ONCE // 2 - len(_line({_PART: ""}))  # a quotation mark takes two
    parts = [text[begin : begin + n_part] for begin in range(0, len(text), n_part)]
    return [*(_line({_PART: part}) for part in parts), _line({_PART: ""})]


def _line(report: Mapping[str, Any]) -> bytes:
    return _MARK + json.dumps(report).encode() + b"\n"


class Splitter:
    """Tells reports from what else comes through the same pipe, which is passed on at once."""

    def __init__(self) -> None:
        self._rest = bytearray()  # the beginning of a report, or of its mark
        self._n_seen = 0  # of its bytes, which have no end of a line
        self._parts: list[str] = []  # of a long one

    def feed(self, data: bytes) -> tuple[bytes, list[dict[str, Any]]]:
        """Returns what else has come, and the reports that are complete."""
        rest, passed = self._rest, bytearray()
        reports: list[dict[str, Any]] = []
        rest += data
        while (begin := rest.find(_MARK)) >= 0:
            end = rest.find(b"\n", max(begin, self._n_seen))
            passed += rest[:begin]
            if end < 0:
                del rest[:begin]
                self._n_seen = len(rest)
                return bytes(passed), reports
            report = _decode(rest[begin + len(_MARK) : end])
            if report is None:
                passed += rest[begin : end + 1]
            elif isinstance(part := report.get(_PART), str):
                reports += self._take_part(part)
            else:
                reports.append(report)
            del rest[: end + 1]
            self._n_seen = 0
        n_passed = len(rest) - _length_of_beginning(rest)
        passed += rest[:n_passed]
        del rest[:n_passed]
        return bytes(passed), reports

    def _take_part(self, part: str) -> list[dict[str, Any]]:
        """Returns the report that ends with it."""
        if part:
            self._parts.append(part)
            return []
        report = _decode("".join(self._parts))
        self._parts.clear()
        return [] if report is None else [report]

    def rest(self) -> bytes:
        """What came last and is no report, at the end."""
        rest = bytes(self._rest)
        self._rest.clear()
        return rest


def _decode(text: bytearray | str) -> dict[str, Any] | None:
    """None: something else has printed the mark."""
    try:
        report = json.loads(text)
    except ValueError:
        return None
    return report if isinstance(report, dict) else None


def _length_of_beginning(data: bytearray) -> int:
    """How many bytes at the end may be the beginning of a mark."""
    return next((n for n in range(len(_MARK) - 1, 0, -1) if data.endswith(_MARK[:n])), 0)
