"""One run, one build: what another build would do with its groups and its book is nobody's guess."""

from __future__ import annotations

from collections.abc import Sequence

from slipstream.errors import UserError
from slipstream.run.provenance import release

RELEASE = "release"


def is_of_another(opened: str) -> bool:
    """Whether a run was opened by another build; a book of before this was written down says nothing ('')."""
    return opened not in ("", release())


def refuse_another(run: str, opened: str, accepted: Sequence[str]) -> None:
    """Refuse to take part in a run of another build, unless it is to go on under this one.

    Args:
        run: Its name.
        opened: The release that opened it.
        accepted: Names of what may have changed (`run.accept`).

    Raises:
        UserError: Names both releases.
    """
    if is_of_another(opened) and RELEASE not in accepted:
        raise UserError(
            f"run {run} is of release {opened}, and this process is of release {release()}",
            "start it from that build; or let the whole run go on under this one: run.accept='[release]'",
        )
