"""From a config to its prompts: the training set and every evaluation set, the same in each process that asks."""

from __future__ import annotations

import json
from pathlib import Path

from slipstream.config.data import DataSection
from slipstream.config.schema import Config
from slipstream.errors import UserError
from slipstream.prompts.load import load_prompts
from slipstream.prompts.sets import PromptSet
from slipstream.prompts.spec import DataSpec, LengthBudget
from slipstream.tokens import Tokenizer


def build_prompts(config: Config, tokenizer: Tokenizer, model: Path) -> tuple[PromptSet, dict[str, PromptSet]]:
    """The training set, and the evaluation sets by name (`holdout` among them if some are held out).

    Raises:
        UserError: A source cannot be read, or a set would be empty.
    """
    sampling = config.sampling
    budget = LengthBudget(context_length(config, model), sampling.max_new_tokens, sampling.min_new_tokens)
    sets = {name: data_spec(section) for name, section in config.evaluation.sets.items()}
    return load_prompts(data_spec(config.data, config.data.holdout), tokenizer, budget, sets)


def data_spec(section: DataSection, holdout: int = 0) -> DataSpec:
    """A config's section in the prompts' own words."""
    fields = section.model_dump(exclude={"holdout"})
    return DataSpec(**fields, eval_size=holdout)


def context_length(config: Config, model: Path) -> int:
    """Room for prompt and completion together: the config's, at most what the model was made for.

    Raises:
        UserError: The config wants more than the model has.
    """
    described = json.loads((model / "config.json").read_text(encoding="utf-8"))
    own = int(described.get("max_position_embeddings", 1 << 20))
    wanted = config.model.context_length
    if wanted is not None and wanted > own:
        raise UserError(
            f"model.context_length {wanted} is above the model's {own}", "lower it, or leave it out"
        )
    return wanted or own
