"""The model's files, as far as they are on this machine: what is not here yet, the learner looks at."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from slipstream.cli.checks.data_check import sets_of
from slipstream.config.schema import Config
from slipstream.learner.checkpoint.start import look_for_start
from slipstream.learner.model.lora_targets import check_targets
from slipstream.learner.model.patterns import matching
from slipstream.learner.step.reference_source import START, check_vocabulary
from slipstream.models.architecture import read_architecture, unsupported
from slipstream.models.resolve import check_folder, present
from slipstream.models.tensors import tensor_shapes
from slipstream.prompts.build import context_length
from slipstream.run.folder import RunFolder


def here(config: Config) -> Path | None:
    """The model's whole folder; None where it is not on this machine, or `folder` has something to say."""
    found = present(config.model.source)
    return found if found is not None and (found / "config.json").is_file() else None


def folder(config: Config) -> Iterator[str]:
    """A folder that is not there, or lacks a part of a model."""
    yield from _lacking(config.model.source, "model.source")


def architecture(config: Config) -> Iterator[str]:
    """A model, or a reference, that cannot be trained here, whatever its weights."""
    sources = {"model.source": config.model.source, "learner.reference.source": config.learner.reference.source}
    for setting, source in sources.items():
        found = None if source in (None, START) else present(source)
        if found is None or not (found / "config.json").is_file():
            continue
        if reason := unsupported(read_architecture(found), config.model.attention):
            yield f"{setting} {source!r}: {reason}"


def context(config: Config) -> Iterator[str]:
    """A context that is longer than the model's."""
    if (model := here(config)) is not None:
        context_length(config, model)
    yield from ()


def chat_template(config: Config) -> Iterator[str]:
    """Sets that ask for the tokenizer's chat template, of a model that has none."""
    model = here(config)
    if model is None or _has_template(model):
        return
    for name, data in sets_of(config).items():
        if data.template == "chat":
            yield (
                f"{name}.template: chat, but {config.model.source} has no chat template; set it to plain, "
                "chatml_no_system or a format string"
            )


def adapters(config: Config) -> Iterator[str]:
    """Targets of adapters that the model has not, and a rank that none of them can have."""
    if (model := here(config)) is not None:
        check_targets(model, config.learner.lora)
    yield from ()


def frozen(config: Config) -> Iterator[str]:
    """Patterns that match no tensor of the files; with adapters it is their names that count."""
    model, patterns = here(config), config.learner.freeze
    if model is None or config.learner.lora.rank is not None:
        return
    names = list(tensor_shapes(model))
    matched = {name for pattern in patterns for name in matching(pattern, names, "learner.freeze")}
    if patterns and len(matched) == len(names):
        yield f"learner.freeze {patterns} leaves nothing to train; freeze less"


def reference(config: Config) -> Iterator[str]:
    """A reference that is not there, or of another vocabulary."""
    source, model = config.learner.reference.source, here(config)
    if source is None or source == START:
        return
    yield from _lacking(source, "learner.reference.source")
    other = present(source)
    if model is not None and other is not None and (other / "config.json").is_file():
        check_vocabulary(config, other, model)


def start(config: Config) -> Iterator[str]:
    """A run or checkpoint to begin with that is not there, of a run that has none of its own to go on from."""
    source, name = config.learner.start_from, config.run.name
    own = name is not None and any(RunFolder(config.run.root, name).checkpoints.glob("step-*"))
    if source is not None and not own:
        look_for_start(source)
    yield from ()


def _lacking(source: str, setting: str) -> Iterator[str]:
    if source.startswith((".", "/", "~")) and not Path(source).expanduser().exists():
        yield f"{setting}: no folder {source!r}; check the path"
    elif Path(source).expanduser().is_dir():
        check_folder(Path(source).expanduser())


def _has_template(model: Path) -> bool:
    if any(
        (model / name).exists()
        for name in ("chat_template.jinja", "chat_template.json", "additional_chat_templates")
    ):
        return True
    try:
        described = json.loads((model / "tokenizer_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):  # whoever loads the tokenizer says so
        return False
    return bool(isinstance(described, dict) and described.get("chat_template"))
