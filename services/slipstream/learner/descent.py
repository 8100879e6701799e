"""Where the learner takes up the run: from the newest complete checkpoint, or from the model it starts with.

Version and step are two counts. Steps are those of the line of descent, so they go back to the checkpoint's;
versions only grow: when steps were lost, the restored weights are published under a new version, and tokens keep
their labels. Ages count updates and not labels (`staleness.age`), so the groups of the lost steps train again as they
did, and tokens of lost versions have their true distance from the line.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from slipstream.errors import UserError
from slipstream.learner.checkpoint.finding import newest_complete, prune, thin
from slipstream.learner.checkpoint.going_back import (
    Consent,
    consented,
    note_version,
    refuse_to_lose,
    set_newer_aside,
    withdraw,
)
from slipstream.learner.checkpoint.identity import ACCEPTED, IDENTITY, refuse_changed, tell_accepted
from slipstream.learner.checkpoint.lora_checkpoint import adapter_files, check_adapters
from slipstream.learner.checkpoint.start import start_checkpoint
from slipstream.learner.checkpoint.trainer_state import OPTIMIZER_FILES, weights_only
from slipstream.learner.checkpoint.writing import Writer, write
from slipstream.learner.parts import Parts, run_terms
from slipstream.learner.replay import recording
from slipstream.ledger.records import LedgerLost, RunNotOpen
from slipstream.lifecycle.release import refuse_another
from slipstream.prompts.build import STREAM, stream_state
from slipstream.run.folder import read_lines

log = logging.getLogger("slipstream.learner")
LINE, LEDGER = "line.json", "ledger.msgpack"
Writers = dict[str, Writer]


@dataclass(frozen=True, slots=True)
class Line:
    """The learner's place: steps committed in the line of descent, the version of its weights, and which versions
    restarts took out of the line (inclusive ranges)."""

    step: int = 0
    version: int = 0
    lost: tuple[tuple[int, int], ...] = ()


async def reopen(parts: Parts) -> Line:
    """Open the run and settle ledger, weights and version on one place.

    Raises:
        UserError: The run in the ledger or in the checkpoint is another one (`identity`) or of another build, the
            checkpoint is of another model, it is older than what the ledger holds as durable and nobody consents to
            go back, or the ledger is empty and there is nothing to restore it from.
    """
    with contextlib.suppress(RunNotOpen):
        opened = (await parts.ledger.state()).terms.release
        refuse_another(parts.config.run.name or "", opened, parts.config.run.accept)
    with contextlib.suppress(RunNotOpen):  # from here on nobody else commits, or makes a checkpoint durable
        await parts.ledger.claim_learner(parts.learner)
    await asyncio.to_thread(recording.sweep, parts.folder)
    consent = await _going_back(parts)
    found = await _find(parts, consent)
    line, snapshot = Line(), None
    if found is not None:
        line, snapshot = await _continue(parts, found)
    elif (source := parts.config.learner.start_from) is not None:
        start = await asyncio.to_thread(start_checkpoint, source)
        await asyncio.to_thread(check_adapters, parts.trainer.policy, start)
        await asyncio.to_thread(parts.trainer.load_weights, start)
        log.info("beginning with the weights of %s", start)
    told = max((each["version"] for each in read_lines(parts.folder.steps)), default=0)
    if consent is not None and snapshot is not None and not await _empty(parts):
        told = max(told, consent.version)
        await parts.ledger.restore(snapshot, back=consent.token)
    await _open(parts, line, snapshot, told)
    await parts.ledger.claim_learner(parts.learner)
    state = await parts.ledger.rollback(line.step, line.version, parts.learner, told)
    withdraw(parts.folder)
    lost = tuple(state.lost_versions)
    if state.version == line.version or lost[-1:] == ((line.version + 1, state.version - 1),):
        return Line(line.step, state.version, lost)  # these very weights have that version already
    renewed = Line(line.step, state.version + 1, lost)
    log.info(
        "versions %d to %d are lost: these weights become %d", line.version + 1, state.version, renewed.version
    )
    await parts.ledger.advance_version(renewed.version, parts.learner)
    return renewed


async def _find(parts: Parts, consent: Consent | None) -> Path | None:
    """The checkpoint to continue from, None for a run that begins."""
    makers = await parts.ledger.makers()
    found = await asyncio.to_thread(
        newest_complete, parts.folder.checkpoints, lambda path: _unwanted(path, makers)
    )
    for path, why in found.skipped:
        log.warning("checkpoint %s skipped: %s", path.name, why)
    if found.path is None:
        _refuse_to_begin_anew([path for path, _ in found.skipped if weights_only(path)])
    refuse_to_lose(parts.folder, found, await _durable_step(parts) if consent is None else consent.step)
    return found.path


async def _continue(parts: Parts, checkpoint: Path) -> tuple[Line, bytes]:
    """Load a checkpoint; returns its place and its copy of the ledger."""
    parts.identity[ACCEPTED] = refuse_changed(checkpoint, parts.identity, parts.config.run.accept)
    await asyncio.to_thread(check_adapters, parts.trainer.policy, checkpoint)
    await asyncio.to_thread(parts.trainer.load, checkpoint)
    line, snapshot = _read(checkpoint)
    tell_accepted(parts.identity[ACCEPTED], line.step)
    log.info("continuing from %s (version %d)", checkpoint.name, line.version)
    return line, snapshot


async def _open(parts: Parts, line: Line, snapshot: bytes | None, told: int) -> None:
    terms = run_terms(parts)
    if snapshot is None and told and await _empty(parts):
        raise UserError(
            f"redis.url: the ledger of run {parts.config.run.name} is empty, but the run has reached version {told} "
            "and has no checkpoint from which its ledger could be restored",
            "give the server its data back, or start a new run under another run.name",
        )
    try:
        await parts.ledger.open_run(terms, expect_version=line.version)
    except LedgerLost as error:
        if snapshot is None:
            raise
        log.warning("%s: restoring the ledger from the checkpoint", error)
        await parts.ledger.restore(snapshot)
        await parts.ledger.open_run(terms, expect_version=line.version)


async def _going_back(parts: Parts) -> Consent | None:
    """The consent to go back, if there is one; the newer checkpoints are out of the way then."""
    consent = consented(parts.folder)
    if consent is None:
        return None
    log.warning("going back to step %d: all after it is given up", consent.step)
    if not await _empty(parts):
        consent = note_version(parts.folder, consent, (await parts.ledger.state()).version)
    await asyncio.to_thread(set_newer_aside, parts.folder, consent.step)
    return consent


async def _durable_step(parts: Parts) -> int:
    return 0 if await _empty(parts) else (await parts.ledger.state()).durable_step


async def _empty(parts: Parts) -> bool:
    try:
        await parts.ledger.state()
    except RunNotOpen:
        return True
    return False


def checkpoint_writers(parts: Parts, line: Line, snapshot: bytes) -> Writers:
    """What the checkpoint of a line holds, by file name: copies, so that training may go on meanwhile."""
    place = {"step": line.step, "version": line.version, "learner": parts.learner}
    stream = stream_state(parts.config, parts.prompts, line.step)
    return parts.trainer.save_writers() | {
        LINE: lambda path: _write(path, json.dumps(place).encode()),
        IDENTITY: lambda path: _write(path, json.dumps(parts.identity, indent=1).encode()),
        LEDGER: lambda path: _write(path, snapshot),
        **adapter_files(parts.trainer.policy, parts.config.model.source),
        **({} if stream is None else {STREAM: lambda path: _write(path, stream)}),
    }


def write_checkpoint(
    parts: Parts, step: int, writers: Writers, confirm: Callable[[], None] = lambda: None
) -> None:
    """Write a checkpoint and prune the older ones; returns once it is durable. `confirm` is asked last."""
    keep = parts.config.learner.checkpoint
    write(parts.folder.checkpoints, step, writers, confirm=confirm)
    uploading = parts.uploader.busy if parts.uploader else None
    prune(parts.folder.checkpoints, keep.keep_last, keep.keep_every or 0, uploading)
    if keep.keep_optimizer_last is not None:
        thin(parts.folder.checkpoints, keep.keep_optimizer_last, OPTIMIZER_FILES, uploading)


def _refuse_to_begin_anew(thinned: list[Path]) -> None:
    """A run whose last whole checkpoint is gone does not start over beside the weights that are left of it."""
    if thinned:
        raise UserError(
            f"the run has no checkpoint left to go on from: {thinned[0].name} and older ones have weights and no "
            "optimizer (learner.checkpoint.keep_optimizer_last)",
            f"bring a newer one back, or begin a new run: run.name=NEW learner.start_from={thinned[0]}",
        )


def _unwanted(path: Path, makers: Mapping[int, str]) -> str:
    """Why an exact resume cannot begin here: its optimizer is gone, or it is not of this run's line; a learner that
    was stopped while another one took the run over may wake and finish its save."""
    if weights_only(path):
        return "has weights and no optimizer (learner.checkpoint.keep_optimizer_last)"
    place = json.loads((path / LINE).read_text(encoding="utf-8"))
    maker, writer = makers.get(place["step"], ""), place.get("learner", "")
    given_up = maker and writer and maker != writer
    return f"is of learner {writer}, whose step was given up for that of {maker}" if given_up else ""


def _write(path: Path, content: bytes) -> None:
    path.write_bytes(content)


def _read(folder: Path) -> tuple[Line, bytes]:
    place = json.loads((folder / LINE).read_text(encoding="utf-8"))
    return Line(place["step"], place["version"]), (folder / LEDGER).read_bytes()
