"""The policy: any causal language model that transformers loads, as a trunk and a head.

The trunk gives hidden states; the head's weight goes to the fused logprobs, so that logits exist only for the
tokens that need them. Shapes: R rows, L tokens, D hidden, V vocabulary, N different (hidden state, next token)
pairs, M actions of S samples of at most T, K further ids of each.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from slipstream.algo.logprobs import from_hidden
from slipstream.config.sections.data_config import ModelSection
from slipstream.config.sections.lora_config import LoraSection
from slipstream.errors import UserError
from slipstream.learner.batch.micro_batches import MicroBatch
from slipstream.learner.model.embedding import embed
from slipstream.learner.model.lazy import Lazy
from slipstream.learner.model.load_model import load_empty, load_whole
from slipstream.learner.model.lora import adapter_tensors, add_adapters, plain_name, without_dropout
from slipstream.learner.model.lora_targets import check_targets
from slipstream.learner.model.probing import additive, check_head, check_repeats, pair_cost, takes_mask
from slipstream.learner.model.sharding import reshard
from slipstream.models.inventory import check_folder_weights
from slipstream.models.joined import read_model_tensors
from slipstream.models.tensors import content_digest


class Policy:
    """A causal language model that computes what the sampler does: nothing in it is random but adapters' dropout.

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
        self,
        folder: Path,
        settings: ModelSection,
        device: str = "auto",
        lora: LoraSection | None = None,
        lazily: bool = False,
    ) -> None:
        """Load from a Hugging Face folder.

        Args:
            folder: The model.
            settings: Dtype and attention.
            device: Where to.
            lora: Adapters to train instead of the weights.
            lazily: Leave the weights in the files until the model is sharded, where that can be; then `probe`.

        Raises:
            UserError: No such device, a folder that transformers cannot load or that holds other tensors than its
                config asks for, a model whose forward pass is random, a head that is more than a matrix product, or
                targets of `lora` that the model has not.
        """
        self.folder = folder
        self.autocast: torch.dtype | None = None
        lora = lora or LoraSection()
        check_folder_weights(folder, settings.attention)
        check_targets(folder, lora)
        self.device = pick_device(device)
        self.lazy: Lazy | None = None
        lazy = load_empty(folder, settings) if lazily and lora.rank is None else None
        if lazy is None:
            self.module = load_whole(folder, settings).to(self.device)
        else:
            self.module, self.lazy = lazy, Lazy(folder, lazy)
            for buffer in self.module.buffers():
                buffer.data = buffer.data.to(self.device)
        # What a model does at random, it does only in training mode; gradients need no mode.
        self.module.eval()
        self.adapters = add_adapters(self.module, lora)
        self.scorer = PolicyScorer(self)
        self._embedding = self.module.get_input_embeddings()
        # The embedding's gradient must not skip an id because the tokenizer also pads with it.
        self._embedding.padding_idx = None
        self.pair_cost = pair_cost(self.module)
        self.shares = False
        if self.lazy is None:
            self.probe()

    def probe(self) -> None:
        """Try what the model can do, once its weights are there; with several ranks common work.

        Raises:
            UserError: A forward pass that is random, or a head that is more than a matrix product.
        """
        self.lazy = None
        with torch.no_grad():
            self.scorer(None, 1.0, trial=lambda: check_repeats(self))
            self.scorer(None, 1.0, trial=lambda: check_head(self))
            if self.module.config._attn_implementation in ("sdpa", "eager"):
                self.shares = self.scorer(None, 1.0, trial=lambda: takes_mask(self))
        reshard(self.scorer)

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
        """Digest of the base's content as the model folder holds it; reads the folder once."""
        return content_digest(read_model_tensors(self.folder, self.base_tensors()))

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
            mask = additive(mask, self.module.dtype)
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


class PolicyScorer(nn.Module):
    """Trunk and head in one forward pass: where the model is sharded, its root's weights are whole only in here."""

    def __init__(self, policy: Policy) -> None:
        super().__init__()
        self.model = policy.module
        self._policy = (policy,)  # a tuple, so that torch does not look for modules in it

    def fill(self, part: nn.Module) -> None:
        """Read the weights of a part that is about to be sharded, where they are still in the files."""
        policy = self._policy[0]
        if policy.lazy is not None:
            policy.lazy.fill(part, policy.device)

    def forward(
        self,
        batch: MicroBatch | None,
        temperature: float,
        tokens_RL: Tensor | None = None,
        ids_STK: Tensor | None = None,
        trial: Callable[[], Any] | None = None,
    ) -> Any:
        """Logprobs and entropies [N] of the batch's pairs; or, of plain tokens, the last logits [R, V] twice; or what
        a trial gives, for which the root's weights are whole.

        With further ids of each of the M actions: logprobs [M, 1 + K], the action's own first, and entropies [M].
        """
        policy = self._policy[0]
        if trial is not None:
            return trial()
        if batch is None:
            logits_RV = policy.module(input_ids=tokens_RL, use_cache=False).logits[:, -1].clone()
            return logits_RV, logits_RV
        source_N, targets = batch.source_N, batch.target_N
        if ids_STK is not None:
            pair_M = batch.pair_ST[batch.action_ST]
            source_N = source_N[pair_M]
            targets = torch.cat([targets[pair_M][:, None], ids_STK[batch.action_ST]], dim=1)
        hidden_ND = policy.hidden_states(batch).flatten(0, 1).index_select(0, source_N)
        logprobs_N, entropy_N = from_hidden(hidden_ND, policy.head_weight, targets, temperature, entropy=True)
        assert entropy_N is not None
        return logprobs_N.clone(), entropy_N.clone()  # no views: FSDP hangs its backward hooks on them
