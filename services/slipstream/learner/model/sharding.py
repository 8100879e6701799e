"""FSDP2 for the policy, and whole tensors from its shards.

Gradients of ranks are *summed*: the objective's denominators are those of the global batch already. A learner of one
rank imports none of torch.distributed, which takes seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from torch import Tensor, nn

from slipstream.config.sections.services_config import LearnerSection
from slipstream.errors import UserError
from slipstream.learner.model.precision import shard_dtypes

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def shard(root: nn.Module, model: nn.Module, mesh: DeviceMesh, settings: LearnerSection) -> None:
    """Shard the model block by block over the mesh's second dimension, replicated over its first.

    Args:
        root: The module whose forward pass makes the logprobs; it owns embeddings, final norm and head. Its `fill`
            reads the weights of each part before that is sharded, if it has one.
        model: The transformers model inside it.
        mesh: (replicate, shard).
        settings: Precision and offloading.

    Raises:
        UserError: The model names no blocks to shard by.
    """
    from torch.distributed.fsdp import (
        CPUOffloadPolicy,
        FSDPModule,
        MixedPrecisionPolicy,
        OffloadPolicy,
        fully_shard,
    )

    over = mesh if mesh.size(0) > 1 else mesh["shard"]
    precision = MixedPrecisionPolicy(*shard_dtypes(settings))
    offload = CPUOffloadPolicy() if settings.parallel.cpu_offload else OffloadPolicy()
    fill: Callable[[nn.Module], None] = getattr(root, "fill", lambda part: None)
    for block in blocks(model):
        fill(block)  # one block at a time is whole
        fully_shard(block, mesh=over, mp_policy=precision, offload_policy=offload)
    fill(root)
    fully_shard(root, mesh=over, mp_policy=precision, offload_policy=offload)
    for part in root.modules():
        if isinstance(part, FSDPModule):
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)


def blocks(model: nn.Module) -> list[nn.Module]:
    """The model's decoder blocks, as transformers names them.

    Raises:
        UserError: It names none.
    """
    names = set(getattr(model, "_no_split_modules", None) or ())
    found = [part for part in model.modules() if type(part).__name__ in names]
    if not found:
        raise UserError(
            f"model {type(model).__name__} names no blocks that could be sharded",
            "train it on one rank (learner.parallel.ranks: 1)",
        )
    return found


def reshard(root: nn.Module) -> None:
    """Back to this rank's shards alone, also after a forward pass that no backward pass followed: until then a module
    names whole parameters, whose memory is gone at the next turn. Nothing happens where nothing is sharded."""
    if not hasattr(root, "reshard"):
        return
    from torch.distributed.fsdp import FSDPModule

    for part in root.modules():
        if isinstance(part, FSDPModule):
            part.reshard()


def is_sharded(value: Tensor) -> bool:
    """Whether this is one rank's part of a tensor."""
    return hasattr(value, "full_tensor")


def whole(value: Tensor) -> Tensor:
    """The tensor itself, or the whole of a sharded one; the latter is common work of all ranks."""
    full: Tensor = value.full_tensor() if is_sharded(value) else value  # type: ignore[operator]
    return full


def whole_on_host(tensors: Mapping[str, Tensor], keep: bool) -> Iterator[tuple[str, Tensor]]:
    """Whole tensors one by one in host memory, so that no device ever holds a second model.

    Args:
        tensors: By name, in the same order on every rank.
        keep: Whether this rank wants them; the others take part and get nothing.
    """
    for name, value in tensors.items():
        gathered = whole(value.detach())
        if keep:
            yield name, gathered.cpu()
