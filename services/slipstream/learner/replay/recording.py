"""The record of a run (`run.record`): what each step was trained on, and a digest of the weights it led to.

One file a step, named by its step and its own digest, so that a step that is made again after a restart leaves the
lost one's file alone; `steps.jsonl` names the file that counts. With it `replay` can make the run again.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import torch
import xxhash
from torch import Tensor

from slipstream.config.rules import resolved
from slipstream.config.schema import Config
from slipstream.errors import UserError
from slipstream.protocol.messages import Group, GroupArrays, decode_group, encode_group
from slipstream.run.folder import RunFolder

SCHEMA = 1
ONE_CPU = "one rank on cpu"
Batch = Sequence[tuple[Group, GroupArrays]]


class Recorded(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One step: the version before it, versions lost by then, the terms of training, and the groups in order.

    `groups` holds the frames of each group as they travel; `terms` is `terms_digest` of the config, and `place`
    where the sums were made: elsewhere they are made in another order, and differ in the last bits.
    """

    step: int
    before: int
    lost: list[tuple[int, int]]
    terms: str
    groups: list[list[bytes]]
    place: str = ONE_CPU
    schema: int = SCHEMA

    def batch(self) -> list[tuple[Group, GroupArrays]]:
        """The groups as the trainer takes them."""
        return [decode_group(frames) for frames in self.groups]


def keep(
    folder: RunFolder,
    config: Config,
    step: int,
    before: int,
    lost: Sequence[tuple[int, int]],
    batch: Batch,
    weights: Mapping[str, Tensor],
    place: str = ONE_CPU,
) -> dict[str, str]:
    """Write the record of a step; returns the digests for its line: of the file and of the weights after it.

    Raises:
        OSError: The disk is full.
    """
    groups = [[bytes(frame) for frame in encode_group(group, arrays)] for group, arrays in batch]
    recorded = Recorded(
        step=step, before=before, lost=list(lost), terms=terms_digest(config), groups=groups, place=place
    )
    content = msgspec.msgpack.encode(recorded)
    digest = xxhash.xxh3_128_hexdigest(content)
    path = file_of(folder, step, digest)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(f".partial{secrets.token_hex(4)}")
    partial.write_bytes(content)
    partial.rename(path)
    return {"record": digest, "weights": weights_digest(weights)}


def sweep(folder: RunFolder) -> None:
    """Remove the halves of records that learners left which died while they wrote."""
    for left in (folder.path / "record").glob("*.partial*"):
        left.unlink(missing_ok=True)


def read(folder: RunFolder, step: int, digest: str) -> Recorded:
    """The record of a step.

    Raises:
        UserError: It is missing, was changed since, or is of another version; names the step.
    """
    path = file_of(folder, step, digest)
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UserError(f"step {step}: its record {path} cannot be read: {error.strerror}") from None
    if xxhash.xxh3_128_hexdigest(content) != digest:
        raise UserError(f"step {step}: its record {path} was changed after it was written")
    try:
        recorded = msgspec.msgpack.decode(content, type=Recorded)
    except msgspec.DecodeError as error:
        raise UserError(
            f"step {step}: its record {path} is of another version of slipstream: {error}"
        ) from None
    if (recorded.step, recorded.schema) != (step, SCHEMA):
        raise UserError(f"{path} holds step {recorded.step}, schema {recorded.schema}, not step {step}")
    return recorded


def file_of(folder: RunFolder, step: int, digest: str) -> Path:
    """Where the record of a step lies."""
    return folder.path / "record" / f"step-{step:08d}-{digest[:16]}.msgpack"


def weights_digest(tensors: Mapping[str, Tensor]) -> str:
    """Digest (xxh3_128) of names, types, shapes and every bit of the weights."""
    digest = xxhash.xxh3_128()
    for name in sorted(tensors):
        value = tensors[name].detach().to("cpu").contiguous()
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
        digest.update(value.reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def place_of(device: str, ranks: int) -> str:
    """Where the learner makes its sums."""
    return f"{'one rank' if ranks == 1 else f'{ranks} ranks'} on {device}"


def terms_digest(config: Config) -> str:
    """Digest of what decides the arithmetic of a step; a resume may change it in the middle of a run."""
    tree = resolved(config)
    learner = {name: value for name, value in tree["learner"].items() if name not in _NO_ARITHMETIC}
    terms = {
        "seed": config.run.seed,
        "steps": config.run.steps,  # the end of a schedule
        "temperature": config.sampling.temperature,
        "learner": learner,
        **{name: tree[name] for name in ("model", "staleness", "objective", "reward")},
    }
    return xxhash.xxh3_128_hexdigest(msgspec.json.encode(terms, order="sorted"))


_NO_ARITHMETIC = ("checkpoint", "take_timeout_seconds", "max_idle_batches")
