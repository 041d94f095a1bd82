"""Makes system calls fail in this process, as the seccomp filters of containers and of systemd do."""

from __future__ import annotations

import ctypes
import errno
import platform
import socket
from dataclasses import dataclass

PR_SET_NO_NEW_PRIVS = 38
PR_SET_SECCOMP = 22
SECCOMP_MODE_FILTER = 2
SECCOMP_RET_ALLOW = 0x7FFF0000
SECCOMP_RET_ERRNO = 0x00050000

# Instructions of the kernel's filter machine: load a word of struct seccomp_data, jump if equal, return.
LOAD, JUMP_IF_EQUAL, RETURN = 0x20, 0x15, 0x06
NUMBER_AT, ARCHITECTURE_AT, FIRST_ARGUMENT_AT = 0, 4, 16


@dataclass(frozen=True)
class Machine:
    """What one machine calls itself, and its system calls, in the kernel's filters."""

    audit_architecture: int
    numbers: dict[str, int]


MACHINES = {
    "x86_64": Machine(0xC000003E, {"memfd_create": 319, "pidfd_open": 434, "socket": 41, "ftruncate": 77}),
    "aarch64": Machine(0xC00000B7, {"memfd_create": 279, "pidfd_open": 434, "socket": 198, "ftruncate": 46}),
}


class _Instruction(ctypes.Structure):
    _fields_ = (("code", ctypes.c_ushort), ("jt", ctypes.c_ubyte), ("jf", ctypes.c_ubyte), ("k", ctypes.c_uint))


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.POINTER(_Instruction)))


def _program(machine: Machine, call: str, error: int) -> list[_Instruction]:
    """`socket` fails for Unix sockets alone, which is what systemd's RestrictAddressFamilies does."""
    allow, deny = SECCOMP_RET_ALLOW, SECCOMP_RET_ERRNO | error
    code = [
        (LOAD, 0, 0, ARCHITECTURE_AT),
        (JUMP_IF_EQUAL, 1, 0, machine.audit_architecture),
        (RETURN, 0, 0, allow),
        (LOAD, 0, 0, NUMBER_AT),
        (JUMP_IF_EQUAL, 1, 0, machine.numbers[call]),
        (RETURN, 0, 0, allow),
    ]
    if call == "socket":
        code += [(LOAD, 0, 0, FIRST_ARGUMENT_AT), (JUMP_IF_EQUAL, 1, 0, socket.AF_UNIX), (RETURN, 0, 0, allow)]
    code.append((RETURN, 0, 0, deny))
    return [_Instruction(*instruction) for instruction in code]


def forbid(calls: list[str], error: int = errno.EPERM) -> None:
    """From now on the calls fail with `error`, in this thread and in what it starts. There is no way back.

    Raises:
        NotImplementedError: This machine's call numbers are not known here.
        OSError: The kernel, or a container, does not allow filters.
    """
    machine = MACHINES.get(platform.machine())
    if machine is None:
        raise NotImplementedError(f"no system call numbers for {platform.machine()}")
    libc = ctypes.CDLL(None, use_errno=True)

    def prctl(*arguments: int) -> None:
        if libc.prctl(*(ctypes.c_ulong(argument) for argument in arguments)) != 0:
            raise OSError(ctypes.get_errno(), "prctl refuses a seccomp filter")

    prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    for call in calls:
        code = _program(machine, call, error)
        program = _Program(len(code), (_Instruction * len(code))(*code))
        prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.addressof(program), 0, 0)
