"""What every engine must do, whatever generates its tokens."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from slipstream.errors import SlipstreamError


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


async def test_many_swaps_under_load_lose_nothing(bench: Any, within: Any) -> None:
    weights = [bench.weights(version) for version in range(2, 52)]

    async def swap_all() -> None:
        for one in weights:
            await bench.engine.swap(one)

    groups = [
        bench.collect(bench.request(seeds=(10 * n, 10 * n + 1, 10 * n + 2), tokens=20)) for n in range(12)
    ]
    *made, _ = await within(asyncio.gather(*groups, swap_all()))
    samples = [sample for group in made for sample in group]
    assert len(samples) == 36
    assert all(sample.finish in ("stop", "length") for sample in samples)
    assert all(sample.versions == sorted(sample.versions) for sample in samples)
    assert len({version for sample in samples for version in sample.versions}) > 1
    assert bench.engine.version == 51
    await bench.engine.close()
    assert all(one.releases >= 1 for one in weights)


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
