"""`init`: a config for a data file and a reward, tried on three rows before it is written."""

from __future__ import annotations

import argparse

from slipstream.cli.init_origins import FROM, MODEL

ABOUT = """Looks at the columns of a data file (JSONL, CSV, Parquet, a folder, a Hugging Face id), picks prompt and
answer, tries the template and the reward on three rows, shows them, and writes a short config with comments."""


def arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument("data", metavar="DATA", help="a data file, a folder, a pattern, or a Hugging Face id")
    parser.add_argument(
        "reward", nargs="?", metavar="REWARD", help="file.py, file.py:function, or a built-in reward"
    )
    parser.add_argument("--reward", dest="named", metavar="REWARD", help="the same")
    parser.add_argument("--model", default=MODEL, help=f"model folder or name (default: {MODEL})")
    parser.add_argument(
        "--from", dest="origin", choices=FROM, help="take this project's numbers where ours differ"
    )
    parser.add_argument("-o", "--output", default="config.yaml", metavar="FILE", help="default: config.yaml")
    parser.add_argument("--force", action="store_true", help="write over a file that is there")


def init(options: argparse.Namespace) -> int:
    """Write a config; what reads rows and calls rewards is imported when it is asked for."""
    from slipstream.cli.init_draft import make

    return make(options)
