"""`audit`, `summary`, `export` and `replay`: look at a run without changing it."""

from __future__ import annotations

import argparse
import asyncio
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipstream.cli.look.find_run import find_run, open_ledger
from slipstream.config.load import load_recorded
from slipstream.errors import EXIT_FAULT, EXIT_OK, LedgerError, UserError
from slipstream.ledger.counts import unmoved
from slipstream.run.folder import line_of_descent, read_lines

if TYPE_CHECKING:
    from slipstream.ledger.counts import Audit, Counts


_WEIGHTS = {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".msgpack", ".h5", ".onnx"}


def audit(options: argparse.Namespace) -> int:
    """Scan the ledger of a run, live or ended, and its steps; exit 1 when the equation does not hold, or when a step
    moved no weights."""
    result, steps = asyncio.run(_audit(options.run))
    print(result.counts.conservation().line)  # noqa: T201
    idle = unmoved(steps)
    for problem in [*result.problems, *idle]:
        print(f"problem: {problem}", file=sys.stderr)  # noqa: T201
    print(f"{len(steps)} steps, {'NOT all' if idle else 'all'} of which moved the weights")  # noqa: T201
    print("the equation holds" if result.holds else "the equation does NOT hold")  # noqa: T201
    return EXIT_OK if result.holds and not idle else EXIT_FAULT


def summary(options: argparse.Namespace) -> int:
    """Print what a run reached and where the time went."""
    from slipstream.supervisor.summary import print_summary

    folder, _ = find_run(options.run)
    print_summary(folder, sys.stdout, asyncio.run(_counts(options.run)))
    return EXIT_OK


async def _counts(run: str) -> Counts | None:
    """The ledger's counts, or None without an answer: a summary is worth having without them."""
    try:
        async with open_ledger(run) as (_, ledger):
            return await ledger.counts()
    except (LedgerError, UserError) as error:
        print(f"without the ledger, whose groups are shown up to the newest step: {error}", file=sys.stderr)  # noqa: T201
        return None


def export(options: argparse.Namespace) -> int:
    """Write the weights of the newest complete checkpoint, or of a step's, into a new folder, with the model's config
    and tokenizer.

    Adapters are merged into their base, or with `--adapter` written as peft loads them.
    """
    from slipstream.learner.checkpoint.export import choose, name_dtype, write_weights
    from slipstream.learner.checkpoint.lora_checkpoint import read_adapter
    from slipstream.models.resolve import resolve

    folder, _ = find_run(options.run)
    target = Path(options.target)
    if target.exists():
        raise UserError(f"{target} exists", "name a folder that does not")
    step, checkpoint = choose(folder.checkpoints, options.step)
    adapter = read_adapter(checkpoint)
    if options.adapter and adapter is None:
        raise UserError(f"--adapter: {checkpoint} holds whole weights", "leave it out")
    config, _ = load_recorded(folder.config)
    model = resolve(config.model.source)
    target.mkdir(parents=True)
    try:
        if adapter is None or not options.adapter:
            _copy_rest(model, target)
        if adapter is None:
            write_weights(checkpoint, target)
        else:
            dtype = config.learner.precision.transfer or config.model.dtype
            _export_adapters(checkpoint, adapter, model, dtype, target, options.adapter)
        if adapter is None or not options.adapter:
            name_dtype(target)
    except BaseException:
        shutil.rmtree(target)
        raise
    print(f"step {step} of {folder.name} in {target}")  # noqa: T201
    return EXIT_OK


def _copy_rest(model: Path, target: Path) -> None:
    """The model's files beside its weights, in whichever format: config, tokenizer, template."""
    for file in model.iterdir():
        weights = file.suffix in _WEIGHTS or file.name.endswith(".index.json")
        if file.is_file() and not weights:
            shutil.copyfile(file, target / file.name)


def _export_adapters(
    checkpoint: Path, adapter: dict[str, Any], model: Path, dtype: str, target: Path, alone: bool
) -> None:
    from slipstream.learner.checkpoint.lora_export import write_merged, write_peft

    if alone:
        write_peft(checkpoint, adapter, model, target)
    else:
        write_merged(checkpoint, adapter, model, dtype, target)


def replay(options: argparse.Namespace) -> int:
    """Make a recorded run's steps again; exit 1 when the weights of one differ."""
    from slipstream.learner.replay.replay import replay as make_again

    folder, _ = find_run(options.run)
    found = make_again(folder, options.after)
    if found.differs is None:
        print(f"steps {found.first} to {found.last}: the weights are the same, bit for bit")  # noqa: T201
        return EXIT_OK
    print(  # noqa: T201
        f"step {found.differs}: the weights differ: recorded {found.recorded}, recomputed {found.recomputed}"
    )
    return EXIT_FAULT


async def _audit(run: str) -> tuple[Audit, list[dict[str, Any]]]:
    from slipstream.ledger.records import RunNotOpen

    async with open_ledger(run) as (folder, ledger):
        try:
            return await ledger.audit(), line_of_descent(read_lines(folder.steps))
        except RunNotOpen:
            raise UserError(
                f"run {folder.name} was never opened in the ledger, so there is nothing to audit",
                "let it reach its first step",
            ) from None
