"""What the http engine makes of servers that cannot be updated, fail, hang, or say less than is needed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from slipstream.errors import SlipstreamError, UserError, WeightsError
from slipstream.rollout.engines.http.http import HttpEngine
from slipstream.rollout.engines.http.http_client import HttpClient, HttpError
from slipstream.rollout.engines.http.http_config import HttpConfig
from slipstream.rollout.engines.http.http_dialects import _generate_piece


@pytest_asyncio.fixture
async def pool(tiny: Any, tmp_path: Path) -> AsyncIterator[Callable[..., Any]]:
    """Makes an engine before as many servers as asked for; all are closed afterwards."""
    tiny.models.model(0).save_pretrained(tmp_path)
    opened: list[Any] = []

    async def make(
        servers: int = 1, *, start: bool = True, server: dict[str, Any] | None = None, **options: Any
    ) -> Any:
        made = [tiny.server(**(server or {})) for _ in range(servers)]
        urls = tuple([await each.start() for each in made])
        opened.extend(made)
        options = {"probe_seconds": 0.02, **options}
        engine = HttpEngine(HttpConfig(tmp_path, slots=4, context=64, endpoints=urls, **options))
        opened.append(engine)
        if start:
            await engine.start()
            await engine.swap(tiny.models.weights(1))
        return engine, made

    yield make
    for each in reversed(opened):
        await (each.close() if isinstance(each, HttpEngine) else each.stop())


async def collect(engine: HttpEngine, request: Any) -> list[tuple[int, ...]]:
    made: dict[int, tuple[int, ...]] = {}
    async for chunk in engine.generate(request):
        made[chunk.sample] = made.get(chunk.sample, ()) + chunk.token_ids
    return [made[sample] for sample in sorted(made)]


async def test_a_server_that_takes_no_weights_is_refused_for_training(pool: Any) -> None:
    engine, _ = await pool(server={"updates": False}, start=False)
    with pytest.raises(UserError, match="takes no new weights, so its tokens would carry false versions"):
        await engine.start()


async def test_fixed_weights_are_version_0_for_ever(pool: Any, tiny: Any) -> None:
    engine, _ = await pool(server={"updates": False}, start=False, fixed_weights=True)
    await engine.start()
    assert (engine.follows, engine.version) == (False, 0)
    versions = {chunk.version async for chunk in engine.generate(tiny.request(tokens=5))}
    assert versions == {0}
    weights = tiny.models.weights(1)
    with pytest.raises(SlipstreamError, match="fixed"):
        await engine.swap(weights)
    assert (weights.releases, engine.version) == (1, 0)


async def test_a_server_that_is_not_there_is_named(pool: Any, tmp_path: Path) -> None:
    engine = HttpEngine(HttpConfig(tmp_path, endpoints=("http://127.0.0.1:9",)))
    (tmp_path / "config.json").write_text('{"vocab_size": 32}')
    with pytest.raises(UserError, match=r"endpoints: http://127.0.0.1:9/v1/models"):
        await engine.start()


async def test_logprobs_before_temperature_are_refused_when_one_is_set(pool: Any, tiny: Any) -> None:
    """Case 41."""
    engine, _ = await pool(server={"raw_logprobs": True})
    assert await collect(engine, tiny.request(tokens=3))
    with pytest.raises(SlipstreamError, match="logprobs before temperature"):
        await collect(engine, tiny.request(tokens=3, temperature=0.7))


async def test_samples_go_on_at_another_server_when_one_fails(pool: Any, tiny: Any) -> None:
    engine, servers = await pool(2)
    servers[0].faults["POST /v1/completions"] = lambda: None  # closes without an answer
    made = await collect(engine, tiny.request(seeds=(1, 2, 3, 4), tokens=6))
    assert [len(ids) for ids in made] == [6] * 4
    servers[0].faults.clear()
    await engine.swap(tiny.models.weights(2))  # it takes a version again, and is asked again
    before = len(servers[0].requests)
    await collect(engine, tiny.request(seeds=(1, 2, 3, 4), tokens=6))
    assert len(servers[0].requests) > before


async def test_when_no_server_answers_the_group_fails_and_nothing_is_made_up(pool: Any, tiny: Any) -> None:
    engine, servers = await pool(2)
    for server in servers:
        server.faults["POST /v1/completions"] = lambda: None
    with pytest.raises(SlipstreamError):
        await asyncio.wait_for(collect(engine, tiny.request(tokens=6)), 30)


async def test_a_server_that_says_nothing_meets_a_deadline(pool: Any, tiny: Any) -> None:
    engine, servers = await pool(token_seconds=0.2)
    silence = asyncio.Event()
    servers[0].delay = silence.wait
    with pytest.raises(SlipstreamError, match=r"no answer within 0.2 s"):
        await asyncio.wait_for(collect(engine, tiny.request(tokens=6)), 30)
    silence.set()


async def test_ids_without_logprobs_are_refused(pool: Any, tiny: Any) -> None:
    """Case 38."""
    engine, servers = await pool(attempts=1)
    servers[0].without_logprobs = True
    with pytest.raises(SlipstreamError, match="without as many logprobs"):
        await collect(engine, tiny.request(tokens=3))


async def test_weights_that_no_server_takes_end_what_is_in_flight(pool: Any, tiny: Any) -> None:
    engine, servers = await pool(2, swap_seconds=0.2)
    for server in servers:
        server.faults["POST /update_weights"] = lambda: None
    weights = tiny.models.weights(2)
    with pytest.raises(WeightsError, match="no server took version 2"):
        await engine.swap(weights)
    assert (weights.releases, engine.version) == (1, None)


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not true():  # noqa: ASYNC110  (a stand-in for what a replica sees by looking)
            await asyncio.sleep(0.005)


async def read(engine: HttpEngine, request: Any) -> list[Any]:
    async with asyncio.timeout(30):
        return [chunk async for chunk in engine.generate(request)]


def restart(server: Any) -> None:
    """It answers again, with the weights of its start."""
    server.down, server.version = False, "default"


@pytest.mark.parametrize("fixed", [False, True])
async def test_samples_wait_for_a_server_that_died_and_go_on_when_it_is_back(pool: Any, tiny: Any, fixed: bool):
    """What failed is the server and not the group; nothing is admitted meanwhile, and nothing has a false version."""
    engine, (server,) = await pool(fixed_weights=fixed, start=not fixed)
    if fixed:
        await engine.start()
    served = engine.version
    server.delay = lambda: asyncio.sleep(0.01)
    reading = asyncio.create_task(read(engine, tiny.request(seeds=(1, 2, 3, 4), tokens=40)))
    await until(lambda: any(path == "POST /v1/completions" for path, _ in server.requests))
    server.down = True
    await until(lambda: engine.version is None)
    engine.check_running()
    restart(server)
    chunks = await reading
    assert {chunk.version for chunk in chunks if chunk.token_ids} == {served}
    assert sum(len(chunk.token_ids) for chunk in chunks) == 160
    assert {chunk.finish for chunk in chunks} == {None, "length"}
    assert server.version == ("default" if fixed else "1")


async def test_a_server_that_died_while_nothing_was_in_flight_samples_nothing_under_a_false_version(
    pool: Any, tiny: Any
) -> None:
    engine, (server,) = await pool()
    restart(server)
    asked = len(server.requests)
    assert await collect(engine, tiny.request(seeds=(1, 2, 3), tokens=6))
    paths = [path for path, _ in server.requests[asked:]]
    assert paths.index("POST /finish_weight_update") < paths.index("POST /v1/completions")


async def test_servers_that_stay_away_end_the_engine_with_the_cause(pool: Any, tiny: Any) -> None:
    engine, servers = await pool(2, swap_seconds=0.3)
    for server in servers:
        server.down = True
    words = r"no server has served version 1 for 0 s: .*127.0.0.1"
    with pytest.raises(SlipstreamError, match=words):
        await read(engine, tiny.request(tokens=6))
    with pytest.raises(SlipstreamError, match=words):
        engine.check_running()


async def test_a_swap_waits_for_a_server_that_is_being_started_again(pool: Any, tiny: Any) -> None:
    engine, (server,) = await pool()
    server.down = True
    swapping = asyncio.create_task(engine.swap(tiny.models.weights(2)))
    await asyncio.sleep(0.1)
    assert not swapping.done()
    restart(server)
    await asyncio.wait_for(swapping, 30)
    assert (engine.version, server.version) == (2, "2")


async def test_a_sample_that_a_server_gave_up_goes_on_and_is_no_completion(pool: Any, tiny: Any) -> None:
    """As one does that is asked to end: it says "abort", which nobody here has asked for."""
    engine, (server,) = await pool()
    server.gives_up_after = 3
    chunks = await read(engine, tiny.request(seeds=(1,), tokens=6))
    assert sum(len(chunk.token_ids) for chunk in chunks) == 6
    assert chunks[-1].finish == "length"


async def test_new_weights_can_go_over_a_shared_folder(pool: Any, tiny: Any, tmp_path: Path) -> None:
    share = tmp_path / "share"
    share.mkdir()
    engine, servers = await pool(share=share)
    paths = [
        body["update_info"]["path"] for path, body in servers[0].requests if path == "POST /update_weights"
    ]
    assert [Path(path).parent for path in paths] == [share]
    assert list(share.iterdir()) == []
    assert await collect(engine, tiny.request(tokens=3))


async def test_the_key_is_sent_and_not_shown(pool: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIPSTREAM_ENGINE_KEY", "s3cret")
    _, servers = await pool()
    assert servers[0].keys == {"Bearer s3cret"}
    with pytest.raises(HttpError) as caught:
        await HttpClient("http://127.0.0.1:9", "s3cret").json("GET", "/", 5.0)
    assert "s3cret" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "endpoints: give the base URL"),
        ({"endpoints": ("gpu1:8000",)}, "no http:// or https:// URL"),
        ({"endpoints": ("http://u:p@host",)}, "take the password out"),
        ({"endpoints": ("http://host",), "server": "sglang"}, "share: SGLang"),
    ],
)
def test_options_that_cannot_work_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        HttpConfig(Path("model"), **options)


def test_events_of_sglang_may_hold_all_tokens_or_the_new_ones() -> None:
    client, entries = HttpClient("http://host"), [[-0.5, 7, None], [-1.0, 8, None], [-2.0, 9, None]]
    piece, seen = _generate_piece(
        client, {"meta_info": {"output_token_logprobs": entries[:2], "completion_tokens": 2}}, 0, 0
    )
    assert (list(piece.token_ids), list(piece.logprobs), seen) == ([7, 8], [-0.5, -1.0], 2)
    whole = {"output_token_logprobs": entries, "completion_tokens": 3, "finish_reason": {"type": "length"}}
    new = {**whole, "output_token_logprobs": entries[2:]}
    for meta in (whole, new):
        piece, seen = _generate_piece(client, {"meta_info": meta}, 2, 0)
        assert (list(piece.token_ids), piece.reason, seen) == ([9], "length", 3)
