"""What `validate --deep` adds: it loads torch, the tokenizer and the prompts, and calls each reward.

Nothing is trained and no run is opened; a model that is not here yet is fetched.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from slipstream.cli.checks.rewards import answer_of
from slipstream.config.schema import Config
from slipstream.errors import UserError
from slipstream.learner.step.reference_source import find_reference
from slipstream.models.resolve import made_here, resolve
from slipstream.prompts.build import build_prompts
from slipstream.prompts.fitting import reward_specs
from slipstream.prompts.sets import Prompt
from slipstream.rewards.base import Scored
from slipstream.rewards.scorers import Scorers
from slipstream.run.tokens import load_tokenizer

SHOWN = 3  # prompts
_WIDEST = 160  # characters of a prompt or of what a reward says


def device(config: Config) -> Iterator[str]:
    """A device that is not on this machine, and dtypes that it lacks."""
    from slipstream.learner.model.model import pick_device
    from slipstream.learner.model.precision import check_precision

    check_precision(config, pick_device(config.learner.device), alone=(config.learner.parallel.ranks or 1) == 1)
    yield from ()


def weights(config: Config) -> Iterator[str]:
    """A model whose files do not hold the tensors that its config asks for."""
    _see_weights(config.model.source, config)
    yield from ()


def reference(config: Config) -> Iterator[str]:
    """A reference that cannot be had, whose tokens are others, or whose files lack some of its tensors."""
    found = find_reference(config, resolve(config.model.source))
    if found is not None and not found.own:
        _see_weights(str(config.learner.reference.source), config)
    yield from ()


def look_deep(config: Config) -> tuple[list[str], list[str]]:
    """Read all prompts, render a few and score their gold answers.

    Returns:
        What is wrong, and lines that show what was found, each for a person to read.
    """
    try:
        prompts, report = _prompts(config)
    except UserError as error:
        return [str(error)], []
    scored = asyncio.run(_score(config, prompts))
    shown = [report]
    wrong: list[str] = []
    for prompt, (answer, result) in zip(prompts, scored, strict=True):
        shown.append(f"prompt {prompt.index} ({len(prompt.prompt_ids)} tokens): {_short(prompt.text)}")
        shown.append(f"  answered {_short(answer)}: {_told(result)}")
        if result.unscored not in ("", "not_applicable"):
            wrong.append(f"reward.functions: prompt {prompt.index} answered {_short(answer)}: {result.detail}")
    return wrong, shown


def _see_weights(source: str, config: Config) -> None:
    from slipstream.models.inventory import check_folder_weights

    folder = resolve(source)
    if not made_here(source):
        check_folder_weights(folder, config.model.attention)


def _prompts(config: Config) -> tuple[list[Prompt], str]:
    model = resolve(config.model.source)
    nameless = config.model_copy(
        update={"run": config.run.model_copy(update={"name": None})}
    )  # no run is taken up
    found, _ = build_prompts(nameless, load_tokenizer(str(model)), model)
    few = [found[index] for index in range(min(SHOWN, len(found)))]
    return few, f"data: {len(found):,} prompts to train on ({found.report})"


async def _score(config: Config, prompts: list[Prompt]) -> list[tuple[str, Scored]]:
    """Each prompt with the answer that its row holds (or some other), as all rewards together score it."""
    scorers = Scorers.load(reward_specs(config))
    try:
        answers = [answer_of(prompt.columns) for prompt in prompts]
        return [
            (answer, (await scorers.score_group(prompt.text, [answer], prompt.columns))[0])
            for prompt, answer in zip(prompts, answers, strict=True)
        ]
    finally:
        await scorers.close()


def _told(result: Scored) -> str:
    parts = ", ".join(
        f"{name} {'none' if value is None else f'{value:g}'}" for name, value in result.components.items()
    )
    if result.reward is None:
        return f"unscored ({result.unscored}: {result.detail[:_WIDEST]})"
    return f"reward {result.reward:g} ({parts})"


def _short(text: str) -> str:
    line = repr(text)
    return line if len(line) <= _WIDEST else f"{line[: _WIDEST // 2]}…{line[-_WIDEST // 2 :]}"
