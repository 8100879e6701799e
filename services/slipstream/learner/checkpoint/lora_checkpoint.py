"""What a checkpoint of adapters says of itself (`adapter.json`): their form, and the base that they belong to.

Such a checkpoint holds adapters and their moments only. The base is named by the digest of its content, so that
adapters never go on, or into a model, on other weights than those they were trained on.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipstream.errors import UserError
from slipstream.learner.checkpoint.writing import Writer

if TYPE_CHECKING:
    from slipstream.learner.model.model import Policy

FILE = "adapter.json"


def adapter_files(policy: Policy, source: str) -> dict[str, Writer]:
    """The writer of a checkpoint's `adapter.json`; none where whole weights are trained.

    Args:
        policy: The policy.
        source: `model.source`, for whoever reads it.
    """
    if policy.adapters is None:
        return {}
    adapters = policy.adapters
    content = {
        "rank": adapters.rank,
        "alpha": adapters.alpha,
        "rslora": adapters.rslora,
        "scale": adapters.scale,
        "layers": list(adapters.layers),
        "base": {"source": source, "digest": policy.base_digest, "tensors": list(policy.base_tensors())},
    }
    return {FILE: lambda path: _write(path, json.dumps(content, indent=2) + "\n")}


def read_adapter(checkpoint: Path) -> dict[str, Any] | None:
    """A checkpoint's `adapter.json`; None where it holds whole weights.

    Raises:
        UserError: It cannot be read.
    """
    path = checkpoint / FILE
    if not path.exists():
        return None
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {error}", "take another checkpoint") from error
    return content


def check_adapters(policy: Policy, checkpoint: Path) -> None:
    """See that a checkpoint and the policy that takes it over train the same: all weights, or these adapters.

    Raises:
        UserError: They do not; names what differs.
    """
    saved, own = read_adapter(checkpoint), policy.adapters
    if saved is None and own is None:
        return
    if saved is None:
        raise UserError(
            f"learner.lora.rank is {own.rank if own else None}, but {checkpoint} holds whole weights",
            "set it to null; or `slipstream export` them, and begin a new run with that folder as model.source",
        )
    if own is None or (own.rank, list(own.layers)) != (saved["rank"], saved["layers"]):
        ours = "null" if own is None else f"{own.rank} on {len(own.layers)} layers"
        raise UserError(
            f"learner.lora.rank is {ours}, but {checkpoint} holds adapters of rank {saved['rank']} on "
            f"{len(saved['layers'])} layers",
            "set learner.lora as it was; or `slipstream export` it, and begin a new run with model.source=FOLDER",
        )
    if own.scale != saved["scale"]:
        raise UserError(
            f"learner.lora.alpha {own.alpha:g} (rslora {str(own.rslora).lower()}) is a scale of {own.scale:g}, but "
            f"the adapters in {checkpoint} have {saved['scale']:g} (alpha {saved['alpha']:g}, rslora "
            f"{str(saved['rslora']).lower()})",
            "set learner.lora as it was",
        )
    if policy.base_digest != saved["base"]["digest"]:
        raise UserError(
            f"model.source: {policy.folder} has content {policy.base_digest}, but the adapters in {checkpoint} "
            f"belong to {saved['base']['digest']} ({saved['base']['source']})",
            "set model.source to the weights that they were trained on",
        )


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
