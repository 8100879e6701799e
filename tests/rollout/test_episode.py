from __future__ import annotations

import math

import msgspec
import numpy as np
import pytest

from slipstream.errors import MessageError
from slipstream.protocol.messages import Group, encode_group
from slipstream.rollout.engines.base import Chunk
from slipstream.rollout.episode import Episode, seeds_of


def header() -> Group:
    return Group(run="r", ticket=1, attempt=0, prompt_index=7, owner="o", admitted_version=4, samples=[])


def chunk(sample: int, *tokens: int, version: int = 4, finish=None, logprob: float = -0.5) -> Chunk:
    return Chunk(sample, tokens, (logprob,) * len(tokens), version, finish)


def test_tokens_of_two_versions_in_one_completion_are_stamped_by_runs(tokenizer):
    """Case 68."""
    episode = Episode(1)
    for part in [chunk(0, 8, 8), chunk(0, 9), chunk(0, 9, version=5), chunk(0, 2, version=5, finish="stop")]:
        episode.add(part)
    group = header()
    arrays = episode.finish(group, (5, 6), tokenizer)
    assert group.samples[0].versions == [(4, 3), (5, 2)]
    assert (group.oldest_version, group.newest_version) == (4, 5)
    assert arrays.token_ids.tolist() == [8, 8, 9, 9, 2]
    assert group.samples[0].text == "<8><8><9><9><2>"


def test_samples_are_put_together_however_their_chunks_interleave(tokenizer):
    episode = Episode(2)
    for part in [chunk(1, 8), chunk(0, 9), chunk(1, 2, finish="stop"), chunk(0, 9, finish="length")]:
        episode.add(part)
    group = header()
    arrays = episode.finish(group, (5,), tokenizer)
    assert [(sample.text, sample.finish) for sample in group.samples] == [
        ("<9><9>", "length"),
        ("<8><2>", "stop"),
    ]
    assert arrays.token_ids.tolist() == [9, 9, 8, 2]
    assert episode.tokens == 4
    encode_group(group, arrays)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 0.5, -1e5])
def test_a_sample_with_a_logprob_that_is_no_number_is_refused_not_padded(tokenizer, bad):
    """Cases 39 and 40."""
    episode = Episode(2)
    episode.add(chunk(0, 8, finish="stop"))
    episode.add(chunk(1, 8, 9, finish="stop", logprob=bad))
    group = header()
    arrays = episode.finish(group, (5,), tokenizer)
    assert (group.samples[1].unscored, group.samples[1].tokens) == ("engine_logprob", 0)
    assert arrays.token_ids.tolist() == [8]
    encode_group(group, arrays)


def test_a_missing_logprob_is_refused(tokenizer):
    """Case 39."""
    episode = Episode(1)
    episode.add(Chunk(0, (8, 9), (-0.5,), 4, "stop"))
    group = header()
    episode.finish(group, (5,), tokenizer)
    assert group.samples[0].unscored == "engine_logprob"


def test_aborted_and_unfinished_samples_carry_no_tokens_and_no_reward(tokenizer):
    """Case 6: an infrastructure failure is absent, not wrong."""
    episode = Episode(3)
    episode.add(chunk(0, 8, finish="abort"))
    episode.add(chunk(1, 8))
    episode.add(chunk(2, 8, 2, finish="stop"))
    group = header()
    arrays = episode.finish(group, (5,), tokenizer)
    assert [sample.unscored for sample in group.samples] == ["aborted", "aborted", ""]
    assert group.token_count == len(arrays.token_ids) == 2
    encode_group(group, arrays)


def test_an_empty_completion_is_a_sample_without_tokens(tokenizer):
    """Case 46."""
    episode = Episode(2)
    episode.add(Chunk(0, (), (), 4, "length"))
    episode.add(chunk(1, 8, finish="length"))
    group = header()
    arrays = episode.finish(group, (5,), tokenizer)
    assert (group.samples[0].tokens, group.samples[0].versions, group.samples[0].unscored) == (0, [], "")
    assert group.oldest_version == 4
    encode_group(group, arrays)


