"""`slipstream COMMAND`: the parser, and one line for every mistake. Commands import what they need themselves."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence

from slipstream.errors import EXIT_FAULT, EXIT_USER, SlipstreamError, UserError

ROLES = ("rollout", "reward", "buffer", "learner")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code."""
    logging.basicConfig(format="%(message)s", level=logging.INFO)
    options = _parser().parse_args(arguments)
    try:
        return int(options.command(options))
    except UserError as error:
        print(f"slipstream: {error}", file=sys.stderr)  # noqa: T201
        return EXIT_USER
    except SlipstreamError as error:
        print(f"slipstream: {error}", file=sys.stderr)  # noqa: T201
        return EXIT_FAULT
    except BrokenPipeError:
        return EXIT_FAULT  # the reader of our output went away, as `| head` does


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="slipstream", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_running(commands)
    _add_config(commands)
    return parser


def _add_running(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    from slipstream.cli import inspect, run

    up = commands.add_parser("up", help="train: start every role on this host and watch them")
    _config_arguments(up)
    up.set_defaults(command=run.up)

    resume = commands.add_parser("resume", help="continue a run from its folder")
    resume.add_argument("run", help="the run's folder, such as runs/NAME")
    resume.add_argument("overrides", nargs="*", metavar="key.sub=value", help="settings to change")
    resume.set_defaults(command=run.resume)

    role = commands.add_parser("run", help="start one role by itself, as containers do")
    role.add_argument("role", choices=ROLES)
    role.add_argument("--config", required=True, dest="config", help="YAML file, or the name of a packaged one")
    role.add_argument("--name", default=None, help="name of this process; default is its role")
    role.add_argument("overrides", nargs="*", metavar="key.sub=value", help="settings to change")
    role.set_defaults(command=run.role)

    fetch = commands.add_parser("fetch", help="bring a model into the cache")
    fetch.add_argument("model", help="folder, built-in name or hub id")
    fetch.set_defaults(command=run.fetch)

    audit = commands.add_parser("audit", help="check that every group of a run is accounted for")
    audit.add_argument("run", help="the run's folder")
    audit.set_defaults(command=inspect.audit)

    summary = commands.add_parser("summary", help="what a run reached, and where the time went")
    summary.add_argument("run", help="the run's folder")
    summary.set_defaults(command=inspect.summary)


def _add_config(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    from slipstream.cli import configs

    validate = commands.add_parser("validate", help="check a config without starting anything")
    _config_arguments(validate)
    validate.set_defaults(command=configs.validate)

    config = commands.add_parser("config", help="what can be configured")
    parts = config.add_subparsers(required=True, metavar="PART")
    parts.add_parser("schema", help="JSON schema, for editors").set_defaults(command=configs.schema)
    parts.add_parser("docs", help="every setting as Markdown").set_defaults(command=configs.docs)


def _config_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", help="YAML file, or the name of a packaged one (smollm2-sums)")
    parser.add_argument("overrides", nargs="*", metavar="key.sub=value", help="settings to change")


if __name__ == "__main__":
    sys.exit(main())
