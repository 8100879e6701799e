"""The policy: any causal language model that transformers loads, as a trunk and a head.

The trunk gives hidden states; the head's weight goes to the fused logprobs, so that logits exist only for the
tokens that need them. Shapes: R rows, L tokens, D hidden, V vocabulary.
"""

from __future__ import annotations

import logging
import math
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from slipstream.config.data import ModelSection
from slipstream.config.lora import LoraSection
from slipstream.errors import UserError
from slipstream.learner.batch import MicroBatch
from slipstream.learner.embedding import embed
from slipstream.learner.lora import adapter_tensors, add_adapters, plain_name, without_dropout
from slipstream.learner.lora_targets import check_names, check_targets
from slipstream.learner.scorer import Scorer
from slipstream.learner.sharding import reshard
from slipstream.models.tensors import content_digest, read_tensors

_LOG = logging.getLogger("slipstream.learner")
# A query-key pair costs more than its share of arithmetic: softmax and masks, not only matrix products.
_PAIR_OVERHEAD = 2.0
_PROBE_TOLERANCE = 1e-3


class Policy:
    """A causal language model in training mode without dropout.

    Attributes:
        module: The transformers model.
        folder: Where it came from.
        device: Where it lives.
        shares: Whether it takes an attention mask, so that samples may share tokens and rows.
        pair_cost: Cost of a query-key pair relative to a token's cost in the rest of the model.
        adapters: What is trained instead of the weights, if anything is.
        autocast: Dtype in which torch may compute what it thinks fit of the trunk; the head stays in the weights'.
    """

    def __init__(
        self, folder: Path, settings: ModelSection, device: str = "auto", lora: LoraSection | None = None
    ) -> None:
        """Load from a Hugging Face folder.

        Raises:
            UserError: No such device, a folder that transformers cannot load, a head that is more than a
                matrix product, or targets of `lora` that the model has not.
        """
        self.folder = folder
        self.autocast: torch.dtype | None = None
        lora = lora or LoraSection()
        check_targets(folder, lora)
        self.device = pick_device(device)
        self.module = _load(folder, settings).to(self.device)
        _switch_off_dropout_modules(self.module)
        self.adapters = add_adapters(self.module, lora)
        self.scorer = Scorer(self)
        if self.adapters is not None:
            check_names(folder, self.base_tensors())
        self.module.train()
        self._embedding = self.module.get_input_embeddings()
        # The embedding's gradient must not skip an id because the tokenizer also pads with it.
        self._embedding.padding_idx = None
        self.pair_cost = _pair_cost(self.module)
        _check_head(self)
        self.shares = settings.attention in ("sdpa", "eager") and _takes_mask(self)

    @property
    def head_weight(self) -> nn.Parameter:
        """The output projection [V, D]; the embedding itself where both are tied."""
        weight: nn.Parameter = self.module.get_output_embeddings().weight
        return weight

    @property
    def tied(self) -> bool:
        """Whether embedding and head are one tensor."""
        return self.head_weight is self._embedding.weight

    def parameters(self) -> dict[str, nn.Parameter]:
        """Trainable parameters by Hugging Face name, tied ones once."""
        named = self.module.named_parameters()
        return {plain_name(name): value for name, value in named if value.requires_grad}

    def tensors(self) -> dict[str, Tensor]:
        """What training changes, by name, detached but not copied.

        Every tensor of the model by Hugging Face name, tied ones once; where there are adapters, only these.
        """
        reshard(self.scorer)
        return self.base_tensors() if self.adapters is None else adapter_tensors(self.module)

    def base_tensors(self) -> dict[str, Tensor]:
        """Every tensor of the model without its adapters, by Hugging Face name, tied ones once."""
        reshard(self.scorer)
        adapters = adapter_tensors(self.module)
        named = {**dict(self.module.named_parameters()), **self._buffers()}
        plain = {plain_name(name): value.detach() for name, value in named.items()}
        return {name: value for name, value in plain.items() if name not in adapters}

    @cached_property
    def base_digest(self) -> str:
        """Digest of the base's content as the model folder holds it; reads the folder once.

        Raises:
            UserError: The folder's files name the tensors otherwise than the model does.
        """
        return content_digest(read_tensors(self.folder, self.base_tensors()))

    def logprobs(self, batch: MicroBatch, temperature: float) -> tuple[Tensor, Tensor]:
        """Logprobs and entropies [S, T] of the samples' actions; the batch is on the policy's device."""
        logprobs_N, entropy_N = self.scorer(batch, temperature)
        return batch.spread(logprobs_N), batch.spread(entropy_N)

    def with_heads(
        self, batch: MicroBatch, temperature: float, ids_STK: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """As `logprobs`, and the logprobs of further ids of each action [S, T, K], 0 where there is no action."""
        logprobs_MC, entropy_M = self.scorer(batch, temperature, None, ids_STK)
        action_ST = batch.action_ST
        zeros_STC = logprobs_MC.new_zeros(*action_ST.shape, logprobs_MC.shape[1])
        logprobs_STC = zeros_STC.masked_scatter(action_ST[..., None], logprobs_MC)
        return (
            logprobs_STC[..., 0],
            entropy_M.new_zeros(action_ST.shape).masked_scatter(action_ST, entropy_M),
            logprobs_STC[..., 1:],
        )

    def last_logits(self, tokens_RL: Tensor) -> Tensor:
        """Logits [R, V] behind the last token of each row, without gradient; tokens are on the policy's device."""
        with torch.no_grad(), without_dropout(self.module):
            logits_RV: Tensor = self.scorer(None, 1.0, tokens_RL)[0]
        return logits_RV

    def hidden_states(self, batch: MicroBatch) -> Tensor:
        """Final hidden states [R, L, D] of a micro-batch's tokens; the batch is on the policy's device."""
        mask = batch.mask_R1LL
        if mask is not None and self.module.config._attn_implementation == "eager":
            mask = _additive(mask, self.module.dtype)
        with torch.autocast(self.device.type, self.autocast, enabled=self.autocast is not None):
            hidden_RLD = self._trunk(batch.tokens_RL, batch.positions_RL, mask)
        return hidden_RLD.to(self.head_weight.dtype) if self.autocast else hidden_RLD

    def _trunk(self, tokens_RL: Tensor, positions_RL: Tensor | None, mask: Tensor | None) -> Tensor:
        given: dict[str, Any] = {"input_ids": tokens_RL}
        if type(self._embedding) is nn.Embedding:
            given = {"inputs_embeds": embed(self._embedding.weight, tokens_RL)}
        output = self.module.base_model(
            **given, position_ids=positions_RL, attention_mask=mask, use_cache=False, return_dict=True
        )
        hidden_RLD: Tensor = output.last_hidden_state
        return hidden_RLD

    def _buffers(self) -> dict[str, Tensor]:
        """Buffers that belong to the model's saved state."""
        kept = self.module.state_dict(keep_vars=True)
        return {name: value for name, value in self.module.named_buffers() if name in kept}


def pick_device(name: str) -> torch.device:
    """The device of a setting `learner.device`.

    Raises:
        UserError: It is not a device, or not on this machine.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UserError(f"learner.device {name!r} is no device", "use auto, cpu, cuda or cuda:N") from None
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        count = torch.cuda.device_count()
        raise UserError(f"learner.device {name!r}: {count} CUDA devices here", "use auto or cpu")
    return device


def _load(folder: Path, settings: ModelSection) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
        _switch_off_dropout(config)
        return AutoModelForCausalLM.from_pretrained(
            folder,
            config=config,
            dtype=getattr(torch, settings.dtype),
            attn_implementation=settings.attention,
            local_files_only=True,
            use_safetensors=True,
        )
    except (OSError, ValueError, ImportError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(f"model folder {folder} cannot be loaded: {reason}", "check model.source") from error


def _switch_off_dropout(config: Any) -> None:
    """Dropout makes the learner's logprobs differ from the sampler's at random, which ruins every ratio."""
    found = [
        name
        for name, value in config.to_dict().items()
        if ("dropout" in name or name.endswith("pdrop")) and isinstance(value, float) and value > 0
    ]
    for name in found:
        setattr(config, name, 0.0)
    if found:
        _LOG.warning("dropout is switched off (%s): ratios to the sampler need it", ", ".join(found))


def _switch_off_dropout_modules(module: nn.Module) -> None:
    for part in module.modules():
        if isinstance(part, nn.modules.dropout._DropoutNd):
            part.p = 0.0


def _pair_cost(module: Any) -> float:
    """Arithmetic of one query-key pair over that of one token, from the model's own sizes."""
    config = module.config.get_text_config()
    layers, hidden = config.num_hidden_layers, config.hidden_size
    embedding = module.get_input_embeddings().weight.numel()
    body = max(sum(p.numel() for p in module.parameters()) - embedding, 1)
    ratio: float = 4 * layers * hidden / (2 * body)
    return _PAIR_OVERHEAD * ratio


def _check_head(policy: Policy) -> None:
    tokens_RL = torch.arange(6, device=policy.device)[None]
    with torch.no_grad():
        logits = policy.module(input_ids=tokens_RL, use_cache=False).logits
        ours = policy._trunk(tokens_RL, None, None) @ policy.head_weight.T
    if not _close(logits, ours):
        raise UserError(
            f"model {type(policy.module).__name__}: its logits are more than hidden states times the head "
            "(a bias, scale or soft cap)",
            "use a model without it",
        )


def _takes_mask(policy: Policy) -> bool:
    """Whether a mask and positions of our own give each branch what it has by itself; tried, not assumed."""
    config = policy.module.config.get_text_config()
    if getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True):
        return False
    branches_RL = torch.tensor([[1, 2, 3, 4], [1, 2, 5, 0]], device=policy.device)
    tree_RL = torch.tensor([[1, 2, 3, 4, 5, 0]], device=policy.device)
    positions_RL = torch.tensor([[0, 1, 2, 3, 2, 3]], device=policy.device)
    mask = torch.ones(6, 6, dtype=torch.bool, device=policy.device).tril()[None, None]
    mask[..., 4:, 2:4] = False
    if policy.module.config._attn_implementation == "eager":
        mask = _additive(mask, policy.module.dtype)
    try:
        with torch.no_grad():
            apart = policy._trunk(branches_RL, None, None)
            together = policy._trunk(tree_RL, positions_RL, mask)[0]
    except (ValueError, RuntimeError, TypeError) as error:
        _LOG.info("samples are not shared in a row: %s", str(error).splitlines()[0])
        return False
    return _close(apart[0], together[:4]) and _close(apart[1, 2:], together[4:])


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    blocked = torch.full(mask.shape, torch.finfo(dtype).min, dtype=dtype, device=mask.device)
    return blocked.masked_fill_(mask, 0.0)


def _close(first: Tensor, second: Tensor) -> bool:
    scale = float(first.float().abs().max())
    tolerance = _PROBE_TOLERANCE if first.dtype == torch.float32 else 20 * _PROBE_TOLERANCE
    distance = float((first.float() - second.float()).abs().max())
    return math.isfinite(distance) and distance <= tolerance * max(scale, 1e-6)
