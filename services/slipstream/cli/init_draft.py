"""A config drafted from a data file and a reward, and tried on three rows before it is written."""

from __future__ import annotations

import argparse
import ast
import asyncio
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slipstream.cli.init_columns import at, gold_column, prompt_column, reward_for, tests_column
from slipstream.cli.init_origins import FROM
from slipstream.config.load import load_config
from slipstream.errors import EXIT_OK, UserError
from slipstream.prompts.sets import open_source
from slipstream.prompts.source_spec import DataSpec
from slipstream.prompts.sources.jsonl import is_lines
from slipstream.rewards.base import RewardSpec
from slipstream.rewards.reward_registry import BUILTIN
from slipstream.rewards.scorers import Scorers

ROWS = 3
_OWN = {"batch.group_size": 8, "sampling.max_new_tokens": 256, "learner.optimizer.learning_rate": 1e-6}
_FORMS = ({"completions"}, {"completion"}, {"solution_str", "ground_truth"}, {"queries"})


@dataclass
class ConfigDraft:
    """What goes into the config, and remarks for who reads it."""

    kind: str
    path: str
    columns: dict[str, str]
    template: str
    rewards: list[dict[str, Any]]
    model: str
    numbers: Mapping[str, Any]
    context: int | None = None
    adapter: tuple[Path, str] | None = None
    remarks: dict[str, str] = field(default_factory=dict)


def make(options: argparse.Namespace) -> int:
    """Write a config; nothing is written where the tries fail."""
    target = Path(options.output)
    if target.exists() and not options.force:
        raise UserError(f"{target} is there already", "give another name (-o NAME), or --force")
    draft = _drafted(options, target)
    text = written(draft)
    if draft.adapter is not None:
        draft.adapter[0].write_text(draft.adapter[1], encoding="utf-8")
    aside = target.with_name(f".{target.name}.new")
    aside.write_text(text, encoding="utf-8")
    try:
        load_config(str(aside), [])
        _try(draft)
        aside.replace(target)
    finally:
        aside.unlink(missing_ok=True)
    print(f"\nwrote {target}; next: slipstream validate --deep {target}; slipstream up {target}")  # noqa: T201
    return EXIT_OK


def _drafted(options: argparse.Namespace, target: Path) -> ConfigDraft:
    kind = "jsonl" if is_lines("jsonl", options.data) and _is_text(options.data) else "huggingface"
    source = open_source(DataSpec(kind=kind, path=options.data, limit=ROWS))
    rows = [source[number] for number in range(min(ROWS, len(source)))]
    prompt = prompt_column(rows)
    if prompt is None:
        raise UserError(
            f"{options.data}: no column of {', '.join(rows[0])} reads like a prompt", "rename one to prompt"
        )
    gold, tests = gold_column(rows, prompt), tests_column(rows)
    columns = {} if prompt in ("prompt", "messages", "conversations") else {"prompt": prompt}
    if gold not in (None, "answer"):
        columns["answer"] = str(gold)
    draft = ConfigDraft(
        kind=kind,
        path=options.data,
        columns=columns,
        template="chat" if _has_chat_template(options.model) else "plain",
        rewards=[],
        model=options.model,
        numbers=_OWN | FROM.get(options.origin, {}),
    )
    _choose_reward(draft, options.named or options.reward, rows, gold, tests, target)
    shown = ", ".join(rows[0])
    print(f"{options.data}: columns {shown}; the prompt is {prompt!r}, the answer {gold or tests!r}")  # noqa: T201
    return draft


def _is_text(path: str) -> bool:
    return (not path.endswith((".parquet", ".arrow")) and Path(path).expanduser().exists()) or "*" in path


def _has_chat_template(model: str) -> bool:
    from slipstream.models.resolve import resolve
    from slipstream.run.tokens import load_tokenizer

    return bool(load_tokenizer(str(resolve(model))).hf.chat_template)


def _choose_reward(
    draft: ConfigDraft,
    asked: str | None,
    rows: Sequence[Mapping[str, Any]],
    gold: str | None,
    tests: str | None,
    target: Path,
) -> None:
    if asked is None:
        if tests is not None:
            options = {} if tests == "tests" else {"tests_column": tests}
            draft.rewards.append({"use": "python", "options": options} if options else {"use": "python"})
            draft.remarks["reward"] = f"column {tests!r} holds tests of a program"
            return
        found = reward_for(rows, gold)
        if found is None:
            raise UserError(
                f"no column of {', '.join(rows[0])} reads like an answer",
                "give --reward FILE.py, or a built-in reward",
            )
        draft.rewards.append({"use": found[0]})
        draft.remarks["reward"] = found[1]
        return
    if asked in BUILTIN:
        draft.rewards.append({"use": asked})
        return
    file, _, name = asked.rpartition(":") if ":" in asked else (asked, "", "")
    for function in functions_of(Path(file), name):
        draft.rewards.append(_own(draft, Path(file), function, target))


