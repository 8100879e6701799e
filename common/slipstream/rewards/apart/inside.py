"""The process that runs a model's program: `python -P inside.py FD HOW`. It imports the standard library alone, for
where it runs nothing of slipstream need be seen.

It shuts itself in, as HOW says (see `walls`), says that it is there, then hears pieces of code on socket FD, one JSON
line each, runs them in one name space, and answers each with the token that came with it, or with what went wrong.
The socket leads to the worker that started it (`program`) and nowhere else; a token is told only together with the
code that it stands for, so a program that writes to the socket by itself, or ends early, has said nothing.
"""

from __future__ import annotations

import builtins
import ctypes
import json
import os
import resource
import signal
import socket
import sys

TYPE_CHECKING = False  # `typing` costs a program's start some milliseconds
if TYPE_CHECKING:
    from typing import Any

_CLONE_NEWNS, _CLONE_NEWIPC, _CLONE_NEWUSER = 0x20000, 0x8000000, 0x10000000
_CLONE_NEWPID, _CLONE_NEWNET = 0x20000000, 0x40000000
_MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_REC, _MS_PRIVATE = 2, 4, 8, 0x4000, 0x40000
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 1, 4, 22, 38
_SECCOMP_MODE_FILTER = 2
_CAPABILITY_VERSION = 0x20080522
_FILE_BYTES = 64 << 20
_OPEN_FILES = 256
READY = b'{"status": "ready"}\n'

_libc = ctypes.CDLL(None, use_errno=True)


class _Filter(ctypes.Structure):
    """`struct sock_fprog`."""

    _fields_ = [("length", ctypes.c_ushort), ("code", ctypes.c_char_p)]


def main() -> None:
    """Run what comes until the worker hangs up."""
    how = json.loads(sys.argv[2])
    with socket.socket(fileno=int(sys.argv[1])) as channel, channel.makefile("rwb") as stream:
        _shut_in(how)
        sys.argv[:] = ["solution"]
        stream.write(READY)
        stream.flush()
        # A name other than __main__ leaves a program's own command line alone.
        space: dict[str, Any] = {"__name__": "solution"}
        # Bound here, and no module of that name left: a program that patches what it finds does not patch these.
        read, told, run, sound = json.loads, json.dumps, _run, vars(builtins)
        sys.modules["__main__"] = type(sys)("__main__")
        for line in stream:
            piece = read(line)
            before = dict(sound)
            answer = run(piece, space)
            if piece["name"] == "completion":  # what it did to the built-ins is not for the tests
                sound.update(before)
            stream.write(told(answer).encode() + b"\n")
            stream.flush()


def _shut_in(how: dict[str, Any]) -> None:
    """Take the steps that `how` asks for, in the only order in which each is still allowed."""
    if sys.platform != "linux":
        return
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    resource.setrlimit(resource.RLIMIT_FSIZE, (_FILE_BYTES, _FILE_BYTES))
    resource.setrlimit(resource.RLIMIT_NOFILE, (_OPEN_FILES, _OPEN_FILES))
    if how["unshare"]:
        _unshare()
    if how["uid"]:
        os.setgroups([])
        os.setresgid(how["uid"], how["uid"], how["uid"])
        os.setresuid(how["uid"], how["uid"], how["uid"])
        _libc.prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0)  # its own entries in /proc are its own again
    if how["tasks"]:
        resource.setrlimit(resource.RLIMIT_NPROC, (how["tasks"], how["tasks"]))
    _drop_powers()
    if how["filter"]:
        code = bytes.fromhex(how["filter"])
        program = _Filter(len(code) // 8, code)
        _must(_libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(program), 0, 0))


def _unshare() -> None:
    """Own network, processes, mounts and shared memory, and a `/proc` that shows no other process.

    Goes on in a child, whose end takes with it every process that the program started, also those in sessions of
    their own; this process only waits for it.
    """
    apart = _CLONE_NEWNS | _CLONE_NEWIPC | _CLONE_NEWPID | _CLONE_NEWNET
    if _libc.unshare(apart) != 0:
        _must(_libc.unshare(_CLONE_NEWUSER | apart))
    child = os.fork()
    if child:
        _, status = os.waitpid(child, 0)
        os._exit(os.waitstatus_to_exitcode(status) & 0xFF)
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    _must(_libc.mount(None, b"/", None, _MS_REC | _MS_PRIVATE, None))
    _must(_libc.mount(b"proc", b"/proc", b"proc", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC, None))


def _drop_powers() -> None:
    """Give up every capability, and for good: with root's, even a hidden process could be traced."""
    _must(_libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    header, none = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION, 0), (ctypes.c_uint32 * 6)()
    _must(_libc.capset(header, none))


def _must(result: int) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _run(piece: dict[str, str], space: dict[str, Any]) -> dict[str, str]:
    try:
        exec(compile(piece["code"], f"<{piece['name']}>", "exec"), space)
    except MemoryError:
        return {"status": "memory"}
    except BaseException as error:  # noqa: BLE001  (also SystemExit: leaving before the tests is no pass)
        return {"status": "failed", "detail": _told(error)}
    return {"status": "ran", "token": piece["token"]}


def _told(error: BaseException) -> str:
    try:
        return repr(error)[:300]
    except BaseException:  # noqa: BLE001  (the program's own exception)
        return type(error).__name__


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # a program's threads and exit handlers must not keep the process
