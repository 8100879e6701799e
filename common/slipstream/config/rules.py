"""Settings that contradict each other, all of them at once; the objective's own rules live with its recipes."""

from __future__ import annotations

from slipstream.algo.contradictions import Context
from slipstream.algo.contradictions import contradictions as objective_contradictions
from slipstream.algo.recipes import resolve
from slipstream.algo.spec import Objective
from slipstream.config.schema import Config


def objective_of(config: Config) -> Objective:
    """The objective that a config names: its recipe with the overrides applied."""
    section = config.objective
    return resolve(section.recipe, section.overrides())


def contradictions(config: Config) -> tuple[list[str], list[str]]:
    """Refusals and warnings about pairs of settings, each naming both."""
    try:
        objective = objective_of(config)
    except ValueError as error:
        return [f"objective: {error}", *_own_refusals(config)], []
    refused, warned = objective_contradictions(objective, _context(config))
    return [f"objective: {line}" for line in refused] + _own_refusals(config), warned


def _context(config: Config) -> Context:
    sampling = config.sampling
    return Context(
        group_size=config.batch.group_size,
        max_staleness=config.staleness.max_staleness,
        staleness_policy=config.staleness.policy,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        reward_components=len(config.reward.functions),
        adam_eps=config.learner.optimizer.eps,
        groups_per_step=config.batch.groups,
    )


def _own_refusals(config: Config) -> list[str]:
    found = []
    if not config.reward.functions:
        found.append("reward.functions: no reward is named; add at least one, such as `- use: last_number`")
    names = [function.name or function.use for function in config.reward.functions]
    if len(set(names)) < len(names):
        found.append("reward.functions: two rewards have the same name; give each its own `name`")
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
    return found + _data_refusals(config)


def _data_refusals(config: Config) -> list[str]:
    found = []
    for path, data in [
        ("data", config.data),
        *((f"evaluation.sets.{n}", d) for n, d in config.evaluation.sets.items()),
    ]:
        if data.kind in ("jsonl", "huggingface", "gsm8k") and not data.path:
            found.append(f"{path}.path: kind {data.kind} needs a path")
        if data.kind == "reasoning_gym" and not data.name:
            found.append(f"{path}.name: kind reasoning_gym needs a task, such as chain_sum")
    return found
