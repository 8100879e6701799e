"""The reference model: frozen weights whose logprobs the KL is measured to. Sharded like the policy.

Where the policy trains adapters on the weights that the run began with, it is its own reference without them, and no
second model is loaded. Shapes: S samples of a micro-batch, T completion tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import torch
from torch import Tensor, nn

from slipstream.config.schema import Config
from slipstream.errors import UserError
from slipstream.learner.batch.micro_batches import MicroBatch
from slipstream.learner.checkpoint import trainer_state as state
from slipstream.learner.model.lora import without_adapters
from slipstream.learner.model.model import Policy
from slipstream.learner.model.precision import autocast_dtype, learner_model
from slipstream.learner.model.sharding import shard
from slipstream.learner.ranks.ranks import Ranks
from slipstream.learner.step.reference_source import ReferenceSource


class Reference:
    """Gives the logprobs of the reference.

    Attributes:
        shares: Whether samples may share tokens and rows in it.
    """

    def __init__(self, source: ReferenceSource, policy: Policy, config: Config, ranks: Ranks) -> None:
        """Load it, unless the policy has it.

        Args:
            source: Where from.
            policy: The model that is trained.
            config: The whole config.
            ranks: This process's place among those that load it together.

        Raises:
            UserError: It cannot be loaded, or dropout is live in the policy.
        """
        _refuse_live_dropout(policy.module)
        self._inside = policy.adapters is not None and source.own and source.start is None
        self._policy = policy if self._inside else _load(source, config, ranks)
        self._offload = config.learner.reference.offload and ranks.mesh is None and not self._inside
        self.shares = self._policy.shares
        if self._offload:
            self._policy.module.to("cpu")

    @contextmanager
    def ready(self) -> Iterator[None]:
        """The weights are where they are needed while the block runs."""
        if self._inside:
            with without_adapters(self._policy.module):
                yield
            return
        if self._offload:
            self._policy.module.to(self._policy.device)
        try:
            yield
        finally:
            if self._offload:
                self._policy.module.to("cpu")
            elif hasattr(self._policy.scorer, "reshard"):
                self._policy.scorer.reshard()  # of its own accord it waits for a backward pass, which never comes

    def logprobs(self, batch: MicroBatch, temperature: float) -> Tensor:
        """Logprobs [S, T] of the samples' actions."""
        return self._policy.logprobs(batch.to(self._policy.device), temperature)[0]


def _load(source: ReferenceSource, config: Config, ranks: Ranks) -> Policy:
    device = config.learner.device if ranks.mesh is None else str(ranks.device)
    lora = config.learner.lora if source.start is not None else None
    random = torch.get_rng_state()
    policy = Policy(source.folder, learner_model(config), device, lora, ranks.mesh is not None)
    policy.autocast = autocast_dtype(config.learner)
    torch.set_rng_state(random)  # adapters that were drawn for nothing must not change what the run draws
    policy.module.requires_grad_(False)
    if ranks.mesh is not None:
        offload = config.learner.reference.offload and ranks.device.type == "cuda"
        parallel = config.learner.parallel.model_copy(update={"cpu_offload": offload})
        settings = config.learner.model_copy(update={"parallel": parallel})
        shard(policy.scorer, policy.module, ranks.mesh, settings)
        if policy.lazy is not None:
            policy.probe()
    if source.start is not None:
        state.load_weights(SimpleNamespace(policy=policy), source.start)
    return policy


def _refuse_live_dropout(module: nn.Module) -> None:
    """With dropout the KL to the very same weights would not be 0."""
    for name, part in module.named_modules():
        if isinstance(part, nn.modules.dropout._DropoutNd) and part.p > 0 and part.training:
            raise UserError(
                f"learner.reference.source: {name} drops out a share of {part.p:g}, so the KL to the reference would "
                "be noise",
                "switch dropout off, or take the reference away (objective.kl_beta 0)",
            )
