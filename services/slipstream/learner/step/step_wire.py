"""A step's arguments as frames, for the other ranks: messages as on any other wire, and never an object."""

from __future__ import annotations

import msgspec

from slipstream.learner.batch.micro_batches import Scored
from slipstream.protocol.messages import SCHEMA, decode_group, decode_header, encode_group, encode_header
from slipstream.staleness import Lost


class _Header(msgspec.Struct, forbid_unknown_fields=True):
    version: int
    lost: list[tuple[int, int]]
    frames: list[int]
    schema: int = SCHEMA


def pack_work(groups: Scored, version: int, lost: Lost) -> list[bytes | memoryview]:
    """The arguments of a step as frames."""
    encoded = [encode_group(group, arrays) for group, arrays in groups]
    header = _Header(version, [(low, high) for low, high in lost], [len(frames) for frames in encoded])
    return [encode_header(header), *[frame for frames in encoded for frame in frames]]


def unpack_work(frames: list[bytes]) -> tuple[Scored, int, Lost]:
    """What `pack_work` packed."""
    header = decode_header(frames[0], _Header)
    groups, at = [], 1
    for count in header.frames:
        groups.append(decode_group(frames[at : at + count]))
        at += count
    return groups, header.version, tuple(header.lost)
