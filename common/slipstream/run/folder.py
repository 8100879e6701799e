"""A run's folder: what lies where, who holds it, and what each attempt at it was made of."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import re
import struct
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from slipstream.config.local_paths import absolute
from slipstream.config.rules import resolved
from slipstream.config.schema import Config
from slipstream.errors import UserError
from slipstream.run.json_line import json_line
from slipstream.run.privacy import close_to_others

# `struct flock`: a write lock on the whole file, owned by the open file and not by the process, as flock's are
_LOCK = struct.Struct("hhqqi0q")
_WHOLE_FILE = _LOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")


def check_name(setting: str, name: str) -> None:
    """Names become parts of paths and keys, so they hold no separators.

    Raises:
        UserError: Names the setting and the name.
    """
    if not _NAME.fullmatch(name):
        mend = "use up to 63 letters, digits, dots, dashes and underscores"
        raise UserError(f"{setting} {name!r} cannot be part of a path", mend)


class Before(NamedTuple):
    """What a run's folder held before an attempt: the recorded config, None without one, and bytes of steps."""

    config: str | None
    steps: int


class RunFolder:
    """Paths of one run; nothing else spells them out. `held_here` says whether this very object holds it."""

    def __init__(self, root: str | Path, name: str) -> None:
        check_name("run.name", name)
        self.name = name
        self.path = Path(root) / name
        self.held_here = False

    @classmethod
    def of(cls, config: Config) -> RunFolder:
        """The folder that a resolved config names.

        Raises:
            UserError: The config has no run.name.
        """
        if config.run.name is None:
            raise UserError(
                "run.name is not set", "a role that starts by itself must know its run; set run.name"
            )
        return cls(config.run.root, config.run.name)

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def redis(self) -> Path:
        return self.path / "redis"

    @property
    def keys(self) -> Path:
        """The folder of the CURVE key that `up` makes for its own processes."""
        return self.path / "keys"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def config(self) -> Path:
        """The resolved config of the newest attempt."""
        return self.path / "config.yaml"

    @property
    def steps(self) -> Path:
        """One JSON line per optimizer step."""
        return self.path / "steps.jsonl"

    @property
    def evaluations(self) -> Path:
        """One JSON line per finished evaluation."""
        return self.path / "evaluations.jsonl"

    @property
    def evaluations_asked(self) -> Path:
        return self.path / "evaluations-asked.jsonl"

    @property
    def warnings(self) -> Path:
        """One JSON line for each stretch in which the run learned nothing, and one for the end of it."""
        return self.path / "warnings.jsonl"

    @property
    def samples(self) -> Path:
        """Samples of the steps, one JSON line a step, thinned out to a bound."""
        return self.path / "samples.jsonl"

    @property
    def dropped(self) -> Path:
        """Groups that were dropped and why, one JSON line each, a few of many."""
        return self.path / "dropped.jsonl"

    def poison(self, process: str) -> Path:
        """Groups that could not be trained on, one JSON line each, as a process met them."""
        return self.path / "poison" / f"{process}.jsonl"

    @property
    def trials(self) -> Path:
        """What the learner is training on, and which groups were there when one died."""
        return self.path / "poison" / "trials.json"

    def buffer(self, shard: int) -> Path:
        """The store of one buffer shard."""
        return self.path / "buffer" / f"shard-{shard}.sqlite"

    def create(self) -> None:
        """Make the folders.

        Raises:
            UserError: The disk refuses.
        """
        try:
            for name in ("checkpoints", "redis", "logs", "buffer", "poison", "attempts"):
                (self.path / name).mkdir(parents=True, exist_ok=True)
            close_to_others(self.path)
            (self.path / ".lock").open("a").close()  # a folder that was there may refuse it
        except OSError as error:
            raise UserError(
                f"run.root: {self.path} cannot be written ({error.strerror})", "choose a writable folder"
            ) from None

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold the run for this process; the lock goes with the process, however it ends.

        Raises:
            UserError: Another process holds it.
        """
        with (self.path / ".lock").open("w") as lock:
            try:
                fcntl.fcntl(lock, fcntl.F_OFD_SETLK, _WHOLE_FILE)
            except OSError:
                mend = "stop the other `slipstream up` first, or let the `slipstream audit` end"
                raise UserError(f"run {self.path} is in use", mend) from None
            self.held_here = True
            try:
                yield
            finally:
                self.held_here = False

    @property
    def in_use(self) -> bool:
        """Whether a process holds the run; asking takes nothing."""
        try:
            with (self.path / ".lock").open("rb+") as lock:
                found = fcntl.fcntl(lock, fcntl.F_OFD_GETLK, _WHOLE_FILE)
        except FileNotFoundError:
            return False
        return bool(_LOCK.unpack(found)[0] != fcntl.F_UNLCK)

    @property
    def held_elsewhere(self) -> bool:
        """Whether somebody else holds the run, which for a run that `up` started means that it goes on."""
        return self.in_use and not self.held_here

    def announce(self, url: str) -> None:
        """Note where the embedded ledger of this attempt is; meaningful only while the run is held."""
        (self.path / ".ledger").write_text(url, encoding="utf-8")

    @property
    def live_url(self) -> str | None:
        """Where the embedded ledger is, if somebody holds the run right now."""
        note = self.path / ".ledger"
        return note.read_text(encoding="utf-8") if self.in_use and note.exists() else None

    def record_attempt(self, config: Config, provenance: dict[str, Any]) -> Before:
        """Write the resolved config and the provenance of this attempt; both hold no secrets.

        Returns:
            What to `take_back` if the attempt is refused.
        """
        before = Before(
            self.config.read_text(encoding="utf-8") if self.config.exists() else None, self._step_bytes()
        )
        text = yaml.safe_dump(absolute(resolved(config)), sort_keys=False, allow_unicode=True)
        folder = self.path / "attempts" / f"{len(list((self.path / 'attempts').iterdir())):03d}"
        folder.mkdir()
        (folder / "config.yaml").write_text(text, encoding="utf-8")
        (folder / "provenance.json").write_text(json.dumps(provenance, indent=2), encoding="utf-8")
        self._write_config(text)
        return before

    def take_back(self, before: Before) -> None:
        """After an attempt that was refused: unless it made a step, the config that counts is the one before it."""
        if before.config is not None and self._step_bytes() == before.steps:
            self._write_config(before.config)

    @property
    def newest_attempt(self) -> Path:
        """The folder of the newest attempt; that of all attempts where there was none."""
        attempts = self.path / "attempts"
        found = attempts.iterdir() if attempts.is_dir() else iter(())
        return max(found, key=lambda path: (len(path.name), path.name), default=attempts)

    def _step_bytes(self) -> int:
        return self.steps.stat().st_size if self.steps.exists() else 0

    def _write_config(self, text: str) -> None:
        partial = self.config.with_suffix(".partial")
        partial.write_text(text, encoding="utf-8")
        partial.rename(self.config)


def append_line(path: Path, record: dict[str, Any]) -> None:
    """Append one JSON line in a single write, so that a reader never sees half of it interleaved.

    A line that a crash tore off before is ended first: it stays one broken line and spoils no other. A number that is
    not finite is written as null.

    Raises:
        OSError: The disk is full; the torn line is left for the next call to end.
    """
    text = json_line(record, path.name) + "\n"
    line = text.encode("utf-8", "backslashreplace")  # a lone surrogate becomes JSON's own escape
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
    try:
        if not _ends_whole(descriptor):
            line = b"\n" + line
        if os.write(descriptor, line) < len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
    finally:
        os.close(descriptor)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a JSON-lines file; those that a crash tore off, the last one or earlier, are left out."""
    if not path.exists():
        return []
    records = []
    for line in path.read_bytes().split(b"\n")[:-1]:
        with suppress(ValueError):  # no UTF-8 or no JSON
            records.append(json.loads(line))
    return records


def line_of_descent(steps: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The steps that count, of all lines of a run's `steps.jsonl`.

    One that was made again after a restart replaces the lost one and all after it. A learner that was stopped while
    another took the run over may wake and append what it had committed before: that was undone, and is left out.
    """
    kept: list[dict[str, Any]] = []
    newest, replaced = "", set()
    for step in steps:
        learner = step.get("learner", "")
        if learner in replaced:
            continue
        if learner != newest:
            replaced.add(newest)
            newest = learner
        while kept and kept[-1]["step"] >= step["step"]:
            kept.pop()
        kept.append(step)
    return kept


def _ends_whole(descriptor: int) -> bool:
    size = os.fstat(descriptor).st_size
    return size == 0 or os.pread(descriptor, 1, size - 1) == b"\n"


def new_name(stem: str) -> str:
    """A name for a new run: the config's stem, the time, and a few digits so that two never collide."""
    clean = re.sub(r"[^A-Za-z0-9._-]+", "-", stem).strip("-._") or "run"
    salt = hashlib.blake2b(f"{os.getpid()}:{time.time_ns()}".encode(), digest_size=2).hexdigest()
    return f"{clean[:36]}-{time.strftime('%Y%m%d-%H%M%S')}-{salt}"
