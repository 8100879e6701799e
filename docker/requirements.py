"""Prints what an image installs, one requirement a line, from pyproject.toml: `requirements.py core|train [EXTRA…]`.

`core` leaves out what only training and generating need; `train` is the rest and the extras named.
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

TRAINING = {"gguf", "torch", "torchdata", "transformers"}


def requirements(project: dict, part: str, extras: list[str]) -> list[str]:
    """The requirements of one part of the project's dependencies."""
    named = {re.split(r"[^\w-]", line)[0]: line for line in project["dependencies"]}
    lines = [line for name, line in named.items() if (name in TRAINING) == (part == "train")]
    for extra in extras:
        lines += project["optional-dependencies"][extra]
    return lines


if __name__ == "__main__":
    text = Path("pyproject.toml").read_text(encoding="utf-8")
    sys.stdout.writelines(
        f"{line}\n" for line in requirements(tomllib.loads(text)["project"], sys.argv[1], sys.argv[2:])
    )
