"""What a message calls a setting is a setting: whoever reads it can change it under that name."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import Any

from slipstream.config.explain import setting_paths
from slipstream.config.schema import Config

ERRORS = {"UserError", "RunHalted", "LedgerError", "SlipstreamError"}
DOTTED = re.compile(r"(?<![\w./{])[a-z_]+(?:\.[a-z_]+)+(?![\w(/])")
ENTRIES = ("data.options.", "data.columns.", "evaluation.sets.")  # free names below these
NOT_YET = {"weights.port"}  # the TCP transport, which the config does not offer yet


def texts_of_errors(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ERRORS:
            for part in ast.walk(node):
                if isinstance(part, ast.Constant) and isinstance(part.value, str):
                    yield part.value


def test_errors_name_settings_that_exist(modules: list[Any]) -> None:
    known = set(setting_paths(Config)) | NOT_YET
    sections = {path.partition(".")[0] for path in known} | {"checkpoint", "optimizer", "engine"}
    named = {
        (module.name, name)
        for module in modules
        for text in texts_of_errors(module.tree)
        for name in DOTTED.findall(text)
        if name.partition(".")[0] in sections and not name.startswith(ENTRIES)
    }
    assert {name for _, name in named} & known
    assert sorted((module, name) for module, name in named if name not in known) == []
