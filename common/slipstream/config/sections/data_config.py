"""What is trained on: the model, the prompts, how completions are sampled and how they are evaluated."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import field_validator

from slipstream.conditions import like, unless, when
from slipstream.config.base import Section, setting

SourceKind = Literal["jsonl", "huggingface", "reasoning_gym", "arithmetic", "sort_digits", "gsm8k"]
_GENERATED = when("kind", "reasoning_gym", "arithmetic", "sort_digits")
_EVALUATED = unless("data.holdout", 0) | unless("evaluation.sets", {})
_EVER = _EVALUATED & (unless("every", 0) | when("at_start", True) | when("at_end", True))


class ModelSection(Section):
    """The language model to train."""

    source: str = setting(
        "smollm2-135m-instruct",
        "a local Hugging Face folder, a built-in name (smollm2-135m-instruct, tiny-sorter) or a hub id",
    )
    dtype: Literal["float32", "bfloat16"] = setting(
        "float32",
        "dtype of the learner's weights and of published ones, unless learner.precision says otherwise",
        acts=when("learner.precision.master", None) | when("learner.precision.transfer", None),
    )
    context_length: int | None = setting(
        None, "longest prompt plus completion, tokens; null takes the model's own", ge=8
    )
    attention: Literal["sdpa", "eager", "flash_attention_2"] = setting("sdpa", "attention implementation")


class DataSection(Section):
    """One set of prompts."""

    kind: SourceKind = setting("jsonl", "where the rows come from")
    path: str = setting(
        "",
        "file, pattern, folder or data set id",
        acts=when("kind", "jsonl", "huggingface", "gsm8k"),
    )
    name: str = setting(
        "",
        "task of reasoning_gym, or configuration of a data set id",
        acts=when("kind", "reasoning_gym", "huggingface", "gsm8k"),
    )
    options: dict[str, Any] = setting({}, "further options of the source, by its own names", acts=_GENERATED)
    columns: dict[str, str] = setting(
        {},
        "our column name -> the row's, or a place in one (reward_model.ground_truth, messages.-1.content), JSON text "
        "too; names not given are taken as they are",
    )
    types: dict[str, Literal["number", "json"]] = setting(
        {},
        "columns whose texts, such as a CSV's cells, are read as numbers or as JSON; others stay the texts they are",
    )
    user_turn: str = setting("{prompt}", "format string over the row's columns for the user's turn")
    template: str = setting(
        "chat", "chat, chatml_no_system, plain, or a format string with {prompt}; applied once, one BOS"
    )
    template_options: dict[str, Any] = setting(
        {}, "extra variables of the chat template", acts=when("template", "chat")
    )
    system: str = setting("", "system turn put in front of rows that bring none; empty for none")
    final_assistant: Literal["drop", "prefill"] = setting(
        "drop",
        "a row whose messages end with the assistant's turn: drop leaves that turn out, prefill goes on from it",
    )
    control_tokens: bool = setting(
        False, "read the text of a control token in a row, such as <|im_end|>, as the token; else it is text"
    )
    split: str = setting(
        "train",
        "split to read, or a slice of it: train, train[:100], test[50%:]; a file is all of train",
        acts=when("kind", "jsonl", "huggingface", "gsm8k"),
    )
    limit: int | None = setting(None, "rows to generate, or to read from the start; null for all", ge=1)
    seed: int = setting(
        0, "seed of generated rows and of the hold-out", acts=_GENERATED | unless("holdout", 0, None), ge=0
    )


class TrainDataSection(DataSection):
    """The prompts to train on, less those held out for evaluation."""

    stream: bool = setting(
        False,
        "draw rows in their own order, without reading the source through first (jsonl, huggingface); "
        "needs limit, and holdout 0",
    )
    holdout: int = setting(64, "distinct questions held out by hash for evaluation", ge=0)


class SamplingSection(Section):
    """How completions are sampled: from the whole distribution, since a warp of it would bias every ratio."""

    temperature: float = setting(1.0, "sampling temperature; the objective uses the same", ge=0.0)
    max_new_tokens: int = setting(256, "longest completion, tokens", ge=1)
    stop_strings: list[str] = setting([], "texts that end a completion, beside the model's own end tokens")
    top_logprobs: int = setting(
        0,
        "likeliest tokens that travel with each sampled one, for objectives that need them; 0 is off",
        acts=like("objective.loss", "dppo_topk_.*", "dppo_topk_tv or dppo_topk_kl")
        | when("objective.score_centring", True),
        ge=0,
        le=20,
    )
    min_new_tokens: int = setting(1, "prompts that leave less room are refused at load, tokens", ge=1)


class BatchSection(Section):
    """How much one step sees."""

    groups: int = setting(8, "groups (prompts) per step; learner.n_mini optimizer steps are made on them", ge=1)
    group_size: int = setting(8, "samples per group", ge=1)
    drop_last: bool = setting(
        False,
        "skip the last partial batch of finite data instead of training on it",
        acts=unless("run.epochs", None),
    )


class EvaluationSection(Section):
    """Greedy accuracy on held-out prompts, generated by the rollout replicas with the version pinned."""

    every: int = setting(0, "evaluate every k steps; 0 is only at the start and the end", acts=_EVALUATED, ge=0)
    at_start: bool = setting(True, "evaluate the untrained model", acts=_EVALUATED)
    at_end: bool = setting(True, "evaluate the final model", acts=_EVALUATED)
    temperature: float = setting(0.0, "0 is greedy", acts=_EVER, ge=0.0)
    timeout_seconds: float = setting(
        600.0, "longest wait for an evaluation at the end, seconds", acts=_EVER, gt=0
    )
    sets: dict[str, DataSection] = setting({}, "further evaluation sets by name, beside the hold-out")


class RunSection(Section):
    """The run as a whole."""

    name: str | None = setting(None, "name of the run; null takes the config file's name and the time")
    root: str = setting("runs", "folder that holds run folders")
    umask: Literal["077", "027", "022"] = setting(
        "077",
        "who else may read the run's folder, as a umask: 077 nobody, 027 its group, 022 everyone on the host",
    )
    seed: int = setting(0, "seed of everything random in the run", ge=0)
    steps: int | None = setting(None, "steps to make, each on one batch; null trains until the data ends", ge=1)
    epochs: int | None = setting(None, "passes over the prompts; null is unbounded", ge=1)
    record: bool = setting(
        False, "keep each step's groups and a digest of its weights, for `slipstream replay`"
    )
    accept: list[str] = setting(
        [],
        "changes of the reward, or of the build (release), that this resume goes on with, by the names that a "
        "refusal gives, such as reward.functions.0.weight; a later resume asks again",
    )
    strict: bool = setting(False, "treat warnings about the config as errors")

    @field_validator("umask", mode="before")
    @classmethod
    def _as_written(cls, value: Any) -> Any:
        """YAML takes 027 for an octal number, and 27 for a decimal one."""
        if isinstance(value, int) and not isinstance(value, bool):
            return f"{value:03}" if value in (77, 27, 22) else f"{value:03o}"
        return value
