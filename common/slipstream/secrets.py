"""Secrets: from the environment or a file that it names; never from the config, which is recorded.

The environment of a process stays readable for its user as long as the process lives, so those that we start get
none there: what needs a secret gets a descriptor to read it from, and what needs none gets nothing.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slipstream.errors import UserError

PASSWORD = "SLIPSTREAM_REDIS_PASSWORD"
ENGINE_KEY = "SLIPSTREAM_ENGINE_KEY"
_NAMES = (PASSWORD, ENGINE_KEY)
HIDDEN = "(hidden)"
_SECRET_NAME = re.compile(
    r"password|passwd|secret|credential|authorization|cookie|api[-_]?keys?$|(^|[-_])(access|auth|private)[-_]?key|(^|[-_])token$",
    re.I,
)
_SECRET_VARIABLE = re.compile(
    r"(^|_)(KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?)(_|$)(?!.*(FILE|PATH|DIR)$)", re.I
)
_SHORTEST = 8  # characters of a variable's value that is looked for: "1" or "true" is no secret
_SECRET_TEXT = re.compile(
    r"(?<=://)[^/@\s]+(?=@)"  # of a URL: its user and password
    r"|(?<=[?&;])[^=&;?\s]*(?:password|passwd|secret|credential|signature|api[-_]?key|token)[^=&;?\s]*=[^&;\s]+"
    r"|\b(?:hf_|sk-|ghp_|github_pat_|glpat-|xox[abp]-|AKIA)[\w-]{10,}"
    r"|(?<=\bBearer )[\w.~+/=-]+",
    re.I,
)
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


def hide(value: Any, environment: Mapping[str, str] | None = None) -> Any:
    """A plain tree, or a text, with everything hidden in it that is a secret or looks like one: what stands under a
    name such as `api_key`, logins and keys in URLs, tokens of known forms, and the values of variables of the
    environment that are named like secrets. For what leaves this machine.
    """
    environment = os.environ if environment is None else environment
    known = {
        each for name, each in environment.items() if _SECRET_VARIABLE.search(name) and len(each) >= _SHORTEST
    }
    return _hidden(value, sorted(known, key=len, reverse=True))


def _hidden(value: Any, known: list[str]) -> Any:
    if isinstance(value, Mapping):
        return {
            _hidden(key, known): HIDDEN if _is_secret(key, each) else _hidden(each, known)
            for key, each in value.items()
        }
    if isinstance(value, list | tuple):
        return [_hidden(each, known) for each in value]
    if not isinstance(value, str):
        return value
    for each in known:
        value = value.replace(each, HIDDEN)
    return _SECRET_TEXT.sub(HIDDEN, value)


def _is_secret(name: Any, value: Any) -> bool:
    """A number or a switch beside such a name, such as `add_token: true`, is none."""
    return (
        isinstance(name, str)
        and _SECRET_NAME.search(name) is not None
        and bool(value)
        and not isinstance(value, bool | int | float)
    )
