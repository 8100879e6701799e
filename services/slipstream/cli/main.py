"""`slipstream COMMAND`: the parser, and one line for every mistake. Commands import what they need themselves."""

from __future__ import annotations

import argparse
import importlib.metadata
import logging
import sys
from collections.abc import Sequence

from slipstream.cli import configs, drop, run
from slipstream.cli import init as cli_init
from slipstream.cli import metrics as cli_metrics
from slipstream.cli import weights as cli_weights
from slipstream.cli.look import inspect, watching
from slipstream.cli.plan import plan as cli_plan
from slipstream.cli.standard_streams import give_up_on, open_streams
from slipstream.errors import EXIT_FAULT, EXIT_USER, SlipstreamError, UserError
from slipstream.telemetry.logs import LAST_WORD, under_supervisor

ROLES = ("rollout", "reward", "buffer", "learner")
EXIT_INTERRUPTED = 130  # what a shell reports for Ctrl-C

_ABOUT = """Asynchronous RL post-training of language models.

Start with `slipstream up smollm2-sums`; it trains a small model on this machine. `slipstream COMMAND --help`
says more about each command."""
_CONFIG = """CONFIG is a YAML file, or the name of a config that comes with slipstream (smollm2-sums,
smollm2-sums-lora, tiny-sorter, qwen-gsm8k-1gpu).

Any setting can be changed behind it, for example: staleness.max_staleness=2 run.steps=10
reward.functions.0.use=math. Lists are indexed by number; a value is YAML. The same from the environment:
SLIPSTREAM__RUN__STEPS=10. The Redis password comes from SLIPSTREAM_REDIS_PASSWORD,
or from the file that SLIPSTREAM_REDIS_PASSWORD_FILE names."""
_EXITS = """Exit codes: 0 done, or stopped in order by Ctrl-C or SIGTERM (up, resume, run); 1 a fault, or a
second Ctrl-C; 2 a mistake in what was given; 3 the run stopped itself; 130 another command cut off by Ctrl-C."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code."""
    open_streams()
    logging.basicConfig(format="%(message)s", level=logging.INFO)
    options = _parse(arguments)
    try:
        code = int(options.command(options))
        sys.stdout.flush()
        return code
    except UserError as error:
        return _say(error, EXIT_USER)
    except SlipstreamError as error:
        return _say(error, EXIT_FAULT)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader of our output went away, as `| head` does; nothing more can be said to it, also not at exit.
        give_up_on(sys.stdout)
        return EXIT_FAULT
    except OSError as error:
        return _say(error, EXIT_FAULT)  # a full disk, a folder without permission: the system's own words


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Options and overrides; argparse alone takes none behind an option, as in `run ROLE --config C a.b=1`."""
    parser = _parser()
    options, rest = parser.parse_known_args(arguments)
    if rest and (not hasattr(options, "overrides") or any(part.startswith("-") for part in rest)):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        options.overrides = [*options.overrides, *rest]
    return options


def _say(error: Exception, code: int) -> int:
    mark = LAST_WORD if under_supervisor() else ""
    print(f"{mark}slipstream: {error}", file=sys.stderr)  # noqa: T201
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="slipstream",
        description=_ABOUT,
        epilog=_EXITS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"slipstream {_version()}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_running(commands)
    _add_looking(commands)
    _add_config(commands)
    _add_weights(commands)
    return parser


Commands = argparse._SubParsersAction


def _add_running(commands: Commands[argparse.ArgumentParser]) -> None:
    up = _command(commands, "up", "train: start every role on this host and watch them", _CONFIG)
    _config_arguments(up)
    up.set_defaults(command=run.up)

    more = "The run continues from its newest checkpoint, with the config that it recorded."
    resume = _command(commands, "resume", "continue a run from its folder", more)
    _run_argument(resume)
    resume.add_argument(
        "--from",
        dest="back",
        metavar="CHECKPOINT",
        help="go back to an older checkpoint, such as step-00000020, and give up the steps after it",
    )
    _overrides_argument(resume)
    resume.set_defaults(command=run.resume)

    out = _command(commands, "drop", "leave one ticket out of a run", drop.ABOUT)
    _run_argument(out)
    out.add_argument("ticket", metavar="TICKET", type=int, help="its number, as logs and records name it")
    out.set_defaults(command=drop.drop)

    more = "The run must have a name (run.name=NAME) and a server (redis.url=redis://HOST:PORT)."
    role = _command(commands, "run", "start one role by itself, as containers do", f"{more}\n\n{_CONFIG}")
    role.add_argument("role", choices=ROLES)
    role.add_argument("--config", required=True, help="YAML file, or the name of a packaged one")
    role.add_argument(
        "--name",
        default=None,
        help="name of this process; {host} in it is this host's name; default is its role",
    )
    role.add_argument(
        "--stay",
        action="store_true",
        help="wait on when the run has ended, where whoever started it starts it again when it ends, as Kubernetes",
    )
    _overrides_argument(role)
    role.set_defaults(command=run.role)

    more = "Give the folder to every role as network.keys. Whoever can read the file in it can join the run."
    keys = _command(commands, "keys", "make the key by which a run's processes know each other", more)
    keys.add_argument("folder", metavar="DIR", help="folder to put it into; made if missing")
    keys.set_defaults(command=run.keys)

    fetch = _command(commands, "fetch", "bring a model into the cache and print its folder")
    fetch.add_argument("model", help="folder, built-in name (smollm2-135m-instruct, tiny-sorter) or hub id")
    fetch.set_defaults(command=run.fetch)


def _add_looking(commands: Commands[argparse.ArgumentParser]) -> None:
    more = "Works on a run that is up and on one that has ended. Exit code 1 when the equation does not hold."
    audit = _command(commands, "audit", "check that every group of a run is accounted for", more)
    _run_argument(audit)
    audit.set_defaults(command=inspect.audit)

    more = "Writes config, tokenizer and the weights of a complete checkpoint, as transformers loads them."
    export = _command(commands, "export", "write a run's weights as a Hugging Face folder", more)
    _run_argument(export)
    export.add_argument("target", metavar="FOLDER", help="folder to make")
    export.add_argument("--step", type=int, metavar="N", help="checkpoint of this step; the newest by default")
    export.add_argument("--adapter", action="store_true", help="LoRA: the adapters alone, in a folder for peft")
    export.set_defaults(command=inspect.export)

    more = (
        "Needs run.record=true while it trained; on the CPU, with as many threads, the bits must be the same."
    )
    replay = _command(commands, "replay", "make a recorded run's steps again and compare the weights", more)
    _run_argument(replay)
    replay.add_argument("--after", type=int, metavar="STEP", help="begin with the checkpoint of this step")
    replay.set_defaults(command=inspect.replay)

    status = _command(commands, "status", "where a run stands, in a few lines or as JSON")
    _run_argument(status)
    status.add_argument("--json", action="store_true", help="everything, for scripts")
    status.set_defaults(command=watching.status)

    more = "Keys: p pauses and resumes, c saves a checkpoint, d drains and ends, q leaves the view."
    top = _command(commands, "top", "watch a run in the terminal", more)
    _run_argument(top)
    top.add_argument("--once", action="store_true", help="print one picture and end")
    top.set_defaults(command=watching.top)

    more = "One page with curves, histograms, samples and provenance, that needs no network. Works on a live run too."
    report = _command(commands, "report", "write a run as one HTML page", more)
    _run_argument(report)
    report.add_argument("-o", "--output", default="report.html", metavar="FILE", help="default is report.html")
    report.set_defaults(command=watching.report)

    summary = _command(commands, "summary", "what a run reached, and where the time went")
    _run_argument(summary)
    summary.set_defaults(command=inspect.summary)


def _add_config(commands: Commands[argparse.ArgumentParser]) -> None:
    begin = _command(commands, "init", "write a config for a data file and a reward", cli_init.ABOUT)
    cli_init.arguments(begin)
    begin.set_defaults(command=cli_init.init)

    validate = _command(commands, "validate", "check a config without starting anything", _CONFIG)
    _config_arguments(validate)
    validate.add_argument(
        "--deep",
        action="store_true",
        help="also what needs torch; shows three prompts and what their rewards say of the gold answer",
    )
    validate.set_defaults(command=configs.validate)

    plan = _command(commands, "plan", "predict speed, ages and memory, and suggest settings", cli_plan.ABOUT)
    _config_arguments(plan)
    cli_plan.arguments(plan)
    plan.set_defaults(command=cli_plan.plan)

    metrics = _command(commands, "metrics", "what can be scraped, and where")
    pages = metrics.add_subparsers(required=True, metavar="PART")
    pages.add_parser("docs", help="every metric as Markdown").set_defaults(command=cli_metrics.docs)
    targets = pages.add_parser("targets", help="where a live run serves them, for Prometheus' file_sd")
    _run_argument(targets)
    targets.set_defaults(command=cli_metrics.targets)

    config = _command(commands, "config", "what can be configured")
    parts = config.add_subparsers(required=True, metavar="PART")
    parts.add_parser("schema", help="JSON schema, for editors").set_defaults(command=configs.schema)
    parts.add_parser("docs", help="every setting as Markdown").set_defaults(command=configs.docs)


def _add_weights(commands: Commands[argparse.ArgumentParser]) -> None:
    weights = _command(
        commands, "weights", "weights in flight: whether they are right, and how fast they travel"
    )
    parts = weights.add_subparsers(required=True, metavar="PART")
    verify = parts.add_parser("verify", help="compare the fingerprints of a live run's learner and replicas")
    _run_argument(verify)
    verify.set_defaults(command=cli_weights.verify)
    bench = parts.add_parser("bench", help="measure every link on this machine")
    bench.add_argument("--megabytes", type=int, default=512, help="size of a version, MiB")
    bench.add_argument("--repeats", type=int, default=5, help="rounds after the warm-up")
    bench.set_defaults(command=cli_weights.bench)


def _command(
    commands: Commands[argparse.ArgumentParser], name: str, what: str, more: str = ""
) -> argparse.ArgumentParser:
    return commands.add_parser(
        name,
        help=what,
        description=f"{what[0].upper()}{what[1:]}.\n\n{more}".strip(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def _config_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", metavar="CONFIG", help="YAML file, or the name of a packaged one")
    _overrides_argument(parser)


def _run_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="the run's folder, such as runs/NAME")


def _overrides_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("overrides", nargs="*", default=[], metavar="key.sub=value", help="settings to change")


def _version() -> str:
    try:
        return importlib.metadata.version("slipstream")
    except importlib.metadata.PackageNotFoundError:
        return "(not installed)"


if __name__ == "__main__":
    sys.exit(main())
