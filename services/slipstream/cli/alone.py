"""What a role does for itself when no `slipstream up` has done it before: as the one process of a container."""

from __future__ import annotations

import importlib.util
import os
import socket

from slipstream.config.schema import Config
from slipstream.errors import UserError
from slipstream.run.folder import Before, RunFolder

_LIBRARIES = {"rollout": ("torch", "transformers"), "learner": ("torch", "transformers")}


def name_of(role: str, given: str | None) -> str:
    """The process's name; `{host}` in it becomes this host's, so that replicas can share one command."""
    return (given or role).replace("{host}", socket.gethostname())


def check_libraries(role: str) -> None:
    """Refuse a role whose libraries are not installed here.

    Raises:
        UserError: Names the role, what is missing and which image has it.
    """
    missing = [name for name in _LIBRARIES.get(role, ()) if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(
            f"role {role} needs {' and '.join(missing)}, which is not installed here",
            "use the image whose tag ends in -cpu or -gpu; -core is for reward, buffer and tools",
        )


def prepare_folder(role: str, config: Config, folder: RunFolder) -> Before | None:
    """Make the run's folder where this role keeps something in it; the learner also records the attempt.

    Returns:
        What was there before an attempt that was recorded, to be taken back if the attempt is refused.

    Raises:
        UserError: The folder cannot be written.
    """
    if role not in ("learner", "buffer"):
        return None
    folder.create()
    if role != "learner" or os.environ.get("RANK", "0") != "0":
        return None
    from slipstream.run.provenance import collect

    return folder.record_attempt(config, collect())
