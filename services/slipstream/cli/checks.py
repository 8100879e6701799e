"""What a config names and this machine lacks, found before anything is started: rewards, files, folders."""

from __future__ import annotations

from pathlib import Path

from slipstream.config.data import DataSection
from slipstream.config.schema import Config
from slipstream.errors import UserError
from slipstream.learner.lora_targets import check_targets
from slipstream.models.resolve import present
from slipstream.rewards.base import RewardSpec
from slipstream.rewards.functions import load_function
from slipstream.rewards.scorers import Scorers


def missing_files(config: Config) -> list[str]:
    """One line for each reward, data file or model folder that is named and not there."""
    found = []
    for index, function in enumerate(config.reward.functions):
        try:
            Scorers.load([RewardSpec(use=function.use, options=function.options)])
        except UserError as error:
            found.append(f"reward.functions.{index}.use: {error}")
    if ":" in config.buffer.order:
        try:
            load_function(config.buffer.order, "buffer.order")
        except UserError as error:
            found.append(str(error))
    sets = {"data": config.data} | {
        f"evaluation.sets.{name}": each for name, each in config.evaluation.sets.items()
    }
    found += [
        f"{name}.path: no file {data.path!r}; check the path" for name, data in sets.items() if _lacks(data)
    ]
    source = config.model.source
    if source.startswith((".", "/", "~")) and not Path(source).expanduser().exists():
        found.append(f"model.source: no folder {source!r}; check the path")
    return [*found, *_unknown_targets(config)]


def _unknown_targets(config: Config) -> list[str]:
    """Targets of adapters that the model has not; of a model that is not here yet, the learner says so."""
    model = present(config.model.source)
    try:
        if model is not None:
            check_targets(model, config.learner.lora)
    except UserError as error:
        return [str(error)]
    return []


def _lacks(data: DataSection) -> bool:
    return data.kind == "jsonl" and not Path(data.path).expanduser().exists()
