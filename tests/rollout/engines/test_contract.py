"""What every engine must do, whatever generates its tokens."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace
from typing import Any

import psutil
import pytest

from slipstream.errors import SlipstreamError

pytestmark = pytest.mark.asyncio(loop_scope="session")


def resident_bytes() -> int:
    """Memory of this process and of those that it started, such as vLLM's workers."""
    own = psutil.Process()
    return sum(process.memory_info().rss for process in [own, *own.children(recursive=True)])


async def test_every_sample_finishes_once_within_its_length(bench: Any) -> None:
    made = await bench.collect(bench.request(seeds=(1, 2, 3, 4), tokens=9))
    assert all(sample.finish in ("length", "stop") for sample in made)
    assert all(1 <= len(sample.token_ids) <= 9 for sample in made)
    assert all(logprob <= 0 for sample in made for logprob in sample.logprobs)
    assert all(set(sample.versions) == {1} for sample in made)


async def test_group_is_distinct_and_repeats_under_the_same_seeds(bench: Any) -> None:
    """Case 75."""
    first = await bench.collect(bench.request(seeds=(1, 2, 3, 4)))
    again = await bench.collect(bench.request(seeds=(1, 2, 3, 4)))
    assert [sample.token_ids for sample in again] == [sample.token_ids for sample in first]
    assert len({tuple(sample.token_ids) for sample in first}) == 4


async def test_sample_does_not_depend_on_what_is_decoded_beside_it(bench: Any) -> None:
    alone = await bench.collect(bench.request(seeds=(7,)))
    both = await asyncio.gather(
        bench.collect(bench.request(seeds=(1, 2), prompt=(9, 3))), bench.collect(bench.request(seeds=(3, 7)))
    )
    assert both[1][1].token_ids == alone[0].token_ids


async def test_length_limit_is_named(bench: Any) -> None:
    (sample,) = await bench.collect(bench.request(seeds=(4,), tokens=2))
    assert (len(sample.token_ids), sample.finish) == (2, "length")


async def test_stop_id_ends_the_sample_and_belongs_to_it(bench: Any) -> None:
    """Case 51."""
    samples = await bench.collect(bench.request(seeds=tuple(range(16)), tokens=40, stop=(2, 3, 4, 11)))
    stopped = [sample for sample in samples if sample.finish == "stop"]
    assert stopped
    for sample in stopped:
        assert sample.token_ids[-1] in (2, 3, 4, 11)
        assert len(sample.logprobs) == len(sample.token_ids)
    assert all(not {2, 3, 4, 11} & set(sample.token_ids[:-1]) for sample in samples)


async def test_empty_completion_is_one_chunk_with_a_reason(bench: Any) -> None:
    """Case 46."""
    chunks = [chunk async for chunk in bench.engine.generate(bench.request(seeds=(1, 2), tokens=0))]
    assert [(chunk.token_ids, chunk.finish, chunk.version) for chunk in chunks] == [((), "length", 1)] * 2


async def test_group_larger_than_the_slots_completes(bench: Any) -> None:
    made = await bench.collect(bench.request(seeds=tuple(range(20))))
    assert all(sample.finish for sample in made)
    assert len({tuple(sample.token_ids) for sample in made}) == 20
    assert bench.engine.free_slots == 6


async def test_free_slots_count_what_is_in_flight(bench: Any) -> None:
    assert bench.engine.free_slots == 6
    stream = bench.engine.generate(bench.request(seeds=(1, 2), tokens=40))
    await anext(stream)
    assert bench.engine.free_slots <= 5
    await stream.aclose()


async def test_abort_ends_each_unfinished_sample(bench: Any, within: Any) -> None:
    request = bench.request(seeds=tuple(range(9)), tokens=1000)
    made: dict[int, str] = {}

    async def read() -> None:
        async for chunk in bench.engine.generate(request):
            if not made:
                await bench.engine.abort(request.request_id)
            if chunk.finish:
                made[chunk.sample] = chunk.finish

    await within(read())
    assert sorted(made) == list(range(9))
    assert "abort" in made.values()
    assert bench.engine.free_slots == 6
    await bench.engine.abort(request.request_id)  # harmless when over


