"""From a config to its prompts: the training set and every evaluation set, the same in each process that asks."""

from __future__ import annotations

import contextlib
import json
import math
from pathlib import Path

from slipstream.config.schema import Config
from slipstream.config.sections.data_config import DataSection
from slipstream.errors import UserError
from slipstream.models.architecture import positions, read_architecture, vocabulary
from slipstream.prompts.fitting import row_faults
from slipstream.prompts.load_prompts import load_prompts
from slipstream.prompts.sets import PromptSet
from slipstream.prompts.source_spec import DataSpec, LengthBudget
from slipstream.run.folder import RunFolder
from slipstream.run.tokens import Tokenizer

STREAM = "stream.json"


def build_prompts(
    config: Config, tokenizer: Tokenizer, model: Path, rows: int | None = None
) -> tuple[PromptSet, dict[str, PromptSet]]:
    """The training set, and the evaluation sets by name (`holdout` among them if some are held out).

    `rows` bounds what is read of the training source: those that it had when the run began.

    Raises:
        UserError: A source cannot be read, a set would be empty, or some reward cannot score some row.
    """
    sampling = config.sampling
    words = vocabulary(read_architecture(model))
    budget = LengthBudget(
        context_length(config, model), sampling.max_new_tokens, sampling.min_new_tokens, words
    )
    sets = {name: data_spec(section) for name, section in config.evaluation.sets.items()}
    spec = data_spec(config.data, config.data.holdout)
    prompts, evaluations = load_prompts(spec, tokenizer, budget, sets, row_faults(config), rows)
    if config.data.stream and config.run.name is not None:
        _take_up(prompts, RunFolder.of(config))
    return prompts, evaluations


def stream_state(config: Config, prompts: PromptSet, step: int) -> bytes | None:
    """What a checkpoint of a step keeps of the prompts, as JSON: where a stream is taken up again.

    Few tickets that are open after this many steps lie further back than all that may be open at once; for one that
    does, the stream is read again from an earlier mark.
    """
    stale, groups = config.staleness, config.batch.groups
    open_at_once = math.ceil((stale.max_staleness + 1) * groups * stale.oversampling)
    reached = max(0, step * groups // config.buffer.reuse - open_at_once)
    state = prompts.state_before(reached % len(prompts))
    return None if state is None else json.dumps(state).encode()


def _take_up(prompts: PromptSet, folder: RunFolder) -> None:
    """Let a stream begin where the newest checkpoint left it; without one it begins at its start."""
    for path in sorted(folder.checkpoints.glob(f"step-*/{STREAM}"), reverse=True):
        with contextlib.suppress(
            OSError, ValueError
        ):  # pruned meanwhile, or damaged: an older one is as good a hint
            prompts.load_state(json.loads(path.read_text(encoding="utf-8")))
            return


def data_spec(section: DataSection, holdout: int = 0) -> DataSpec:
    """A config's section in the prompts' own words."""
    fields = section.model_dump(exclude={"holdout"})
    return DataSpec(**fields, eval_size=holdout)


def context_length(config: Config, model: Path) -> int:
    """Room for prompt and completion together: the config's, at most what the model was made for.

    Raises:
        UserError: The config wants more than the model has.
    """
    own = positions(read_architecture(model)) or 1 << 20
    wanted = config.model.context_length
    if wanted is not None and wanted > own:
        raise UserError(
            f"model.context_length {wanted} is above the model's {own}", "lower it, or leave it out"
        )
    return wanted or own
