"""The rows that a run began with, kept in its folder: a source may grow under a run, and a row that changed is named.

16 bytes a row: its number and eight bytes of its digest. Only a learner reads and writes them; what it finds goes to
the others by the ledger (`RunTerms.source_rows`).
"""

from __future__ import annotations

import json
import logging
import os
from array import array
from pathlib import Path

from slipstream.config.schema import Config
from slipstream.errors import UserError
from slipstream.prompts.build import build_prompts
from slipstream.prompts.sets import PromptSet
from slipstream.run.folder import RunFolder
from slipstream.run.tokens import Tokenizer

log = logging.getLogger("slipstream.learner")
KNOWN = "data.rows"


class KnownRows:
    """What the file says: the fingerprint of the set, how many rows its source had, and a digest of each."""

    def __init__(self, fingerprint: str, source_rows: int, digests: dict[int, bytes]) -> None:
        self.fingerprint = fingerprint
        self.source_rows = source_rows
        self.digests = digests

    @classmethod
    def read(cls, path: Path) -> KnownRows | None:
        """None where there is no such file, or none that makes sense: it only helps to say more."""
        try:
            head, _, body = path.read_bytes().partition(b"\n")
            told = json.loads(head)
            rows = array("Q")
            rows.frombytes(body[: 8 * told["kept"]])
            digests = [body[at : at + 8] for at in range(8 * told["kept"], 16 * told["kept"], 8)]
            known = dict(zip(rows, digests, strict=True))
            return cls(str(told["fingerprint"]), int(told["source_rows"]), known)
        except (OSError, ValueError, KeyError, TypeError):
            return None

    @staticmethod
    def write(path: Path, prompts: PromptSet) -> None:
        """Keep those of a set."""
        digests = prompts.digests()
        told = {
            "fingerprint": prompts.fingerprint,
            "source_rows": prompts.source_rows,
            "kept": len(digests),
        }
        aside = path.with_name(f"{path.name}.new")
        with aside.open("wb") as file:
            file.write(json.dumps(told).encode() + b"\n")
            file.write(array("Q", digests).tobytes() + b"".join(digests.values()))
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)

    def first_difference(self, prompts: PromptSet) -> int | None:
        """Number of the first row of the source that was another, came, or went; rows beyond those of before do not
        count."""
        now = {row: each for row, each in prompts.digests().items() if row < self.source_rows}
        differing = (row for row in now.keys() | self.digests.keys() if now.get(row) != self.digests.get(row))
        return min(differing, default=None)


def prompts_of_run(config: Config, tokenizer: Tokenizer, model: Path) -> tuple[PromptSet, dict[str, PromptSet]]:
    """The prompts of a run, be it new or one that goes on: rows that its source got since it began are left out.

    Raises:
        UserError: As `build_prompts`; or a row of the run is not what it was, and the run has a checkpoint.
    """
    made = prompts, _ = build_prompts(config, tokenizer, model)
    folder = RunFolder.of(config)
    known = KnownRows.read(folder.path / KNOWN)
    if config.data.stream or (known is not None and known.fingerprint == prompts.fingerprint):
        return made
    begun = any(folder.checkpoints.glob("step-*"))
    if known is not None and 0 < known.source_rows < prompts.source_rows:
        before = build_prompts(config, tokenizer, model, known.source_rows)
        if before[0].fingerprint == known.fingerprint:
            log.warning(
                "data: %d rows were added since the run began with %d: they are left out of it",
                prompts.source_rows - known.source_rows,
                known.source_rows,
            )
            return before
        prompts = before[0]
    if not begun:
        folder.path.mkdir(parents=True, exist_ok=True)
        KnownRows.write(folder.path / KNOWN, made[0])
    elif known is not None and (row := known.first_difference(prompts)) is not None:
        label = f"row {row + 1}" if row >= prompts.source_rows else prompts.label(row)
        raise UserError(
            f"data: the run cannot go on: {label} is not the row that it was",
            "put it back; or begin a new run with these weights: run.name=NEW "
            f"learner.start_from={folder.path}",
        )
    return made
