"""A model small enough for tests: a two-layer Llama of 0.5M parameters that half knows how to sort six digits.

Prompt `314159>`, answer `113459$`. After 50 supervised steps it sorts about 4 of 10 prompts when sampled, so
reinforcement learning has something to improve. Shapes: B sequences, T positions.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

CHARACTERS = "_$0123456789+=>*"
PAD_ID, STOP_ID = 0, 1
DIGITS = 6
STEPS, BATCH, RATE, RAMP = 50, 128, 1e-3, 20
CONTEXT = 64


def build_tiny_sorter(folder: Path, seed: int = 0) -> None:
    """Make and train the sorter (about 5 CPU seconds), and save it with its tokenizer into the folder.

    The same seed gives the same weights on the same machine; the caller's random state is left as it was.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # with more, sums are taken in another order and the weights differ
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = new_sorter()
            train_sorter(model)
    finally:
        torch.set_num_threads(threads)
    weights = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    model.config.save_pretrained(folder)
    write_character_tokenizer(folder)


def new_sorter() -> Any:
    """An untrained sorter (transformers' `LlamaForCausalLM`, float32), from torch's random state."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=len(CHARACTERS),
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=False,
        pad_token_id=PAD_ID,
        bos_token_id=None,
        eos_token_id=STOP_ID,
    )
    return LlamaForCausalLM(config)


def train_sorter(model: Any) -> None:
    """50 supervised AdamW steps on random digits; only the answer is trained."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.0)
    model.train()
    for step in range(STEPS):
        optimizer.param_groups[0]["lr"] = RATE * min(1.0, (step + 1) / RAMP)
        ids_BT = sorting_batch(BATCH)
        logits_BTV = model(input_ids=ids_BT[:, :-1]).logits[:, DIGITS:]
        loss = torch.nn.functional.cross_entropy(logits_BTV.flatten(0, 1), ids_BT[:, DIGITS + 1 :].flatten())
        optimizer.zero_grad(set_to_none=True)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    model.eval()


def sorting_batch(count: int) -> Tensor:
    """Ids [B, 14] of `digits>sorted$` for random digits, from torch's random state."""
    zero = CHARACTERS.index("0")
    digits_BT = torch.randint(0, 10, (count, DIGITS))
    arrow_B1 = torch.full((count, 1), CHARACTERS.index(">"))
    stop_B1 = torch.full((count, 1), STOP_ID)
    return torch.cat([digits_BT + zero, arrow_B1, digits_BT.sort(dim=1).values + zero, stop_B1], dim=1)


def write_character_tokenizer(folder: Path) -> None:
    """Write a tokenizer of one id per character; unknown characters become `_` (also the pad)."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

    vocab = {character: index for index, character in enumerate(CHARACTERS)}
    pad, stop = CHARACTERS[PAD_ID], CHARACTERS[STOP_ID]
    tokenizer: Any = Tokenizer(models.WordLevel(vocab=vocab, unk_token=pad))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(name, normalized=False, special=True) for name in (pad, stop)])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": pad,
        "unk_token": pad,
        "eos_token": stop,
        "model_max_length": CONTEXT,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
