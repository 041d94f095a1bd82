"""Which hosts, and how many processes on each: a list or a file, as horovodrun reads them. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

_MASTER_PORT = 29500


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
        name, colon, slots = entry.strip().rpartition(":")
        hosts.append(_host(name, slots, entry) if colon else _host(slots, "1", entry))
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
        name, _, rest = entry.partition(" ")
        if rest:
            hosts.append(_host(name, rest.strip().removeprefix("slots=").strip(), entry))
        else:
            hosts += parse_hosts(entry)
    if not hosts:
        raise ValueError("horon: the host file names no host.")
    return hosts


def _host(name: str, slots: str, entry: str) -> Host:
    if not name or not slots.isdigit() or int(slots) == 0:
        raise ValueError(f"horon: hosts: expected <name>:<number of processes>, got {entry!r}.")
    return Host(name, int(slots))


def check_hosts(hosts: Sequence[Host], num_proc: int, is_here: Callable[[str], bool]) -> None:
    """Returns if `num_proc` processes may run on this host, the only one.

    Raises:
        ValueError: There are other hosts: says what to start on each of them. Or there are too few slots.
    """
    if others := [host.name for host in hosts if not is_here(host.name)]:
        raise ValueError(
            f"horon: processes are started on this host only, and {', '.join(others)} is another one. Run on each "
            "host, in place of `python script.py`:\n" + "\n".join(_torchrun(hosts))
        )
    slots = sum(host.slots or num_proc for host in hosts)
    if slots < num_proc:
        raise ValueError(f"horon: {num_proc} processes were asked for, but the hosts have {slots} slots.")


def _torchrun(hosts: Sequence[Host]) -> list[str]:
    """The command for each host. torchrun wants as many processes on each."""
    common = f"--master-addr {hosts[0].name} --master-port {_MASTER_PORT} script.py"
    return [
        f"  {host.name}: torchrun --nnodes {len(hosts)} --node-rank {number} "
        f"--nproc-per-node {host.slots or 1} {common}"
        for number, host in enumerate(hosts)
    ]
