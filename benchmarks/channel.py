"""Messages between the driver and the ranks of a benchmark: one line of JSON each, over a Unix socket.

JSON, because the two sides may be different Pythons. A rank that has nothing to do sleeps in `receive`.
"""

from __future__ import annotations

import json
import socket
from typing import Any

Message = dict[str, Any]


class Closed(Exception):
    """The other side is gone."""


class Channel:
    """One connection. Ownership: owns the socket."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._unread = b""

    @classmethod
    def connect(cls, path: str) -> Channel:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.connect(path)
        return cls(connection)

    def send(self, message: Message) -> None:
        try:
            self._socket.sendall(json.dumps(message).encode() + b"\n")
        except OSError as error:
            raise Closed(str(error)) from None

    def receive(self, timeout_seconds: float | None = None) -> Message:
        """Blocks for the next message.

        Raises:
            TimeoutError: None came in time.
            Closed: The other side is gone.
        """
        self._socket.settimeout(timeout_seconds)
        while b"\n" not in self._unread:
            try:
                received = self._socket.recv(1 << 20)
            except TimeoutError:
                raise
            except OSError as error:
                raise Closed(str(error)) from None
            if not received:
                raise Closed("end of stream")
            self._unread += received
        line, self._unread = self._unread.split(b"\n", 1)
        message: Message = json.loads(line)
        return message

    def close(self) -> None:
        self._socket.close()
