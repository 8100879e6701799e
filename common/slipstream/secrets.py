"""Secrets: from the environment or a file that it names; never from the config, which is recorded.

The environment of a process stays readable for its user as long as the process lives, so those that we start get
none there: what needs a secret gets a descriptor to read it from, and what needs none gets nothing.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from slipstream.errors import UserError

PASSWORD = "SLIPSTREAM_REDIS_PASSWORD"
ENGINE_KEY = "SLIPSTREAM_ENGINE_KEY"
_NAMES = (PASSWORD, ENGINE_KEY)
_HANDED = "/proc/self/fd/"


def redis_password(environment: Mapping[str, str] | None = None) -> str | None:
    """The password of the ledger's server, if there is one; see `secret`."""
    return secret(PASSWORD, environment)


def secret(name: str, environment: Mapping[str, str] | None = None) -> str | None:
    """A secret, if there is one: the variable of that name, or the content of the file that NAME_FILE names (as
    containers mount secrets), without the line's end.

    Raises:
        UserError: The file cannot be read or is empty.
    """
    environment = os.environ if environment is None else environment
    if given := environment.get(name):
        return given
    if not (file := environment.get(f"{name}_FILE")):
        return None
    try:
        password = Path(file).read_text(encoding="utf-8").strip("\r\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "no UTF-8"
        raise UserError(f"{name}_FILE: {file} cannot be read ({reason})", "mount the secret there") from None
    if not password:
        raise UserError(f"{name}_FILE: {file} is empty", "put the secret into it")
    return password


def free_of_secrets(environment: Mapping[str, str]) -> dict[str, str]:
    """An environment for a process that needs no secret of ours, nor is told where one lies."""
    ours = {name for each in _NAMES for name in (each, f"{each}_FILE")}
    return {name: value for name, value in environment.items() if name not in ours}


def hand_over(environment: Mapping[str, str]) -> tuple[dict[str, str], list[int]]:
    """How a role of ours gets the secrets that an environment holds: variables for it, and the descriptors that it
    must inherit, which stay open here for those that are started again. They lie in memory, in no folder.
    """
    variables: dict[str, str] = {}
    descriptors: list[int] = []
    for name in _NAMES:
        if (value := environment.get(name)) and not hasattr(os, "memfd_create"):  # not Linux
            variables[name] = value
        elif value:
            descriptor = os.memfd_create("secret")
            os.write(descriptor, value.encode())
            variables[f"{name}_FILE"] = f"{_HANDED}{descriptor}"
            descriptors.append(descriptor)
        elif file := environment.get(f"{name}_FILE"):
            variables[f"{name}_FILE"] = file
    return variables, descriptors


def handed_over(environment: Mapping[str, str]) -> list[int]:
    """The descriptors that this process was handed, for further processes of the same role to inherit."""
    files = [environment.get(f"{name}_FILE", "") for name in _NAMES]
    return [int(file.removeprefix(_HANDED)) for file in files if file.startswith(_HANDED)]
