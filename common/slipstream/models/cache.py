"""The model cache: folders built once, seen only when whole, and shared by every process of the host."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock, Timeout

from slipstream.errors import SlipstreamError, UserError

CACHE_VARIABLE = "SLIPSTREAM_CACHE"
BUILD_SECONDS = 900.0


def cache_root() -> Path:
    """Folder of the cache: `SLIPSTREAM_CACHE` when set, else `~/.cache/slipstream`."""
    chosen = os.environ.get(CACHE_VARIABLE)
    return Path(chosen).expanduser() if chosen else Path.home() / ".cache" / "slipstream"


def build_once(target: Path, build: Callable[[Path], None], seconds: float = BUILD_SECONDS) -> Path:
    """Return `target`, building it first if it does not exist.

    `build` fills a folder beside the target, which is then renamed: a reader sees all of it or nothing. Of
    several processes that start together one builds and the others wait.

    Args:
        target: Folder that shall exist.
        build: Fills the empty folder it is given.
        seconds: Longest wait for another process that builds.

    Raises:
        UserError: The cache cannot be written.
        SlipstreamError: Another process held the lock for longer than `seconds`.
    """
    if target.is_dir():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(target.parent / f".{target.name}.lock", timeout=seconds):
            if not target.is_dir():
                _build(target, build)
    except Timeout as error:
        raise SlipstreamError(f"{target}: another process has been building it for {seconds:.0f} s") from error
    except OSError as error:
        raise _unusable(target, error) from error
    return target


def _build(target: Path, build: Callable[[Path], None]) -> None:
    prefix = f".{target.name}.part-"
    for leftover in target.parent.glob(f"{prefix}*"):  # we hold the lock, so their builders are dead
        shutil.rmtree(leftover, ignore_errors=True)
    part = Path(tempfile.mkdtemp(prefix=prefix, dir=target.parent))
    try:
        build(part)
        part.chmod(0o755)  # mkdtemp and safetensors make private files; a cache may be shared by users
        for file in part.iterdir():
            file.chmod(0o644)
        part.rename(target)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _unusable(target: Path, error: OSError) -> UserError:
    reason = "no space left on its disk" if error.errno == errno.ENOSPC else str(error)
    return UserError(
        f"model cache {target.parent}: {reason}", f"set {CACHE_VARIABLE} to a writable folder with room"
    )
