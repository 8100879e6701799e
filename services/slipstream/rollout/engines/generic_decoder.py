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

from slipstream.errors import WeightsError
from slipstream.rollout.engines.rows import Row


@dataclass(slots=True)
class _Cohort:
    rows: list[Row]
    cache: Any


class GenericDecoder:
    """See `rows.Decoder`."""

    def __init__(self, config: Any) -> None:
        from transformers import AutoModelForCausalLM

        with torch.inference_mode(False):  # parameters made in it could not be replaced later
            self._model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        self._cohorts: list[_Cohort] = []
        parameters = inspect.signature(self._model.forward).parameters
        self._cache_name = "cache" if "cache" in parameters else "past_key_values"

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Put the tensors in the place of the model's parameters."""
        wanted = dict(self._model.named_parameters())
        missing = sorted(wanted.keys() - tensors.keys())
        if missing:
            raise WeightsError(f"weights lack tensor {missing[0]!r}")
        for name, parameter in wanted.items():
            if tensors[name].shape != parameter.shape:
                found, expected = list(tensors[name].shape), list(parameter.shape)
                raise WeightsError(f"tensor {name!r} has shape {found} instead of {expected}")
        with torch.inference_mode(False):
            for name, parameter in wanted.items():  # tied parameters are one object, so both uses change
                parameter.data = tensors[name].float()

    def unload(self) -> None:
        """Let go of the tensors."""
        with torch.inference_mode(False):
            for parameter in self._model.parameters():
                parameter.data = torch.empty(0)

    def step(self, fresh: Sequence[Sequence[Row]]) -> tuple[list[Row], Tensor]:
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

    def remove(self, row: Row) -> None:
        """Take the row out of its cohort."""
        for cohort in self._cohorts:
            if row in cohort.rows:
                keep = [index for index, other in enumerate(cohort.rows) if other is not row]
                cohort.rows.remove(row)
                if keep:
                    cohort.cache.batch_select_indices(torch.tensor(keep))
        self._cohorts = [cohort for cohort in self._cohorts if cohort.rows]

    def _forward(self, ids_BT: Tensor, cohort: _Cohort) -> Tensor:
        """Logits [B, V] after the last id; the cohort's cache grows."""
        result = self._model(
            input_ids=ids_BT, use_cache=True, logits_to_keep=1, **{self._cache_name: cohort.cache}
        )
        cohort.cache = getattr(result, self._cache_name)
        last_BV: Tensor = result.logits[:, -1].float()
        return last_BV
