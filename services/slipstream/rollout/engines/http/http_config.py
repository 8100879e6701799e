"""Settings of the http engine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from slipstream.secrets import ENGINE_KEY


@dataclass(frozen=True, slots=True)
class HttpConfig:
    """Settings of the engine; `folder` is the model's Hugging Face folder, whose tensors the servers must have.

    `endpoints` are base URLs of equal servers, without `/v1`. `server` is what they speak: "vllm" or "sglang"
    (experimental: no such server could be run here).
    `share` is a folder that the servers see too; a new version is written there for them, where they cannot open
    this host's memory (vLLM elsewhere, or SGLang). `fixed_weights: true` says that servers may generate although
    they cannot be updated: their tokens then carry version 0 for ever. Servers that were left out are looked at every
    `probe_seconds`; when none has served for `swap_seconds`, the engine ends. A key for the servers comes from the
    environment, `SLIPSTREAM_ENGINE_KEY` or the file that `SLIPSTREAM_ENGINE_KEY_FILE` names.
    """

    folder: Path
    slots: int = 64
    context: int = 1024
    requests: int = 256
    chunk_tokens: int = 16
    endpoints: tuple[str, ...] = ()
    server: Literal["vllm", "sglang"] = "vllm"
    model: str | None = None
    share: Path | None = None
    fixed_weights: bool = False
    token_seconds: float = 120.0
    swap_seconds: float = 300.0
    attempts: int = 3
    probe_seconds: float = 5.0

    def __post_init__(self) -> None:
        if not self.endpoints:
            raise ValueError("endpoints: give the base URL of a server at least, such as http://host:8000")
        for url in self.endpoints:
            parts = urlsplit(url)
            if parts.scheme not in ("http", "https") or not parts.hostname:
                raise ValueError(f"endpoints: {url!r} is no http:// or https:// URL")
            if parts.password is not None:
                raise ValueError(f"endpoints: take the password out of the URL and set {ENGINE_KEY}")
        if self.server == "sglang" and self.share is None and not self.fixed_weights:
            raise ValueError("share: SGLang loads new weights from a folder that it sees; name one")
