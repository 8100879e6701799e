"""`up`, `resume`, `run ROLE` and `fetch`: the commands that start processes."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import logging
import os
import socket
import sys
from pathlib import Path

from slipstream.cli.checks.listing import PLAIN, STARTING, problems
from slipstream.cli.going_on import recorded_config, refuse_another_run, settle_going_back, tell_going_on
from slipstream.cli.standard_streams import written
from slipstream.config.load import load_config, load_recorded
from slipstream.config.rules import missing_parts
from slipstream.config.rules_learner import missing_compiler
from slipstream.config.schema import Config
from slipstream.errors import EXIT_OK, EXIT_USER, ConfigError, UserError
from slipstream.learner.checkpoint.start import pinned
from slipstream.learner.ranks.launch import launch, ranks_to_start
from slipstream.lifecycle.life import Life, Service
from slipstream.lifecycle.process import PARENT_VARIABLE, die_with_parent, end_on_sigterm, exit_now, run_process
from slipstream.run.attempt_end import End, record_end
from slipstream.run.folder import Before, RunFolder, check_name, new_name
from slipstream.run.privacy import keep_private
from slipstream.telemetry.logs import set_up_logs

_LIBRARIES = {"rollout": ("torch", "transformers"), "learner": ("torch", "transformers")}


def name_of(role: str, given: str | None) -> str:
    """The process's name; `{host}` in it becomes this host's, so that replicas can share one command."""
    return (given or role).replace("{host}", socket.gethostname())


def check_libraries(role: str) -> None:
    """Refuse a role whose libraries are not installed here.

    Raises:
        UserError: Names the role, what is missing and which image has it.
    """
    missing = [name for name in _LIBRARIES.get(role, ()) if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(
            f"role {role} needs {' and '.join(missing)}, which is not installed here",
            "use the image whose tag ends in -cpu or -gpu; -core is for reward, buffer and tools",
        )


def prepare_folder(role: str, config: Config, folder: RunFolder) -> Before | None:
    """Make the run's folder where this role keeps something in it; the learner also records the attempt.

    Returns:
        What was there before an attempt that was recorded, to be taken back if the attempt is refused.

    Raises:
        UserError: The folder cannot be written.
    """
    if role not in ("learner", "buffer"):
        return None
    folder.create()
    if role != "learner" or os.environ.get("RANK", "0") != "0":
        return None
    from slipstream.run.provenance import collect

    return folder.record_attempt(config, collect())


log = logging.getLogger("slipstream.cli")


def up(options: argparse.Namespace) -> int:
    """Start a run, or go on with it when its folder exists, and print its summary at the end."""
    config, warnings = load_config(options.config, options.overrides)
    if config.run.name is None:
        config = _named(config, new_name(Path(options.config).stem))
    return _supervise(config, warnings, "up")


def resume(options: argparse.Namespace) -> int:
    """Continue a run from its folder, with the config that it recorded."""
    folder = Path(options.run)
    if not (folder / "config.yaml").is_file():
        raise UserError(f"{folder} holds no run", "give the folder of a run, such as runs/NAME")
    if any(override.replace(" ", "").startswith("objective.recipe=") for override in options.overrides):
        raise UserError(
            "objective.recipe cannot change in a run that goes on",
            f"begin a new run with its weights: run.name=NEW learner.start_from={folder}",
        )
    place = folder.resolve()
    # it may have been moved since it was recorded
    moved = [f"run.root={json.dumps(str(place.parent))}"]
    config, warnings = load_recorded(folder / "config.yaml", [*moved, *options.overrides])
    if RunFolder.of(config).path.resolve() != place:
        raise UserError(
            f"{folder} was recorded as run {config.run.name}",
            f"give its folder that name back: a run's ledger knows it as {config.run.name}",
        )
    return _supervise(config, warnings, "resume", options.back)


def role(options: argparse.Namespace) -> int:
    """Run one role in this process until it ends or is asked to."""
    end_on_sigterm()
    die_with_parent()
    config, warnings = load_config(options.config, options.overrides)
    folder = RunFolder.of(config)
    keep_private(config)
    name = name_of(options.role, options.name)
    check_name("--name", name)
    check_libraries(options.role)
    if options.role == "learner":
        if missing := missing_compiler(config):
            raise UserError(missing[0])
        config = pinned(config, folder)
    before = None if PARENT_VARIABLE in os.environ else prepare_folder(options.role, config, folder)
    set_up_logs(name, folder.name, config.telemetry.log_format, config.telemetry.log_level, options.role)
    if before is not None:  # else `up` says them, or the first rank of the learner
        for warning in warnings:
            log.warning("config: %s", warning)
    more = config.learner.checkpoint.stop_seconds if options.role == "learner" else 0.0
    if options.role == "learner" and (ranks := ranks_to_start(config)):
        code = launch(ranks, sys.argv[1:], config.supervisor.drain_seconds + more)
        return _ended(End(code), folder, before)
    # the learner ends by itself, and `up` ends the others
    alone = options.role != "learner" and PARENT_VARIABLE not in os.environ
    code = run_process(
        _service(options.role, name, config, folder),
        config.supervisor.drain_seconds,
        save_seconds=more,
        with_run=alone and not options.stay,
    )
    exit_now(_ended(End(code), folder, before))
    return code


def keys(options: argparse.Namespace) -> int:
    """Make a run's CURVE key in a folder."""
    from slipstream.transport.zeromq.keys import make

    print(make(Path(options.folder)))  # noqa: T201
    return EXIT_OK


