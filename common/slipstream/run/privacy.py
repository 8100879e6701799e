"""Who else on the host may read what a run writes."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from slipstream.config.schema import Config


def keep_private(config: Config) -> None:
    """From now on what this process, and those that it starts, write is for those whom run.umask names."""
    os.umask(int(config.run.umask, 8))


def close_to_others(folder: Path) -> None:
    """Close a folder that was there before, perhaps made under another umask, like one that is made now."""
    with suppress(PermissionError):  # another user's, who decides
        folder.chmod(0o777 & ~_umask())


def open_as_others(file: Path) -> None:
    """Give a file the mode that the umask allows: safetensors makes private ones whatever it says."""
    file.chmod(0o666 & ~_umask())


def _umask() -> int:
    """This process's umask, which can only be had by setting it; a file made just then is for nobody else."""
    mask = os.umask(0o077)
    os.umask(mask)
    return mask
