"""Secrets: from the environment or a file that it names; never from the config, which is recorded."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from slipstream.errors import UserError

PASSWORD = "SLIPSTREAM_REDIS_PASSWORD"


def redis_password(environment: Mapping[str, str] | None = None) -> str | None:
    """The password of the ledger's server, if there is one: SLIPSTREAM_REDIS_PASSWORD, or the content of the file
    that SLIPSTREAM_REDIS_PASSWORD_FILE names (as containers mount secrets), without the line's end.

    Raises:
        UserError: The file cannot be read or is empty.
    """
    environment = os.environ if environment is None else environment
    if given := environment.get(PASSWORD):
        return given
    if not (file := environment.get(f"{PASSWORD}_FILE")):
        return None
    try:
        password = Path(file).read_text(encoding="utf-8").strip("\r\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "no UTF-8"
        raise UserError(
            f"{PASSWORD}_FILE: {file} cannot be read ({reason})", "mount the secret there"
        ) from None
    if not password:
        raise UserError(f"{PASSWORD}_FILE: {file} is empty", "put the password of redis.url into it")
    return password
