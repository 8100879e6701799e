"""The command line as a person meets it: in its own process, or called for speed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.conftest import save_family

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("SLIPSTREAM_")]:
        monkeypatch.delenv(name)


@pytest.fixture
def slipstream(tmp_path: Path, clean_environment: None) -> Run:
    def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "slipstream.cli.main", *arguments],
            cwd=tmp_path,
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            timeout=250,
            check=False,
        )

    return run


@pytest.fixture(scope="session")
def chatty(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny model that takes any text, with a chat template."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    folder = save_family(
        "llama",
        tmp_path_factory.mktemp("chatty"),
        vocab_size=300,
        max_position_embeddings=512,
        eos_token_id=257,
    )
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    hf = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>")
    hf.chat_template = CHATML
    hf.save_pretrained(folder)
    return str(folder)
