"""What servers speak: how a sample is asked for, how its tokens come back, and how new weights are taken.

Every dialect gives ids and logprobs for ids; text is never encoded again. An answer that lacks either is refused.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from slipstream.rollout.engines.base import Head, Sampling
from slipstream.rollout.engines.handover import Handover
from slipstream.rollout.engines.http.http_client import HttpClient, HttpError

PROBE_SECONDS = 30.0


class AnswerPiece(NamedTuple):
    """New tokens of a sample; `reason` is the server's word for why it ended, empty while it goes on."""

    token_ids: Sequence[int]
    logprobs: Sequence[float]
    heads: Sequence[Head]
    reason: str


@dataclass(frozen=True, slots=True)
class Ask:
    """One sample to continue: all ids so far, how many more at most, and under which version."""

    ids: Sequence[int]
    limit: int
    seed: int
    sampling: Sampling
    version: int


class Dialect(Protocol):
    """A kind of server."""

    async def open(self, client: HttpClient) -> None:
        """Look whether the server is there; learn what requests need.

        Raises:
            HttpError: It is not, or it is another kind of server.
        """
        ...

    async def can_update(self, client: HttpClient) -> bool:
        """Whether the server takes new weights."""
        ...

    def sample(self, client: HttpClient, ask: Ask, seconds: float) -> AsyncIterator[AnswerPiece]:
        """Tokens of one sample; leaving early makes the server stop."""
        ...

    async def served(self, client: HttpClient) -> str:
        """The version that the server says it serves."""
        ...

    async def update(self, client: HttpClient, handover: Handover, seconds: float) -> None:
        """Have the server load a version, and read back that it serves it.

        Raises:
            HttpError: It did not, and may hold a mixture.
        """
        ...


class VllmDialect:
    """vLLM's OpenAI server, started with our worker extension and its update routes."""

    def __init__(self, model: str | None) -> None:
        self._model = model

    async def open(self, client: HttpClient) -> None:
        listed = await client.json("GET", "/v1/models", PROBE_SECONDS)
        names = [entry["id"] for entry in listed.get("data", [])]
        if self._model is None and names:
            self._model = names[0]
        if self._model not in names:
            raise HttpError(f"{client.base}: serves {names or 'no model'}, not {self._model!r}")

    async def can_update(self, client: HttpClient) -> bool:
        try:
            await client.json("POST", "/init_weight_transfer_engine", PROBE_SECONDS, {"init_info": {"pid": 0}})
        except HttpError as error:
            if error.status in (400, 404, 405, 500):
                return False
            raise
        return True

    async def sample(self, client: HttpClient, ask: Ask, seconds: float) -> AsyncIterator[AnswerPiece]:
        sampling = ask.sampling
        body = {
            "model": self._model,
            "prompt": list(ask.ids),
            "max_tokens": ask.limit,
            "temperature": sampling.temperature,
            "seed": ask.seed,
            "stop_token_ids": list(sampling.stop_ids),
            "ignore_eos": True,  # what stops is in stop_token_ids, and nothing else
            "logprobs": sampling.top_logprobs,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
            "cache_salt": f"version {ask.version}",
            "top_p": 1.0,
            "top_k": 0,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "stream": True,
        }
        async for event in client.events("/v1/completions", seconds, body):
            if "error" in event:
                raise HttpError(f"{client.base}: {event['error']}")
            for choice in event.get("choices", []):
                yield _completion_piece(client, choice, sampling.top_logprobs)

    async def served(self, client: HttpClient) -> str:
        return str((await client.json("GET", "/weight_info", PROBE_SECONDS)).get("weight_version"))

    async def update(self, client: HttpClient, handover: Handover, seconds: float) -> None:
        version = str(handover.version)
        async with asyncio.timeout(seconds):
            await client.json("POST", "/pause?mode=abort&clear_cache=true", seconds)
            await client.json("POST", "/start_weight_update", seconds)
            await client.json("POST", "/update_weights", seconds, {"update_info": handover.message()})
            await client.json("POST", "/finish_weight_update", seconds, {"weight_version": version})
            if (served := await self.served(client)) != version:
                raise HttpError(f"{client.base}: serves version {served} after {version} was loaded")
            await client.json("POST", "/resume", seconds)


