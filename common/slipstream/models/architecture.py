"""What a model's `config.json` says of it, without any library: its context, its vocabulary, and whether it can be
trained here at all. So `validate` can answer before anything is loaded.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from slipstream.errors import UserError

Described = dict[str, Any]

_TEXT_PARTS = ("text_config", "llm_config", "language_config", "thinker_config", "decoder")
_OTHER_SENSES = ("vision_config", "audio_config", "visual", "speech_config", "image_config")
# the names that the library's families give to the number of positions, as they stand in config.json
_POSITIONS = (
    *(
        "max_position_embeddings",
        "n_positions",
        "n_ctx",
        "max_sequence_length",
        "max_seq_len",
        "max_seq_length",
    ),
    *(
        "seq_length",
        "seq_len",
        "model_max_length",
        "context_length",
        "max_context_length",
        "max_target_positions",
    ),
)
_RECURRENT_LAYER = re.compile(r"linear|mamba|ssm|recurrent|rwkv|lru|conv|hybrid|delta|kda|lightning")
_RECURRENT_KEY = re.compile(
    r"(mamba|ssm|mlstm|slstm|rwkv|lru|time_mix|linear_(conv|num|key|value|attn))_\w+"
    r"|ssm_cfg|state_size|hybrid_override_pattern|attn_layer_period|conv_L_cache|recurrent_block_type"
)
_RECURRENT_FAMILY = re.compile(
    r"mamba|jamba|bamba|zamba|rwkv|xlstm|recurrent_gemma|falcon_h1|nemotron_h|lfm|kimi_linear|olmo_hybrid"
    r"|bailing_hybrid|qwen3_next|qwen3_5|retnet|minimax(_text_01)?$"
)


def read_architecture(folder: Path) -> Described:
    """`config.json` of a model folder as it stands.

    Raises:
        UserError: There is none that can be read.
    """
    path = folder / "config.json"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(
            f"model folder {folder}: config.json cannot be read ({error})", "check model.source"
        ) from error
    if not isinstance(content, dict):
        raise UserError(f"model folder {folder}: config.json holds no object", "check model.source")
    return content


def text_part(described: Described) -> Described:
    """The description with that of its language model on top, where a model of several parts nests it."""
    for name in _TEXT_PARTS:
        if isinstance(described.get(name), dict):
            return {**described, **text_part(described[name])}
    return described


def positions(described: Described) -> int | None:
    """Tokens that the model was made for, prompt and completion together; None where it names no bound.

    Of several names the smallest number counts.
    """
    text = text_part(described)
    found = [int(text[name]) for name in _POSITIONS if _is_count(text.get(name))]
    return min(found, default=None)


def vocabulary(described: Described) -> int | None:
    """Rows of the embedding, the ids that the model knows; None where it does not say."""
    size: int | None = text_part(described).get("vocab_size")
    return size if _is_count(size) else None


def unsupported(described: Described, attention: str = "sdpa") -> str | None:
    """Why this model cannot be trained here, with the mend; None where nothing speaks against it.

    Args:
        described: Its `config.json`.
        attention: `model.attention`.
    """
    name = described.get("model_type", "without a model_type")
    if parts := [each for each in (*_OTHER_SENSES, *_TEXT_PARTS) if isinstance(described.get(each), dict)]:
        return (
            f"a {name} model has several parts ({', '.join(parts)}), and only a language model alone is trained; "
            "save its language model in a folder of its own and name that"
        )
    if described.get("is_encoder_decoder"):
        return f"a {name} model has an encoder and a decoder; name one that only decodes"
    if described.get("quantization_config"):
        return f"the weights of this {name} model are quantized; name a model whose weights are floats"
    if reason := _recurrent(described):
        return (
            f"a {name} model is recurrent ({reason}), and its state cannot be decoded in batches that change; "
            "name a model whose layers are all attention"
        )
    return _capped(described, attention)


def _capped(described: Described, attention: str) -> str | None:
    caps = {name: value for name, value in described.items() if "softcap" in name and value}
    for name, value in caps.items():
        if "attn" not in name and "attention" not in name:
            return (
                f"{name} {value:g} caps the logits, which are then more than hidden states times the head; "
                "name a model without a soft cap on its logits"
            )
    if caps and attention == "sdpa":
        name, value = next(iter(caps.items()))
        return f"{name} {value:g} caps attention, which {attention} leaves out; set model.attention=eager"
    return None


def _recurrent(described: Described) -> str | None:
    """What in the description says that layers carry a state from token to token."""
    for name in ("layer_types", "layers_block_type", "block_types", "_block_types"):
        kinds = described.get(name)
        if isinstance(kinds, list) and kinds:
            # what the layers are said to be counts more than the sizes of such as it may not have
            other = [str(kind) for kind in kinds if _RECURRENT_LAYER.search(str(kind))]
            return f"{name}: {other[0]}" if other else None
    if _RECURRENT_FAMILY.match(str(described.get("model_type", ""))):
        return f"model_type: {described['model_type']}"
    return next((name for name, value in described.items() if value and _RECURRENT_KEY.fullmatch(name)), None)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
