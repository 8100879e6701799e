"""Build a Hugging Face tokenizer from the metadata of a GGUF file (byte-level BPE).

transformers can read GGUF tokenizers too, but loses the rule that splits digits, so the pre-tokenizer is built
here from the file's own name for it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from slipstream.errors import UserError
from slipstream.models.gguf_weights import GgufFile

CONTROL = 3  # gguf.TokenType.CONTROL


def write_tokenizer(file: GgufFile, folder: Path) -> None:
    """Write `tokenizer.json`, `tokenizer_config.json` and the chat template into the folder.

    Raises:
        UserError: The file's tokenizer is no byte-level BPE that we know.
    """
    tokens, types = file.field("tokenizer.ggml.tokens"), file.field("tokenizer.ggml.token_type")
    control = [token for token, kind in zip(tokens, types, strict=True) if kind == CONTROL]
    parts = (merge.partition(" ") for merge in file.field("tokenizer.ggml.merges"))
    merges = [(left, right) for left, _, right in parts]
    tokenizer = _byte_level_bpe(tokens, merges, control, _digits_split(file))
    tokenizer.save(str(folder / "tokenizer.json"))
    template = file.field("tokenizer.chat_template")
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    config = _tokenizer_config(file, tokens)
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def _digits_split(file: GgufFile) -> bool:
    model, pre = file.field("tokenizer.ggml.model"), file.field("tokenizer.ggml.pre", "gpt-2")
    if model != "gpt2" or pre not in ("smollm", "gpt-2"):
        raise UserError(
            f"GGUF tokenizer {model}/{pre}", "only gpt2 with the pre-tokenizers smollm and gpt-2 is known"
        )
    return bool(pre == "smollm")


def _byte_level_bpe(
    tokens: list[str], merges: list[tuple[str, str]], control: list[str], split_digits: bool
) -> Any:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    vocab = {token: index for index, token in enumerate(tokens)}
    tokenizer: Any = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    bytes_: Any = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, bytes_]) if split_digits else bytes_
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in control])
    return tokenizer


def _tokenizer_config(file: GgufFile, tokens: list[str]) -> dict[str, Any]:
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": file.field("llama.context_length"),
        "clean_up_tokenization_spaces": False,
    }
    for key, name in {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}.items():
        index = file.field(f"tokenizer.ggml.{name}_token_id")
        if index is not None:
            config[f"{key}_token"] = tokens[index]
    return config