async def test_leaving_a_stream_early_frees_its_slots(bench: Any, within: Any) -> None:
    stream = bench.engine.generate(bench.request(seeds=tuple(range(6)), tokens=1000))
    await anext(stream)
    await stream.aclose()
    await within(bench.collect(bench.request(seeds=tuple(range(6)))))
    assert bench.engine.free_slots == 6


async def test_tokens_after_a_swap_carry_the_new_version_and_none_before(bench: Any) -> None:
    """Cases 67 and 68."""
    samples = await bench.collect_across_a_swap(bench.request(seeds=tuple(range(6)), tokens=30))
    assert bench.engine.version == 2
    assert {version for sample in samples for version in sample.versions} == {1, 2}
    assert all(sample.versions == sorted(sample.versions) for sample in samples)
    fresh = await bench.collect(bench.request())
    assert {version for sample in fresh for version in sample.versions} == {2}


@pytest.mark.timeout(300)
async def test_a_hundred_swaps_under_load_lose_nothing(bench: Any, within: Any) -> None:
    """Each after the one before and some progress; no sample is lost or twice, and no memory stays."""
    requests = [bench.request(seeds=(10 * n, 10 * n + 1, 10 * n + 2), tokens=20) for n in range(8)]
    made = [[bench.completion() for _ in request.seeds] for request in requests]
    progress, swapped = asyncio.Event(), 0
    memory: list[int] = []

    async def read(index: int) -> None:
        async for chunk in bench.engine.generate(requests[index]):
            made[index][chunk.sample].add(chunk)
            progress.set()

    async def swap_all(reading: asyncio.Future[Any]) -> None:
        nonlocal swapped
        for version in range(2, 102):
            if not reading.done():
                await asyncio.wait(
                    [reading, waiting := asyncio.ensure_future(progress.wait())], return_when="FIRST_COMPLETED"
                )
                waiting.cancel()
                swapped += 1
            progress.clear()
            weights = bench.weights(2 + version % 8)
            weights.version = version
            await bench.engine.swap(weights)
            memory.append(resident_bytes())

    reading = asyncio.gather(*(read(index) for index in range(len(requests))))
    await within(asyncio.gather(reading, swap_all(reading)), 240)
    samples = [sample for group in made for sample in group]
    assert all(sample.finish in ("stop", "length") for sample in samples)
    assert all(sample.versions == sorted(sample.versions) for sample in samples)
    assert swapped > 3
    assert len({version for sample in samples for version in sample.versions}) > 3
    assert bench.engine.version == 101
    assert memory[-1] - memory[20] < 64 << 20


async def test_weights_are_released_once_the_next_are_served(bench: Any) -> None:
    second, third = bench.weights(2), bench.weights(3)
    await bench.engine.swap(second)
    await bench.engine.swap(third)
    assert second.releases == 1


async def test_request_id_in_use_is_refused(bench: Any) -> None:
    request = bench.request(tokens=40)
    stream = bench.engine.generate(request)
    await anext(stream)
    with pytest.raises(SlipstreamError, match="already"):
        await bench.collect(request)
    await stream.aclose()


async def test_close_aborts_what_is_open_and_may_be_repeated(bench: Any, within: Any) -> None:
    stream = bench.engine.generate(bench.request(seeds=tuple(range(6)), tokens=1000))
    finishes = {(await anext(stream)).finish}
    await bench.engine.close()

    async def rest() -> None:
        finishes.update([chunk.finish async for chunk in stream])

    await within(rest())
    assert finishes <= {None, "abort", "length", "stop"}
    await bench.engine.close()
    with pytest.raises(SlipstreamError):
        await bench.collect(bench.request())


