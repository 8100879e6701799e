"""Which files a `data.path` names: one, all that a pattern fits, or those of a folder that belong to a split."""

from __future__ import annotations

import glob
import re
from collections.abc import Sequence
from pathlib import Path

from slipstream.errors import UserError

LINES = (".jsonl", ".ndjson")
CELLS = (".csv", ".tsv")
OTHERS = (".parquet", ".json", ".arrow")
# The words by which datasets, too, tells the files of a folder apart.
_WORDS = {
    "train": ("train", "training"),
    "test": ("test", "testing", "eval", "evaluation"),
    "validation": ("validation", "valid", "val", "dev"),
}
_SAVED = ("state.json", "dataset_dict.json")


def form_of(path: Path) -> str:
    """What a file's name says that it holds: its suffix, without the one of gzip."""
    return Path(path.name.removesuffix(".gz")).suffix.lower()


def named_files(path: str, forms: Sequence[str] = (*LINES, *CELLS, *OTHERS)) -> list[Path]:
    """Files of this machine that a path names, in the order of their names; none where it is an id or a saved set.

    Args:
        path: A file, a pattern such as `data/*.jsonl`, or a folder.
        forms: What counts in a folder, by suffix.
    """
    place = Path(path).expanduser()
    if place.is_file() or (place.exists() and not place.is_dir()):
        return [place]
    if place.is_dir():
        if any((place / name).is_file() for name in _SAVED):
            return []
        found = (each for each in place.rglob("*") if each.is_file() and form_of(each) in forms)
        return sorted(each for each in found if not _hidden(each.relative_to(place)))
    if glob.has_magic(path):
        return sorted(each for each in map(Path, glob.glob(str(place), recursive=True)) if each.is_file())
    return []


def files_of_split(path: str, files: Sequence[Path], name: str) -> tuple[list[Path], str]:
    """The files that hold a split, and the split that they hold; only in a folder do names of files say which.

    Raises:
        UserError: The folder's files have other names.
    """
    place = Path(path).expanduser()
    if not place.is_dir():
        return list(files), "train"
    splits: dict[str, list[Path]] = {}
    for each in files:
        splits.setdefault(_split_in(str(each.relative_to(place))), []).append(each)
    if name not in splits:
        raise UserError(
            f"data.split: {name!r}, but the files in {path!r} are of the splits {', '.join(sorted(splits))}",
            "set it to one of these, or give one file",
        )
    return splits[name], name


def _split_in(name: str) -> str:
    words = set(re.split(r"[^a-z]+", name.lower()))
    return next((split for split, known in _WORDS.items() if words & set(known)), "train")


def _hidden(path: Path) -> bool:
    return any(part.startswith((".", "__")) for part in path.parts)
