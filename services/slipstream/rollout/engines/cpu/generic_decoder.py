"""A decoder for any causal model, over its transformers forward pass and cache; slower than the Llama one.

Rows that start together from one prompt are a cohort: equally long for ever, so that neither padding nor masks
are needed, and each cohort is one forward pass.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from slipstream.errors import UserError, WeightsError
from slipstream.rollout.engines.batch_rows import DecodedRow

_CLOSE = 1e-3


@dataclass(slots=True)
class _Cohort:
    rows: list[DecodedRow]
    cache: Any


class GenericDecoder:
    """See `rows.Decoder`."""

    def __init__(self, config: Any) -> None:
        from transformers import AutoModelForCausalLM

        try:
            with torch.inference_mode(False):  # parameters made in it could not be replaced later
                self._model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
            self._cohorts: list[_Cohort] = []
            parameters = inspect.signature(self._model.forward).parameters
            self._cache_name = "cache" if "cache" in parameters else "past_key_values"
            with torch.inference_mode():
                decodes = self._tried()
        except (AttributeError, LookupError, TypeError, ValueError, RuntimeError) as error:
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise _undecodable(config, reason) from error
        if not decodes:
            raise _undecodable(config, "what it keeps of a prompt does not give what the whole text gives")
        self._kept = dict(self._model.named_parameters()) | _kept_buffers(self._model)
        self._shapes = {name: value.shape for name, value in self._kept.items()}
        self._twice = set(self._model.state_dict()) - set(self._kept)  # further names of tied parameters

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Put the tensors in the place of the model's parameters, and of the buffers that are saved with them.

        Raises:
            WeightsError: Names the first that is missing, unknown, of another shape or no float.
        """
        for name in [*self._kept, *tensors]:
            self._check(name, tensors.get(name))
        with torch.inference_mode(False):
            for name, own in self._kept.items():  # tied parameters are one object, so both uses change
                own.data = tensors[name].float() if own.is_floating_point() else tensors[name]

    def _check(self, name: str, given: Tensor | None) -> None:
        if given is None:
            raise WeightsError(f"weights lack tensor {name!r}")
        if name not in self._kept:
            if name not in self._twice:
                raise WeightsError(f"tensor {name!r} is no part of this model")
            return
        if given.shape != self._shapes[name]:
            raise WeightsError(
                f"tensor {name!r} has shape {list(given.shape)} instead of {list(self._shapes[name])}"
            )
        if given.is_floating_point() != self._kept[name].is_floating_point():
            kind = "no float" if self._kept[name].is_floating_point() else "no whole number"
            raise WeightsError(f"tensor {name!r} has type {given.dtype}, which is {kind}")

    def unload(self) -> None:
        """Let go of the tensors."""
        with torch.inference_mode(False):
            for own in self._kept.values():
                own.data = torch.empty(0, dtype=own.dtype)

    def step(self, fresh: Sequence[Sequence[DecodedRow]]) -> tuple[list[DecodedRow], Tensor]:
        """Logits [V, N] of the next token of each row, cohort by cohort."""
        parts = []
        for cohort in self._cohorts:
            newest_B1 = torch.tensor([[row.ids[-1]] for row in cohort.rows])
            parts.append(self._forward(newest_B1, cohort))
        for rows in fresh:
            cohort = _Cohort(list(rows), None)
            logits_1V = self._forward(torch.tensor([rows[0].ids]), cohort)
            cohort.cache.batch_repeat_interleave(len(rows))
            parts.append(logits_1V.expand(len(rows), -1))
            self._cohorts.append(cohort)
        return [row for cohort in self._cohorts for row in cohort.rows], torch.cat(parts).t()

    def recompute(self) -> None:
        """Compute every cohort's cache again."""
        for cohort in self._cohorts:
            cohort.cache = None
            self._forward(torch.tensor([row.ids[:-1] for row in cohort.rows]), cohort)

    def remove(self, row: DecodedRow) -> None:
        """Take the row out of its cohort."""
        for cohort in self._cohorts:
            if row in cohort.rows:
                keep = [index for index, other in enumerate(cohort.rows) if other is not row]
                cohort.rows.remove(row)
                if keep:
                    cohort.cache.batch_select_indices(torch.tensor(keep))
        self._cohorts = [cohort for cohort in self._cohorts if cohort.rows]

    def _tried(self) -> bool:
        """Whether a prompt computed once, spread over rows and gone on with gives what the whole text gives."""
        text_BT = torch.tensor([[1, 2, 3, 4], [1, 2, 3, 5]])
        cohort = _Cohort([], None)
        self._forward(text_BT[:1, :3], cohort)
        cohort.cache.batch_repeat_interleave(3)
        cohort.cache.batch_select_indices(torch.tensor([0, 2]))
        found_BV = self._forward(text_BT[:, 3:], cohort)
        whole_BV = self._forward(text_BT, _Cohort([], None))
        return bool((found_BV - whole_BV).abs().max() <= _CLOSE * whole_BV.abs().max())

    def _forward(self, ids_BT: Tensor, cohort: _Cohort) -> Tensor:
        """Logits [B, V] after the last id; the cohort's cache grows."""
        result = self._model(
            input_ids=ids_BT, use_cache=True, logits_to_keep=1, **{self._cache_name: cohort.cache}
        )
        cohort.cache = getattr(result, self._cache_name)
        last_BV: Tensor = result.logits[:, -1].float()
        return last_BV


def _kept_buffers(model: Any) -> dict[str, Tensor]:
    """Buffers that are saved with the weights, and so come along with them."""
    saved = model.state_dict(keep_vars=True)
    return {name: value for name, value in model.named_buffers() if name in saved}


def _undecodable(config: Any, reason: str) -> UserError:
    return UserError(
        f"model.source: a {config.model_type} model cannot be decoded here ({reason})",
        "name a model whose layers are all attention, or another rollout.engine",
    )