def fetch(options: argparse.Namespace) -> int:
    """Bring a model into the cache, see that its files are those of its config, and print its folder."""
    from slipstream.models.resolve import made_here, resolve

    die_with_parent()
    folder = resolve(options.model)
    if not made_here(options.model):
        from slipstream.models.inventory import check_folder_weights

        check_folder_weights(folder)
    print(folder)  # noqa: T201
    return EXIT_OK


def _ended(end: End, folder: RunFolder, before: Before | None) -> int:
    """The exit code of an attempt, noted in its folder; one that was refused leaves the config of the attempt before
    it to go on with."""
    if before is not None:
        with contextlib.suppress(OSError):  # a full disk may be why it ends
            record_end(folder, end)
    if end.code == EXIT_USER and before is not None:
        folder.take_back(before)
    return end.code


def _supervise(config: Config, warnings: list[str], asked: str, back: str | None = None) -> int:
    from slipstream.run.provenance import collect
    from slipstream.supervisor.summary import print_summary
    from slipstream.supervisor.supervisor import Supervisor

    _refuse_what_up_cannot_do(config)
    folder = RunFolder.of(config)
    keep_private(config)
    config = pinned(config, folder)
    refuse_another_run(config, folder, asked)
    earlier = recorded_config(folder)
    folder.create()
    set_up_logs("up", folder.name, config.telemetry.log_format, config.telemetry.log_level)
    with folder.held():
        step = settle_going_back(folder, back)
        tell_going_on(config, earlier, folder, asked, step)
        before = folder.record_attempt(config, collect())
        for warning in warnings:
            log.warning("config: %s", warning)
        log.info("run %s in %s", folder.name, folder.path)
        outcome, cause, finished, counts = EXIT_OK, "", False, None

        async def supervise(life: Life) -> None:
            nonlocal outcome, cause, finished, counts
            supervisor = Supervisor(config, folder)
            outcome = await supervisor.run(life)
            cause, finished, counts = supervisor.cause, supervisor.finished, supervisor.counts

        # twice the children's own time: they drain first, then the supervisor itself ends
        saving = config.learner.checkpoint.stop_seconds
        fault = run_process(supervise, 2 * config.supervisor.drain_seconds, save_seconds=saving)
        if folder.steps.exists() or not fault:
            written(sys.stdout, lambda: print_summary(folder, sys.stdout, counts))
        if not fault and outcome == EXIT_OK and not finished:
            log.info("to go on: slipstream resume %s", folder.path)
        if cause:
            log.error("the run ended: %s", cause)  # once more, so that it stands last
        code = _ended(End(fault or outcome, cause, finished), folder, before)
    return code


def _refuse_what_up_cannot_do(config: Config) -> None:
    missing = [*missing_parts(config), *problems(config, (*PLAIN, *STARTING))]
    if missing:
        raise UserError(missing[0]) if len(missing) == 1 else ConfigError(missing)
    for setting in ("port", "metrics_port"):
        if port := getattr(config.network, setting):
            raise UserError(
                f"network.{setting} {port} is for a role that starts alone; `up` starts several on one host",
                "leave it at 0, and each takes a free port",
            )


def _service(role: str, name: str, config: Config, folder: RunFolder) -> Service:
    if role == "rollout":
        from slipstream.rollout.service import serve
    elif role == "reward":
        from slipstream.reward.service import serve
    elif role == "buffer":
        from slipstream.buffer.service import serve
    else:
        from slipstream.learner.service import serve
    return serve(config, folder, name)


def _named(config: Config, name: str) -> Config:
    return config.model_copy(update={"run": config.run.model_copy(update={"name": name})})