class SglangDialect:
    """SGLang's own /generate, and its updates from a folder; unverified against a real server."""

    async def open(self, client: HttpClient) -> None:
        await client.json("GET", "/get_model_info", PROBE_SECONDS)

    async def can_update(self, client: HttpClient) -> bool:
        return True  # every server has the route; whether it sees the folder shows at the first update

    async def sample(self, client: HttpClient, ask: Ask, seconds: float) -> AsyncIterator[AnswerPiece]:
        sampling = ask.sampling
        body = {
            "input_ids": list(ask.ids),
            "sampling_params": {
                "temperature": sampling.temperature,
                "max_new_tokens": ask.limit,
                "stop_token_ids": list(sampling.stop_ids),
                "ignore_eos": True,
                "sampling_seed": ask.seed % 2**31,
            },
            "return_logprob": True,
            "top_logprobs_num": sampling.top_logprobs,
            "stream": True,
        }
        seen = 0
        async for event in client.events("/generate", seconds, body):
            if "error" in event:
                raise HttpError(f"{client.base}: {event['error']}")
            piece, seen = _generate_piece(client, event, seen, sampling.top_logprobs)
            yield piece

    async def served(self, client: HttpClient) -> str:
        return str((await client.json("GET", "/get_model_info", PROBE_SECONDS)).get("weight_version"))

    async def update(self, client: HttpClient, handover: Handover, seconds: float) -> None:
        version = str(handover.version)
        body = {
            "model_path": handover.path,
            "weight_version": version,
            "flush_cache": True,
            "abort_all_requests": True,
        }
        answer = await client.json("POST", "/update_weights_from_disk", seconds, body)
        if not answer.get("success"):
            raise HttpError(f"{client.base}: refused version {version}: {answer.get('message')}")
        if (served := await self.served(client)) != version:
            raise HttpError(f"{client.base}: serves version {served} after {version} was loaded")


def _completion_piece(client: HttpClient, choice: Mapping[str, Any], top: int) -> AnswerPiece:
    ids, logprobs = choice.get("token_ids"), choice.get("logprobs")
    reason = choice.get("finish_reason") or ""
    if not ids:
        return AnswerPiece((), (), (), reason)
    if not logprobs or len(logprobs["token_logprobs"]) != len(ids):
        raise HttpError(f"{client.base}: {len(ids)} ids came without as many logprobs")
    values = [float("nan") if value is None else float(value) for value in logprobs["token_logprobs"]]
    heads = [_head(entry, top) for entry in logprobs.get("top_logprobs") or ()] if top else []
    _check_heads(client, heads, len(ids), top)
    return AnswerPiece(ids, values, heads, reason)


def _check_heads(client: HttpClient, heads: Sequence[Head], tokens: int, top: int) -> None:
    if top and (len(heads) != tokens or not all(heads)):
        raise HttpError(
            f"{client.base}: tokens came without their {top} likeliest; set sampling.top_logprobs to 0"
        )


def _head(entries: Mapping[str, float] | None, top: int) -> Head:
    """Entries named "token_id:123", likeliest first."""
    pairs = [(int(name.rpartition(":")[2]), float(value)) for name, value in (entries or {}).items()]
    return tuple(sorted(pairs, key=lambda pair: -pair[1])[:top])


def _generate_piece(
    client: HttpClient, event: Mapping[str, Any], seen: int, top: int
) -> tuple[AnswerPiece, int]:
    """New tokens of an event; its lists may hold all tokens so far, or the new ones only."""
    meta = event.get("meta_info", {})
    entries = meta.get("output_token_logprobs")
    if entries is None:
        raise HttpError(f"{client.base}: tokens came without logprobs")
    total = int(meta.get("completion_tokens", len(entries)))
    new = entries[seen:] if len(entries) == total else entries
    tops = meta.get("output_top_logprobs") or []
    heads = (
        [tuple((int(i), float(p)) for p, i, *_ in row)[:top] for row in tops[len(tops) - len(new) :]]
        if top
        else []
    )
    _check_heads(client, heads, len(new), top)
    reason = (meta.get("finish_reason") or {}).get("type", "")
    piece = AnswerPiece([int(entry[1]) for entry in new], [float(entry[0]) for entry in new], heads, reason)
    return piece, seen + len(new)