def functions_of(file: Path, name: str = "") -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    """The functions of a file that can be rewards: those of a known form, else all that are public; or the named one.

    Raises:
        UserError: The file cannot be read, or has none.
    """
    try:
        tree = ast.parse(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(
            f"--reward {file}: {error.strerror}", "give a Python file, or a built-in reward"
        ) from error
    except SyntaxError as error:
        raise UserError(f"--reward {file}:{error.lineno}: {error.msg}", "mend it") from error
    defined = [node for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    public = [node for node in defined if not node.name.startswith("_") and (not name or node.name == name)]
    known = [node for node in public if any(form <= set(_parameters(node)) for form in _FORMS)]
    if not public:
        there = ", ".join(node.name for node in defined) or "none"
        raise UserError(f"--reward {file}: no function {name or 'in it'}", f"it has {there}")
    return known or public[:1]


def _parameters(node: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    return [each.arg for each in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]


def _own(
    draft: ConfigDraft, file: Path, node: ast.FunctionDef | ast.AsyncFunctionDef, target: Path
) -> dict[str, Any]:
    """The reward's section; a function of no known form gets an adapter that calls it with text and answer."""
    names = _parameters(node)
    if any(form <= set(names) for form in _FORMS):
        return {"use": f"{file}:{node.name}"}
    adapter = target.with_name(f"{target.stem}_reward.py")
    arguments = ", ".join(["completion", "answer"][: max(1, min(2, len(names)))])
    draft.adapter = (
        adapter,
        f'"""{node.name} of {file.name}, called with the completion\'s text and the row\'s answer."""\n\n'
        f"from {file.stem} import {node.name}\n\n\n"
        f"def reward(completion, answer):\n    return {node.name}({arguments})\n",
    )
    draft.remarks["reward"] = f"{node.name}({', '.join(names)}) is of no known form: see {adapter.name}"
    return {"use": f"{adapter}:reward"}


def written(draft: ConfigDraft) -> str:
    """The config's text."""
    return "\n".join([*_head(draft), *_body(draft)]) + "\n"


def _head(draft: ConfigDraft) -> Iterator[str]:
    yield "# Made by `slipstream init`. Every setting: docs/config.md; what differs from other projects:"
    yield "# docs/guides/coming-from.md."
    yield "run:"
    yield "  steps: 100"
    yield ""
    yield "model:"
    yield f"  source: {draft.model}"
    yield ""


def _body(draft: ConfigDraft) -> Iterator[str]:
    numbers = draft.numbers
    yield "data:"
    yield f"  kind: {draft.kind}"
    yield f"  path: {json.dumps(draft.path)}"
    if draft.columns:
        yield f"  columns: {json.dumps(draft.columns)}   # ours: the file's"
    yield f"  template: {draft.template}" + (
        "" if draft.template == "chat" else "   # the tokenizer has no chat template"
    )
    yield "  holdout: 0   # distinct questions kept out of training to evaluate on; 64 is a good number"
    yield ""
    yield "reward:"
    yield "  functions:"
    for reward in draft.rewards:
        remark = f"   # {draft.remarks['reward']}" if "reward" in draft.remarks else ""
        yield f"    - use: {json.dumps(reward['use'])}{remark}"
        if reward.get("options"):
            yield f"      options: {json.dumps(reward['options'])}"
    yield ""
    yield "sampling:"
    yield f"  max_new_tokens: {numbers['sampling.max_new_tokens']}   # raise it for models that reason at length"
    yield ""
    yield "batch:"
    yield "  groups: 8        # prompts of a step"
    yield f"  group_size: {numbers['batch.group_size']}    # samples of each"
    yield ""
    yield "learner:"
    yield "  optimizer:"
    yield f"    learning_rate: {numbers['learner.optimizer.learning_rate']}   # small models bear more, such as 2e-5"


def _try(draft: ConfigDraft) -> None:
    """Show three rows as the model sees them, and what the rewards say of the right answer and of an empty one."""
    from slipstream.models.resolve import resolve
    from slipstream.prompts.raw_rows import read_row
    from slipstream.prompts.template import Template
    from slipstream.run.tokens import load_tokenizer

    tokenizer = load_tokenizer(str(resolve(draft.model)))
    spec = DataSpec(
        kind=draft.kind, path=draft.path, columns=draft.columns, template=draft.template, limit=ROWS
    )  # type: ignore[arg-type]
    source, template = open_source(spec), Template(spec, tokenizer)
    for number in range(min(ROWS, len(source))):
        row = read_row(source[number], spec, source.label(number))
        text = tokenizer.literal.unmark(template.render(row, source.label(number)))
        answer = at(row.columns, "answer")
        print(f"row {number + 1}: {_short(text)}")  # noqa: T201
        for said, told in asyncio.run(_scored(draft, text, [str(answer or ""), ""], row.columns)):
            print(f"  answered {_short(said)}: {told}")  # noqa: T201


async def _scored(
    draft: ConfigDraft, prompt: str, answers: list[str], columns: Mapping[str, Any]
) -> list[tuple[str, str]]:
    scorers = Scorers.load(
        [RewardSpec(use=each["use"], options=each.get("options", {})) for each in draft.rewards]
    )
    try:
        scored = await scorers.score_group(prompt, answers, columns)
    finally:
        await scorers.close()
    if scored[0].unscored == "exception":
        raise UserError(
            f"--reward: {scored[0].detail}", "mend the function, or name another: --reward FILE.py:NAME"
        )
    return [
        (said, "no reward" if each.reward is None else f"reward {each.reward:g}")
        for said, each in zip(answers, scored, strict=True)
    ]


def _short(text: str) -> str:
    line = repr(text)
    return line if len(line) <= 120 else f"{line[:60]}…{line[-59:]}"
