"""How a host is reached, and what of this process's environment holds there. Pure."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

# Of the host, the user's session there, or this shell.
_NOT_FOR_OTHERS = re.compile(
    r"HOME|HOSTNAME|HOST|USER|LOGNAME|MAIL|SHELL|PWD|OLDPWD|SHLVL|_|TERM|TMPDIR|DISPLAY|WINDOWID|XAUTHORITY"
    r"|(SSH|XDG|DBUS|BASH_FUNC)_.*"
)


@dataclass(frozen=True)
class Ssh:
    """How ssh is called; None: as ssh does by itself."""

    port: int | None = None
    identity_file: str | None = None

    def command(self, host: str, command: Sequence[str], variables: Mapping[str, str]) -> list[str]:
        """Returns what runs `command` on `host`, with variables that it needs from the beginning.

        ssh asks for nothing: where it needs a password, it ends. Hosts that it does not know yet it takes as they are.
        A connection that says nothing for a minute is lost.
        """
        options = ["BatchMode=yes", "StrictHostKeyChecking=accept-new", "LogLevel=ERROR", "ConnectTimeout=30"]
        options += ["ServerAliveInterval=15", "ServerAliveCountMax=4"]
        words = ["ssh", "-T", *(word for option in options for word in ("-o", option))]
        if self.port is not None:
            words += ["-p", str(self.port)]
        if self.identity_file is not None:
            words += ["-i", self.identity_file]
        assignments = [f"{name}={value}" for name, value in variables.items()]
        return [*words, host, shlex.join(["env", *assignments, *command])]


def environment_for_others(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables that ranks of other hosts get, too."""
    return {name: value for name, value in environment.items() if not _NOT_FOR_OTHERS.fullmatch(name)}
