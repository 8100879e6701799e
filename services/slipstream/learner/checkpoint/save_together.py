"""A checkpoint that all ranks write together: each its own files, all into the folder that rank 0 seals.

Nothing is gathered. A save is common work only while each rank copies its part; then rank 0's thread names the folder
in torchrun's store, the others' threads write into it, and answer there with size and digest of each file or with
what went wrong. So training goes on meanwhile, and a folder has its manifest only when all ranks' files are on disk.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from slipstream.errors import RunHalted, SlipstreamError, TransportTimeout
from slipstream.learner.checkpoint.checkpoint_files import FileEntry, digest_file, fsync_path
from slipstream.learner.ranks.ranks import Ranks

_POLL_S = 0.02
_FOLDER_SECONDS = 60.0  # a network file system may show a new folder late
Writer = Callable[[Path], object]
Writers = Mapping[str, Writer]


class _Answer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a rank wrote, or why it did not."""

    files: dict[str, FileEntry] = {}
    error: str = ""
    halted: bool = False


class CommonSave:
    """Rank 0's side of one save."""

    def __init__(self, ranks: Ranks, number: int, seconds: float) -> None:
        """Args:
        ranks: This process's place.
        number: The save's, counted alike on every rank.
        seconds: Deadline for a rank's answer.
        """
        self._ranks = ranks
        self._key = f"save/{number}"
        self._seconds = seconds
        self._begun = False
        self._answers: dict[int, _Answer] = {}

    def own(self, writer: Writer) -> Writer:
        """A writer of rank 0's own file, which has the others begin as well."""

        def write(path: Path) -> object:
            self._begin(path.parent)
            return writer(path)

        return write

    def of(self, rank: int) -> Writer:
        """The writer of another rank's file: waits until that rank has written it.

        Raises (when called):
            RunHalted: A number there is not finite.
            SlipstreamError: It failed, or does not answer.
        """

        def write(path: Path) -> FileEntry:
            self._begin(path.parent)
            answer = self._answer(rank)
            if answer.halted:
                raise RunHalted(answer.error)
            if answer.error:
                raise SlipstreamError(f"rank {rank} could not write its part of a checkpoint: {answer.error}")
            return answer.files[path.name]

        return write

    def _begin(self, folder: Path) -> None:
        if not self._begun:
            self._begun = True
            self._ranks.note(self._key, str(folder.absolute()).encode())

    def _answer(self, rank: int) -> _Answer:
        if rank not in self._answers:
            key, deadline = f"{self._key}/{rank}", time.monotonic() + self._seconds
            while (content := self._ranks.noted(key)) is None:
                if time.monotonic() > deadline:
                    raise TransportTimeout(
                        f"rank {rank} has not written its part of a checkpoint in {self._seconds:.0f} s "
                        "(learner.parallel.timeout_seconds)"
                    )
                time.sleep(_POLL_S)
            self._ranks.forget(key)
            self._answers[rank] = msgspec.msgpack.decode(content, type=_Answer)
        return self._answers[rank]


class PartSave:
    """The side of a rank other than 0: a thread that writes this rank's files once the folder is named."""

    def __init__(self, ranks: Ranks, number: int, writers: Writers) -> None:
        self._ranks = ranks
        self._key = f"save/{number}"
        self._dropped = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(writers,), name="checkpoint", daemon=True)
        self._thread.start()

    def drop(self, seconds: float) -> None:
        """Give up a save that nobody has asked for, or wait so long for one that is being written."""
        self._dropped.set()
        self._thread.join(seconds)

    def _run(self, writers: Writers) -> None:
        try:
            while (folder := self._ranks.noted(self._key)) is None:
                if self._dropped.wait(_POLL_S):
                    return
            answer = _written(Path(folder.decode()), writers)
            self._ranks.note(f"{self._key}/{self._ranks.rank}", msgspec.msgpack.encode(answer))
        except RuntimeError:  # the store is gone, and the run with it
            return


def _written(folder: Path, writers: Writers) -> _Answer:
    """Write and make durable; every failure is an answer, for rank 0 is who can end the run."""
    try:
        _await(folder)
        files = {}
        for name, writer in writers.items():
            writer(folder / name)
            fsync_path(folder / name)
            files[name] = digest_file(folder / name)
        return _Answer(files)
    except RunHalted as error:
        return _Answer(error=str(error), halted=True)
    except Exception as error:  # noqa: BLE001
        return _Answer(error=f"{type(error).__name__}: {error}")


def _await(folder: Path) -> None:
    deadline = time.monotonic() + _FOLDER_SECONDS
    while not folder.is_dir():
        if time.monotonic() > deadline:
            raise SlipstreamError(f"it does not see {folder}; run.root must lie where every rank sees it")
        time.sleep(_POLL_S)
