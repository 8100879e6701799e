"""What rank 0 hands to the other ranks, and their loop: they do what it does, with the same inputs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from slipstream.learner.batch import Scored
from slipstream.messages import decode_group, encode_group
from slipstream.staleness import Lost

if TYPE_CHECKING:
    from slipstream.learner.trainer import Trainer

STOP = "stop"


class _Header(msgspec.Struct, forbid_unknown_fields=True):
    version: int
    lost: list[tuple[int, int]]
    frames: list[int]


def pack_work(groups: Scored, version: int, lost: Lost) -> list[bytes | memoryview]:
    """The arguments of a step as frames."""
    encoded = [encode_group(group, arrays) for group, arrays in groups]
    header = _Header(version, [(low, high) for low, high in lost], [len(frames) for frames in encoded])
    return [msgspec.msgpack.encode(header), *[frame for frames in encoded for frame in frames]]


def unpack_work(frames: list[bytes]) -> tuple[Scored, int, Lost]:
    """What `pack_work` packed."""
    header = msgspec.msgpack.decode(frames[0], type=_Header)
    groups, at = [], 1
    for count in header.frames:
        groups.append(decode_group(frames[at : at + count]))
        at += count
    return groups, header.version, tuple(header.lost)


def follow(trainer: Trainer, stopped: Callable[[], bool] = lambda: False) -> None:
    """Ranks other than 0: repeat what rank 0 does until it says stop.

    Args:
        trainer: This rank's part of the learner.
        stopped: Asked between two pieces of work; True ends the loop.
    """
    ranks = trainer.ranks
    while not stopped():
        work = ranks.called()
        if work == STOP:
            return
        if work == "step":
            trainer.step(*unpack_work(ranks.share(None)))
        elif work == "tensors":
            trainer.tensors()
        elif work == "save":
            trainer.save_writers()
        elif work == "load":
            trainer.load(Path(ranks.share(None)[0].decode()))
