"""How a model's program is shut in: under bubblewrap, else in namespaces of our own making, else by limits alone."""

from __future__ import annotations

import functools
import json
import os
import secrets
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from slipstream.rewards.apart.forbidden import syscall_filter

Kind = Literal["bubblewrap", "namespaces", "limits"]
TASKS = 64
TMP_BYTES = 64 << 20
_INSIDE = Path(__file__).with_name("inside.py")
_MOUNTED_INSIDE = "/slipstream/inside.py"
_ROOTS = ("/bin", "/sbin", "/lib", "/lib32", "/lib64")
_PARTS = (
    "bin",
    "lib",
    "lib32",
    "lib64",
    "pyvenv.cfg",
)  # of a Python's folder: beside them there may be anything
_FILES = ("/etc/ld.so.cache", "/etc/alternatives", "/etc/localtime", "/nix/store")
_ENVIRONMENT = {
    "HOME": "/tmp",
    "TMPDIR": "/tmp",
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "LANG": "C.UTF-8",
    "USER": "program",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
}


@dataclass(frozen=True)
class Walls:
    """One way to start a program.

    Args:
        kind: What holds it.
        proc: Whether it gets a `/proc` of its own; some containers allow none.
    """

    kind: Kind
    proc: bool = True

    def command(self, channel: int) -> list[str]:
        """The command that starts a program which hears on descriptor `channel`."""
        inside = _MOUNTED_INSIDE if self.kind == "bubblewrap" else str(_INSIDE)
        python = [sys.executable, "-P", inside, str(channel), json.dumps(self._how())]
        return [*_bubblewrap(self.proc), *python] if self.kind == "bubblewrap" else python

    @property
    def environment(self) -> dict[str, str] | None:
        """What the command is given; None for that of the worker, which is bare."""
        return {} if self.kind == "bubblewrap" else None

    def _how(self) -> dict[str, Any]:
        # A root that is nobody else: what only root may read or write it may not, and its processes are counted.
        uid = (1 << 30) + secrets.randbelow(1 << 30) if self.kind == "bubblewrap" and _is_root() else 0
        return {
            "unshare": self.kind == "namespaces",
            "uid": uid,
            "tasks": TASKS if self.kind != "limits" and _counts_by_namespace() else 0,
            "filter": syscall_filter().hex() if sys.platform == "linux" else "",
        }


def ways() -> Sequence[Walls]:
    """Every way that this system might allow, the best first; the last always goes."""
    best = [Walls("bubblewrap"), Walls("bubblewrap", proc=False)] if shutil.which("bwrap") else []
    own = [Walls("namespaces")] if sys.platform == "linux" else []
    return [*best, *own, Walls("limits")]


@functools.cache
def _bubblewrap(proc: bool) -> tuple[str, ...]:
    """The command line up to the program: a system to read, two small places to write, no network, own processes."""
    words = [str(shutil.which("bwrap")), "--die-with-parent", "--new-session", "--hostname", "program"]
    words += ["--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try"]
    words += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"] if _is_root() else ["--unshare-user"]
    for name, value in _ENVIRONMENT.items():
        words += ["--setenv", name, value]
    words += ["--ro-bind", "/usr", "/usr"]
    for root in _ROOTS:
        if os.path.islink(root):
            words += ["--symlink", os.readlink(root), root]
        else:
            words += ["--ro-bind-try", root, root]
    words += ["--proc", "/proc"] if proc else ["--dir", "/proc"]
    words += ["--dev", "/dev"]
    for place in ("/dev/shm", "/tmp"):  # before what is shown: a Python may lie below them
        words += ["--perms", "1777", "--size", str(TMP_BYTES), "--tmpfs", place]
    shown = {path: path for path in (*_FILES, *_python_paths())} | {str(_INSIDE): _MOUNTED_INSIDE}
    # bubblewrap's own folders on the way are closed to all but root
    for folder in dict.fromkeys(
        str(each) for path in shown.values() for each in reversed(Path(path).parents[:-1])
    ):
        words += ["--dir", folder]
    for source, path in shown.items():
        words += ["--ro-bind-try", source, path]
    return (*words, "--remount-ro", "/dev", "--remount-ro", "/", "--chdir", "/tmp", "--")


def _python_paths() -> list[str]:
    """Where this Python and its installed packages lie, outside of the system's own folders."""
    executable = Path(sys.executable)
    homes = dict.fromkeys(
        [sys.prefix, sys.base_prefix, *(str(each.parent.parent) for each in _links(executable))]
    )
    parts = [f"{home}/{part}" for home in homes if home != "/" for part in _PARTS]
    packages = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    found = [path for path in dict.fromkeys([*parts, *packages]) if not path.startswith("/usr/")]
    return [path for path in found if os.path.exists(path) and not any(path.startswith(f"{p}/") for p in found)]


def _links(path: Path) -> list[Path]:
    """A path and what it leads to, one link after another."""
    found = [path]
    while found[-1].is_symlink() and len(found) < 16:
        found.append(found[-1].parent / found[-1].readlink())
    return found


def _is_root() -> bool:
    return hasattr(os, "geteuid") and os.geteuid() == 0


def _counts_by_namespace() -> bool:
    """Whether a limit on processes counts those of the program alone, which it does from Linux 5.14 on."""
    major, minor = (int(part) for part in os.uname().release.split(".")[:2])
    return (major, minor) >= (5, 14)
