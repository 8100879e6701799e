"""Whether a model folder's files hold the tensors that its config asks for: names, shapes and types.

Only headers are read. transformers itself answers, with a model and tensors that have no memory, so that what it
renames, joins or leaves out as it loads counts here as it will then; a tensor that it would make up is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from slipstream.errors import UserError
from slipstream.models.architecture import read_architecture, unsupported
from slipstream.models.tensors import FLOATS, LEFT_OUT, Headers, Shapes, read_tensors, tensor_headers

_MEND = "fetch or save the model anew with transformers, or correct its config.json"


def check_folder_weights(folder: Path, attention: str = "eager") -> None:
    """Refuse a model folder whose weights are not those of the model that its config describes.

    Args:
        folder: The model.
        attention: `model.attention`; the default is one that every model can have.

    Raises:
        UserError: Names the first tensor that is missing, unexpected, no float or of another shape, and says how
            many there are; or a model that cannot be trained, or a head that contradicts a tied config.
    """
    if reason := unsupported(read_architecture(folder), attention):
        raise UserError(f"model folder {folder}: {reason}")
    headers = tensor_headers(folder)
    kind, config = _model_class(folder)
    integers = {name for name, (_, dtype) in headers.items() if dtype not in FLOATS}
    found = _trial(kind, config, {name: shape for name, (shape, _) in headers.items() if name not in integers})
    if problem := _problem(found, integers, headers):
        raise UserError(f"model folder {folder}: {problem}", _MEND)
    if found["model"] is None:
        raise UserError(f"model folder {folder}: transformers cannot join its tensors", _MEND)
    _check_tied(folder, found["model"], headers)


def _problem(found: Mapping[str, Any], integers: set[str], headers: Headers) -> str | None:
    missing, mismatched = sorted(found["missing_keys"]), sorted(found["mismatched_keys"])
    lacking = [*missing, *(name for name, *_ in mismatched)]
    if integers and lacking:
        wanted = [n for n in sorted(integers) if any(n.endswith(each) or each.endswith(n) for each in lacking)]
        first, *more = wanted or sorted(integers)
        return f"tensor {first!r} has type {headers[first][1]}, which is no float ({_count([first, *more])} so)"
    if mismatched:
        name, has, wants = mismatched[0]
        return f"tensor {name!r} has shape {list(has)} instead of {list(wants)} ({_count(mismatched)} so)"
    unexpected = sorted(name for name in found["unexpected_keys"] if not name.endswith(LEFT_OUT))
    parts = []
    if missing:
        parts.append(f"lacks tensor {missing[0]!r} of its model ({_count(missing)} missing)")
    if unexpected:
        parts.append(
            f"holds tensor {unexpected[0]!r}, which is no part of its model ({len(unexpected)} unexpected)"
        )
    return " and ".join(parts) or None


def _count(names: Any) -> str:
    return f"{len(names)} tensor" + ("s" if len(names) != 1 else "")


def _model_class(folder: Path) -> tuple[Any, Any]:
    """The model's class and config, as transformers would choose them."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig

    with told(folder), quiet():
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UserError(
            f"model folder {folder}: {config.model_type} is no causal language model that transformers knows",
            "check model.source",
        )
    return MODEL_FOR_CAUSAL_LM_MAPPING[type(config)], config


def _trial(kind: Any, config: Any, shapes: Shapes) -> dict[str, Any]:
    """What transformers says to tensors of these shapes: its lists, and the model that it made; None for one whose
    tensors do not fit together where it joins them."""
    import torch

    given = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    options = {"device_map": "meta", "output_loading_info": True, "ignore_mismatched_sizes": True}
    with quiet():
        try:
            model, lists = kind.from_pretrained(None, config=config, state_dict=given, **options)
        except RuntimeError:
            return {**_compared(kind, config, shapes), "model": None}
        if any(
            name not in shapes for name, *_ in lists["mismatched_keys"]
        ):  # what it joined: named by its parts
            return {**_compared(kind, config, shapes), "model": model}
    return {**lists, "model": model}


def _compared(kind: Any, config: Any, shapes: Shapes) -> dict[str, Any]:
    """The same lists by the names that transformers would save the model under."""
    import torch
    from transformers.core_model_loading import revert_weight_conversion

    with torch.device("meta"):
        model = kind._from_config(config)
    state = {
        name: value for name, value in model.state_dict().items() if name not in model.all_tied_weights_keys
    }
    wanted = {name: tuple(value.shape) for name, value in revert_weight_conversion(model, state).items()}
    return {
        "missing_keys": wanted.keys() - shapes.keys(),
        "unexpected_keys": shapes.keys() - wanted.keys() - model.all_tied_weights_keys.keys(),
        "mismatched_keys": [
            (n, shapes[n], wanted[n]) for n in wanted.keys() & shapes.keys() if shapes[n] != wanted[n]
        ],
    }


def _check_tied(folder: Path, model: Any, headers: Headers) -> None:
    """Refuse a file that holds two different tensors where the config says that both are one."""
    for one, other in dict(model.get_expanded_tied_weights_keys(all_submodels=True)).items():
        if one not in headers or other not in headers:
            continue
        first, second = read_tensors(folder, [one, other]).values()
        if first.shape != second.shape or bool((first != second).any()):
            raise UserError(
                f"model folder {folder}: its config ties {one!r} to {other!r} (tie_word_embeddings), and the files "
                "hold two that differ",
                "set tie_word_embeddings to false in its config.json, or save the model anew",
            )


@contextmanager
def told(folder: Path) -> Iterator[None]:
    """What transformers finds wrong with a folder, in one line."""
    try:
        yield
    except (OSError, ValueError, ImportError, RuntimeError, KeyError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        mend = "set model.attention=eager" if "attention implementation" in reason else "check model.source"
        raise UserError(f"model folder {folder} cannot be loaded: {reason}", mend) from error


@contextmanager
def quiet() -> Iterator[None]:
    """Lets transformers print no tables and bars of transformers: what is wrong is said in one line."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
