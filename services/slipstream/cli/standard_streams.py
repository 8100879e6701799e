"""Standard output and error that may be closed, full, gone, or of an encoding that lacks our characters."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Callable
from typing import TextIO


def open_streams() -> None:
    """See that descriptors 0 to 2 are open, or the next file or socket would be taken for them, and that any text can
    be written: what an encoding lacks becomes a question mark."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free: this one
    sys.stdout = sys.stdout or open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stderr = sys.stderr or open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def written(out: TextIO, write: Callable[[], None]) -> None:
    """Write what a finished command has to say, if it can be said: its work is done, whoever reads of it."""
    try:
        write()
        out.flush()
    except (OSError, ValueError):
        give_up_on(out)


def give_up_on(out: TextIO) -> None:
    """Send all that follows nowhere, also what is flushed at exit."""
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, out.fileno())
        os.close(nowhere)