async def test_samples_go_on_from_what_was_sampled_elsewhere(bench: Any) -> None:
    """The same as if they had not moved; nothing is streamed again, and the limit counts the whole."""
    whole = await bench.collect(bench.request(temperature=0.0))
    cuts = [5, 0, 1]
    prefixes = tuple(tuple(sample.token_ids[:cut]) for sample, cut in zip(whole, cuts, strict=True))
    rest = await bench.collect(replace(bench.request(temperature=0.0), prefixes=prefixes))
    for sample, full, cut in zip(rest, whole, cuts, strict=True):
        assert sample.token_ids == full.token_ids[cut:]
        assert sample.logprobs == pytest.approx(full.logprobs[cut:], abs=1e-4)
        assert sample.finish == full.finish


async def test_a_sample_that_has_its_length_already_ends_at_once(bench: Any) -> None:
    request = replace(bench.request(seeds=(1, 2), tokens=2), prefixes=((4, 9), ()))
    first, second = await bench.collect(request)
    assert (first.token_ids, first.finish) == ([], "length")
    assert second.token_ids


async def test_drain_finishes_what_is_in_flight_and_takes_nothing_new(bench: Any) -> None:
    reading = asyncio.create_task(bench.collect(bench.request(seeds=(1, 2, 3), tokens=8)))
    await asyncio.sleep(0)  # the request is with the engine now
    await bench.engine.drain(30.0)
    assert all(sample.finish in ("length", "stop") for sample in await reading)
    with pytest.raises(SlipstreamError, match="draining"):
        await bench.collect(bench.request())


async def test_drain_without_time_aborts_what_is_in_flight(bench: Any) -> None:
    reading = asyncio.create_task(bench.collect(bench.request(seeds=tuple(range(12)), tokens=40)))
    await asyncio.sleep(0)
    await bench.engine.drain(0.0)
    finishes = {sample.finish for sample in await reading}
    assert "abort" in finishes


async def test_stop_string_ends_the_sample_with_the_token_that_completes_it(bench: Any) -> None:
    """Case 51: over tokens, as text; the sample keeps that token."""
    whole = await bench.collect(bench.request(seeds=(1, 2, 3, 4, 5, 6), tokens=30))
    strings = tuple({bench.text(sample.token_ids[2:4]) for sample in whole if len(sample.token_ids) > 5})
    assert strings
    for sample in await bench.collect(bench.request(seeds=(1, 2, 3, 4, 5, 6), tokens=30, strings=strings)):
        text = bench.text(sample.token_ids)
        assert not any(string in text[:-1] for string in strings)
        assert (sample.finish == "stop") == any(text.endswith(string) for string in strings)
        assert len(sample.logprobs) == len(sample.token_ids)
    stopped = await bench.collect(bench.request(seeds=(1,), tokens=30, strings=strings))
    assert stopped[0].finish == "stop"


async def test_likeliest_tokens_come_with_each_token_where_asked_for(bench: Any) -> None:
    for sample in await bench.collect(bench.request(heads=4, temperature=0.8)):
        assert len(sample.heads) == len(sample.token_ids)
        for token, logprob, head in zip(sample.token_ids, sample.logprobs, sample.heads, strict=True):
            values = [value for _, value in head]
            assert len(head) == 4
            assert values == sorted(values, reverse=True)
            assert sum(math.exp(value) for value in values) < 1.0001
            if token in dict(head):
                assert dict(head)[token] == pytest.approx(logprob, abs=1e-4)
            else:
                assert logprob <= values[-1] + 1e-4
    assert all(not sample.heads for sample in await bench.collect(bench.request()))


async def test_tokens_over_kept_keys_and_values_are_flagged_and_no_others(bench: Any) -> None:
    samples = await bench.collect_across_a_swap(bench.request(seeds=tuple(range(6)), tokens=30))
    for sample in samples:
        assert sample.kept == [bench.keeps_cache and version == 2 for version in sample.versions]
    assert all(not any(sample.kept) for sample in await bench.collect(bench.request()))
