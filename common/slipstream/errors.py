"""Errors that carry their own mend, and the exit codes of every process.

A `UserError` is a mistake in what a person gave us (a config, a file, a port). It prints as one line that
names the setting, the value and the mend, and ends the process with exit code 2. Every other error is a fault
of the run, and ends the process with exit code 1 and its cause; a run that stops itself because going on would
be wrong or useless ends with exit code 3, and nobody restarts it.
"""

from __future__ import annotations

from collections.abc import Sequence

EXIT_OK = 0
EXIT_FAULT = 1
EXIT_USER = 2
EXIT_HALTED = 3


class SlipstreamError(Exception):
    """Base of every error that slipstream raises on purpose."""


class UserError(SlipstreamError):
    """A mistake in what the user gave; the message names the setting, the value and the mend.

    Args:
        problem: What is wrong, with the setting's name and its value.
        mend: What to do about it; printed after the problem.
    """

    def __init__(self, problem: str, mend: str = "") -> None:
        super().__init__(f"{problem}; {mend}" if mend else problem)
        self.problem = problem
        self.mend = mend


class ConfigError(UserError):
    """A config that cannot be used; holds *all* problems found, one line each.

    Attributes:
        unknown: Keys of the source that are no settings, each with what may have been meant.
    """

    def __init__(self, problems: list[str], source: str = "config", unknown: Sequence[str] = ()) -> None:
        self.problems = problems
        self.unknown = unknown
        count = f"{len(problems)} problem" + ("s" if len(problems) != 1 else "")
        super().__init__(f"{source}: {count}\n" + "\n".join(f"  - {problem}" for problem in problems))


class MessageError(SlipstreamError):
    """A message that is malformed, oversized or of another schema; refused and counted, never fatal."""


class StalenessError(SlipstreamError):
    """A version label that cannot be true, such as a token from a version that does not exist yet."""


class LedgerError(SlipstreamError):
    """The ledger refused a call."""


class FencedError(LedgerError):
    """The caller no longer owns the ticket: its lease ran out and another attempt took over."""


class TransportTimeout(SlipstreamError):
    """A wait on a peer passed its deadline; the message names the peer, the wait and the deadline."""


class WeightsError(SlipstreamError):
    """A set of weights that is incomplete, torn or does not fit; nothing of it was applied."""


class BaseMismatch(UserError):
    """This host's model folder is not the one that the learner trains adapters for; asking again does not help."""


class RunHalted(SlipstreamError):
    """The run stops because going on would be wrong or useless; the message is the reason."""


def install(extra: str) -> str:
    """The mend where an optional package is missing: the command that brings the packages of one of our extras.

    They are named one by one, which works beside a checkout and beside a wheel; `slipstream[extra]` would be
    another's project wherever ours is not installed.
    """
    from importlib import metadata

    try:
        required = metadata.requires("slipstream") or []
    except metadata.PackageNotFoundError:  # a bare source tree on the path
        required = []
    ends = (f"extra == '{extra}'", f'extra == "{extra}"')
    names = [each.partition(";")[0].strip() for each in required if each.endswith(ends)]
    if not names:
        return f"install what pyproject.toml lists as {extra}"
    return "pip install " + " ".join(f"'{name}'" for name in names)
