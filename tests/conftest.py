"""What tests of several parts make."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from slipstream.ledger.records import MemberInfo

settings.register_profile("unhurried", deadline=None)  # a machine may be busy
settings.load_profile("unhurried")


def pytest_configure() -> None:
    """Processes that tests start hear the signals that they are sent, also under `make test &` and nohup: what is
    ignored here would be ignored there."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGHUP, signal.SIGUSR1, signal.SIGTERM):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)


@pytest.fixture(scope="session")
def member() -> Callable[..., MemberInfo]:
    """A process as the ledger knows it; `detail` by keyword."""

    def make(
        name: str,
        role: str = "rollout",
        version: int = -1,
        incarnation: str = "i",
        metrics_port: int = 0,
        **detail: Any,
    ) -> MemberInfo:
        return MemberInfo(
            id=name,
            role=role,
            endpoint="",
            metrics_port=metrics_port,
            host="h",
            pid=1,
            incarnation=incarnation,
            version=version,
            detail=detail,
        )

    return make


SIZES: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "pad_token_id": 2,
    "eos_token_id": 2,
    "bos_token_id": None,
}
MIXTURE = {"num_local_experts": 4, "num_experts_per_tok": 2}
GPT2 = {"vocab_size": 40, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "initializer_range": 0.2}
OPT = {"ffn_dim": 64, "word_embed_proj_dim": 32, "init_std": 0.2, "layerdrop": 0.5}
# name: the config's class in transformers, and what it takes beside or instead of the sizes
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {"tie_word_embeddings": False}),
    "llama-tied": ("LlamaConfig", {"tie_word_embeddings": True}),
    "mistral": ("MistralConfig", {"sliding_window": 8}),
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", {"head_dim": 16}),
    "phi3": ("Phi3Config", {}),
    "gemma3": ("Gemma3TextConfig", {"head_dim": 8}),
    "gpt2": ("GPT2Config", GPT2),
    "opt": ("OPTConfig", OPT),
    "neox": ("GPTNeoXConfig", {"num_key_value_heads": 4}),
    "mixtral": ("MixtralConfig", {**MIXTURE, "router_jitter_noise": 0.5}),
    "qwen3-moe": ("Qwen3MoeConfig", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}),
    "phimoe": ("PhimoeConfig", {**MIXTURE, "router_jitter_noise": 0.01, "input_jitter_noise": 0.5}),
}


def save_family(name: str, folder: Path, dtype: str = "float32", **changes: Any) -> Path:
    """Save a random tiny model of a family, in a dtype."""
    import torch
    import transformers

    kind, settings = FAMILIES[name]
    config = getattr(transformers, kind)(**(settings if name == "gpt2" else SIZES | settings) | changes)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        for parameter in model.parameters():  # norms and biases too, which start as constants
            parameter.data += 0.05 * torch.randn(parameter.shape)
        model.to(getattr(torch, dtype)).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def make_family() -> Callable[..., Path]:
    return save_family


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    """The name of each family of the test matrix."""
    return str(request.param)
