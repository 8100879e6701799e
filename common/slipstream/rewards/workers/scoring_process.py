"""Starting and killing one worker process, from the outside."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading

from slipstream.errors import UserError
from slipstream.rewards.workers.worker_wire import Ready, Setup, pack, read_frame
from slipstream.secrets import free_of_secrets

START_SECONDS = 60.0
_KILL_SECONDS = 5.0
# Libraries say a lot when their memory ends, or hang, and seldom what it was.
_MEND = "where it imports torch or the like, raise memory_mb to 8192 or more"
# An isolated process gets these and nothing else, so that the model's code sees no secrets.
_BARE = ("PATH", "PYTHONPATH", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "VIRTUAL_ENV")
_ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


class WorkerChild:
    """A worker process and its keeper (`apart.keeper`), each in a process group of its own.

    `control` carries the frames, `output` what the process prints. It must be started from a thread that lives
    as long as the child should: the kernel's parent-death signal follows the thread.

    Raises:
        OSError: The system can't start a process.
    """

    def __init__(self, isolated: bool) -> None:
        self._folder = tempfile.mkdtemp(prefix="slipstream-run-") if isolated else None
        self.control, control = socket.socketpair()
        self.output, output = socket.socketpair()
        command = [sys.executable, "-P", "-m", "slipstream.rewards.workers.scoring_worker"]
        try:
            self._process = subprocess.Popen(
                [*command, str(control.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=output.fileno(),
                stderr=output.fileno(),
                pass_fds=[control.fileno()],
                cwd=self._folder,
                env=_environment(self._folder),
                start_new_session=True,
            )
        except OSError:
            self.control.close()
            self.output.close()
            self._remove_folder()
            raise
        finally:
            control.close()
            output.close()
        self.pid = self._process.pid

    def kill(self) -> None:
        """Have the keeper kill the worker and all that it started; returns at once."""
        self._process.terminate()

    def reap(self) -> None:
        """Wait for the end of all of them and remove the folder; blocks for at most a few seconds."""
        try:
            self._process.wait(_KILL_SECONDS)
        except subprocess.TimeoutExpired:  # the keeper itself is stopped, or waits for what cannot be killed
            self._process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_KILL_SECONDS)
        self._remove_folder()

    def _remove_folder(self) -> None:
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)


def probe(setup: Setup) -> Ready:
    """Load a scorer in a process that ends at once, to learn its form or what is wrong with it.

    One that is killed without a word, as by a kernel that wants its memory, is tried once more.

    Raises:
        UserError: It can't be loaded; the message holds the cause.
    """
    ready, printed = _load(setup)
    if ready is None and not printed:
        ready, printed = _load(setup)
    return check_ready(setup, ready, printed)


def _load(setup: Setup) -> tuple[Ready | None, bytes]:
    """What a process that loads the scorer answers, None when it ended before, and the end of what it printed."""
    child = WorkerChild(setup.isolated)
    # Read what the import prints, or a talkative one would block on a full socket.
    printed: list[bytes] = []
    reader = threading.Thread(target=_read_output, args=(child.output, printed), daemon=True)
    reader.start()
    try:
        child.control.settimeout(START_SECONDS)
        child.control.sendall(pack(setup))
        with child.control.makefile("rb") as stream:
            ready = read_frame(stream, Ready)
    except TimeoutError:
        raise UserError(f"scorer {setup.use!r}: loading took more than {START_SECONDS:g} s", _MEND) from None
    except ConnectionError:
        ready = None
    finally:
        child.kill()
        child.reap()
        reader.join(_KILL_SECONDS)
        child.control.close()
        child.output.close()
    return ready, b"".join(printed)


def check_ready(setup: Setup, ready: Ready | None, printed: bytes = b"") -> Ready:
    """The answer of a worker that could load its scorer.

    Raises:
        UserError: It couldn't, or it ended without a word; then its last printed line is the cause.
    """
    if ready is None:
        lines = printed.decode(errors="replace").strip().splitlines()
        cause = lines[-1] if lines else "no message"
        raise UserError(f"scorer {setup.use!r}: the worker process ended while loading ({cause})", _MEND)
    if ready.problem:
        raise UserError(ready.problem, ready.mend)
    return ready


def _read_output(output: socket.socket, printed: list[bytes]) -> None:
    with contextlib.suppress(OSError):
        while chunk := output.recv(1 << 16):
            printed[:] = [(b"".join(printed) + chunk)[-2000:]]


def _environment(folder: str | None) -> dict[str, str]:
    if folder is None:
        return {**dict.fromkeys(_ONE_THREAD, "1"), **free_of_secrets(os.environ)}
    bare = {name: os.environ[name] for name in _BARE if name in os.environ}
    return {**bare, **dict.fromkeys(_ONE_THREAD, "1"), "HOME": folder, "TMPDIR": folder}
