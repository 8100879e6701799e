"""`validate`, `config schema`, `config docs`: no torch, no network, no process."""

from __future__ import annotations

import argparse
import json
import sys

from slipstream.cli.checks.listing import problems
from slipstream.config.load import load_config
from slipstream.config.reference import markdown
from slipstream.config.schema import Config
from slipstream.errors import EXIT_OK, ConfigError


def validate(options: argparse.Namespace) -> int:
    """Check a config, and that what it names is here; problems end in a ConfigError, warnings are printed."""
    config, warnings = load_config(options.config, options.overrides)
    for warning in warnings:
        print(f"warning: {warning}", file=sys.stderr)  # noqa: T201
    if wrong := problems(config):
        raise ConfigError(wrong, options.config)
    batch = config.batch.groups * config.batch.group_size
    print(  # noqa: T201
        f"{options.config}: ok; {config.model.source}, {batch} samples a step, "
        f"recipe {config.objective.recipe}, max_staleness {config.staleness.max_staleness}"
    )
    return EXIT_OK


def schema(options: argparse.Namespace) -> int:
    """Print the JSON schema of the config."""
    print(json.dumps(Config.model_json_schema(), indent=2))  # noqa: T201
    return EXIT_OK


def docs(options: argparse.Namespace) -> int:
    """Print the reference of all settings as Markdown."""
    print(markdown(Config), end="")  # noqa: T201
    return EXIT_OK
