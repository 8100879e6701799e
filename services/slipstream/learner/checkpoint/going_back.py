"""Going back to an older checkpoint: what a run loses by it, a person's consent to that, and carrying it out.

A durable step is one that the buffers have forgotten, so a run never goes back behind it by itself. With consent the
book that the older checkpoint carries takes the place of the newer one: what it does not know as trained is issued
again. The consent lies in the run's folder until the learner has settled on the older place.
"""

from __future__ import annotations

import json
import secrets
from dataclasses import asdict, dataclass
from pathlib import Path

from slipstream.errors import UserError
from slipstream.learner.checkpoint.checkpoint_files import folder as folder_of
from slipstream.learner.checkpoint.checkpoint_files import fsync_path, step_of, write_durably
from slipstream.learner.checkpoint.finding import FoundCheckpoint, sealed, verify
from slipstream.run.folder import RunFolder, line_of_descent, read_lines

GIVEN_UP = "given-up-"


@dataclass(frozen=True, slots=True)
class Consent:
    """To give up every step after `step`; `token` names it, `version` is the newest of the book that is given up."""

    step: int
    token: str
    version: int = 0


def consent_to(folder: RunFolder, named: str) -> tuple[int, list[str]]:
    """Write the consent to go back to a checkpoint; returns its step, and what is given up, for a person.

    Args:
        folder: The run, which nobody else holds.
        named: The checkpoint, as `step-00000020` or 20.

    Raises:
        UserError: There is no such checkpoint, or nothing can continue from it.
    """
    step = _usable(folder, named)
    lines = [line for line in line_of_descent(read_lines(folder.steps)) if line["step"] > step]
    _write(folder, Consent(step, secrets.token_hex(8)))
    if not lines:
        return step, [f"going back to step {step}, after which the run has told of no step"]
    groups, tokens = sum(len(line["tickets"]) for line in lines), sum(line["tokens"] for line in lines)
    return step, [
        f"going back to step {step}: steps {lines[0]['step']} to {lines[-1]['step']} are given up, with {groups} "
        f"groups and {tokens} tokens, which are issued again",
        *(f"checkpoint {path.name} is set aside as {GIVEN_UP}{path.name}" for path in _newer(folder, step)),
    ]


def consented(folder: RunFolder) -> Consent | None:
    """The consent that waits to be carried out."""
    try:
        return Consent(**json.loads(_place(folder).read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None


def note_version(folder: RunFolder, consent: Consent, version: int) -> Consent:
    """Keep the newest version of the book that is given up: no version is ever used twice."""
    noted = Consent(consent.step, consent.token, max(version, consent.version))
    _write(folder, noted)
    return noted


def withdraw(folder: RunFolder) -> None:
    """There is nothing to carry out any more, or it was not asked for again."""
    _place(folder).unlink(missing_ok=True)


def set_newer_aside(folder: RunFolder, step: int) -> None:
    """Rename what is newer than a step, so that no restart takes it for the run's line."""
    for path in _newer(folder, step):
        target = folder.checkpoints / f"{GIVEN_UP}{path.name.lstrip('.')}"
        while target.exists():  # given up once before
            target = target.with_name(f"{target.name}-{secrets.token_hex(2)}")
        path.rename(target)
    if folder.checkpoints.exists():
        fsync_path(folder.checkpoints)


def refuse_to_lose(folder: RunFolder, found: FoundCheckpoint, durable: int) -> None:
    """A run does not go back behind a durable step without a word, nor behind the one that it was told to go back to.

    Raises:
        UserError: The newest usable checkpoint is older than that step.
    """
    if durable <= (found.step or 0):
        return
    name = folder_of(folder.checkpoints, durable).name
    why = next((why for path, why in found.skipped if path.name == name), "it is not there")
    problem = f"checkpoint {name} cannot be used: {why}"
    if found.path is None:
        raise UserError(f"{problem}; no other one is whole", "bring it back, or begin a new run (run.name=NEW)")
    raise UserError(
        f"{problem}; the newest whole one is {found.path.name}, and steps {(found.step or 0) + 1} to {durable} are "
        "durable",
        f"bring the file back, or give these steps up: slipstream resume {folder.path} --from {found.path.name}",
    )


def _usable(folder: RunFolder, named: str) -> int:
    from slipstream.learner.checkpoint.trainer_state import weights_only

    digits = named.removeprefix("step-")
    there = [path.name for _, path in sealed(folder.checkpoints)]
    mend = f"there are: {', '.join(there) or 'none'}"
    path = folder_of(folder.checkpoints, int(digits)) if digits.isdecimal() else folder.checkpoints / named
    if path.name not in there:
        raise UserError(f"--from {named}: {folder.path} has no such checkpoint", mend)
    if problems := verify(path):
        raise UserError(f"--from {named}: it is damaged: {problems[0]}", mend)
    if weights_only(path):
        raise UserError(
            f"--from {named}: it has weights and no optimizer (learner.checkpoint.keep_optimizer_last)", mend
        )
    return int(digits)


def _newer(folder: RunFolder, step: int) -> list[Path]:
    found = [] if not folder.checkpoints.exists() else list(folder.checkpoints.iterdir())
    return sorted(path for path in found if (step_of(path) or 0) > step)


def _place(folder: RunFolder) -> Path:
    return folder.path / "going-back.json"


def _write(folder: RunFolder, consent: Consent) -> None:
    partial = _place(folder).with_suffix(".partial")
    write_durably(partial, json.dumps(asdict(consent)).encode())
    partial.rename(_place(folder))
