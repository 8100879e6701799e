"""The process that runs a model's program: `python -m slipstream.rewards.program FD`.

It hears pieces of code on socket FD, one JSON line each, runs them in one name space, and answers each with the
token that came with it, or with what went wrong. The socket leads to the worker that started it (`contained`) and
nowhere else; a token is told only together with the code that it stands for, so a program that writes to the socket
by itself, or ends early, has said nothing.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from typing import Any

from slipstream.rewards import limits


def main() -> None:
    """Run what comes until the worker hangs up."""
    limits.die_with_parent()
    limits.drop_powers()
    with socket.socket(fileno=int(sys.argv[1])) as channel, channel.makefile("rwb") as stream:
        sys.argv[:] = ["solution"]
        # A name other than __main__ leaves a program's own command line alone.
        space: dict[str, Any] = {"__name__": "solution"}
        for line in stream:
            stream.write(json.dumps(_run(json.loads(line), space)).encode() + b"\n")
            stream.flush()


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
