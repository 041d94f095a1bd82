"""Which hosts, and how many processes on each: a list or a file, as horovodrun reads them. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Host:
    """A host, and how many processes may run there; None: as many as are asked for."""

    name: str
    slots: int | None


def parse_hosts(text: str) -> list[Host]:
    """Reads ``host1:2,host2:4``; a host without a number has one slot, as in Horovod.

    Raises:
        ValueError: A number of slots is not a positive whole number, or a name is missing.
    """
    hosts = []
    for entry in text.split(","):
        whole = entry.strip()
        name, colon, slots = whole.rpartition(":")
        is_alone = not colon or whole.endswith("]")  # an IPv6 address in its brackets has colons
        hosts.append(_host(whole, "1", entry) if is_alone else _host(name, slots, entry))
    return hosts


def parse_hostfile(text: str) -> list[Host]:
    """Reads lines of ``host slots=4``; ``host:4`` and ``host`` as well. # begins a comment.

    Raises:
        ValueError: As parse_hosts; or there is no host.
    """
    hosts = []
    for line in text.splitlines():
        entry = line.split("#", 1)[0].strip()
        if not entry:
            continue
        name, *rest = entry.split(None, 1)
        if rest:
            hosts.append(_host(name, rest[0].removeprefix("slots=").strip(), entry, is_apart=True))
        else:
            hosts += parse_hosts(entry)
    if not hosts:
        raise ValueError("horon: the host file names no host.")
    return hosts


def _host(name: str, slots: str, entry: str, *, is_apart: bool = False) -> Host:
    user, at, host = name.rpartition("@")
    is_bracketed = host.startswith("[") and host.endswith("]")  # an IPv6 address, which ssh takes without
    # A name with a hyphen in front would be an option of ssh.
    is_plain = not name.startswith("-") and not any(map(str.isspace, name))
    is_name = host and is_plain and (is_bracketed or is_apart or ":" not in host)
    if not is_name or not (slots.isascii() and slots.isdigit()) or int(slots) == 0:
        raise ValueError(
            f"horon: hosts: expected <name>:<number of processes>, got {entry!r}; IPv6 addresses have brackets."
        )
    return Host(f"{user}{at}{host[1:-1]}" if is_bracketed else name, int(slots))


@dataclass(frozen=True)
class Share:
    """The ranks of a job that run on one host: `n_ranks` of them, from `first_rank` on.

    Attributes:
        name: The host's, as it was given.
        is_here: Whether it is the host that starts them all.
    """

    name: str
    is_here: bool
    first_rank: int
    n_ranks: int


def share_out(hosts: Sequence[Host], num_proc: int, is_here: Callable[[str], bool]) -> list[Share]:
    """Fills the hosts in their order, as Horovod does. A host that comes twice, by whatever names, is one.

    Raises:
        ValueError: There are too few slots.
    """
    slots: dict[str, int] = {}
    names: dict[str, str] = {}  # of hosts as they are told apart, as they were given
    for host in hosts:
        key = "" if is_here(host.name) else host.name
        names.setdefault(key, host.name)
        slots[key] = slots.get(key, 0) + (num_proc if host.slots is None else host.slots)
    if sum(slots.values()) < num_proc:
        raise ValueError(f"horon: {num_proc} processes were asked for, but the hosts have {sum(slots.values())} slots.")
    shares: list[Share] = []
    first_rank = 0
    for key, n_slots in slots.items():
        n_ranks = min(n_slots, num_proc - first_rank)
        if n_ranks > 0:
            shares.append(Share(names[key], key == "", first_rank, n_ranks))
        first_rank += n_ranks
    return shares
