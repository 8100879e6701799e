"""`validate`, `config schema`, `config docs`: no torch, no network, no process."""

from __future__ import annotations

import argparse
import json
import sys

from slipstream.cli.checks.deep import look_deep
from slipstream.cli.checks.listing import DEEP, NOT_PLAIN, REACHING, problems
from slipstream.config.load import load_config
from slipstream.config.reference_page import markdown
from slipstream.config.rules import missing_parts
from slipstream.config.schema import Config
from slipstream.errors import EXIT_OK, ConfigError


def validate(options: argparse.Namespace) -> int:
    """Check a config, and that what it names is here; problems end in a ConfigError, warnings are printed."""
    config, warnings = load_config(options.config, options.overrides)
    for warning in warnings:
        print(f"warning: {warning}", file=sys.stderr)  # noqa: T201
    wrong, shown = problems(config), []
    if options.deep and not wrong:  # what is wrong already would only be said again, more slowly
        wrong = [*missing_parts(config), *problems(config, (*REACHING, *DEEP))]
        if not wrong:
            wrong, shown = look_deep(config)
    for line in shown:
        print(line)  # noqa: T201
    if wrong:
        raise ConfigError(wrong, options.config)
    batch = config.batch.groups * config.batch.group_size
    print(  # noqa: T201
        f"{options.config}: ok; {config.model.source}, {batch} samples a step, "
        f"recipe {config.objective.recipe}, max_staleness {config.staleness.max_staleness}"
    )
    if not options.deep:
        print("not looked at without --deep: " + NOT_PLAIN)  # noqa: T201
    return EXIT_OK


def schema(options: argparse.Namespace) -> int:
    """Print the JSON schema of the config."""
    print(json.dumps(Config.model_json_schema(), indent=2))  # noqa: T201
    return EXIT_OK


def docs(options: argparse.Namespace) -> int:
    """Print the reference of all settings as Markdown."""
    print(markdown(Config), end="")  # noqa: T201
    return EXIT_OK
