"""Which calls of the system a model's program is refused, as a filter that the kernel runs (seccomp).

Refused are sockets (a pair within the program is none), whatever makes memory that no process is seen to hold,
looking into other processes, and namespaces of its own, in which it could do more than outside of them.
"""

from __future__ import annotations

import errno
import platform
import struct

_NUMBERS = {
    "x86_64": {
        "socket": 41, "ptrace": 101, "mount": 165, "umount2": 166, "shmget": 29, "msgget": 68, "semget": 64,
        "unshare": 272, "setns": 308, "process_vm_readv": 310, "process_vm_writev": 311, "memfd_create": 319,
        "bpf": 321, "userfaultfd": 323, "perf_event_open": 298, "add_key": 248, "request_key": 249, "keyctl": 250,
        "pivot_root": 155, "mq_open": 240,
    },
    "aarch64": {
        "socket": 198, "ptrace": 117, "mount": 40, "umount2": 39, "shmget": 194, "msgget": 186, "semget": 190,
        "unshare": 97, "setns": 268, "process_vm_readv": 270, "process_vm_writev": 271, "memfd_create": 279,
        "bpf": 280, "userfaultfd": 282, "perf_event_open": 241, "add_key": 217, "request_key": 218, "keyctl": 219,
        "pivot_root": 41, "mq_open": 180,
    },
}  # fmt: skip
# The same on every architecture: io_uring, mounts by descriptor, pidfd_getfd, memfd_secret.
_NEWER = (425, 426, 427, 428, 429, 430, 431, 432, 433, 438, 442, 447)
_CLONE = {"x86_64": 56, "aarch64": 220}
_CLONE3 = 435  # its flags lie where a filter cannot look; without it the C library takes clone
_AUDIT = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_X32 = 0x40000000  # the other set of numbers that x86 knows
_NAMESPACES = 0x7E020000  # CLONE_NEW*

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _ERRNO, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_NUMBER, _ARCHITECTURE, _FIRST = 0, 4, 16  # offsets in `struct seccomp_data`


def syscall_filter() -> bytes:
    """The filter's code for this machine; empty where its numbers are not known."""
    machine = platform.machine()
    if machine not in _NUMBERS:
        return b""
    refuse = _line(_RETURN, _ERRNO | errno.EPERM)
    code = [
        _line(_LOAD, _ARCHITECTURE),
        _line(_EQUAL, _AUDIT[machine], 1, 0),
        _line(_RETURN, _KILL),
        _line(_LOAD, _NUMBER),
        _line(_AT_LEAST, _X32, 0, 1),
        refuse,
        _line(_EQUAL, _CLONE3, 0, 1),
        _line(_RETURN, _ERRNO | errno.ENOSYS),
    ]
    for number in sorted({*_NUMBERS[machine].values(), *_NEWER}):
        code += [_line(_EQUAL, number, 0, 1), refuse]
    code += [
        _line(_EQUAL, _CLONE[machine], 0, 3),
        _line(_LOAD, _FIRST),
        _line(_ANY_BIT, _NAMESPACES, 0, 1),
        refuse,
        _line(_RETURN, _ALLOW),
    ]
    return b"".join(code)


def _line(operation: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("<HBBI", operation, if_true, if_false, value)