def test_seeds_differ_in_a_group_and_between_tickets_and_are_the_same_again():
    """Case 75."""
    assert seeds_of(1, 5, 4) == seeds_of(1, 5, 4)
    seeds = [seed for run in (1, 2) for ticket in range(20) for seed in seeds_of(run, ticket, 4)]
    assert len(set(seeds)) == len(seeds)
    assert seeds_of(1, 5, 2) == seeds_of(1, 5, 4)[:2]
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_a_group_goes_on_from_its_partial():
    episode = Episode(3)
    for part in (
        chunk(0, 8, 2, finish="stop"),
        chunk(1, 8, version=4),
        chunk(1, 9, version=5),
        chunk(2, finish="length"),
    ):
        episode.add(part)
    tokens, blob = episode.partial(seconds=1.5)
    onward = Episode(3, blob)
    assert (tokens, onward.begun, onward.tokens, onward.seconds) == (4, 4, 4, 1.5)
    assert (onward.unfinished, onward.prefix(1)) == ([1], (8, 9))
    assert onward.partial(seconds=0.0) == (tokens, blob)


def test_a_refused_sample_is_handed_over_as_refused():
    episode = Episode(2)
    episode.add(Chunk(0, (8, 9), (-0.5,), 4))
    tokens, blob = episode.partial(0.0)
    onward = Episode(2, blob)
    assert (tokens, onward.unfinished) == (0, [1])
    group = header()
    onward.finish(group, (5,), tokenizer=None)
    assert [sample.unscored for sample in group.samples] == ["engine_logprob", "aborted"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema": 3}, "schema 3 received, this process speaks 2"),
        ({"schema": None}, "no schema received, this process speaks 2"),
        ({"samples": []}, "0 samples, the group has 1"),
        ({"token_ids": b""}, "0 bytes for 1 tokens"),
        ({"logprobs": np.float32(np.nan).tobytes()}, "not finite"),
        ({"samples": [{"tokens": 1, "versions": []}]}, "do not stamp 1 tokens"),
        ({"more": 1}, "unknown field"),
    ],
)
def test_a_partial_that_does_not_fit_is_refused(change, message):
    episode = Episode(1)
    episode.add(chunk(0, 8))
    tree = msgspec.msgpack.decode(episode.partial(0.0)[1])
    with pytest.raises(MessageError, match=message):
        Episode(1, msgspec.msgpack.encode(tree | change))


def headed(sample, tokens, heads, version=4, finish=None):
    return Chunk(sample, tokens, (-0.5,) * len(tokens), version, finish, heads)


def test_likeliest_tokens_go_with_a_group_and_with_its_partial(tokenizer):
    episode = Episode(2, head=2)
    episode.add(headed(0, (8, 9), (((8, -0.5), (1, -1.0), (2, -3.0)), ((9, -0.5),)), finish="stop"))
    episode.add(headed(1, (7,), (((3, -0.1), (7, -0.5)),)))
    onward = Episode(2, episode.partial(0.0)[1], head=2)
    onward.add(headed(1, (6,), (((6, -0.5), (5, -0.9)),), finish="length"))
    group = header()
    arrays = onward.finish(group, (1,), tokenizer)
    assert arrays.head_ids.tolist() == [[8, 1], [9, 0], [3, 7], [6, 5]]
    assert arrays.head_logprobs[1].tolist() == [-0.5, -np.inf]
    with pytest.raises(MessageError, match="head_ids: 24 bytes for 3 tokens with 3 likeliest each"):
        Episode(2, episode.partial(0.0)[1], head=3)


def test_a_sample_whose_likeliest_tokens_are_missing_is_unscored(tokenizer):
    episode = Episode(2, head=2)
    episode.add(headed(0, (8, 9), (((8, -0.5), (1, -1.0)),), finish="stop"))
    episode.add(headed(1, (8,), (((8, float("nan")), (1, -1.0)),), finish="stop"))
    group = header()
    arrays = episode.finish(group, (1,), tokenizer)
    assert [sample.unscored for sample in group.samples] == ["engine_logprob"] * 2
    assert arrays.head_ids.shape == (0, 2)


def test_a_sure_tokens_logprob_that_rounding_put_above_nothing_is_nothing(tokenizer):
    episode = Episode(1)
    episode.add(chunk(0, 8, finish="stop", logprob=3e-6))
    assert episode.finish(header(), (1,), tokenizer).logprobs.tolist() == [0.0]
